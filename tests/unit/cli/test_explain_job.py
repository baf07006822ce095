"""`podfabric explain --job` with FabricNodes and pods of a made-up cluster."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from base.paths import Paths
from kube.resources import Meta
from node import job_pods
from node.fabric_node import (
    AttachmentStatus,
    FabricNode,
    FabricNodeStatus,
    FaultStatus,
    GpuStatus,
    HcaStatus,
    PortStatus,
    RefusalStatus,
)
from node.job_pods import LABELS, JobPod, JobPodSpec, JobPodStatus
from node.usage import LockedMemory, RdmaObjects
from tests.fake_api import FakeApi, Fault
from tests.unit.cli.commands import Printed, Shell

NDR, HDR = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
IDS = ("0000:1a:00.0", "0000:3c:00.0")


def port(number: int, **changes: Any) -> PortStatus:  # noqa: ANN401
    made = PortStatus(
        port=f"mlx5_{number}/1",
        state="ACTIVE",
        link_layer="InfiniBand",
        rate=NDR,
        subnet="fe80:0000:0000:0000",
        pkeys=("0xffff", "0x8001"),
        netdevs=(f"ib{number}",),
    )
    return replace(made, **changes)


def status(pod: str, ports: Sequence[PortStatus] | None = None, pkey: str = "0x8001") -> Any:  # noqa: ANN401
    """The FabricNode's status of a node with one HCA per port, which the pod holds."""
    ports = (port(0), port(1)) if ports is None else ports
    hcas = [
        HcaStatus(id=id_, rdma=(one.port[:6],), ports=(one,), pods=(f"ml/{pod}",))
        for id_, one in zip(IDS, ports, strict=False)
    ]
    attachment = AttachmentStatus(
        pod=f"ml/{pod}",
        interface="net1",
        hca=IDS[0],
        parent="ib0",
        pkey=pkey,
        addresses=(f"10.56.0.{int(pod[-1]) + 1}/24",),
        mtu=2044,
    )
    return FabricNodeStatus(
        written="2026-11-28T10:00:00Z",
        hcas=tuple(hcas),
        attachments=(attachment,),
        gpus=tuple(
            GpuStatus(
                id=f"0000:{number}b:00.0",
                distances=("PIX mlx5_0", "NODE mlx5_1"),
                pods=(f"ml/{pod}",),
            )
            for number in (1, 2)
        ),
        objects=(RdmaObjects(pod=f"ml/{pod}", device="mlx5_0", qp=12),),
        locked_memory=(LockedMemory(pod=f"ml/{pod}", limit="unlimited"),),
    )


