"""Random histories of a node against a model that is a plain dictionary."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from base.pod import Pod
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, parse_interface, text
from ipam.ranges import Range, RangeSet, merged, of_network
from ipam.store import repair
from ipam.store.reservations import Owner
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from tests.unit.ipam.conftest import SHARED_MEMORY

pytestmark = pytest.mark.slow

BOOTS = ("boot-a", "boot-b")


class Held(msgspec.Struct, frozen=True):
    """The holder of an address in the model."""

    attachment: Attachment
    pod: str
    boot: str
    network: str
    segment: str


class Model:
    """The simplest store: a model of the real store."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], Held] = {}
        self.before = self.held  # what an undo leads back to
        self.boot = BOOTS[0]

    def reserve(self, owner: Owner, sets: list[RangeSet], segment: str) -> list[int] | Code:
        """The addresses, or the code of the error."""
        own = {key: held for key, held in self.held.items() if held.attachment == owner.attachment}
        if any(held.boot == self.boot for held in own.values()):
            return Code.ALREADY_ATTACHED
        chosen = self._chosen(owner, sets, segment)
        if chosen is None:  # what earlier boots left gives way, all of it
            self.held = {key: held for key, held in self.held.items() if held.boot == self.boot}
            chosen = self._chosen(owner, sets, segment)
        if chosen is None:
            return Code.NO_FREE_ADDRESS
        self.before = dict(self.held)
        for index, ranges in enumerate(sets):
            range_ = ranges.ranges[0]
            self.held[(range_.domain, chosen[index])] = Held(
                owner.attachment, owner.pod.name, self.boot, str(range_.network), segment
            )
        return [chosen[index] for index in range(len(sets))]

    def _chosen(self, owner: Owner, sets: list[RangeSet], segment: str) -> dict[int, int] | None:
        chosen: dict[int, int] = {}
        for index, ranges in enumerate(sets):
            kept = self._kept(owner, ranges.ranges[0], set(chosen.values()), segment)
            if kept is not None:
                chosen[index] = kept
        for index, ranges in enumerate(sets):
            if index not in chosen:
                found = self._found(ranges.ranges[0], set(chosen.values()), segment)
                if found is None:
                    return None
                chosen[index] = found
        return chosen

    def _elsewhere(self, range_: Range, segment: str, *, alive: bool) -> set[int]:
        """The addresses that other domains hold on the segment. If `alive`, only those of this
        boot.
        """
        return {
            address
            for (domain, address), held in self.held.items()
            if domain != range_.domain
            and segment != ""
            and held.segment == segment
            and (held.boot == self.boot or not alive)
        }

    def _kept(self, owner: Owner, range_: Range, used: set[int], segment: str) -> int | None:
        candidates = [
            (held.network != str(range_.network), held.attachment != owner.attachment, address)
            for (domain, address), held in self.held.items()
            if domain == range_.domain
            and address not in used | self._elsewhere(range_, segment, alive=True)
            and range_.allows(address)
            and (held.attachment == owner.attachment or same_pod(held, owner))
        ]
        return min(candidates)[2] if candidates else None

    def _found(self, range_: Range, used: set[int], segment: str) -> int | None:
        used = used | self._elsewhere(range_, segment, alive=False)
        allowed = filter(range_.allows, range(range_.first, range_.last + 1))
        free = (
            address
            for address in allowed
            if address not in used and (range_.domain, address) not in self.held
        )
        return next(free, None)

    def forget(self, dead: set[Attachment]) -> None:
        """Free what these attachments hold."""
        self.held = {key: held for key, held in self.held.items() if held.attachment not in dead}


def same_pod(held: Held, owner: Owner) -> bool:
    attachment = owner.attachment
    return (
        owner.pod.name != ""
        and held.pod == owner.pod.name
        and held.attachment.network == attachment.network
        and held.attachment.ifname == attachment.ifname
    )


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    """Small ranges of few networks, so that they meet, with exclusions and gateways."""
    network = parse_interface(
        draw(st.sampled_from(["10.0.0.0/28", "10.0.0.8/29", "10.0.0.0/29", "fd00::/125"]))
    )[1]
    inside = st.integers(network.address, network.last)
    start, end = sorted((draw(inside), draw(inside)))
    bounds = draw(st.sampled_from([(None, None), (start, end)]))
    first, last = of_network(network, start=bounds[0], end=bounds[1], use_all=draw(st.booleans()))
    holes = draw(st.lists(st.tuples(inside, inside), max_size=3))
    return Range(
        network=network,
        first=first,
        last=last,
        excluded=merged(Interval(min(pair), max(pair)) for pair in holes),
        gateway=draw(st.none() | inside),
        domain=draw(st.sampled_from(["", "", "blue"])),
    )


