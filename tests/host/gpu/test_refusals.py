"""Processes that get no GPU though their container holds a part of one: who is told, and what."""

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpu import layout, refusals
from gpu.group_limits import GroupError, Limit
from gpu.watch import Watch
from tests.host.gpu.pods import GroupsNode
from tests.unit.gpu.made import A
from tests.waiting import until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[GroupsNode]:
    with GroupsNode(tmp_path / "gpu") as node:
        yield node


@pytest.fixture
def make_watch(node: GroupsNode) -> Callable[[], Watch]:
    """The watch of another agent, each time."""
    of = node.registrar
    return lambda: Watch(node.groups, of._tenants, of.living, dict, node.told)


@pytest.fixture
def watch(make_watch: Callable[[], Watch]) -> Watch:
    return make_watch()


def test_a_pod_is_told_of_a_process_with_a_library_of_another_version(
    node: GroupsNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refusals, "QUIET", 1e9)
    with node.container("a").client(node.socket("a")) as client:
        for _ in range(3):  # a tenant asks as often as it likes
            assert client.register(0, version=2)[0] == layout.STATUS_VERSION
    assert node.refused() == [("a", refusals.VERSION)]
    (line,) = [record.message for record in caplog.records if "got no GPU" in record.message]
    assert line == (
        f"GPUs: pod default/pod-of-a, container main: {refusals.VERSION} (process {client.pid})"
    )


def test_a_slot_that_another_process_has_is_told(node: GroupsNode) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as first, container.client(node.socket("a")) as second:
        assert first.register(5)[0] == layout.STATUS_OK
        node.claim("a", 5)
        assert second.register(5)[0] == layout.STATUS_SLOT
        assert node.refused() == [("a", refusals.SLOT)]


def test_whose_process_asks_for_another_groups_gpu_is_told_and_not_that_group(
    node: GroupsNode,
) -> None:
    node.container("a")
    theirs = node.container("b")
    with theirs.client(node.socket("a")) as stranger:
        assert stranger.register(0)[0] == layout.STATUS_STRANGER
    assert node.refused() == [("b", refusals.STRANGER)]


def test_who_holds_the_group_is_told_of_a_process_of_no_container(node: GroupsNode) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as moved:
        (container.directory.parent.parent / "cgroup.procs").write_text(f"{moved.pid}\n")
        assert moved.register(0)[0] == layout.STATUS_STRANGER
    assert node.refused() == [("a", refusals.STRANGER)]


def test_of_a_group_that_nobody_holds_the_log_alone_tells(
    node: GroupsNode, caplog: pytest.LogCaptureFixture
) -> None:
    container = node.container("a")
    node.tenants.clear()
    with container.client(node.socket("a")) as client:
        assert client.register(0)[0] == layout.STATUS_STRANGER
    assert node.refused() == []
    assert f"group a: nobody holds it: a process was refused (process {client.pid})" in caplog.text


def test_a_process_that_the_agent_cannot_enter_is_told(
    node: GroupsNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(group: str, processes: object) -> None:
        raise GroupError("the file system is full")

    monkeypatch.setattr(node.groups, "register_all", full)
    with node.container("a").client(node.socket("a")) as client:
        assert client.register(0)[0] == layout.STATUS_BUSY
    assert node.refused() == [("a", refusals.BUSY)]
    assert f"(processes {client.pid}: the file system is full)" in caplog.text


def missing(file: Path) -> None:
    file.unlink()


def of_version_2(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8] = 2  # struct pf_limits, struct pf_region: the version
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("region", missing, refusals.REGION),
        ("region", of_version_2, refusals.REGION),
        ("limits", of_version_2, refusals.LIMITS),
    ],
)
def test_a_file_that_is_missing_or_of_another_version_is_told_at_the_second_look_and_once(
    node: GroupsNode, watch: Watch, name: str, damage: Callable[[Path], object], text: str
) -> None:
    for group in ("a", "b"):
        node.container(group)
    watch.look(None)
    damage(node.groups.root / "a" / name)
    watch.look(None)
    assert node.refused() == []  # it may be a group that is removed now
    for _ in range(3):
        watch.look(None)
    assert node.refused() == [("a", text)]


def test_a_group_that_is_not_made_yet_is_no_fault(node: GroupsNode, watch: Watch) -> None:
    """It is in the ledger before its files are there, and stays so while a start is refused."""
    node.container("a")
    node.groups.remove("a")
    for _ in range(3):
        watch.look(None)
    assert node.refused() == []


LEASE = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["limits", "region"])
def test_a_lease_that_a_tenant_takes_is_no_fault_of_the_file(
    node: GroupsNode, watch: Watch, name: str
) -> None:
    node.container("a")
    file = node.groups.root / "a" / name
    with subprocess.Popen(
        [sys.executable, "-c", LEASE, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGIO, signal.SIG_IGN),
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"has it\n"
        for _ in range(3):
            watch.look(None)
    assert node.refused() == []


RENEWED = """
import fcntl, os, signal, sys
file = os.open(sys.argv[1], os.O_RDONLY)
def renew(*_):
    for kind in (fcntl.F_UNLCK, fcntl.F_RDLCK):
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, kind)
        except OSError:  # there is none, or the file is open for writing
            signal.setitimer(signal.ITIMER_REAL, 0.0001)
signal.signal(signal.SIGIO, renew)
signal.signal(signal.SIGALRM, renew)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
print("has it", flush=True)
while True:
    signal.pause()
"""


def test_the_limits_of_a_tenant_that_renews_its_lease_can_be_changed(node: GroupsNode) -> None:
    node.container("a")
    with subprocess.Popen(
        [sys.executable, "-c", RENEWED, node.groups.root / "a/limits"], stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"has it\n"
            with pytest.raises(GroupError, match="holds a lease of it"):
                node.groups.change("a", Limit(A, 1 << 30, 0.1))

            def changes() -> bool:
                with suppress(GroupError):
                    node.groups.change("a", Limit(A, 1 << 30, 0.1))
                    return True
                return False

            for _ in range(100):
                until(changes, what="share", pause=0.1)
        finally:
            holder.kill()
    assert node.groups.read("a").in_force.share == 0.1


def test_an_agent_without_descriptors_tells_nothing_of_the_files(
    node: GroupsNode, watch: Watch
) -> None:
    for group in "abc":
        node.container(group)
    watch.look(None)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        for _ in range(3):
            watch.look(None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert node.refused() == []


def test_who_found_no_slot_is_not_told_again_by_the_next_agent(
    node: GroupsNode, make_watch: Callable[[], Watch]
) -> None:
    node.container("a")
    with (node.groups.root / "a/region").open("r+b") as region:
        region.seek(layout.PfRegionHeader.refused_slots.offset)
        region.write((1).to_bytes(8, "little"))
    for _ in range(2):
        watch = make_watch()
        for _ in range(2):
            watch.look(None)
    assert node.refused() == []


def test_a_process_that_finds_no_slot_is_told_once_for_all_until_the_next_look(
    node: GroupsNode, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shim counts it in the region, and never asks the agent."""
    monkeypatch.setattr(refusals, "QUIET", 0.0)
    node.container("a")
    watch.look(None)

    def count(refused: int) -> None:
        with (node.groups.root / "a/region").open("r+b") as region:
            region.seek(layout.PfRegionHeader.refused_slots.offset)
            region.write(refused.to_bytes(8, "little"))

    for refused, told in ((0, 0), (2, 1), (2, 1), (3, 2)):
        count(refused)
        watch.look(None)
        assert node.refused() == [("a", refusals.FULL)] * told
