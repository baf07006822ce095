"""A container runtime from the distribution: podman, runc, the reference bridge, our addresses."""

import pytest

from tests.host.podman.runtime import Podman, reason_to_skip
from tests.waiting import until

NO_CNI = reason_to_skip()
pytestmark = pytest.mark.skipif(NO_CNI != "", reason=NO_CNI)


def test_a_container_gets_an_address_of_the_range(podman: Podman) -> None:
    podman.network(range="10.77.0.0/24", range_start="10.77.0.20", gateway="10.77.0.1")
    container = podman.run("one")
    assert container.addresses() == ["10.77.0.20/24"]
    assert container.reserved() == ["10.77.0.20"]
    [reservation] = podman.machine.reservations()
    assert (reservation.network, reservation.ifname) == ("fabric", "eth0")
    assert (reservation.pod, reservation.range) == ("one", "10.77.0.0/24")


def test_containers_reach_each_other_and_the_gateway(podman: Podman) -> None:
    podman.network(range="10.77.0.0/24", gateway="10.77.0.1")
    first, second = podman.run("one"), podman.run("two")
    assert [*first.reserved(), *second.reserved()] == ["10.77.0.2", "10.77.0.3"]
    for container, target in (first, "10.77.0.3"), (second, "10.77.0.2"), (first, "10.77.0.1"):
        ping = container.execute("ping", "-c", "1", "-W", "5", target)
        assert ping.returncode == 0, ping.stdout + ping.stderr


def test_removal_frees_the_address_and_the_next_container_gets_it(podman: Podman) -> None:
    podman.network(range="10.77.0.0/24", gateway="10.77.0.1")
    first, second = podman.run("one"), podman.run("two")
    podman.succeed("rm", "--force", "--time", "0", "one")
    assert first.reserved() == []
    assert second.reserved() == ["10.77.0.3"]
    assert podman.run("three").addresses() == ["10.77.0.2/24"]
    podman.succeed("rm", "--force", "--time", "0", "--all")
    assert podman.machine.reservations() == []


def test_a_requested_address_is_given_and_recorded(podman: Podman) -> None:
    podman.network(range="10.77.0.0/24", gateway="10.77.0.1")
    container = podman.run("one", "--ip", "10.77.0.77")
    assert container.addresses() == ["10.77.0.77/24"]
    assert container.reserved() == ["10.77.0.77"]


def test_requested_addresses_of_both_families_are_given(podman: Podman) -> None:
    # Two addresses, so that podman passes them by the capability "ips" and not in CNI_ARGS.
    podman.network(ipRanges=[{"range": "10.77.0.0/24"}, {"range": "fd77::/64"}])
    container = podman.run("one", "--ip", "10.77.0.77", "--ip6", "fd77::77")
    assert sorted(container.addresses()) == ["10.77.0.77/24", "fd77::77/64"]
    assert sorted(container.reserved()) == ["10.77.0.77", "fd77::77"]


def test_a_requested_address_that_is_taken_is_an_error_that_names_no_other_container(
    podman: Podman,
) -> None:
    podman.network(range="10.77.0.0/24", gateway="10.77.0.1")
    podman.run("one", "--ip", "10.77.0.77")
    second = podman.start("two", "--ip", "10.77.0.77")
    assert second.returncode != 0
    assert "10.77.0.77" in second.stderr
    assert "in use by another attachment" in second.stderr
    assert "one, network fabric" not in second.stderr
    assert [reservation.pod for reservation in podman.machine.reservations()] == ["one"]


def test_a_container_that_finds_no_free_address_fails_with_our_error(podman: Podman) -> None:
    podman.network(range="10.77.0.0/30", gateway="10.77.0.1")
    container = podman.run("one")
    assert container.addresses() == ["10.77.0.2/30"]
    second = podman.start("two")
    assert second.returncode != 0
    assert "no free address in " in second.stderr
    assert "10.77.0.0/30" in second.stderr
    assert [reservation.pod for reservation in podman.machine.reservations()] == ["one"]
    podman.succeed("rm", "--force", "--time", "0", "one")
    podman.succeed("start", "two")
    assert [reservation.pod for reservation in podman.machine.reservations()] == ["two"]


def test_a_killed_container_gives_its_address_back(podman: Podman) -> None:
    podman.network(range="10.77.0.0/24", gateway="10.77.0.1")
    podman.run("one")
    podman.succeed("kill", "one")
    until(lambda: podman.machine.reservations() == [])
    podman.succeed("start", "one")
    assert [reservation.pod for reservation in podman.machine.reservations()] == ["one"]


def test_a_container_that_died_without_its_monitor_gives_its_address_back_when_removed(
    podman: Podman,
) -> None:
    podman.network(range="10.77.0.0/24", gateway="10.77.0.1")
    container = podman.run("one")
    shown = podman.succeed("inspect", "--format", "{{.State.ConmonPid}} {{.State.Pid}}", "one")
    podman.machine.run("kill", "-KILL", *shown.split())
    assert container.reserved() == ["10.77.0.2"]
    # podman may first notice that there is nothing to stop, and remove the container then.
    until(lambda: podman("rm", "--force", "--time", "0", "one").returncode == 0)
    assert podman.machine.reservations() == []
