"""Processes that get no GPU although their container holds a part of one, and the reports of
that."""

import subprocess
import sys
from contextlib import suppress

import pytest

from gpu.limits import layout, process_registration
from gpu.limits.limits_file import GroupError, Limit
from tests.host.gpu.pods import GroupsNode
from tests.unit.gpu.made import A
from tests.waiting import until


def test_process_with_another_library_version_is_reported_to_its_pod(
    node: GroupsNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_registration, "QUIET", 1e9)
    with node.container("a").client(node.socket("a")) as client:
        for _ in range(3):  # a tenant can repeat this at any rate
            assert client.register(0, version=2)[0] == layout.STATUS_VERSION
    assert node.refused() == [("a", process_registration.VERSION)]
    (line,) = [record.message for record in caplog.records if "got no GPU" in record.message]
    assert line == (
        "GPUs: pod default/pod-of-a, container main: "
        f"{process_registration.VERSION} (process {client.pid})"
    )


def test_request_for_a_taken_slot_is_reported(node: GroupsNode) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as first, container.client(node.socket("a")) as second:
        assert first.register(5)[0] == layout.STATUS_OK
        node.claim("a", 5)
        assert second.register(5)[0] == layout.STATUS_SLOT
        assert node.refused() == [("a", process_registration.SLOT)]


def test_request_for_another_groups_gpu_is_reported_to_the_requesters_pod_only(
    node: GroupsNode,
) -> None:
    node.container("a")
    theirs = node.container("b")
    with theirs.client(node.socket("a")) as stranger:
        assert stranger.register(0)[0] == layout.STATUS_STRANGER
    assert node.refused() == [("b", process_registration.STRANGER)]


def test_process_of_no_container_is_reported_to_the_groups_holder(node: GroupsNode) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as moved:
        (container.directory.parent.parent / "cgroup.procs").write_text(f"{moved.pid}\n")
        assert moved.register(0)[0] == layout.STATUS_STRANGER
    assert node.refused() == [("a", process_registration.STRANGER)]


def test_refusal_in_an_unheld_group_is_only_logged(
    node: GroupsNode, caplog: pytest.LogCaptureFixture
) -> None:
    container = node.container("a")
    node.tenants.clear()
    with container.client(node.socket("a")) as client:
        assert client.register(0)[0] == layout.STATUS_STRANGER
    assert node.refused() == []
    assert f"group a: no container holds it: refused process {client.pid}" in caplog.text


def test_process_that_the_agent_cannot_enter_is_reported(
    node: GroupsNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise GroupError("the file system is full")

    monkeypatch.setattr(node.groups, "register", full)
    with node.container("a").client(node.socket("a")) as client:
        assert client.register(0)[0] == layout.STATUS_BUSY
    assert node.refused() == [("a", process_registration.BUSY)]
    assert f"(process {client.pid}: the file system is full)" in caplog.text


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


def test_the_next_agent_has_the_limits_of_a_tenant_that_renews_its_lease(node: GroupsNode) -> None:
    """A tenant may have taken a lease while no agent had the file open."""
    node.container("a")
    node.groups._forget("a")
    with subprocess.Popen(
        [sys.executable, "-c", RENEWED, node.groups.root / "a/limits"], stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"has it\n"
            with pytest.raises(GroupError, match=r"holds a lease .F_SETLEASE. of this file"):
                node.groups.make("a", Limit(A, 1 << 30, 0.1))

            def changes() -> bool:
                with suppress(GroupError):
                    node.groups.make("a", Limit(A, 1 << 30, 0.1))
                    return True
                return False

            until(changes, what="share", pause=0.1)
        finally:
            holder.kill()
    assert node.groups.read("a").limit.compute_share == 0.1