containers = st.integers(0, 7).map(lambda n: f"c{n}")
networks = st.sampled_from(["n1", "n1", "n2"])
attachments = st.builds(Attachment, networks, containers, st.sampled_from(["eth0", "eth1"]))
pods = st.sampled_from([Pod(), Pod("ns", "p0"), Pod("ns", "p1"), Pod("ns", "p2")])
owners = st.builds(Owner, attachments, pods)
segments = st.sampled_from(["", "ib0 0x8001", "ib0 0x8001", "ib0 0x8002"])
steps = st.one_of(
    st.tuples(
        st.just("add"), owners, st.lists(st.integers(0, 3), min_size=1, max_size=3), segments
    ),
    st.tuples(
        st.just("add"), owners, st.lists(st.integers(0, 3), min_size=1, max_size=2), segments
    ),
    st.tuples(st.just("del"), attachments),
    st.tuples(
        st.just("undo"), owners, st.lists(st.integers(0, 3), min_size=1, max_size=2), segments
    ),
    st.tuples(st.just("gc"), networks, st.sets(attachments, max_size=6)),
    st.tuples(st.just("boot")),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ranges(), min_size=4, max_size=4), st.lists(steps, min_size=1, max_size=30))
def test_the_store_does_what_the_model_does(pool: list[Range], history: list[tuple]) -> None:  # type: ignore[type-arg]
    with scratch() as directory:
        compare([directory], pool, history)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ranges(), min_size=4, max_size=4), st.lists(steps, min_size=1, max_size=30))
def test_a_store_that_is_kept_open_does_too(pool: list[Range], history: list[tuple]) -> None:  # type: ignore[type-arg]
    with scratch() as directory, closing(StoreFiles(directory)) as kept:
        compare([kept], pool, history)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ranges(), min_size=4, max_size=4), st.lists(steps, min_size=1, max_size=20))
def test_and_so_do_the_two_in_turn(pool: list[Range], history: list[tuple]) -> None:  # type: ignore[type-arg]
    with scratch() as directory, closing(StoreFiles(directory)) as kept:
        compare([kept, directory], pool, history)


def compare(forms: list[Path | StoreFiles], pool: list[Range], history: list[tuple]) -> None:  # type: ignore[type-arg]
    """Play a history on store and model. The forms are the same store and take turns."""
    model = Model()
    SqliteStore(forms[0], model.boot).release_stale()  # makes the store
    for number, step in enumerate(history):
        files = forms[number % len(forms)]
        play(step, pool, model, SqliteStore(files, model.boot))
        assert {
            (reservation.domain, reservation.address): (
                reservation.attachment,
                reservation.pod,
                reservation.boot,
            )
            for reservation in SqliteStore(files, model.boot).reservations()
        } == {
            (domain, text(address)): (held.attachment, held.pod, held.boot)
            for (domain, address), held in model.held.items()
        }
        expect_usage(SqliteStore(files, model.boot), pool, model)
    assert repair.check(SqliteStore(forms[0], "").directory, print)


def expect_usage(store: SqliteStore, pool: list[Range], model: Model) -> None:
    """Each range of the pool alone: what it allows is used or free."""
    for range_ in pool:
        allowed = [
            address for address in range(range_.first, range_.last + 1) if range_.allows(address)
        ]
        used = sum((range_.domain, address) in model.held for address in allowed)
        named = store.usage((range_,))
        assert (used, len(allowed) - used) in [
            (attachment.used, attachment.free)
            for attachment in named
            if attachment.domain == range_.domain
        ]


def play(step: tuple, pool: list[Range], model: Model, store: SqliteStore) -> None:  # type: ignore[type-arg]
    verb, *values = step
    if verb in ("add", "undo"):
        owner, picks, segment = values
        sets = [RangeSet((pool[pick],)) for pick in picks]
        expected = model.reserve(owner, sets, segment)
        before = model.before
        try:
            grant = store.reserve(owner, sets, segment=segment)
        except CNIError as error:
            assert error.code == expected
            return
        assert [granted.reservation.address for granted in grant.granted] == (
            [text(address) for address in expected] if isinstance(expected, list) else expected
        )
        if verb == "undo":
            store.undo(grant)
            # A former sandbox of this boot does not get its address back: it may be gone.
            granted = {
                (granted.reservation.domain, parse(granted.reservation.address))
                for granted in grant.granted
            }
            model.held = {
                key: held
                for key, held in before.items()
                if key not in granted or held.boot != model.boot
            }
    elif verb == "del":
        store.release(values[0])
        model.forget({values[0]})
    elif verb == "gc":
        network, valid = values
        store.collect(
            network, {(attachment.container_id, attachment.ifname) for attachment in valid}
        )
        pairs = {(attachment.container_id, attachment.ifname) for attachment in valid}
        everyone = {held.attachment for held in model.held.values()}
        model.forget(
            {
                attachment
                for attachment in everyone
                if attachment.network == network
                and (attachment.container_id, attachment.ifname) not in pairs
            }
        )
    else:
        model.boot = BOOTS[1 - BOOTS.index(model.boot)]


@contextmanager
def scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
