"""The page's document: its limits, its filter, and objects of a foreign node."""

import threading
import time
from html.parser import HTMLParser
from itertools import takewhile

import pytest

from kube.resources import Meta
from node.fabric_node import (
    AttachmentStatus,
    Counts,
    FabricNode,
    FabricNodeStatus,
    FaultStatus,
    GpuStatus,
    HcaStatus,
    OfferedPool,
    PortStatus,
    RefusalStatus,
)
from node.page import html_page
from node.page.feed import ClusterFeed, Feed
from node.usage import GpuPartStatus, RdmaObjects
from tests.fake_api import FakeApi
from tests.waiting import until

HCA = HcaStatus(
    id="0000:3b:00.0",
    rdma=("mlx5_0",),
    switch="0000:3a:00.0",
    numa=1,
    ports=(PortStatus(port="mlx5_0/1", state="ACTIVE", rate="400 Gb/sec (4X NDR)"),),
    pods=("ml/worker-0",),
)
VF = HcaStatus(id="0000:3b:00.2", rdma=("mlx5_2",), pf=HCA.id, pods=("ml/worker-1",))


def attachment(pod: str, *addresses: str, hca: str = HCA.id) -> AttachmentStatus:
    return AttachmentStatus(
        pod=pod, interface="net1", hca=hca, pkey="0x8001", network="ml/fabric", addresses=addresses
    )


def shown(*statuses: FabricNodeStatus, query: str = "") -> str:
    """The text of the page, with a blank between elements."""
    nodes = [(f"node-{number}", status) for number, status in enumerate(statuses)]
    page = html_page.document(nodes, query).decode().removeprefix("<!DOCTYPE html>\n")
    body = page[page.index('<main id="main">') : page.index("</main>") + len("</main>")]
    found = list[str]()
    parser = HTMLParser()
    parser.handle_data = found.append  # type: ignore[method-assign, assignment]
    parser.feed(body)
    return " ".join(found)


def test_a_node_is_drawn_with_its_vfs_and_the_match_of_a_pod() -> None:
    status = FabricNodeStatus(
        hcas=(HCA, VF),
        gpus=(GpuStatus(id="0000:3c:00.0", numa=1, switch="0000:3a:00.0", memory_bytes=80 << 30),),
        attachments=(attachment("ml/worker-0", "10.0.0.5/24"), attachment("ml/worker-9")),
    )
    text = shown(status)
    assert "NUMA node 1" in text
    assert "PCIe switch 0000:3a:00.0" in text
    assert "pod ml/worker-0 net1 ✓" in text
    assert "pod ml/worker-9 net1" in text
    assert "pod ml/worker-9 net1 ✓" not in text  # it holds no HCA
    assert "pod ml/worker-9 net1 ✗" not in text
    other = shown(FabricNodeStatus(hcas=(HCA, VF), attachments=(attachment("ml/worker-1"),)))
    assert "pod ml/worker-1 net1 ✗" in other  # it holds another HCA
    assert f"VF {VF.id}" in text
    assert "80.0 GiB" in text


def test_several_nodes_are_a_table_and_one_can_be_chosen() -> None:
    one = FabricNodeStatus(hcas=(HCA,), counts=Counts(hcas=1, ports=1, active_ports=1))
    other = FabricNodeStatus(hcas=(VF,), faults=(FaultStatus(about="x", text="port 1 is DOWN"),))
    both = shown(one, other)
    assert "2 nodes" in both
    assert "NUMA node" not in both
    assert "check the cable" in both.lower()
    chosen = shown(one, other, query="node=node-0")
    assert "NUMA node" in chosen
    assert "DOWN" not in chosen


def test_the_objects_of_pods_are_shown_and_filtered() -> None:
    objects = tuple(
        RdmaObjects(pod=f"ml/worker-{number}", device="mlx5_0", qp=200 + number)
        for number in range(2)
    )
    text = shown(FabricNodeStatus(objects=objects), query="q=worker-1")
    assert "ml/worker-1 mlx5_0 201 0 0 0" in text
    assert "worker-0" not in text


def test_a_filter_without_a_match_says_so() -> None:
    status = FabricNodeStatus(attachments=(attachment("ml/worker-0"),))
    assert "No attachment fits the filter" in shown(status, query="q=worker-9")


def test_a_full_pool_and_a_fault_with_its_pods_are_shown() -> None:
    pool = OfferedPool(resource="rdma/hca", mode="exclusive", ids=8, held=7, withheld=1)
    fault = FaultStatus(
        about=HCA.id,
        text="it is gone from this node",
        pods=("ml/worker-0",),
        since="2026-11-28T08:00:00Z",
    )
    text = " ".join(shown(FabricNodeStatus(pools=(pool,), faults=(fault,))).split())
    assert "rdma/hca exclusive 7 of 8 0 1" in text
    assert "ml/worker-0 2026-11-28T08:00:00Z Cordon the node and delete these pods." in text


