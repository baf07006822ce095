"""Claims of a device: granted, refused, waited for, or restored from a dead attachment.

The journal and its locks are real, below a directory of the test's own; devices are made up.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from filelock import FileLock

from base import locks
from base.paths import Paths
from base.pod import Pod
from cni.attachments.journal import Journal, JournalEntry, Phase
from cni.attachments.matching import Match
from cni.attachments.pod_choices import lock_of
from cni.spec.attachment import Attachment
from cni.spec.config import decode
from cni.spec.errors import CNIError
from cni.spec.notes import collected
from cni.spec.request import Request
from cni.sriov import options, vf_release
from cni.sriov.claim import Claimer
from cni.sriov.device_record import DeviceRecord
from deviceplugin.checkpoint import AllocatedHCA
from deviceplugin.pod_devices import PodDevice, PodHoldings
from host.namespaces import NetworkNamespace, view
from tests.unit.sriov.node import BOOT, HOST, VF0, VF1, Node
from tests.waiting import PATIENCE

pytestmark = pytest.mark.root

OWNER = Attachment("fabric", "c0", "net1")
OWN = f"/proc/{os.getpid()}/ns/net"  # a namespace that lives: this process' own
MASTER: dict[str, Any] = {"deviceID": None, "master": "enp175s0f1"}


class Claims:
    """The plugin on an artificial node, and the devices that it restored."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = node
        self.journal = Journal(node.paths)
        self.released: list[str] = []
        self.given = PodHoldings(Pod("", ""))
        monkeypatch.setattr(vf_release, "release_locked", self._release)

    def claim(self, container_id: str = "c1", **config: Any) -> str:  # noqa: ANN401
        """The device that an ADD gets; the journal has its owner then."""
        return self._claim(_request(container_id, **config)).device

    def attach(self, container_id: str, **config: Any) -> str:  # noqa: ANN401
        """As `claim`, with the attachment's lock held, and the ADD completes."""
        request = _request(container_id, **config)
        with self.journal.locked(Attachment("fabric", container_id, "net1")):
            entry = self._claim(request)
            time.sleep(0.1)
            self.journal.write(entry.attached(DeviceRecord(device=entry.device, driver=""), ()))
        return entry.device

    def refusal(self, **config: Any) -> CNIError:  # noqa: ANN401
        """The error of an ADD that gets no device."""
        with pytest.raises(CNIError) as caught:
            self.claim(**config)
        return caught.value

    def owned(self, owner: Attachment = OWNER, **more: object) -> JournalEntry:
        """An attachment in the journal that has VF 0, in a living namespace."""
        usual: dict[str, object] = {
            "plugin": "sriov",
            "network": owner.network,
            "container_id": owner.container_id,
            "ifname": owner.ifname,
            "netns": OWN,
            "netns_identity": _identity(),
            "boot_id": BOOT,
            "phase": Phase.ATTACHED,
            "since": "2026-01-02T03:04:05+00:00",
            "device": VF0,
        }
        entry = JournalEntry(**{**usual, **more})  # type: ignore[arg-type]
        self.journal.write(entry)
        return entry

    def _claim(self, request: Request) -> JournalEntry:
        with NetworkNamespace.open(OWN) as namespace:
            wanted = options.read(request)
            match = Match(self.node.paths, self.given, "fabric/net1")
            claimer = Claimer(self.journal, self.node.paths, request, namespace, HOST, match)
            return claimer.claim(wanted).entry

    def _release(
        self,
        journal: Journal,
        paths: Paths,
        attachment: Attachment,
        request: Request,
        entry: JournalEntry,
        device: str,
    ) -> None:
        self.released.append(str(attachment))
        journal.write(msgspec.structs.replace(entry, device=""))


def _request(container_id: str, **config: Any) -> Request:  # noqa: ANN401
    document = {"type": "sriov", "deviceID": VF0} | config
    return Request(
        command="ADD",
        container_id=container_id,
        netns=OWN,
        ifname="net1",
        config=decode(msgspec.json.encode(document)),
        network="fabric",
    )


def _identity() -> str:
    with NetworkNamespace.open(OWN) as namespace:
        return namespace.identity


@pytest.fixture
def claims(ethernet: Node, monkeypatch: pytest.MonkeyPatch) -> Claims:
    return Claims(ethernet, monkeypatch)


@contextmanager
def _held(journal: Journal, attachment: Attachment) -> Iterator[threading.Event]:
    """A call holds the attachment's lock until the event is set."""
    holds, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with journal.locked(attachment):
            holds.set()
            ends.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(hold)
        assert holds.wait(PATIENCE)
        try:
            yield ends
        finally:
            ends.set()
            done.result()