class Cluster:
    """Pods of namespace ml and FabricNodes. `run` runs `explain --job`."""

    def __init__(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = FakeApi()
        self.shell = shell
        self.client = self.api.client("reader")
        monkeypatch.setattr("cli.cluster_ipam.connect", lambda kubeconfig: self.client)

    def pod(self, name: str, node: str, phase: str = "Running", **metadata: Any) -> None:  # noqa: ANN401
        metadata = {"labels": {JOBSET: "trainer"}} | metadata
        meta = Meta(name=name, namespace="ml", uid=f"uid-{name}", **metadata)
        status = JobPodStatus(phase=phase, start_time="2026-11-28T09:00:00Z")
        self.api.put(JobPod(metadata=meta, spec=JobPodSpec(node_name=node), status=status))

    def node(self, name: str, status: FabricNodeStatus) -> None:
        self.api.put(FabricNode(metadata=Meta(name=name, uid=name), status=status))

    def worker(self, number: int, status: FabricNodeStatus, **metadata: Any) -> None:  # noqa: ANN401
        """The pod worker-N on the node gpu-N."""
        self.pod(f"worker-{number}", f"gpu-{number}", **metadata)
        self.node(f"gpu-{number}", status)

    def run(self, job: str = "trainer", *options: str) -> Printed:
        return self.shell("explain", "--job", job, "-n", "ml", *options)

    def texts(self) -> list[str]:
        """The sentences below the table."""
        found = self.run("trainer", "-o", "json").document()
        return [each["text"] for each in found["differences"]]


@pytest.fixture
def cluster(
    tmp_path: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Cluster:
    return Cluster(Shell(Paths(etc=tmp_path), monkeypatch, capsys), monkeypatch)


@pytest.fixture
def four(cluster: Cluster) -> Cluster:
    """A job of four pods: one in another partition, one with one HCA less, one with a port down."""
    cluster.worker(0, status("worker-0"))
    cluster.worker(1, status("worker-1", pkey="0xffff"))
    cluster.worker(2, status("worker-2", [port(0)]))
    cluster.worker(3, status("worker-3", [port(0), port(1, state="DOWN")]))
    return cluster


def test_what_differs_is_marked_and_explained(four: Cluster) -> None:
    four.shell.as_shown("podfabric explain --job trainer -n ml")
    assert four.texts() == [
        "worker-2 has 1 HCA, most pods have 2 HCAs: NCCL may hang without a message; a pod without "
        "an HCA uses TCP",
        "worker-1 has P_Key 0xffff, most pods have P_Key 0x8001: pods of different partitions do "
        "not reach each other, and connections time out",
        "worker-3: mlx5_1/1 is DOWN: NCCL and MPI use TCP, or fail",
    ]


def test_json_has_each_pod_and_each_difference(four: Cluster) -> None:
    found = four.run("trainer", "-o", "json").document()
    assert found["job"] == "JobSet trainer"
    assert [pod["node"] for pod in found["pods"]] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    (interface,) = found["pods"][0]["interfaces"]
    assert (interface["pkey"], interface["member"], interface["mtu"]) == ("0x8001", "full", 2044)
    assert found["pods"][0]["objects"] == [{"pod": "ml/worker-0", "device": "mlx5_0", "qp": 12}]
    assert [each["about"] for each in found["differences"]] == ["HCAS", "P_KEY", "PORTS"]
    assert found["differences"][1]["pods"] == ["ml/worker-1"]


def test_equal_pods_have_no_mark(cluster: Cluster) -> None:
    for number in range(3):
        cluster.worker(number, status(f"worker-{number}"))
    printed = cluster.run()
    assert (printed.code, printed.err) == (0, "")
    assert "no pod differs from the others" in printed.out
    assert "≠" not in printed.out


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"rate": HDR}, f"rate {HDR}, most pods have rate {NDR}: the job runs at the rate of"),
        ({"link_layer": "Ethernet"}, "link layer Ethernet, most pods have link layer InfiniBand"),
        (
            {"subnet": "fec0:0000:0000:0001"},
            "worker-2 has subnet fec0:0000:0000:0001, most pods have",
        ),
        ({"pkeys": ("0xffff",)}, "worker-2: the port's table lacks P_Key 0x8001: connections"),
    ],
)
def test_another_port_is_told(cluster: Cluster, changed: dict[str, Any], text: str) -> None:
    cluster.worker(0, status("worker-0"))
    cluster.worker(1, status("worker-1"))
    cluster.worker(2, status("worker-2", [port(0, **changed), port(1, **changed)]))
    (told,) = cluster.texts()
    assert text in told


def test_roce_ports_with_other_gids_are_told(cluster: Cluster) -> None:
    for number, kind in enumerate(("IPv4", "IPv4", "link-local")):
        gids = (f"RoCE v2 {kind}",)
        roce = {"link_layer": "Ethernet", "subnet": "", "gids": gids}
        cluster.worker(number, status(f"worker-{number}", [port(0, **roce), port(1, **roce)]))
    assert cluster.texts() == [
        "worker-2 has GIDs RoCE v2 link-local, most pods have GIDs RoCE v2 IPv4: NCCL and UCX may "
        "choose GIDs of different kinds, which cannot connect"
    ]


def test_gpus_without_a_near_hca_are_told(cluster: Cluster) -> None:
    for number in range(3):
        cluster.worker(number, status(f"worker-{number}"))
    far = status("worker-2", [port(1)])  # the pod lacks the near HCA
    hca = replace(far.hcas[0], id=IDS[1])
    vf = HcaStatus(id="vf", rdma=("mlx5_9",), pf=IDS[1], pods=hca.pods)
    for hcas, label in (((hca,), "mlx5_1"), ((replace(hca, pods=()), vf), "mlx5_9")):
        cluster.node("gpu-2", replace(far, hcas=hcas, attachments=()))
        found = cluster.run("trainer", "-o", "json").document()
        assert found["pods"][2]["gpus"][0]["distances"] == {label: "NODE"}
        assert "worker-2 has GPU distance NODE, most pods have GPU distance PIX" in str(found)
    assert "≠ 2 NODE" in cluster.run().out


def test_a_vf_has_not_the_gids_of_its_pf(cluster: Cluster) -> None:
    pf = HcaStatus(id="pf", ports=(port(0, gids=("RoCE v2 IPv4",)),))
    vf = HcaStatus(id=IDS[0], rdma=("mlx5_4",), pf="pf", pods=("ml/worker-0",))
    cluster.worker(0, replace(status("worker-0"), hcas=(pf, vf)))
    (pod,) = cluster.run("trainer", "-o", "json").document()["pods"]
    assert "gids" not in pod["ports"][0]


