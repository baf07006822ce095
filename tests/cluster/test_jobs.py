"""Programs of jobs between two pods: the examples in netattach-examples/jobs.

One node with two Soft-RoCE devices, one for each pod: emulated nodes have no network between them.
The kernel's Soft-RoCE sends from the network namespace of the host, not from the pod's.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import images
from tests.cluster.cluster import PATIENCE, Cluster, Document, Namespace
from tests.cluster.installation import HCA, configured
from tests.kernel.vm import layout
from tests.runtime import CHECKOUT
from tests.waiting import until

EXAMPLES = CHECKOUT / "netattach-examples/jobs"
RXE, DEVICES = "rdma/rxe", ("rxe7", "rxe8")
REGISTERED = 1 << 30  # bytes
HOLDING = f"""hold_objects "${{NCCL_IB_HCA#=}}" 1 {REGISTERED} > /tmp/held &
until grep -q ready /tmp/held; do sleep 1; done
grep -E '^(Uid|CapEff|VmPin)' /proc/$!/status
"""
"""A script for a pod: a process that keeps 1 GiB registered, and the kernel's lines about it."""


@pytest.fixture(scope="module")
def soft_roce(cluster: Cluster) -> Iterator[None]:
    """A pool of two Soft-RoCE devices that reach each other, and one of the HCAs with IPoIB.

    The first pool's devices are those in the variables for NCCL and UCX.
    """
    command = f"cd {layout.CHECKOUT} && {layout.PYTHON} -m tests.kernel.verbs"
    cluster.node.run(f"{command} {' '.join(DEVICES)}")
    pools = [
        {"name": RXE, "mode": "shared", "slots": 1, "selectors": {"drivers": ["rdma_rxe"]}},
        {"name": HCA, "slots": 16},
    ]
    try:
        with configured(cluster, {"pools": pools}, {RXE: len(DEVICES), HCA: 32}):
            yield
    finally:
        cluster.node.run(f"ip link delete {DEVICES[0]}-net")


def documents(name: str) -> dict[str, Document]:
    """The objects of an example by kind and name. Each of its pods also gets a Soft-RoCE device,
    because the node's HCAs with IPoIB have no verbs for programs."""
    text = (EXAMPLES / f"{name}.yaml").read_text()
    text = text.replace("registry.example/jobs:latest", images.JOBS)
    text = text.replace(f'{HCA}: "1"', f'{HCA}: "1", {RXE}: "1"')
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(text)}


def with_hosts(spec: dict[str, Any], addresses: Mapping[str, str]) -> None:
    """Give the pod names of hosts, as this cluster has no DNS."""
    spec["hostAliases"] = [{"ip": at, "hostnames": [name]} for name, at in addresses.items()]


def ended(namespace: Namespace, *names: str) -> dict[str, str]:
    """The logs of these pods, once all have succeeded."""

    def logs() -> dict[str, str]:
        read = namespace.cluster.core.read_namespaced_pod_log
        return {name: read(name, namespace.name) for name in names}

    def succeeded() -> bool:
        return all(namespace.read(name).status.phase == "Succeeded" for name in names)

    try:
        until(succeeded, PATIENCE, f"end of {', '.join(names)}", pause=1)
    except AssertionError as error:
        said = "\n".join(f"{name}: {namespace.events(name)}" for name in names)
        raise AssertionError(f"{error}\n{said}\n{logs()}") from None
    return logs()


def sent(cluster: Cluster) -> list[int]:
    """The packets that each Soft-RoCE device has sent."""
    files = (f"/sys/class/infiniband/{name}/ports/1/hw_counters/sent_pkts" for name in DEVICES)
    return [int(number) for number in cluster.node.run(f"cat {' '.join(files)}").split()]


