"""The FabricNode of a made-up server: its document, its schema, and how the agent writes it."""

import json
import shutil
import time
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from agent import node_report
from agent.node_report import NodeReport
from agent.observe import pod_counters
from base.paths import Paths
from base.pod import Pod
from base.types import DeviceId
from cni.attachments.journal import Journal, JournalEntry, Phase
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from deviceplugin import checkpoint, health
from deviceplugin.checkpoint import AllocatedHCA, Allocation
from host import mounts
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import rdma
from host.netlink.rdma import RdmaNetlink
from node import fabric_node, observation, usage
from node.fabric_node import (
    AttachmentStatus,
    FabricNode,
    FabricNodeStatus,
    HcaStatus,
    OfferedPool,
)
from node.page import html_page
from node.state import ThisNode
from node.usage import RdmaObjects, Usage
from tests.fake_api import FakeApi, FakeClient, Fault
from tests.unit.cli.commands import Shell, short_path
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

MANIFEST = Path(__file__).resolve().parents[3] / "deploy/kustomize/base/podfabric.yaml"
FIRST, SECOND = servers.DGX_HCAS[:2]
NODE = "node-a"


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_path() as root:
        made = servers.dgx(root)
        made.config.parent.mkdir(parents=True, exist_ok=True)
        made.config.write_text('pools: [{name: "rdma/hca", mode: exclusive}]')
        (made.proc / "sys/kernel/random").mkdir(parents=True, exist_ok=True)
        (made.proc / "sys/kernel/random/boot_id").write_text("boot\n")
        yield made


@pytest.fixture
def shell(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    return Shell(paths, monkeypatch, capsys)


def seen(paths: Paths, **mistakes: str) -> FabricNodeStatus:
    return observation.observed(ThisNode(paths, tolerant=True), mistakes, "1.2.3")


def attach(paths: Paths, pod: str, parent: str = "ib0", **record: object) -> None:
    """Journal an attachment whose P_Key the subnet manager has given to the parent's port."""
    if parent:
        port = f"class/infiniband/mlx5_{parent.removeprefix('ib')}/ports/1"
        Tree(paths.sys, paths).write(f"{port}/pkeys/1", "0x8001")
    Journal(paths).write(
        JournalEntry(
            plugin="ipoib",
            network="fabric",
            container_id=f"c-{pod}",
            ifname="net1",
            netns="/n",
            netns_identity="1:2",
            boot_id="boot",
            phase=Phase.ATTACHED,
            pod_namespace="ml",
            pod_name=pod,
            since="2026-11-28T08:00:00Z",
            addresses=("10.0.0.5/24",),
            undo=msgspec.Raw(msgspec.json.encode({"parent": parent, "pkey": 0x8001} | record)),
        )
    )


def hold(paths: Paths, hca: str, uid: str) -> None:
    """Give the HCA to a container of the pod with this UID."""
    held = Allocation(
        resource="rdma/hca",
        id=DeviceId(hca),
        devices=(AllocatedHCA(id=hca, address=hca, netdevs=(), rdma=()),),
        time="2026-11-28T08:00:00Z",
        boot_id="boot",
    )
    checkpoint.write(paths, [checkpoint.encode(held)])
    entry = {"PodUID": uid, "ContainerName": "main", "ResourceName": "rdma/hca"}
    entries = [{**entry, "DeviceIDs": {"-1": [hca]}}]
    paths.device_plugins.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"Data": {"PodDeviceEntries": entries}})
    (paths.device_plugins / "kubelet_internal_checkpoint").write_text(content)


def test_every_hca_and_port_is_listed_with_its_pool(paths: Paths) -> None:
    status = seen(paths)
    assert [hca.id for hca in status.hcas] == sorted(servers.DGX_HCAS)
    first = status.hcas[0]
    assert (first.rdma, first.pools, first.fault) == (("mlx5_0",), ("rdma/hca",), "")
    (port,) = first.ports
    assert (port.port, port.state, port.netdevs) == ("mlx5_0/1", "ACTIVE", ("ib0",))
    assert status.counts.ports == status.counts.active_ports == status.counts.hcas == 8
    (pool,) = status.pools
    assert (pool.resource, pool.ids, pool.held, pool.withheld) == ("rdma/hca", 8, 0, 0)
    assert status.faults == ()


