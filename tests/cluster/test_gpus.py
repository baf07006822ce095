"""GPUs that containers share, with the pods of two systems that podfabric replaces.

The node's driver is the stand-in of tests/standin. Its libraries are in the directory in which GKE
has NVIDIA's, its files below /proc/driver are simulated, and its device nodes lead to other
devices. Files replace the state of the driver's kernel module. Pods and the agent mount these
files, which is the only addition to the pods here. All else is real: the runtime, the mounts, the
agent in its pod, its metrics.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import images
from tests.cluster.cluster import PATIENCE, Cluster, Document, Namespace
from tests.cluster.installation import (
    await_agent,
    await_nothing_left,
    await_offered,
    kill_agent,
    unplugged,
    upgrade,
    with_vfs,
)
from tests.cluster.seen import uverbs
from tests.kernel.vm import layout
from tests.standin import build
from tests.standin.gpus import (
    GIB,
    MIB,
    OF_MACHINE,
    Accounts,
    Behaviour,
    Gpu,
    described,
    gpus,
)
from tests.waiting import until

pytestmark = pytest.mark.long

SHARED = "deepomatic.com/shared-gpu"
MEMORY, COMPUTE = "alnair/vgpu-memory", "alnair/vgpu-compute"
VF = "rdma/vf"
DRIVER, IN_CONTAINER = "/home/kubernetes/bin/nvidia", "/usr/local/nvidia"
# FAR and NEAR are given in parts, WHOLE to several containers in the order of their requests.
FAR, NEAR, WHOLE = range(3)
# Devices that any container may open: null, zero, full; random, urandom.
NODES = {
    "nvidia0": "1 3",
    "nvidia1": "1 5",
    "nvidia2": "1 7",
    "nvidiactl": "1 8",
    "nvidia-uvm": "1 9",
}
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
RESERVE = 400 * MIB  # the charge for a context until its size is measured
CONTEXT = 100 * MIB  # the actual size of a context
CLOSE = 0.1  # of the GPU's time
# The percents that pods request in this order, and the GPU that each gets. The second and the third
# pod of a round reuse the slots of the previous round, on the other GPU.
ROUNDS = (
    ((80, FAR), (50, NEAR), (20, FAR)),
    ((20, FAR), (80, FAR), (50, NEAR)),
    ((80, FAR), (50, NEAR), (20, FAR)),
)
SECOND = 1_000_000_000  # ns

OF_ALNAIR = """
apiVersion: v1
kind: Pod
metadata:
  name: gpu-pod
spec:
  containers:
    - name: cuda-container
      image: hxhp/elastic-horovod-demo:1.0
      resources:
        limits:
          alnair/vgpu-memory: 2
          alnair/vgpu-compute: 50
      command: ["python", "/examples/tensorflow2_mnist.py"]
  restartPolicy: OnFailure
"""
# The README of shared-gpu requires these of pods: the resource, and two tolerations.
OF_DEEPOMATIC = f"""
apiVersion: v1
kind: Pod
metadata:
  name: shared
spec:
  tolerations:
    - {{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}}
    - {{key: deepomatic.com--shared-gpu, operator: Exists, effect: NoSchedule}}
  containers:
    - name: main
      image: {images.OF_ALNAIR}
      command: [python]
      resources:
        limits:
          deepomatic.com/shared-gpu: 1