GONE: dict[str, Any] = {
    "netns": "/nowhere/ns",
    "netns_identity": "cookie:0",
    "netns_seen_from": view(),
}


def test_free_device_is_journaled_first(claims: Claims) -> None:
    assert claims.claim() == VF0
    (entry,) = claims.journal.holders(VF0)
    assert isinstance(entry, JournalEntry)
    assert (entry.container_id, entry.phase, entry.device) == ("c1", Phase.ADDING, VF0)
    record = entry.undo_as(DeviceRecord)
    assert (record.device, record.driver, record.before) == (VF0, "mlx5_core", claims.node.vfs[0])
    assert claims.node.calls == []


@pytest.mark.parametrize(
    ("pod", "whose"),
    [({}, "to container c0"), ({"pod_namespace": "a", "pod_name": "b"}, "to a/b, container c0")],
)
def test_device_of_a_living_pod_is_refused_and_only_the_log_names_that_pod(
    claims: Claims, pod: dict[str, Any], whose: str
) -> None:  # SC15, SP2, S7
    owner = claims.owned(**pod)
    with collected() as notes:
        refusal = claims.refusal()
    assert refusal.code == 11
    assert refusal.message == (
        f"device {VF0} is already allocated: another attachment has had it since "
        "2026-01-02T03:04:05+00:00, and the agent's log names that attachment: try again, "
        "or name another device"
    )
    assert notes.text == (
        f'device {VF0} is allocated {whose}, interface "net1" of network "fabric", '
        "since 2026-01-02T03:04:05+00:00\n"
    )
    assert list(claims.journal.holders(VF0)) == [owner]
    assert claims.released == []


def test_other_device_of_the_same_pf_is_free(claims: Claims) -> None:  # SP1
    claims.owned()
    assert claims.claim(deviceID=VF1) == VF1


@pytest.mark.parametrize("phase", [Phase.ADDING, Phase.ATTACHED, Phase.LEAVING])
def test_device_of_a_dead_pod_is_restored_and_attached(claims: Claims, phase: str) -> None:  # SP3
    claims.owned(phase=phase, **GONE)
    assert claims.claim() == VF0
    assert claims.released == [str(OWNER)]
    owner = claims.journal.read(OWNER)
    assert owner is not None  # for its addresses, which the DEL to come releases
    assert owner.device == ""


def test_device_of_an_earlier_boot_is_attached_without_a_restore(claims: Claims) -> None:
    claims.owned(boot_id="another boot")
    assert claims.claim() == VF0
    assert claims.released == []
    owner = claims.journal.read(OWNER)
    assert owner is not None
    assert owner.device == ""


def test_device_of_a_killed_add_is_restored_though_its_pod_lives(claims: Claims) -> None:
    claims.owned(phase=Phase.ADDING)
    assert claims.claim() == VF0
    assert claims.released == [str(OWNER)]


def test_restored_device_is_free(claims: Claims) -> None:
    claims.owned(device="", config=msgspec.json.encode({"deviceID": VF0}).decode())
    assert claims.claim() == VF0
    assert claims.released == []