def test_a_port_that_is_down_is_a_fault_and_withholds_its_hca(paths: Paths) -> None:
    Tree(paths.sys, paths).port("mlx5_0", 1, state="1: DOWN")
    status = seen(paths)
    assert status.counts.active_ports == 7
    assert status.hcas[0].fault
    assert [fault.about for fault in status.faults] == [FIRST]
    (pool,) = status.pools
    assert pool.withheld == 1
    assert pool.reasons[0].startswith("1: ")


def test_an_attachment_has_its_pod_its_hca_and_its_p_key(paths: Paths) -> None:
    attach(paths, "worker-0")
    (one,) = seen(paths).attachments
    assert (one.pod, one.interface, one.phase) == ("ml/worker-0", "net1", "attached")
    assert (one.hca, one.parent, one.pkey) == (FIRST, "ib0", "0x8001")
    assert (one.addresses, one.mtu) == (("10.0.0.5/24",), 0)
    attach(paths, "worker-0", mtu=2044)
    assert seen(paths).attachments[0].mtu == 2044


def test_a_damaged_entry_of_the_journal_is_a_fault_and_hides_no_other(paths: Paths) -> None:
    attach(paths, "worker-0")
    attach(paths, "worker-1", "ib1")
    next(paths.attachments.glob("*.json")).write_text("{")
    status = seen(paths)
    assert len(status.attachments) == 1
    assert [fault.about for fault in status.faults] == ["journal"]


def test_mistakes_in_the_configuration_are_faults(paths: Paths) -> None:
    paths.config.write_text("pools: 7")
    status = seen(paths, pools="pools: is not a list")
    assert [(fault.about, fault.text) for fault in status.faults] == [
        ("config.yaml: pools", "pools: is not a list")
    ]
    assert len(status.hcas) == 8


def test_a_large_status_leaves_attachments_out_and_says_how_many() -> None:
    many = tuple(
        AttachmentStatus(pod=f"{'n' * 63}/{number:0253d}", interface="net1")
        for number in range(400)
    )
    status = fabric_node.fitted(FabricNodeStatus(attachments=many))
    kept = len(status.attachments)
    assert 0 < kept < 400
    assert status.attachments == many[:kept]
    assert status.left_out == f"{400 - kept} of 400 attachments"
    assert len(msgspec.json.encode(status)) <= fabric_node.MOST_BYTES


def test_idle_vfs_are_left_out_first() -> None:
    vfs = tuple(
        HcaStatus(id=f"0000:3b:{number // 8:02x}.{number % 8}", pf="0000:3b:00.0", driver="d" * 64)
        for number in range(2, 402)
    )
    used = replace(vfs[7], pods=("ml/worker-0",))
    attachments = (AttachmentStatus(pod="ml/worker-0", interface="net1"),)
    status = fabric_node.fitted(
        FabricNodeStatus(hcas=(*vfs[:7], used, *vfs[8:]), attachments=attachments)
    )
    assert (status.hcas, status.attachments) == ((used,), attachments)
    assert status.left_out == "399 idle VFs"


def test_objects_are_left_out_before_attachments() -> None:
    attachments = (AttachmentStatus(pod="ml/worker-0", interface="net1"),) * 400
    status = fabric_node.fitted(FabricNodeStatus(attachments=attachments, objects=OBJECTS * 400))
    assert status.attachments == attachments
    assert status.left_out.endswith("of 400 objects")


def test_any_status_fits() -> None:
    pools = (OfferedPool(resource="r" * 317, reasons=("x" * 300,) * 4),) * 256
    hcas = (HcaStatus(id="i" * 253, pods=("p" * 330,) * 256),) * 64
    status = fabric_node.fitted(FabricNodeStatus(hcas=hcas, pools=pools))
    assert len(msgspec.json.encode(status)) <= fabric_node.MOST_BYTES
    assert "of 64 hcas" in status.left_out


def test_110_pods_with_usual_names_fit(paths: Paths) -> None:
    for number in range(110):
        attach(paths, f"llama-7b-pretraining-worker-{number}", f"ib{number % 8}")
    status = fabric_node.fitted(seen(paths))
    assert (len(status.attachments), status.left_out) == (110, "")


