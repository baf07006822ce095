"""The election, with a clock for each process: at most one leads at any time."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kube.leadership import DURATION, RENEW_EVERY, RENEW_WITHIN, Leadership
from kube.resources import Lease
from tests.fake_api import FakeApi, FakeClient, Fault


class Process:
    """A candidate and its client."""

    def __init__(self, api: FakeApi, name: str, clock: Callable[[], float]) -> None:
        self.client: FakeClient = api.client(name)
        self.leadership = Leadership(
            self.client, "podfabric", "controller", name, clock=clock, wall=clock
        )

    @property
    def leads(self) -> bool:
        return self.leadership.holds


class Election:
    """Two processes whose clocks go differently fast, within 1 %."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.api = FakeApi()
        self.first = Process(self.api, "first", lambda: self.now * 0.99)
        self.second = Process(self.api, "second", lambda: self.now * 1.01 + 70)

    @property
    def lease(self) -> Lease:
        """The current Lease."""
        return self.api.look(Lease, "controller", "podfabric")

    def run(self, seconds: float, *processes: Process) -> None:
        """Steps of the processes while time passes; never do two lead."""
        end = self.now + seconds
        while self.now < end:
            for process in processes:
                process.leadership.step()
                assert not (self.first.leads and self.second.leads)
            for _ in range(int(RENEW_EVERY)):
                self.now += 1
                assert not (self.first.leads and self.second.leads)


def test_the_first_leads_as_long_as_it_renews() -> None:
    election = Election()
    election.run(300, election.first, election.second)
    assert election.first.leads
    assert not election.second.leads
    lease = election.lease.spec
    assert (lease.holder_identity, lease.lease_transitions) == ("first", 0)
    assert lease.lease_duration_seconds == DURATION


def test_a_leader_that_cannot_renew_stops_before_another_begins() -> None:
    election = Election()
    election.run(20, election.first, election.second)
    election.first.client.down = True
    stopped_at = began_at = None
    cut_off_at = election.now
    while began_at is None:
        election.run(1, election.first, election.second)
        if stopped_at is None and not election.first.leads:
            stopped_at = election.now
        if election.second.leads:
            began_at = election.now
    assert stopped_at is not None
    assert stopped_at - cut_off_at <= RENEW_WITHIN + RENEW_EVERY
    # A request that was sent just before has ended meanwhile.
    assert began_at - stopped_at >= 8
    election.first.client.down = False
    election.run(100, election.first, election.second)
    assert election.second.leads


def test_a_lease_that_is_given_back_is_taken_at_once() -> None:
    election = Election()
    election.run(20, election.first, election.second)
    election.first.leadership.give_back()
    assert not election.first.leads
    assert election.lease.spec.holder_identity == ""
    assert election.second.leadership.step()
    assert election.lease.spec.lease_transitions == 1


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.LATE])
def test_a_renewal_without_an_answer_does_not_cost_the_leadership(fault: Fault) -> None:
    election = Election()
    election.run(20, election.first, election.second)
    faults = [fault]
    election.first.client.faults = lambda *_: faults.pop() if faults else None
    election.first.leadership.step()
    assert not faults
    election.api.deliver()
    election.run(200, election.first, election.second)
    assert election.first.leads


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.CONFLICT])
def test_a_first_lease_without_an_answer_is_seen_in_the_next_step(fault: Fault) -> None:
    election = Election()
    faults = [fault, None]
    election.first.client.faults = lambda *_: faults.pop() if faults else None
    assert not election.first.leadership.step()
    assert election.first.leadership.step()


def test_a_lease_that_another_took_is_lost() -> None:
    election = Election()
    election.run(20, election.first)
    lease = election.lease
    taken = replace(lease.spec, holder_identity="administrator")
    election.api.update(replace(lease, spec=taken))
    assert not election.first.leadership.step()
    assert not election.first.leads


def test_a_lease_that_is_deleted_is_taken_again() -> None:
    election = Election()
    election.run(20, election.first, election.second)
    election.api.remove(Lease, "controller", "podfabric")
    election.run(10, election.first, election.second)
    assert election.first.leads != election.second.leads
