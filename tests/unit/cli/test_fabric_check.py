"""`podfabric check` with a made-up cluster, whose kubelet gives addresses and runs the orders."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from base.paths import Paths
from cli.fabric_check import check_pods, command, ring
from cli.fabric_check.check_pods import RUN_LABEL, STATUS, CheckMeta, CheckPod, OrdersMap
from cli.fabric_check.probes import FabricProbe, transfer_port
from cli.fabric_check.ring import Orders, PodReport, Rail
from kube.resources import Meta
from node.fabric_node import FabricNode, FabricNodeStatus, OfferedPool, RefusalStatus
from tests.fake_api import FakeApi, Fault
from tests.unit.cli.commands import Printed, Shell
from tests.waiting import join

HCA = "rdma/hca"
CHECK = ("check", "--network", "ml/fabric", "--resource", HCA)


def well(orders: Orders) -> PodReport:
    """The report of a pod that finds nothing."""
    return PodReport(tuple(replace(it, mtu=2044, pkey="0x8001") for it in orders.rails))


class Kubelet:
    """All kubelets of the cluster. `answer` is the report to a pod's orders."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.answer: Callable[[Orders], PodReport | None] = well
        self.refused: set[str] = set()  # nodes
        self.seen: dict[str, CheckPod] = {}
        self.orders: dict[str, Orders] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.01):
            for pod in self.api.list(CheckPod, labels=RUN_LABEL).items:
                self.seen[pod.metadata.name] = pod
                changed = self._next(pod)
                if changed != pod:
                    self.api.put(changed)

    def end(self) -> None:
        self._ended.set()

    def _next(self, pod: CheckPod) -> CheckPod:
        if node_of(pod) in self.refused:
            return replace(pod, status={"phase": "Failed", "reason": "Evicted", "message": "\x1b["})
        if STATUS not in pod.metadata.annotations:
            (asked,) = msgspec.json.decode(pod.metadata.annotations[check_pods.NETWORKS])
            got = {"name": f"{asked['namespace']}/{asked['name']}", "interface": "net1"}
            text = msgspec.json.encode(
                [got | {"ips": [f"10.1.0.{int(pod.metadata.name[-1]) + 1}"]}]
            ).decode()
            annotations = {**pod.metadata.annotations, STATUS: text}
            return replace(pod, metadata=replace(pod.metadata, annotations=annotations))
        for each in self.api.list(OrdersMap).items:
            if each.metadata.name == pod.metadata.name and not pod.has_ended:
                orders = msgspec.json.decode(each.data["orders"], type=Orders)
                self.orders[orders.pod] = orders
                report = self.answer(orders)
                message = msgspec.json.encode(report).decode() if report else "Traceback"
                states = [{"state": {"terminated": {"message": message, "reason": "Completed"}}}]
                return replace(pod, status={"phase": "Succeeded", "containerStatuses": states})
        return pod


def node_of(pod: CheckPod) -> str:
    affinity = pod.spec["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    node: str = term["matchFields"][0]["values"][0]
    return node


@pytest.fixture
def kubelet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubelet]:
    api = FakeApi()
    for number in range(3):
        pools = (OfferedPool(HCA, ids=4 if number < 2 else 0),)
        status = FabricNodeStatus(pools=pools)
        api.put(FabricNode(metadata=Meta(name=f"gpu-{number}"), status=status))
    monkeypatch.setattr(check_pods, "POLL", 0.02)
    monkeypatch.setattr("cli.cluster_ipam.connect", lambda kubeconfig: api.client("admin"))
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    kubelet = Kubelet(api)
    thread = threading.Thread(target=kubelet.run)
    thread.start()
    yield kubelet
    kubelet.end()
    join(thread)
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture
def check(
    kubelet: Kubelet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Printed]:
    shell = Shell(Paths(etc=tmp_path), monkeypatch, capsys)
    return lambda *more: shell(*CHECK, "--image", "podfabric:1", *more)


Check = Callable[..., Printed]