def test_the_schema_has_just_the_fields_of_the_document() -> None:
    (crd,) = (
        each
        for each in yaml.safe_load_all(MANIFEST.read_text())
        if each and each["metadata"]["name"] == "fabricnodes.fabric.podfabric.io"
    )
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["status"]
    compare(FabricNodeStatus, schema)


def compare(shape: Any, schema: dict[str, Any]) -> None:  # noqa: ANN401
    """Check the fields, types and requirements of a struct against its schema."""
    fields = msgspec.structs.fields(shape)
    assert {field.encode_name for field in fields} == set(schema["properties"])
    assert {field.encode_name for field in fields if field.required} == set(
        schema.get("required", ())
    )
    for field in fields:
        inner, of = schema["properties"][field.encode_name], field.type
        if isinstance(of, types.UnionType):
            (of,) = (each for each in typing.get_args(of) if each is not types.NoneType)
        if typing.get_origin(of) is tuple:
            assert inner["type"] == "array"
            of, inner = typing.get_args(of)[0], inner["items"]
        if isinstance(of, type) and issubclass(of, msgspec.Struct):
            compare(of, inner)
        else:
            assert inner["type"] == {str: "string", int: "integer", bool: "boolean"}[of]


@pytest.fixture
def api() -> FakeApi:
    server = FakeApi()
    server.add_node(NODE)
    return server


def report(
    paths: Paths, client: FakeClient, tell: Callable[[str, str, Pod], object] = print
) -> NodeReport:
    return NodeReport(paths, dict, tell, {"NODE_NAME": NODE}, lambda environ: client)