@pytest.mark.parametrize(
    ("limit", "wanted", "text"),
    [
        ("68719476736", "", "worker-2 has locked memory 68719476736, most pods have locked memory "
         "unlimited: registering more fails with ENOMEM, and NCCL and MPI use TCP, or fail"),
        ("65536", "unlimited", "worker-2: locked memory 65536, not unlimited: registering more "
         "fails with ENOMEM, and NCCL and MPI use TCP, or fail"),
    ],
)  # fmt: skip
def test_less_locked_memory_is_told(cluster: Cluster, limit: str, wanted: str, text: str) -> None:
    for number in range(3):
        cluster.worker(number, status(f"worker-{number}"))
    low = (LockedMemory(pod="ml/worker-2", limit=limit, wanted=wanted),)
    cluster.node("gpu-2", replace(status("worker-2"), locked_memory=low))
    assert cluster.texts() == [text]
    assert f"≠ {limit}" in cluster.run().out


def test_two_limited_members_do_not_reach_each_other(cluster: Cluster) -> None:
    limited = [port(0, pkeys=("0x7fff", "0x0001")), port(1)]
    cluster.worker(0, status("worker-0", limited))
    cluster.worker(1, status("worker-1"))
    assert cluster.texts() == []
    cluster.worker(2, status("worker-2", limited))
    (told,) = cluster.texts()
    assert told.startswith("worker-0, worker-2: limited members of P_Key 0x8001: two limited")


def test_without_a_majority_all_pods_are_named(cluster: Cluster) -> None:
    cluster.worker(0, status("worker-0"))
    cluster.worker(1, status("worker-1", [port(0)]))
    (told,) = cluster.texts()
    assert told.startswith("worker-0 has 2 HCAs, worker-1 has 1 HCA: NCCL may hang")


def test_a_port_that_all_pods_leave_unused_is_no_difference(cluster: Cluster) -> None:
    for number in range(2):
        of_pod = status(f"worker-{number}")
        ports = (port(0), port(0, port="mlx5_0/2", state="DOWN"))
        cluster.worker(number, replace(of_pod, hcas=(replace(of_pod.hcas[0], ports=ports),)))
    assert cluster.texts() == []


def test_a_vf_in_a_pod_has_the_port_of_its_pf(cluster: Cluster) -> None:
    pf = HcaStatus(id="pf", ports=(port(0, state="DOWN"),), fault="mlx5_0/1 is DOWN")
    vf = HcaStatus(id=IDS[0], rdma=("mlx5_4",), pf="pf", pods=("uid-worker-0",))
    cluster.worker(0, replace(status("worker-0"), hcas=(pf, vf)))
    assert cluster.texts() == [
        "worker-0: mlx5_0/1 is DOWN: NCCL and MPI use TCP, or fail",
        "worker-0: pf: mlx5_0/1 is DOWN: NCCL and MPI use TCP, or fail",
    ]


def test_faults_of_other_pods_are_left_out(cluster: Cluster) -> None:
    texts = [f"the MTU of net1 of ml/{pod} is wrong" for pod in ("worker-1", "worker-10")]
    faults = tuple(FaultStatus(about=IDS[0], text=text) for text in texts)
    cluster.worker(1, replace(status("worker-1"), faults=faults))
    assert cluster.texts() == [f"worker-1: {IDS[0]}: {texts[0]}: NCCL and MPI use TCP, or fail"]


def test_a_pod_that_does_not_start_has_its_refused_add(cluster: Cluster) -> None:
    refused = tuple(
        RefusalStatus(pod=f"ml/{pod}", interface="net1", text=f"no address for {pod}")
        for pod in ("worker-1", "other")
    )
    cluster.worker(1, replace(status("worker-1"), refusals=refused), phase="Pending")
    assert cluster.texts() == [
        "worker-1: unknown: it has not started: ADD of net1: no address for worker-1"
    ]