"""


def _cards(addresses: Sequence[str]) -> tuple[Gpu, ...]:
    made = gpus(len(addresses), bytes=4 * GIB, context_bytes=CONTEXT)
    return tuple(
        msgspec.structs.replace(gpu, pci=f"0000{address}")
        for gpu, address in zip(made, addresses, strict=True)
    )


def _load(cluster: Cluster, cards: Sequence[Gpu]) -> None:
    """Install the driver and its GPUs on the node."""
    node = cluster.node
    behaviour = Behaviour(nodes="/dev")
    node.write(OF_MACHINE / "gpus.json", described(OF_MACHINE, tuple(cards), behaviour).decode())
    node.run(f"chmod 755 {OF_MACHINE} && mkdir -p {DRIVER}/lib64")
    for name in ("libcuda.so", "libnvidia-ml.so"):
        file = f"{name}.{behaviour.driver}"
        node.run(
            f"cp {build.libraries()}/{name}.1 {DRIVER}/lib64/{file} && cd {DRIVER}/lib64 && "
            f"ln -s {file} {name}.1 && ln -s {name}.1 {name}"
        )
    node.run("mount -t tmpfs tmpfs /proc/driver")
    for gpu in cards:
        address = gpu.pci.removeprefix("0000")
        node.write(
            f"/proc/driver/nvidia/gpus/{address}/information",
            f"GPU UUID: {gpu.uuid}\nBus Location: {address}\nDevice Minor: {gpu.minor}\n",
        )
    for name, numbers in NODES.items():
        node.run(f"mknod -m 666 /dev/{name} c {numbers}")


def _unload(cluster: Cluster) -> None:
    cluster.node.run(
        f"umount -l /proc/driver; rm -rf /dev/nvidia* {shlex.quote(DRIVER)} {OF_MACHINE}"
    )


@contextmanager
def _loaded(cluster: Cluster, cards: Sequence[Gpu]) -> Iterator[None]:
    try:
        _load(cluster, cards)
        yield
    finally:
        _unload(cluster)


@contextmanager
def _hca_on_a_card(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """An HCA on a VF in place of the node's own; the addresses of that VF and of another one."""
    with with_vfs(cluster, 2) as pf, unplugged(cluster):
        links = f"/sys/class/net/{pf}/device/virtfn"
        beside = f"for n in 0 1; do basename $(readlink {links}$n); done"
        vf, other = cluster.node.run(beside).split()
        cluster.node.run(f"/sbin/modprobe ibloop parents={vf}")
        try:
            yield vf, other
        finally:
            cluster.node.run("/sbin/modprobe --remove ibloop")


@pytest.fixture(scope="module")
def cards(cluster: Cluster) -> Iterator[tuple[Gpu, ...]]:
    """Three GPUs and an HCA. One GPU is on the HCA's card; the other two are not."""
    with _hca_on_a_card(cluster) as (hca, beside):
        made = _cards(("0000:00:00.0", beside, "0000:00:01.0"))
        shared = {"mode": "replicas", "name": SHARED, "replicas": 100}
        shared |= {"devices": [made[WHOLE].uuid]}
        shared |= {"driverMount": {"host": DRIVER, "container": IN_CONTAINER}}
        configuration = {
            "pools": [{"name": VF, "mode": "exclusive", "selectors": {"pciAddresses": [hca]}}],
            "gpus": [shared, {"mode": "units", "reserve": 0}],
            "gpuLimits": {"driverRoot": DRIVER},
        }
        directories = {"extraDirectories": [{"path": str(OF_MACHINE)}]}
        with _loaded(cluster, made):
            upgrade(cluster, configuration, host=directories)
            try:
                await_offered(cluster, {SHARED: 100, MEMORY: 8, COMPUTE: 200, VF: 1})
                yield made
                await_nothing_left(cluster, allocations=True)
            finally:
                upgrade(cluster, {})
    kill_agent(cluster)  # the next agent sees the node's own /proc/driver again
    await_agent(cluster)


def _with_driver(pod: Document) -> Document:
    """The pod, with the files that replace the state of the driver's kernel module."""
    spec = pod["spec"]
    spec["volumes"] = [{"name": "kernel", "hostPath": {"path": str(OF_MACHINE)}}]
    for container in spec["containers"]:
        container["volumeMounts"] = [{"name": "kernel", "mountPath": str(OF_MACHINE)}]
    return pod


