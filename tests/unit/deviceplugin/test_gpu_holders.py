"""Which container holds a group: by the kubelet's records, which tell names and UIDs apart."""

from pathlib import Path

import pytest

from base.paths import Paths
from base.pod import Pod
from base.types import DeviceId
from deviceplugin.checkpoint import AllocatedGPU
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.ledger import Ledger
from gpu.limits.tenants import Tenant
from gpu.pools.holders import Holders

MEMORY = "alnair/vgpu-memory"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(Paths(state=tmp_path), "boot", print)


@pytest.fixture
def holders(tmp_path: Path, ledger: Ledger) -> Holders:
    return Holders(Paths(state=tmp_path, kubelet=tmp_path), ledger)


def give(ledger: Ledger, *ids: str, group: str) -> None:
    given = AllocatedGPU(uuid="GPU-1", bdf="0000:10:00.0", minor=0, slot=ids[0], group=group)
    ledger.record(MEMORY, {DeviceId(device_id): given for device_id in ids})


def row(*ids: str, name: str = "", uid: str = "", container: str = "main") -> PodDevices:
    return PodDevices(
        namespace="ml" if name else "",
        name=name,
        uid=uid,
        container=container,
        resource=MEMORY,
        ids=tuple(DeviceId(device_id) for device_id in ids),
    )


def test_a_container_is_known_from_its_start_and_its_uid_from_the_checkpoint(
    holders: Holders, ledger: Ledger
) -> None:
    give(ledger, "a_0", "a_1", group="g")
    holders.starts("g", [row("a_0", "a_1", name="trainer")])
    assert holders.listed() == [Tenant(group="g", pod=Pod("ml", "trainer"), container="main")]
    holders.learn([row("a_0", "a_1", uid="u")])
    assert holders.listed()[0].pod == Pod("ml", "trainer", "u")


def test_after_a_restart_the_records_tell(holders: Holders, ledger: Ledger) -> None:
    give(ledger, "a_0", group="g")
    give(ledger, "a_1", group="h")
    assert [tenant.pod for tenant in holders.listed()] == [Pod(), Pod()]
    holders.learn([row("a_0", uid="u"), row("a_1", uid="v")])
    holders.learn([row("a_0", name="trainer"), row("a_1", name="other")])
    assert holders.listed() == [
        Tenant(group="g", pod=Pod("ml", "trainer", "u"), container="main"),
        Tenant(group="h", pod=Pod("ml", "other", "v"), container="main"),
    ]


def test_records_that_contradict_each_other_tell_nothing(holders: Holders, ledger: Ledger) -> None:
    give(ledger, "a_0", group="g")
    holders.learn([row("a_0", uid="u"), row("a_0", uid="v")])
    assert holders.listed()[0].pod == Pod()


def test_old_records_do_not_replace_who_has_started(holders: Holders, ledger: Ledger) -> None:
    give(ledger, "a_0", group="g")
    holders.starts("g", [row("a_0", name="second", uid="u2")])
    holders.learn([row("a_0", name="first", uid="u1")])
    assert holders.listed()[0].pod == Pod("ml", "second", "u2")


def test_the_container_after_an_init_container_counts(holders: Holders, ledger: Ledger) -> None:
    give(ledger, "a_0", group="g")
    init, main = (
        row("a_0", uid="u", container="init"),
        row("a_0", uid="u", name="", container="main"),
    )
    holders.learn([init, main, row("a_0", name="trainer", container="main")])
    assert holders.listed() == [Tenant(group="g", pod=Pod("ml", "trainer", "u"), container="main")]


def test_a_container_that_has_not_started_and_one_that_is_gone_are_not_listed(
    holders: Holders, ledger: Ledger
) -> None:
    give(ledger, "a_0", group="")
    give(ledger, "a_1", group="h")
    holders.starts("h", [row("a_1", name="gone", uid="u")])
    ledger.drop_unknown([], age=-1.0)
    assert holders.listed() == []


def test_pods_that_are_gone_are_forgotten(holders: Holders, ledger: Ledger) -> None:
    """Their groups may be other containers' later."""
    for n in range(3):
        group = f"g{n}"
        holders.starts(group, [row("a_0", name=f"trainer-{n}", uid=f"u{n}")])
        give(ledger, "a_0", group=group)
    assert list(holders._known) == ["g1", "g2"]
    assert [tenant.pod.name for tenant in holders.listed()] == ["trainer-2"]