@pytest.mark.parametrize("words", ["worker-1", "ML/WORKER-1", "10.0.0.6", "0000:5e:00.0"])
def test_the_filter_finds_pods_addresses_and_hcas(words: str) -> None:
    status = FabricNodeStatus(
        attachments=(
            attachment("ml/worker-0", "10.0.0.5/24"),
            attachment("ml/worker-1", "10.0.0.6/24", hca="0000:5e:00.0"),
        ),
        refusals=(RefusalStatus(pod="ml/worker-5"),),
    )
    text = shown(status, query=f"q={words}")
    rows = text[text.index("Attachments") :]
    assert "ml/worker-1" in rows
    assert "ml/worker-0" not in rows


def test_a_foreign_node_cannot_break_the_page_of_others() -> None:
    long = "\x00\x1b]0;\udcff\u202e</script><script>alert(1)</script>" * 40
    gpu = GpuStatus(id=long, numa=2**62, memory_bytes=-1, free_percent=-(2**62))
    part = GpuPartStatus(gpu=long, pod=long, container=long, used_bytes=-(2**62))
    evil = FabricNodeStatus(
        version=long,
        written=long,
        hcas=tuple(
            HcaStatus(
                id=f"{number}{long}", rdma=(long,), numa=-(2**62), switch=long, pods=(long,) * 1024
            )
            for number in range(1000)
        ),
        pools=(OfferedPool(resource=long, ids=-1, held=2**62, withheld=-1, reasons=(long,)),) * 256,
        gpus=(gpu,) * 64,
        gpu_parts=(part,) * 1000,
        attachments=(attachment(long, long, "10.0.0.5/24", "::1/0", "fe80::/999"),) * 4096,
        objects=(RdmaObjects(pod=long, device=long, qp=-(2**62)),) * 1024,
        faults=(FaultStatus(about=long, text=long, since=long, pods=(long,) * 16),) * 32,
        refusals=(RefusalStatus(pod=long, code=2**62),) * 16,
        left_out=long,
    )
    good = FabricNodeStatus(hcas=(HCA,), attachments=(attachment("ml/worker-0", "10.0.0.9/24"),))
    began = time.thread_time()
    text = shown(evil, good)
    assert time.thread_time() - began < 20
    assert "ml/worker-0" in text
    assert "\x1b" not in text
    html = html_page.document([("a", evil), ("b", good)]).decode()
    assert html.count("<script>") == 1
    assert len(html) < 20 << 20
    shown(evil)  # the picture


@pytest.mark.parametrize("query", ["q=%ff%00", "node=&node=&q", "=" * 5000, "q=" + "a" * 9000])
def test_any_query_gets_a_page(query: str) -> None:
    assert (
        "1 HCAs" in shown(FabricNodeStatus(counts=Counts(hcas=1)), query=query) or "node" in query
    )


def test_a_map_has_a_cell_for_each_address_and_names_the_pods() -> None:
    held = [attachment(f"ml/w{number}", f"10.0.0.{number}/24") for number in range(10, 20)]
    six = attachment("ml/w6", "fd00::5/64"), attachment("ml/w7", "fd00::1:5/64")
    text = shown(FabricNodeStatus(attachments=(*held, *six)))
    assert "10.0.0.0/24: 10 addresses are held" in text
    assert "10.0.0.17 ml/w17 net1 node-0" in text
    assert "fd00::/64: 2 addresses are held" in text
    assert "each cell is 512 addresses" in text


def test_events_come_after_changes_until_the_end() -> None:
    feed = Feed(list)
    ended = threading.Event()
    events = feed.events(ended.is_set)
    assert next(events).startswith(b"retry:")
    feed.changed()
    assert next(events) == b"data: 1\n\n"
    ended.set()
    assert list(takewhile(bool, events)) == []


def test_the_first_reader_follows_the_cluster() -> None:
    api = FakeApi()
    client = api.client("controller")
    feed = ClusterFeed(client)
    try:
        assert client.calls["list", "FabricNode"] == 0
        for name in ("node-b", "node-a"):
            api.put(FabricNode(metadata=Meta(name=name, uid=name)))
        until(lambda: [name for name, _ in feed.nodes()] == ["node-a", "node-b"])
        api.remove(FabricNode, "node-b")
        until(lambda: [name for name, _ in feed.nodes()] == ["node-a"])
    finally:
        feed.close()