def test_pods_run_with_few_rights_on_the_nodes_that_offer_the_resource(
    check: Check, kubelet: Kubelet
) -> None:
    done = check()
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "all tests passed"
    assert sorted(map(node_of, kubelet.seen.values())) == ["gpu-0", "gpu-1"]
    spec = next(iter(kubelet.seen.values())).spec
    (container,) = spec["containers"]
    assert container["resources"]["limits"][HCA] == "1"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 300 + check_pods.AFTER
    assert kubelet.api.list(CheckPod).items == ()


def test_a_failed_test_is_in_the_matrix_with_cause_and_remedy(
    check: Check, kubelet: Kubelet
) -> None:
    def answer(orders: Orders) -> PodReport:
        (peer,) = orders.peers
        failed = {peer: (ring.MTU, "too \x1b[31mlarge")}
        return replace(well(orders), failed=failed if orders.pod.endswith("a0") else {})

    kubelet.answer = answer
    done = check()
    assert done.code == 1
    rows = [line.split() for line in done.out.splitlines()]
    assert ["gpu-0", "net1", "10.1.0.1", "2044", "0x8001", "-", "mtu"] in rows
    assert ["gpu-1", "net1", "10.1.0.2", "2044", "0x8001", "ok", "-"] in rows
    assert r"FAILED mtu: gpu-0 to gpu-1: too \x1b[31mlarge" in done.out
    found = check("-o", "json").document()
    assert [(it["source"], it["result"]) for it in found["pairs"]] == [
        ("gpu-0", "mtu"),
        ("gpu-1", "ok"),
    ]
    assert found["failures"][0]["remedy"].startswith("set the same MTU")


def test_other_partitions_of_two_pods_are_failures(check: Check, kubelet: Kubelet) -> None:
    def answer(orders: Orders) -> PodReport:
        if orders.pod.endswith("a0"):
            return well(orders)
        (rail,) = well(orders).rails
        return PodReport((replace(rail, pkey="0x8002"),))

    kubelet.answer = answer
    failures = check("-o", "json").document()["failures"]
    assert [(each["result"], each["cause"]) for each in failures] == [
        (ring.PKEY, "the P_Keys are 0x8001 here, 0x8002 there"),
        (ring.PKEY, "the P_Keys are 0x8002 here, 0x8001 there"),
    ]


def test_networks_that_must_be_separate_get_pods_of_both(check: Check, kubelet: Kubelet) -> None:
    def answer(orders: Orders) -> PodReport:
        failed = dict.fromkeys(orders.foreign, (ring.ISOLATION, "it answers"))
        return replace(well(orders), failed=failed if "-b0" in orders.pod else {})

    kubelet.answer = answer
    done = check("--isolated-from", "ml/other")
    assert done.code == 1
    assert "pairs of the two networks: 8, proved separate: 6" in done.out
    assert "FAILED isolation: gpu-0 to gpu-0 (ml/fabric): it answers" in done.out
    assert {len(each.foreign) for each in kubelet.orders.values()} == {2}
    assert {it.metadata.namespace for it in kubelet.seen.values()} == {"ml"}