def _trainer(name: str, *command: str, **devices: int) -> Document:
    resources = {"memory": MEMORY, "compute": COMPUTE, "vf": VF}
    limits = {resources[each]: str(number) for each, number in devices.items()}
    container = {"name": "main", "image": images.OF_ALNAIR, "command": ["python", *command]}
    return _with_driver(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "terminationGracePeriodSeconds": 2,
                "containers": [{**container, "resources": {"limits": limits}}],
            },
        }
    )


def _said(namespace: Namespace, name: str) -> str:
    """The line that a pod's program has written."""
    said = ""

    def has_said() -> bool:
        nonlocal said
        said = str(namespace.cluster.core.read_namespaced_pod_log(name, namespace.name))
        return said.endswith("\n")

    try:
        until(has_said, PATIENCE, f"a line of {name}", pause=1)
    except AssertionError as error:
        raise AssertionError(f"{error}: {namespace.events(name)}") from None
    return said.splitlines()[-1]


def _gpu_nodes(namespace: Namespace, name: str) -> list[str]:
    return namespace.run(name, "/bin/sh", "-c", "cd /dev && echo nvidia*").split()


def _metrics(cluster: Cluster, pod: str) -> dict[str, float]:
    """The agent's metrics of a pod on its GPU, by the metric's name."""
    text = cluster.node.run("busybox wget -q -O - http://127.0.0.1:9810/metrics")
    return {
        sample.name.removeprefix("podfabric_gpu_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("podfabric_gpu_") and sample.labels.get("pod") == pod
    }


def _accounts(cluster: Cluster) -> Accounts:
    """The driver's own accounts."""
    command = f"cd {layout.CHECKOUT} && {layout.PYTHON} -m tests.standin.accounts"
    return msgspec.json.decode(cluster.node.run(command), type=Accounts)


def test_alnairs_pod_has_its_2_gib_and_the_agent_reports_it(
    cluster: Cluster, cards: tuple[Gpu, ...], namespace: Namespace
) -> None:
    namespace.apply(_with_driver(yaml.safe_load(OF_ALNAIR)))
    namespace.running("gpu-pod")
    said = json.loads(_said(namespace, "gpu-pod"))
    assert said["gpus"] == 1
    assert said["total"] == said["nvml_total"] == 2 * GIB
    assert said["refused"] == OUT_OF_MEMORY
    assert 2 * GIB - RESERVE - 16 * MIB < said["allocated"] <= 2 * GIB - CONTEXT
    assert said["nvml_used"] <= 2 * GIB
    told: dict[str, float] = {}

    def has_measured() -> bool:
        nonlocal told
        told = _metrics(cluster, "gpu-pod")
        return "memory_overhead_bytes" in told and told["memory_overhead_bytes"] == CONTEXT

    until(has_measured, PATIENCE, "measured context", pause=1)
    assert told["memory_limit_bytes"] == 2 * GIB
    assert told["memory_device_bytes"] == said["allocated"] + CONTEXT
    # The context counts with its charge until the program allocates again.
    assert said["allocated"] + CONTEXT <= told["memory_used_bytes"] <= 2 * GIB
    assert told["memory_denied_total"] == 1
    assert told["memory_overuse_bytes"] == 0
    assert told["compute_share_ratio"] == 0.5
    assert told["processes"] == 1
    assert _accounts(cluster).gpus[FAR].resident == said["allocated"] + CONTEXT
    namespace.delete("gpu-pod", grace=1)


def test_deepomatics_pod_has_the_gpu_and_the_drivers_directory(
    cluster: Cluster, cards: tuple[Gpu, ...], namespace: Namespace
) -> None:
    namespace.apply(_with_driver(yaml.safe_load(OF_DEEPOMATIC)))
    namespace.running("shared")
    said = json.loads(_said(namespace, "shared"))
    assert said["gpus"] == 1
    assert said["total"] == 4 * GIB  # nothing is limited
    assert said["allocated"] == 4 * GIB - CONTEXT - (4 * GIB - CONTEXT) % (16 * MIB)
    assert _gpu_nodes(namespace, "shared") == ["nvidia-uvm", "nvidia2", "nvidiactl"]
    mounts = namespace.run("shared", "cat", "/proc/mounts").splitlines()
    (options,) = (line.split()[3] for line in mounts if line.split()[1] == IN_CONTAINER)
    assert options.split(",")[0] == "ro"
    namespace.delete("shared", grace=1)


def test_two_pods_hold_their_shares_of_a_gpus_time(
    cluster: Cluster, cards: tuple[Gpu, ...], namespace: Namespace
) -> None:
    """The times of kernels contain time slices of the other pod. The driver's samples need about
    35 s to prove the difference.
    """
    shares = {"has-30": 0.3, "has-70": 0.7}
    for name, share in shares.items():
        compute = round(100 * share)
        namespace.apply(_trainer(name, "launch", "work_20ms", memory=1, compute=compute))
        namespace.running(name)
        assert _said(namespace, name) == "begins"
    for name in shares:
        assert f"nvidia{FAR}" in _gpu_nodes(namespace, name)
    held = _parts(cluster, 90 * SECOND)
    assert held == pytest.approx(sorted(shares.values()), abs=CLOSE)
    told = {name: _metrics(cluster, name) for name in shares}
    for name, share in shares.items():
        assert told[name]["compute_share_ratio"] == share
        assert told[name]["throttled_launches_total"] > 0
    namespace.delete(*shares)
    await_nothing_left(cluster, allocations=True)  # the next pods find both GPUs free


def _parts(cluster: Cluster, window: int) -> list[float]:
    """The processes' parts of the GPU's time over a window of at least `window` ns, sorted."""
    first = last = _accounts(cluster)

    def passed() -> int:
        return last.gpus[FAR].time_ns - first.gpus[FAR].time_ns

    def has_passed() -> bool:
        nonlocal last
        last = _accounts(cluster)
        return passed() >= window

    until(has_passed, PATIENCE, f"{window} ns of the GPU's time", pause=2)
    busy = [
        last.process(each.pid).gpus[FAR].busy_ns - each.gpus[FAR].busy_ns
        for each in first.processes
        if each.alive
    ]
    return sorted(ns / passed() for ns in busy)


def test_container_with_a_vf_has_the_gpu_that_is_nearest_to_it(
    cluster: Cluster, cards: tuple[Gpu, ...], namespace: Namespace
) -> None:
    namespace.apply(_trainer("alone", memory=1, compute=10))
    namespace.running("alone")
    assert f"nvidia{FAR}" in _gpu_nodes(namespace, "alone")  # among equals, the first
    namespace.apply(_trainer("pair", memory=1, compute=10, vf=1))
    namespace.running("pair")
    assert f"nvidia{NEAR}" in _gpu_nodes(namespace, "pair")
    assert len(uverbs(namespace, "pair")) == 1
    said = json.loads(_said(namespace, "pair"))
    assert (said["gpus"], said["total"]) == (1, GIB)
    namespace.delete("alone", "pair")


def test_container_has_the_gpu_that_was_chosen_at_its_start(
    cluster: Cluster, cards: tuple[Gpu, ...], namespace: Namespace
) -> None:
    """The runtime reads the files that PreStartContainer wrote."""
    slots: list[str] = []
    for number, pods in enumerate(ROUNDS):
        names = [f"trainer-{number}-{percent}" for percent, _ in pods]
        for name, (percent, gpu) in zip(names, pods, strict=True):
            namespace.apply(_trainer(name, memory=1, compute=percent))
            namespace.running(name)
            assert _gpu_nodes(namespace, name) == ["nvidia-uvm", f"nvidia{gpu}", "nvidiactl"]
            variable = namespace.run(name, "/bin/sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES")
            assert variable.strip() == "void"
        slots.append(cluster.node.run("ls /var/run/cdi"))
        namespace.delete(*names)
        await_nothing_left(cluster, allocations=True)
        assert "podfabric-slot" not in cluster.node.run("ls /var/run/cdi")
    assert len(set(slots)) == 1  # the same names, with other GPUs behind them
