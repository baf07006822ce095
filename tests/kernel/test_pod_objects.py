"""The RDMA objects of pods on a Soft-RoCE device: processes in cgroups and PID namespaces."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from base.paths import Paths
from node import usage
from node.state import ThisNode
from node.usage import RdmaObjects
from tests.kernel import verbs
from tests.unit.node.test_fabric_node import attach
from tests.waiting import until

DEVICE = "rxe7"
UIDS = tuple(f"{number}b0e0a5c-1111-4222-8333-944445555666" for number in range(3))


@contextmanager
def pod_with(uid: str, number: int, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process with `number` queue pairs in the cgroup of a container of the pod."""
    slice_ = Path(f"/sys/fs/cgroup/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice")
    cgroup = slice_ / f"cri-containerd-{number:064x}.scope"
    cgroup.mkdir(parents=True)
    enter = f"echo $$ > {cgroup}/cgroup.procs && exec {' '.join(words)} {verbs.program()}"
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"{enter} {DEVICE} {number}"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        until(lambda: not (cgroup / "cgroup.procs").read_text(), what="end of the processes")
        cgroup.rmdir()
        slice_.rmdir()


def counts(paths: Paths) -> list[RdmaObjects]:
    return list(usage.measured(ThisNode(paths, tolerant=True)).objects)


def test_objects_are_counted_by_pod_until_their_process_ends(tmp_path: Path) -> None:
    paths = Paths(sys=tmp_path / "sys", state=tmp_path, run=tmp_path / "run")
    attach(paths, "worker-0")  # without pods, nothing is counted
    with ExitStack() as stack:
        stack.enter_context(verbs.soft_roce(DEVICE))
        own_pids = ("unshare", "--pid", "--fork", "--kill-child")
        stack.enter_context(pod_with(UIDS[0], 20, *own_pids))
        stack.enter_context(pod_with(UIDS[1], 200))
        host = subprocess.Popen([verbs.program(), DEVICE, "3"], stdout=subprocess.PIPE)
        stack.callback(host.wait)
        stack.callback(host.kill)
        assert host.stdout is not None and host.stdout.readline() == b"ready\n"  # in no pod
        assert counts(paths) == [
            RdmaObjects(pod=UIDS[0], device=DEVICE, qp=20, mr=1, cq=1),
            RdmaObjects(pod=UIDS[1], device=DEVICE, qp=200, mr=1, cq=1),
        ]
        node = ThisNode(paths, tolerant=True)
        before = usage.measured(node)
        assert usage.measured(node, before).objects is before.objects  # not counted again
        with pod_with(UIDS[2], 1) as process:
            assert len(usage.measured(node, before).objects) == 3
            assert counts(paths)[2] == RdmaObjects(pod=UIDS[2], device=DEVICE, qp=1, mr=1, cq=1)
            process.kill()
            until(lambda: len(counts(paths)) == 2, what="end of the objects")