def test_a_pod_that_does_not_start_or_report_fails_the_check(
    check: Check, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet.refused = {"gpu-1"}
    done = check()
    assert done.code == 1
    assert r"FAILED start: gpu-1: Evicted: \x1b[" in done.out
    monkeypatch.setattr("secrets.token_hex", lambda size: "0a")
    refusal = RefusalStatus(pod="ml/fabric-check-0a-a1", interface="net1", text="no address")
    shown = kubelet.api.look(FabricNode, "gpu-1")
    kubelet.api.put(replace(shown, status=replace(shown.status, refusals=(refusal,))))
    assert "FAILED start: gpu-1: ADD of net1: no address" in check().out
    kubelet.refused, kubelet.answer = set(), lambda orders: None
    done = check()
    assert "FAILED start: gpu-0: Completed: Traceback" in done.out
    assert kubelet.api.list(CheckPod).items == ()


def test_a_refused_create_and_a_signal_leave_no_pod(
    check: Check, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(verb: str, kind: str, name: str) -> Fault | None:
        return Fault.REFUSED if verb == "create" and name.endswith("a1") else None

    client = kubelet.api.client("admin", fault)
    monkeypatch.setattr("cli.cluster_ipam.connect", lambda kubeconfig: client)
    done = check()
    assert (done.code, done.out) == (1, "")
    assert "refused (fault)" in done.err
    assert len(kubelet.api.list(CheckPod).items) == 0

    def killed(orders: Orders) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    client.faults, kubelet.answer = None, killed
    assert check().code == 128 + signal.SIGTERM
    assert kubelet.api.list(CheckPod).items == ()


def test_pods_that_cannot_be_deleted_are_named(
    check: Check, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {"delete": Fault.REFUSED}
    client = kubelet.api.client("admin", lambda verb, kind, name: faults.get(verb))
    monkeypatch.setattr("cli.cluster_ipam.connect", lambda kubeconfig: client)
    done = check()
    assert done.code == 0
    (label,) = {it.metadata.labels[RUN_LABEL] for it in kubelet.seen.values()}
    assert done.err == (
        f"podfabric check: pods are left: kubectl -n ml delete pods -l {RUN_LABEL}={label}\n"
    )


def test_pods_of_dead_runs_are_deleted_and_those_of_a_living_run_stay(kubelet: Kubelet) -> None:
    kubelet.end()
    now = datetime.now(UTC)
    for name, minutes in (("dead", 10), ("alive", 1)):
        kubelet.api.clock = (now - timedelta(minutes=minutes)).timestamp
        meta = CheckMeta(name=name, namespace="ml", labels={RUN_LABEL: name})
        kubelet.api.put(CheckPod(metadata=meta, spec={"activeDeadlineSeconds": 300}))
    check_pods.remove_leftovers(kubelet.api, "ml", now)
    assert [pod.metadata.name for pod in kubelet.api.list(CheckPod).items] == ["alive"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--network", "fabric"), "expected namespace/definition"),
        (("--isolated-from", "ml/fabric"), "names the same definition"),
        (("--timeout", "20"), "a check takes up to 150 seconds"),
        (("--peers", "9"), "invalid choice: 9"),
    ],
)
def test_a_wrong_command_line(check: Check, words: tuple[str, ...], said: str) -> None:
    done = check(*words)
    assert done.code == 2
    assert said in done.err


def test_a_cluster_without_such_nodes_or_agents(check: Check, kubelet: Kubelet) -> None:
    done = check("--resource", "rdma/none")
    assert (done.code, done.err) == (
        1,
        "podfabric check: 0 nodes have rdma/none, not 1 to 1000: name other nodes with --nodes\n",
    )
    done = check("--image", "")
    assert "no agent of podfabric runs in this cluster" in done.err
    kubelet.api.add_node("cpu-0")
    done = check("--nodes", "kubernetes.io/os=linux")
    assert "0 nodes are found by kubernetes.io/os=linux" in done.err


def test_orders_form_a_ring_in_which_each_pod_is_tested() -> None:
    pods: dict[str, ring.Rails] = dict.fromkeys("abcd", ())
    given = list(ring.orders("r", [pods], 2, verbs=True))
    tested: Any = {each.pod: list(each.peers) for each in given}
    assert tested == {"a": ["b", "c"], "b": ["c", "d"], "c": ["d", "a"], "d": ["a", "b"]}
    ports = [transfer_port(list(of.peers).index("c"), 0) for of in given if "c" in of.peers]
    assert len(set(ports)) == 2
    assert [it.peers for it in ring.orders("r", [{"a": ()}], 2, verbs=True)] == [{}]


def test_a_long_report_fits_into_a_termination_message(monkeypatch: pytest.MonkeyPatch) -> None:
    rails = tuple(
        Rail(f"net{n}", "10.100.100.100", "", 65520, "0x8001", "mlx5_10") for n in range(16)
    )
    others = {f"fabric-check-00112233-a{n}": rails for n in range(2 * ring.MOST_PEERS)}
    orders = Orders("r", "fabric-check-00112233-a16", (), others)
    probe = FabricProbe(orders, Paths())
    monkeypatch.setattr(probe, "_test", lambda _, it: probe._fail(it[0], ring.ADDRESS, "x" * 999))
    monkeypatch.setattr(probe, "_left", lambda *_: 0)
    report = replace(probe.run(), rails=rails)
    assert len(msgspec.json.encode(report)) <= 4096
    assert list(report.failed) == list(others)
    assert ring.SECONDS < command.LEAST
