"""How long an ADD waits for a block, and when it does not wait."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from agent.settings import Settings
from base import interrupts
from base.interrupts import Call
from cni.spec.errors import CNIError, Code
from ipam.addresses import parse
from ipam.leases import leased_store
from ipam.leases.block_store import BlockStore
from ipam.leases.claim_request import (
    PATIENCE,
    POOL_PATIENCE,
    Attempts,
    Claims,
    LeasesNothing,
    PoolPending,
    Want,
)
from ipam.leases.objects import AddressBlock
from ipam.store.block_rows import LeasedBlock
from ipam.store.reservations import Owner
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from kube.client import ClusterApi
from kube.requests import Response, Transport
from kube.resources import NotFound, Unavailable
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, sets_of

SETS = sets_of(range_of("10.0.0.0/24"))


class Time:
    """`time` of the module under test: a sleep takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class NoClaims:
    """The methods of `Claims` except `claim`, for a node that leases nothing."""

    def low(self, wants: Sequence[Want]) -> None:
        pass

    def failed(self, owner: Owner, error: CNIError) -> None:
        pass

    def unable(self, wants: Sequence[Want]) -> str:
        return "nothing is leased"


class Refusing(NoClaims):
    """Claims that end with an error, each after some time."""

    def __init__(self, clock: Time, error: CNIError, seconds: float = 0.0) -> None:
        self.asked = 0
        self._clock = clock
        self._error = error
        self._seconds = seconds

    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        self.asked += 1
        self._clock.now += self._seconds
        raise self._error


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(leased_store, "time", made)
    return made


def waits(directory: Path, claims: Claims) -> CNIError:
    """The error of an ADD without a block."""
    made = leased_store.ClusterStore(
        StoreFiles(directory, report=lambda text: None, kept=False),
        BOOT,
        claims,
        [(each.domain, each.network) for each in SETS[0].ranges],
    )
    return error_of(lambda: made.reserve(owner("c1"), SETS))


def test_an_add_waits_ten_seconds_and_asks_ever_more_rarely(tmp_path: Path, clock: Time) -> None:
    claims = Refusing(clock, CNIError(Code.TRY_AGAIN, "not now"))
    assert waits(tmp_path, claims).code == Code.TRY_AGAIN
    assert PATIENCE - 1.0 <= clock.now <= PATIENCE
    assert 8 <= claims.asked <= 14


class Worker:
    """Of a call, whose place another call may have while `away`."""

    def __init__(self) -> None:
        self.away = False
        self.times = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        assert not self.away
        self.away = True
        self.times += 1
        try:
            yield
        finally:
            self.away = False


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker, call = Worker(), Call(endable=True)
    call.aside = worker.aside
    with interrupts.serving(call):
        yield worker


def test_an_add_that_waits_for_a_block_or_a_pool_keeps_no_worker(
    tmp_path: Path, clock: Time, worker: Worker
) -> None:
    class Looking(Refusing):
        def claim(self, wants: Sequence[Want], deadline: float) -> None:
            assert worker.away
            super().claim(wants, deadline)

    waits(tmp_path, Looking(clock, PoolPending("no pool")))
    assert (worker.away, worker.times) == (False, 1)


def test_a_call_that_waits_for_the_api_server_keeps_no_worker(worker: Worker) -> None:
    answers: list[Unavailable | Response] = [Unavailable("gone"), Response(404, b"{}")]

    class Answering:
        def send(self, *arguments: Any) -> Response:  # noqa: ANN401
            assert worker.away
            answer = answers.pop(0)
            if isinstance(answer, Unavailable):
                raise answer
            return answer

    def sleep(seconds: float) -> None:
        assert worker.away

    api = ClusterApi(cast(Transport, Answering()), sleep=sleep)
    with pytest.raises(NotFound):
        api.get(AddressBlock, "a")
    assert (answers, worker.away, worker.times) == ([], False, 3)


class Ending(NoClaims):
    """Its claim fails, and meanwhile a pod of this node ends."""

    def __init__(self, local: SqliteStore, container: str) -> None:
        self.asked = 0
        self._local = local
        self._container = container

    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        self.asked += 1
        if self.asked == 2:
            self._local.release(owner(self._container).attachment)
        raise CNIError(Code.TRY_AGAIN, "not now")


def test_an_add_that_waits_gets_what_a_del_on_its_own_node_frees(
    tmp_path: Path, clock: Time
) -> None:
    files = StoreFiles(tmp_path, report=lambda text: None, kept=False)
    address = parse("10.0.0.1")
    BlockStore(files).put(
        LeasedBlock(
            name="default-10.0.0.1-32",
            uid="u",
            space="default",
            pool="10.0.0.0-24",
            domains=(SETS[0].ranges[0].domain,),
            first=address,
            last=address,
            max_offline=1800.0,
            boot=BOOT,
            confirmed=10.0,
        )
    )
    local = SqliteStore(files, BOOT)
    claims = Ending(local, "c1")
    leased = [(each.domain, each.network) for each in SETS[0].ranges]
    made = leased_store.ClusterStore(files, BOOT, claims, leased, clock=lambda: 20.0)
    held = made.reserve(owner("c1"), SETS)
    assert made.reserve(owner("c2"), SETS).granted[0].reservation.address == "10.0.0.1"
    assert held.granted[0].reservation.address == "10.0.0.1"
    assert claims.asked == 2


@pytest.mark.parametrize("code", [Code.NO_FREE_ADDRESS, Code.ADDRESS_TAKEN])
def test_a_definite_answer_ends_it_at_once(tmp_path: Path, clock: Time, code: Code) -> None:
    claims = Refusing(clock, CNIError(code, "full"))
    assert waits(tmp_path, claims).code == code
    assert (claims.asked, clock.now) == (1, 0.0)


def test_a_process_that_leases_nothing_does_not_wait(tmp_path: Path, clock: Time) -> None:
    claims = Refusing(clock, LeasesNothing("nothing"))
    assert waits(tmp_path, claims).code == Code.TRY_AGAIN
    assert (claims.asked, clock.now) == (1, 0.0)


def test_both_waits_fit_into_a_call(tmp_path: Path, clock: Time) -> None:
    claims = Refusing(clock, PoolPending("there is no pool yet"))
    waits(tmp_path, claims)
    assert clock.now <= POOL_PATIENCE
    assert Settings().deadline / 2 > POOL_PATIENCE + PATIENCE


def test_a_claim_is_late_while_no_add_waits_for_it() -> None:
    attempts = Attempts(lambda want, is_late: None)
    range_ = SETS[0].ranges[0]
    want = Want(range_, (range_.domain, range_.network))
    attempt = attempts.add(want, -math.inf)
    assert attempt.is_late()
    attempts.add(want, math.inf)
    assert not attempt.is_late()