@pytest.mark.usefixtures("soft_roce")
def test_pods_exchange_data_with_verbs_and_register_much_memory(
    cluster: Cluster, namespace: Namespace
) -> None:
    objects = documents("verbs")
    client = objects.pop("Pod/verbs-client")
    for pod in (client, objects["Pod/verbs-server"]):
        (container,) = pod["spec"]["containers"]
        container["command"][2] = HOLDING + container["command"][2]
    before = sent(cluster)
    for each in objects.values():
        namespace.apply(each)
    (server,) = namespace.running("verbs-server")
    with_hosts(client["spec"], {"server.verbs": server.status.pod_ip})
    namespace.apply(client)
    logs = ended(namespace, "verbs-server", "verbs-client")
    print(*logs.values(), sep="\n")
    for log in logs.values():
        of_process = dict(re.findall(r"^(Uid|CapEff|VmPin):\s+(.*)$", log, re.MULTILINE))
        assert of_process["Uid"].split() == ["1000"] * 4
        assert int(of_process["CapEff"], 16) == 0
        assert int(of_process["VmPin"].split()[0]) * 1024 >= REGISTERED
        assert "1000 iters in" in log
        assert "RDMA_Write BW Test" in log
    used = [next(name for name in DEVICES if f": {name}\n" in log) for log in logs.values()]
    assert sorted(used) == sorted(DEVICES)
    assert all(now - then > 1000 for now, then in zip(sent(cluster), before, strict=True))


def keys(directory: Path) -> Document:
    """The secret that the example's comment makes."""
    key = directory / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    content = {file.name: file.read_text() for file in (key, key.with_suffix(".pub"))}
    metadata = {"name": "mpi-ssh"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": content}


def launched(namespace: Namespace, launcher: Document, name: str, **changed: str) -> str:
    """The log of a launcher, started as Job `name` with changed variables, once it has ended."""
    launcher["metadata"]["name"] = name
    (container,) = launcher["spec"]["template"]["spec"]["containers"]
    container["command"] = [*container["command"][:-1], "mpi_program"]
    variables = {each["name"]: each["value"] for each in container["env"]} | changed
    container["env"] = [{"name": key, "value": value} for key, value in variables.items()]
    namespace.apply(launcher)

    def pods() -> list[str]:
        names = (pod.metadata.name for pod in namespace.pods())
        return [each for each in names if each.startswith(f"{name}-")]

    until(pods, PATIENCE, f"pod of {name}", pause=0.5)
    (log,) = ended(namespace, *pods()).values()
    print(log)
    return log


@pytest.mark.long
@pytest.mark.usefixtures("soft_roce")
def test_a_job_of_mpi_uses_verbs_or_the_pods_interfaces(
    cluster: Cluster, namespace: Namespace, tmp_path: Path
) -> None:
    objects = documents("mpi")
    launcher = objects.pop("Job/mpi-launcher")
    for each in (keys(tmp_path), *objects.values()):
        namespace.apply(each)
    workers = ["mpi-0", "mpi-1"]
    until(lambda: all(map(namespace.exists, workers)), PATIENCE, "workers", pause=0.5)
    addresses = {
        f"{pod.metadata.name}.mpi": pod.status.pod_ip for pod in namespace.running(*workers)
    }
    with_hosts(launcher["spec"]["template"]["spec"], addresses)

    def over_net1() -> list[int]:
        file = "/sys/class/net/net1/statistics/tx_bytes"
        return [int(namespace.run(name, "cat", file)) for name in workers]

    def require_right(log: str) -> None:
        assert all(f"rank {rank} of 2 on {name}" in log for rank, name in enumerate(workers))
        assert "latency" in log
        assert "all-reduce of 65536 bytes" in log

    packets, octets = sent(cluster), over_net1()
    require_right(launched(namespace, launcher, "mpi-launcher"))
    assert all(now - then > 20 for now, then in zip(sent(cluster), packets, strict=True))
    assert all(now - then < 65536 for now, then in zip(over_net1(), octets, strict=True))

    packets, octets = sent(cluster), over_net1()
    of_tcp = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}
    require_right(launched(namespace, launcher, "mpi-tcp", **of_tcp))
    assert all(now - then > 65536 for now, then in zip(over_net1(), octets, strict=True))
    assert sent(cluster) == packets