def test_device_that_cannot_be_restored_is_not_attached(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("it is stuck")

    monkeypatch.setattr(vf_release, "release_locked", fail)
    owner = claims.owned(**GONE)
    with pytest.raises(OSError, match="it is stuck"):
        claims.claim()
    assert list(claims.journal.holders(VF0)) == [owner]


def test_owner_that_is_being_removed_is_waited_for(claims: Claims) -> None:  # SI5
    claims.owned()
    with _held(claims.journal, OWNER) as ends, ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(claims.claim)
        time.sleep(0.3)
        assert not claiming.done()
        claims.journal.remove(OWNER)
        ends.set()
        assert claiming.result(PATIENCE) == VF0
    assert claims.released == []


def test_running_add_of_the_owner_is_waited_for_and_keeps_the_device(
    claims: Claims,
) -> None:  # SI4
    adding = claims.owned(phase=Phase.ADDING)
    with _held(claims.journal, OWNER) as ends, ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(claims.refusal)
        time.sleep(0.3)
        assert not claiming.done()
        claims.journal.write(msgspec.structs.replace(adding, phase=Phase.ATTACHED))
        ends.set()
        refusal = claiming.result(PATIENCE)
    assert refusal.code == 11
    assert f"device {VF0} is already allocated" in refusal.message
    assert claims.released == []


def test_waiting_for_an_owner_ends(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "TIMEOUT", 0.3)
    claims.owned()
    with _held(claims.journal, OWNER):
        started = time.monotonic()
        assert claims.refusal().code == 11
        assert 0.3 <= time.monotonic() - started < PATIENCE / 2


def test_no_call_waits_with_the_device_locked(claims: Claims) -> None:
    claims.owned()
    with _held(claims.journal, OWNER) as ends, ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(claims.refusal)
        time.sleep(0.2)
        with claims.journal.device_locked(VF0, timeout=locks.TIMEOUT / 2):
            pass
        ends.set()
        claiming.result(PATIENCE)


def test_no_call_waits_with_the_pods_choice_locked(claims: Claims) -> None:
    pod = Pod("a", "b", "uid")
    held = AllocatedHCA(id=VF0, address=VF0, netdevs=(), rdma=())
    claims.given = PodHoldings(pod, (PodDevice("rdma/vf", VF0, held),), frozenset([VF0]))
    claims.owned()
    with _held(claims.journal, OWNER) as ends, ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(claims.claim, deviceID=None, master="enp175s0f1")
        time.sleep(0.2)
        with FileLock(lock_of(claims.node.paths, pod), timeout=locks.TIMEOUT / 2):
            assert not claiming.done()
            claims.journal.remove(OWNER)
        ends.set()
        assert claiming.result(PATIENCE) == VF0
    (kept,) = (claims.node.paths.devices / "pods").iterdir()
    assert f'"fabric/net1":"{VF0}"'.encode() in kept.read_bytes()


def test_damaged_journal_that_names_the_device_is_an_error(claims: Claims) -> None:
    entry = claims.owned()
    path = claims.journal.path_of(entry.attachment)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"net1"', b'"net2"'))
    with collected() as notes:
        refusal = claims.refusal()
    assert refusal.code == 113
    assert refusal.message == (
        f"device {VF0} may belong to an attachment with a damaged journal file: run DEL for that "
        "attachment (the agent's log names the file)"
    )
    assert notes.text == (
        f"journal file {path} is damaged: its checksum is wrong; the file is for device {VF0}: run "
        "DEL for its attachment\n"
    )
    path.write_bytes(content[:-4])
    assert claims.refusal().code == 113


def test_damaged_journal_of_another_device_does_not_matter(claims: Claims) -> None:
    entry = claims.owned(device=VF1)
    claims.journal.path_of(entry.attachment).write_bytes(b'{"device": "0000:af:06.1"')
    assert claims.claim() == VF0


def test_master_skips_used_vfs(claims: Claims) -> None:
    claims.owned()
    assert claims.claim(**MASTER) == VF1


def test_master_skips_vfs_that_do_not_fit(claims: Claims) -> None:
    claims.node.tree.bound(VF0, "")
    del claims.node.links["enp175s6"]
    assert claims.claim(**MASTER) == VF1


def test_master_does_not_wait_for_a_vf_that_is_being_removed(claims: Claims) -> None:
    claims.owned()
    with _held(claims.journal, OWNER):
        started = time.monotonic()
        assert claims.claim(**MASTER) == VF1
        assert time.monotonic() - started < locks.TIMEOUT / 2


def test_master_without_a_free_vf_logs_every_owner(claims: Claims) -> None:
    claims.owned()
    claims.owned(Attachment("fabric", "c9", "net2"), device=VF1)
    with collected() as notes:
        refusal = claims.refusal(**MASTER)
    assert refusal.code == 11
    for owner in ('container c0, interface "net1"', 'container c9, interface "net2"'):
        assert owner in notes.text
    for text in ("c0", "c9", "net2"):
        assert text not in refusal.message


def test_masters_last_vf_is_waited_for_if_no_other_will_do(claims: Claims) -> None:
    claims.owned()
    claims.owned(Attachment("fabric", "c9", "net2"), device=VF1)
    with _held(claims.journal, OWNER) as ends, ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(claims.claim, **MASTER)
        time.sleep(0.3)
        claims.journal.remove(OWNER)
        ends.set()
        assert claiming.result(PATIENCE) == VF0


def test_damaged_journal_of_one_vf_does_not_hide_the_others_of_a_master(claims: Claims) -> None:
    path = claims.journal.path_of(claims.owned().attachment)
    path.write_bytes(path.read_bytes()[:-4])
    assert claims.claim(**MASTER) == VF1


def test_temporary_refusal_is_try_again(claims: Claims) -> None:
    claims.owned()
    claims.node.tree.bound(VF1, "")
    del claims.node.links["enp175s7"]
    assert claims.refusal(**MASTER).code == 11