def test_pods_without_the_fabric_use_tcp(cluster: Cluster) -> None:
    empty = FabricNodeStatus(written="2026-11-28T10:00:00Z")
    cluster.worker(0, empty)
    (told,) = cluster.texts()
    assert told == "worker-0: no HCA and no interface: NCCL and MPI use TCP, or fail"
    cluster.worker(1, status("worker-1"))
    cluster.worker(2, status("worker-2"))
    hcas, interfaces = cluster.texts()
    assert hcas.startswith("worker-0 has no HCAs, most pods have 2 HCAs")
    assert interfaces.startswith("worker-0 has no interface, most pods have interface net1")
    cluster.worker(
        0, empty, labels={JOBSET: "trainer", "training.kubeflow.org/job-role": "launcher"}
    )
    assert cluster.texts() == []


def test_what_is_unknown_is_said(cluster: Cluster) -> None:
    cluster.worker(0, status("worker-0"))
    cluster.pod("worker-1", "gpu-1")
    cluster.pod("worker-2", "", phase="Pending")
    cluster.worker(3, FabricNodeStatus(written="2026-11-28T08:00:00Z"))
    cluster.worker(4, replace(status("worker-4", []), left_out="3 of 9 hcas"))
    cluster.pod("worker-5", "gpu-0", phase="Succeeded")
    assert cluster.texts() == [
        "worker-1: unknown: no FabricNode of gpu-1 can be read: it does not exist: does the agent "
        "run there?",
        "worker-2: unknown: it has no node yet",
        "worker-3: unknown: the FabricNode of gpu-3 is older than the pod",
        "worker-4: unknown: the FabricNode of gpu-4 is too large and lacks 3 of 9 hcas",
    ]
    assert "* pods that have ended: 1" in cluster.run().out


@pytest.mark.parametrize("label", LABELS)
def test_each_controllers_label_finds_the_pods(cluster: Cluster, label: str) -> None:
    cluster.worker(0, status("worker-0"), labels={label: "trainer"})
    cluster.worker(1, status("worker-1"), labels={label: "other"})
    printed = cluster.run()
    assert printed.out.startswith(f"pods of {LABELS[label]} trainer in namespace ml: 1\n")


def test_a_statefulset_is_found_by_the_owner(cluster: Cluster) -> None:
    for name, owner in (("trainer-0", "trainer"), ("trainer-x-0", "trainer-x")):
        owners = ({"kind": "StatefulSet", "name": owner},)
        labels = {"statefulset.kubernetes.io/pod-name": name}
        cluster.pod(name, "gpu-0", labels=labels, owner_references=owners)
    assert cluster.run().out.startswith("pods of StatefulSet trainer in namespace ml: 1\n")
    cluster.pod("web-0", "gpu-0", labels={"app": "trainer"})
    assert cluster.run("app=trainer").out.startswith("pods of selector app=trainer")


def test_a_hostile_name_cannot_control_the_terminal(cluster: Cluster) -> None:
    evil = [port(0, state="\x1b[2J", rate="\x1b]0;x\x07"), port(1)]
    cluster.worker(0, replace(status("worker-0", evil), left_out="\x1b[31m hcas"))
    cluster.worker(1, status("worker-1", evil, pkey="\x1b[2J0x8001"))
    for form in ("table", "json"):
        printed = cluster.run("trainer", "-o", form)
        assert printed.code == 0
        assert "\x1b" not in printed.out


def test_a_node_says_nothing_about_pods_of_other_nodes(cluster: Cluster) -> None:
    cluster.worker(0, status("worker-0"))
    cluster.worker(1, replace(status("worker-0"), written="2026-11-28T10:00:00Z"))
    told = cluster.texts()
    assert told[0].startswith("worker-0 has 2 HCAs, worker-1 has no HCAs")


def test_an_unknown_job_fails_with_the_searches(cluster: Cluster) -> None:
    printed = cluster.run("trainr")
    assert (printed.code, printed.out) == (1, "")
    for looked in (*LABELS, "owner StatefulSet trainr", "in ml"):
        assert looked in printed.err
    assert "labels app=x" in cluster.run("app=x").err
    cluster.pod("worker-0", "gpu-0", phase="Failed")
    assert "pods that have ended: 1" in cluster.run().err


def test_wrong_calls_and_an_unreachable_server_fail(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "expected POD or --job NAME" in cluster.shell("explain").err
    assert cluster.shell("explain", "worker-0", "--job", "trainer").code == 2
    cluster.worker(0, status("worker-0"))
    cluster.client = cluster.api.client("x", lambda verb, kind, name: Fault.REFUSED)
    refused = cluster.run()
    assert (refused.code, refused.out) == (1, "")
    assert "refused" in refused.err
    cluster.client = cluster.api.client("reader")
    monkeypatch.setattr(job_pods, "MOST_PODS", 1)
    assert "only 1 pods were read" in cluster.run().out