def test_the_agent_writes_its_node_once_until_something_changes(
    paths: Paths, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client("agent")
    writer = report(paths, client)
    for _ in range(3):
        assert writer.step() == node_report.LOOK
    stored = api.look(FabricNode, NODE)
    assert stored.status.counts.hcas == 8
    assert stored.metadata.owner_references[0]["uid"] == api.machines[NODE].uid
    assert client.calls["update_status", "FabricNode"] == 1
    attach(paths, "worker-0")
    writer.step()  # too soon after the last write
    assert client.calls["update_status", "FabricNode"] == 1
    later = time.monotonic() + node_report.PAUSE
    monkeypatch.setattr(time, "monotonic", lambda: later)
    writer.step()
    assert api.look(FabricNode, NODE).status.counts.attachments == 1
    assert client.calls["get", "FabricNode"] == 1


def test_a_new_fault_is_written_soon(
    paths: Paths, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, now = api.client("agent"), time.monotonic()
    writer = report(paths, client)

    def faults_at(seconds: float) -> int:
        """The number of stored faults after a step at this time."""
        monkeypatch.setattr(time, "monotonic", lambda: now + seconds)
        writer.step()
        return api.look(FabricNode, NODE).status.counts.faults

    assert faults_at(0) == 0
    Tree(paths.sys, paths).port("mlx5_0", 1, state="1: DOWN")
    assert faults_at(0.5) == 0  # too new
    assert faults_at(0.5 + health.NOTICE) == 0  # too soon after the last write
    assert faults_at(node_report.FAULT_PAUSE) == 1
    assert client.calls["update_status", "FabricNode"] == 2


OBJECTS = (RdmaObjects(pod="ml/worker-0", device="mlx5_0", qp=20, mr=3),)


def test_changed_objects_alone_are_shown_at_once_and_written_each_minute(
    paths: Paths, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = [Usage(), Usage(OBJECTS), Usage((replace(OBJECTS[0], qp=21),))]
    monkeypatch.setattr(usage, "measured", lambda *_: counted.pop(0))
    attach(paths, "worker-0")
    writer, now = report(paths, api.client("agent")), time.monotonic()

    def at(seconds: float) -> tuple[RdmaObjects, ...]:
        """The stored objects after a step at this time."""
        monkeypatch.setattr(time, "monotonic", lambda: now + seconds)
        writer.step()
        return api.look(FabricNode, NODE).status.objects

    assert at(0) == ()
    assert at(node_report.MEASURE_EVERY) == ()
    ((_, status),) = writer.feed.nodes()
    assert status.objects == OBJECTS
    (family,) = (each for each in writer.families() if each.name == "podfabric_pod_rdma_objects")
    pod = {"namespace": "ml", "pod": "worker-0", "device": "mlx5_0"}
    assert {each.labels["type"]: each.value for each in family.samples} == {
        "qp": 20, "mr": 3, "cq": 0, "cm_id": 0
    }  # fmt: skip
    assert all(each.labels.items() >= pod.items() for each in family.samples)
    assert at(node_report.STEADY_PAUSE) == (replace(OBJECTS[0], qp=21),)


def test_a_kernel_that_counts_no_objects_stops_nothing(
    paths: Paths, api: FakeApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> RdmaNetlink:
        raise HostError("no RDMA netlink")

    monkeypatch.setattr(rdma, "rdma", refused)
    monkeypatch.setattr(node_report, "MEASURE_EVERY", 0.0)
    monkeypatch.setattr(node_report, "_MEASURE_PAUSE", 0)
    attach(paths, "worker-0")
    writer = report(paths, api.client("agent"))
    for _ in range(3):
        writer.step()
    assert api.look(FabricNode, NODE).status.counts.attachments == 1
    assert caplog.text.count("no RDMA netlink") == 1


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.CONFLICT])
@pytest.mark.parametrize("verb", ["get", "create", "update_status"])
def test_a_failed_write_is_repeated(
    paths: Paths, api: FakeApi, monkeypatch: pytest.MonkeyPatch, fault: Fault, verb: str
) -> None:
    if (verb, fault) == ("get", Fault.CONFLICT):
        pytest.skip("a read has no conflict")
    faults = iter([fault])
    client = api.client("agent", lambda of, kind, name: next(faults, None) if of == verb else None)
    monkeypatch.setattr(node_report, "PAUSE", 0.0)  # also before the second attempt
    writer = report(paths, client)
    for _ in range(2):
        assert writer.step() == node_report.LOOK
    assert api.look(FabricNode, NODE).status.counts.hcas == 8


def test_a_deleted_object_is_made_again(
    paths: Paths, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_report, "PAUSE", 0.0)
    writer = report(paths, api.client("agent"))
    writer.step()
    api.remove(FabricNode, NODE)
    attach(paths, "worker-0")
    writer.step()
    writer.step()
    assert api.look(FabricNode, NODE).status.counts.attachments == 1


def test_a_metric_joins_ports_with_the_pods_that_hold_them(paths: Paths, api: FakeApi) -> None:
    writer = report(paths, api.client("agent"))
    assert [each.name for each in writer.families() if each.name == "podfabric_pod_device"] == []
    hold(paths, FIRST, "uid-7")
    writer.step()
    faulty, faults, family, *_ = writer.families()
    assert {each.value for each in (*faulty.samples, *faults.samples)} == {0}
    (sample,) = family.samples
    assert sample.value == 1
    assert sample.labels == {
        "namespace": "",
        "pod": "",
        "uid": "uid-7",
        "container": "main",
        "resource": "rdma/hca",
        "device": "mlx5_0",
        "port": "1",
        "pci_address": FIRST,
        "netdev": "ib0",
        "link_layer": "InfiniBand",
    }


def test_counters_that_cannot_be_read_are_counted(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pod in ("worker-0", "worker-1", "worker-2"):
        attach(paths, pod)
    (first, second, _) = Journal(paths).entries()
    assert isinstance(first, JournalEntry) and isinstance(second, JournalEntry)
    Journal(paths).write(replace(first, undo=msgspec.Raw(b'{"rdma": 7}')))  # damaged
    Journal(paths).write(replace(second, undo=msgspec.Raw(b'{"rdma": [{}]}')))  # no such netns
    monkeypatch.setattr(rdma, "rdma", nullcontext)
    monkeypatch.setattr(rdma, "mode", lambda socket: "exclusive")
    counters, unreadable = pod_counters.families(paths)
    assert (counters.samples, unreadable.samples[0].value) == ([], 1)


def test_a_port_without_counters_hides_no_other_port(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(paths, "worker-0")
    (entry,) = Journal(paths).entries()
    assert isinstance(entry, JournalEntry)
    with NetworkNamespace.own() as own:
        Journal(paths).write(
            replace(
                entry,
                undo=msgspec.Raw(b'{"rdma": [{}]}'),
                netns=own.path,
                netns_identity=own.identity,
            )
        )
    tree = Tree(paths.sys, paths)
    tree.write("class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "7")
    monkeypatch.setattr(rdma, "rdma", nullcontext)
    monkeypatch.setattr(rdma, "mode", lambda socket: "exclusive")
    monkeypatch.setattr(mounts, "sysfs_of", lambda namespace: nullcontext(paths.sys))
    counters, unreadable = pod_counters.families(paths)
    (sample,) = counters.samples
    assert (sample.labels["device"], sample.labels["counter"]) == ("mlx5_0", "port_rcv_data")
    assert (sample.value, unreadable.samples[0].value) == (7, 7)


def test_a_refused_add_is_shown_once_with_the_time_of_its_first_failure(
    paths: Paths, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = report(paths, api.client("agent"))
    request = Request(
        command="ADD",
        ifname="net1",
        network="fabric",
        args="K8S_POD_NAMESPACE=ml;K8S_POD_NAME=worker-0",
    )
    for _ in range(3):
        writer.refused(request, CNIError(Code.TRY_AGAIN, "no block is free"))
    writer.refused(replace(request, command="DEL"), CNIError(Code.TRY_AGAIN, "no"))
    writer.step()
    status = api.look(FabricNode, NODE).status
    (refusal,) = status.refusals
    assert (refusal.pod, refusal.interface, refusal.network) == ("ml/worker-0", "net1", "fabric")
    assert (refusal.code, refusal.text) == (11, "no block is free")
    assert status.counts.refusals == 1
    later = time.monotonic() + 3601
    monkeypatch.setattr(time, "monotonic", lambda: later)
    writer.step()
    assert api.look(FabricNode, NODE).status.refusals == ()


def refuse(writer: NodeReport, namespace: str, ifname: str, text: str) -> None:
    names = f"K8S_POD_NAMESPACE={namespace};K8S_POD_NAME=worker-0"
    request = Request(command="ADD", ifname=ifname, args=names)
    writer.refused(request, CNIError(Code.TRY_AGAIN, text))


def kept(writer: NodeReport) -> list[tuple[str, str]]:
    writer.step()
    ((_, status),) = writer.feed.nodes()
    assert all(0 < len(one.text) <= 300 for one in status.refusals)
    return [(one.pod.partition("/")[0], one.interface) for one in status.refusals]


def test_only_the_last_16_refused_adds_are_kept(paths: Paths, api: FakeApi) -> None:
    writer = report(paths, api.client("agent"))
    for number in range(20):
        refuse(writer, f"ns{number}", "net1", "x" * 1000)
    assert kept(writer) == [(f"ns{number}", "net1") for number in range(4, 20)]
    assert len(api.look(FabricNode, NODE).status.refusals) == 16


def test_refused_adds_of_one_namespace_leave_those_of_others(paths: Paths, api: FakeApi) -> None:
    writer = report(paths, api.client("agent"))
    refuse(writer, "quiet", "net1", "no block is free")
    for number in range(20):
        refuse(writer, "loud", f"net{number}", "no block is free")
    of_loud = [("loud", f"net{number}") for number in range(16, 20)]
    assert kept(writer) == [("quiet", "net1"), *of_loud]
    for number in range(12):  # the last leaves no room
        refuse(writer, f"ns{number}", "net1", "no block is free")
    others = [(f"ns{number}", "net1") for number in range(12)]
    assert kept(writer) == [("quiet", "net1"), *of_loud[1:], *others]


def test_a_refused_add_with_another_number_is_the_same_refused_add(
    paths: Paths, api: FakeApi
) -> None:
    writer = report(paths, api.client("agent"))
    for number in range(20):
        refuse(writer, "ml", "net1", f"sandbox {number} is gone")
    assert kept(writer) == [("ml", "net1")]
    assert api.look(FabricNode, NODE).status.refusals[0].text == "sandbox 19 is gone"


def test_a_refused_add_with_impossible_names_fits_the_schema(paths: Paths, api: FakeApi) -> None:
    writer = report(paths, api.client("agent"))
    long = "\udcff\x1b" * 400
    request = Request(command="ADD", ifname=long, network=long, args="K8S_POD_NAME=")
    writer.refused(request, CNIError(Code.INVALID_ENVIRONMENT, long))
    writer.step()
    (refusal,) = api.look(FabricNode, NODE).status.refusals
    assert (len(refusal.interface), len(refusal.network)) == (15, 253)
    assert "\x1b" not in refusal.text


def test_an_hca_that_is_gone_stays_a_fault_after_its_pods(paths: Paths, api: FakeApi) -> None:
    attach(paths, "worker-0")  # on ib0, an interface of the first HCA
    writer = report(paths, api.client("agent"))
    writer.step()
    hold(paths, FIRST, "uid-7")
    Tree(paths.sys, paths).remove(FIRST)
    writer.step()
    for pods in (("uid-7", "ml/worker-0"), ("ml/worker-0",)):
        time.sleep(health.NOTICE)
        writer.step()
        ((_, status),) = writer.feed.nodes()
        (fault,) = (fault for fault in status.faults if fault.about == FIRST)
        assert (fault.text, fault.pods) == (health.GONE, pods)
        assert fault.since.endswith("Z")
        assert (status.counts.hcas, status.counts.active_ports, status.counts.ports) == (7, 7, 8)
        faulty = next(each for each in writer.families() if each.name == "podfabric_hca_faulty")
        assert [each.labels["hca"] for each in faulty.samples if each.value] == [FIRST]
        checkpoint.write(paths, [])  # its holder ends


def test_a_software_device_that_is_removed_is_no_fault(paths: Paths, api: FakeApi) -> None:
    pool = '{name: "rdma/rxe", selectors: {drivers: [rdma_rxe]}}'
    paths.config.write_text(f"pools: [{pool}]")
    tree = Tree(paths.sys, paths)
    tree.netdev("", "eth7")
    device = tree.soft_rdma("rxe0", "eth7")
    tree.port("rxe0", link_layer="Ethernet", netdev="eth7")
    writer = report(paths, api.client("agent"))
    writer.step()
    ((_, status),) = writer.feed.nodes()
    assert [hca.id for hca in status.hcas if hca.pools] == ["rxe0"]
    shutil.rmtree(device)
    (paths.sys / "class/infiniband/rxe0").unlink()
    writer.step()
    ((_, status),) = writer.feed.nodes()
    assert (status.counts.hcas, status.faults) == (8, ())


def test_pools_stay_while_the_configuration_has_a_mistake(paths: Paths, api: FakeApi) -> None:
    writer = report(paths, api.client("agent"))
    writer.step()
    paths.config.write_text('pools: [{name: "rdma/hca", mode: exclusiv}]')
    attach(paths, "worker-0")
    writer.step()
    ((_, status),) = writer.feed.nodes()
    assert [(pool.resource, pool.mode, pool.ids) for pool in status.pools] == [
        ("rdma/hca", "exclusive", 8)
    ]


def test_status_shows_a_mistake_in_the_pools(paths: Paths, shell: Shell) -> None:
    paths.config.write_text('pools: [{name: "rdma/hca", mode: exclusiv}]')
    assert "'exclusiv'" in shell("status").out


def test_a_fault_names_the_pods_that_hold_or_use_the_hca(paths: Paths, api: FakeApi) -> None:
    told = []
    writer = report(
        paths, api.client("agent"), lambda reason, text, pod: told.append((reason, text, pod))
    )
    attach(paths, "worker-0")
    attach(paths, "worker-1", "ib1")
    hold(paths, FIRST, "uid-7")
    writer.step()
    assert told == []
    Tree(paths.sys, paths).port("mlx5_0", 1, state="1: DOWN")
    assert writer.step() == node_report.LOOK_AGAIN  # the fault is too new
    assert told == []
    time.sleep(health.NOTICE)
    writer.step()
    before = list(told)
    writer.step()
    assert told == before  # once while the fault lasts
    assert {reason for reason, _, _ in told} == {node_report.FAULT}
    assert all(FIRST in text for _, text, _ in told)
    assert {str(pod) for _, _, pod in told} == {"ml/worker-0"}


@pytest.mark.parametrize("error", [HostError("sysfs"), OSError(5, "I/O error")])
def test_a_node_that_cannot_be_read_fails_no_step(
    paths: Paths, api: FakeApi, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A failing step would make the agent unready."""

    def fails(*_: object) -> FabricNodeStatus:
        raise error

    writer = report(paths, api.client("agent"))
    with monkeypatch.context() as patched:
        patched.setattr(observation, "observed", fails)
        assert writer.step() == node_report.LOOK
    writer.step()
    assert api.look(FabricNode, NODE).status.counts.hcas == 8


def test_without_a_server_the_page_shows_the_node(paths: Paths) -> None:
    writer = NodeReport(paths, dict, print, {"NODE_NAME": NODE})
    assert writer.step() == node_report.LOOK
    ((name, status),) = writer.feed.nodes()
    assert (name, status.counts.hcas) == (NODE, 8)


def test_the_agents_own_page_shows_when_the_node_changed(
    paths: Paths, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api.client("agent")
    writer = report(paths, client)

    def changed(second: int) -> str:
        later = time.monotonic() + second * node_report.RESCAN_EVERY  # a full look each
        with monkeypatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: later)
            patched.setattr(node_report, "_now", lambda: f"2026-11-28T08:00:0{second}Z")
            writer.step()
        ((_, status),) = writer.feed.nodes()
        assert status.written.encode() in html_page.document(writer.feed.nodes())
        return status.written

    assert changed(1) == changed(2) == "2026-11-28T08:00:01Z"
    assert (client.calls["update_status", "FabricNode"], writer.feed.version) == (1, 1)
    attach(paths, "worker-0")
    assert changed(3) == api.look(FabricNode, NODE).status.written == "2026-11-28T08:00:03Z"


def test_flaps_are_counted_and_found_without_a_whole_look(paths: Paths, api: FakeApi) -> None:
    writer = report(paths, api.client("agent"))
    writer.step()
    version = writer.feed.version
    writer.step()
    assert writer.feed.version == version
    Tree(paths.sys, paths).port("mlx5_0", 1, state="1: DOWN")
    writer.step()
    time.sleep(health.NOTICE)
    writer.step()
    ((_, status),) = writer.feed.nodes()
    assert (status.hcas[0].flaps, status.hcas[1].flaps) == (1, 0)
    assert "DOWN" in status.hcas[0].fault


def test_status_shows_this_node(paths: Paths, shell: Shell) -> None:
    attach(paths, "worker-0")
    hold(paths, SECOND, "uid-7")
    Tree(paths.sys, paths).port("mlx5_0", 1, state="1: DOWN")
    printed = shell("status")
    assert (printed.code, printed.err) == (0, "")
    text = printed.out
    assert f"{FIRST}" in text
    assert "ml/worker-0" in text
    assert "0x8001" in text
    assert "WITHHELD" in text
    document = shell("status", "-o", "json").document()
    assert document["counts"]["attachments"] == 1


def test_a_hostile_name_cannot_control_the_terminal(paths: Paths, shell: Shell) -> None:
    attach(paths, "a\x1b[2J")
    assert "\x1b" not in shell("status").out


def test_status_of_the_cluster_lists_all_nodes_and_their_faults(
    paths: Paths, api: FakeApi, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(paths, api.client("agent")).step()
    stored = api.look(FabricNode, NODE)
    broken = replace(stored.status, faults=(fabric_node.FaultStatus(about="x", text="is broken"),))
    api.put(FabricNode(metadata=replace(stored.metadata, name="node-b", uid="b"), status=broken))
    monkeypatch.setattr("cli.cluster_ipam.connect", lambda kubeconfig: api.client("reader"))
    text = shell("status", "--cluster").out
    assert "node-a" in text
    assert "8 of 8" in text
    assert "is broken" in text
    assert "mlx5_0/1" in shell("status", "--node", NODE).out
    missing = shell("status", "--node", "node-c")
    assert missing.code == 1
    assert "node-c" in missing.err
