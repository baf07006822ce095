"""InfiniBand VFs in pods, through the kernel's own IPoIB: GUIDs, link state, P_Keys, traffic."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin.pools import formats
from deviceplugin.pools.pool_config import PoolConfig
from host.sysfs import pci
from tests import runtime
from tests.kernel import cards, igb
from tests.kernel import infiniband_vfs as ib
from tests.kernel.cards import DEVICES, Card
from tests.kernel.devices import beside, pool_node, uverbs_numbers
from tests.kernel.pods import IP, Reply, SriovNode, ipam, link_in, pings, pod, run
from tests.kernel.processes import in_processes
from tests.waiting import until

NODE_GUID, PORT_GUID = "02:00:00:00:00:00:01:00", "02:00:00:00:00:00:01:01"  # VF 0, on the host
POD_GUID = "02:00:00:00:00:00:00:ab"
GUIDS = [f"02:00:00:00:00:00:00:{index:02x}" for index in (1, 2, 3)]  # of three pods
EXAMPLE = runtime.CHECKOUT / "netattach-examples/sriov-infiniband.yaml"
NO_GUID = "ff:ff:ff:ff:ff:ff:ff:ff"


@pytest.fixture(scope="module")
def hca() -> Iterator[Card]:
    """A PF with six VFs. It has set the GUIDs of the first three; the other three have their
    own."""
    with ib.with_infiniband_vfs(6) as card:
        ib.set_guids(card, 0, NODE_GUID, PORT_GUID)
        for index in (1, 2):
            ib.set_guids(
                card, index, f"02:00:00:00:00:00:1{index}:00", f"02:00:00:00:00:00:1{index}:01"
            )
        for vf in card.vfs[:3]:
            ib.rebind(vf)
        yield card


@pytest.fixture
def unchanged(hca: Card, sriov: SriovNode) -> Iterator[dict[str, str]]:
    """The state of all VFs, which the test's last DEL restores."""
    before = ib.state(hca)
    yield before
    assert ib.state(hca) == before
    assert sriov.leftovers() == []


def guid_in(netns: str) -> str:
    """The port GUID in the address of the pod's interface."""
    link = link_in(netns)
    assert link is not None
    return link.mac[-23:]


def pkey_in(netns: str) -> int | None:
    """The P_Key of the pod's interface."""
    link = link_in(netns)
    assert link is not None
    return link.pkey


def await_carrier(netns: str, *, present: bool) -> None:
    """Wait until the pod's interface has carrier, or has none."""

    def is_as_expected() -> bool:
        link = link_in(netns)
        return link is not None and link.carrier is present

    until(is_as_expected, what=f"carrier {present} in {netns}")


def packets_received(card: Card, index: int) -> int:
    """The VF's received packets, as its PF reports them."""
    (link,) = json.loads(run(IP, "-s", "-j", "link", "show", card.pf))
    return int(link["vfinfo_list"][index]["stats"]["rx"]["packets"])


def difference(sriov: SriovNode, netns: str, previous: Reply, **config: Any) -> str:  # noqa: ANN401
    """The difference that CHECK names, or ""."""
    checked = sriov.call("CHECK", "c1", netns, previous=previous, **config)
    assert checked.document.get("code", 102) == 102, checked
    return checked.text if checked.exit_code else ""


def test_vf_has_the_guids_that_its_pf_set_before_it_was_bound(hca: Card) -> None:
    shown = cards.shown(hca.pf, 0)
    assert (shown["node guid"], shown["port guid"]) == (NODE_GUID, PORT_GUID)
    assert ib.state(hca)[f"{hca.vfs[0]} node GUID"] == NODE_GUID
    assert ib.state(hca)[f"{hca.vfs[0]} port GUID"] == PORT_GUID


def test_guid_of_the_pod_is_set_and_goes_again(
    sriov: SriovNode, pods: list[str], hca: Card, unchanged: dict[str, str]
) -> None:
    vf = hca.vfs[0]
    config: dict[str, Any] = {"deviceID": vf, "guid": POD_GUID, "ipam": ipam("10.5.0.0/24")}
    reply = sriov.add("c1", pods[0], **config)
    link = link_in(pods[0])
    assert link is not None
    assert (link.device, link.up, link.mac[-23:]) == (vf, True, POD_GUID)
    assert reply.interface == {
        "name": "net1",
        "mac": link.mac,
        "mtu": 2044,
        "sandbox": f"/var/run/netns/{pods[0]}",
        "pciID": vf,
        "rdmaDevice": unchanged[f"{vf} RDMA"],
        "uverbs": unchanged[f"{vf} uverbs"],
    }
    assert ib.node_guid(vf) == POD_GUID
    assert difference(sriov, pods[0], reply, **config) == ""
    sriov.delete("c1", pods[0], **config)


def test_guids_of_which_the_pf_knows_nothing_are_restored_both(
    sriov: SriovNode, pods: list[str], hca: Card
) -> None:
    """mlx5's PF reports only settings made since it was bound; the node GUID is another one."""
    vf = hca.vfs[3]
    before = ib.state(hca)
    assert before[f"{vf} node GUID"] != before[f"{vf} port GUID"]
    config: dict[str, Any] = {"deviceID": vf, "guid": POD_GUID}
    sriov.add("c1", pods[0], **config)
    assert guid_in(pods[0]) == POD_GUID
    sriov.delete("c1", pods[0], **config)
    after = ib.state(hca)
    shown = {key for key in before if before[key] != after[key]}
    assert shown == {f"{hca.pf} VF 3 node guid", f"{hca.pf} VF 3 port guid"}
    assert sriov.leftovers() == []


def test_guid_that_was_set_alone_is_restored_with_the_other(
    sriov: SriovNode, pods: list[str], hca: Card
) -> None:
    """`ip link set PF vf N node_guid A port_guid B` sets the node GUID only."""
    vf, mine = hca.vfs[4], "02:00:00:00:00:00:04:00"
    own = ib.state(hca)[f"{vf} port GUID"]
    run(IP, "link", "set", hca.pf, "vf", "4", "node_guid", mine, "port_guid", mine)
    ib.rebind(vf)
    config: dict[str, Any] = {"deviceID": vf, "guid": POD_GUID}
    sriov.add("c1", pods[0], **config)
    sriov.delete("c1", pods[0], **config)
    after = ib.state(hca)
    assert (after[f"{vf} node GUID"], after[f"{vf} port GUID"]) == (mine, own)


def test_vf_without_a_guid_needs_one_and_has_none_afterwards(
    sriov: SriovNode, pods: list[str], hca: Card
) -> None:
    """Like a new VF of a ConnectX, of which its PF reports nothing either."""
    vf = hca.vfs[5]
    with ib.new_vfs_have_no_guid():
        ib.rebind(vf)
    before = ib.state(hca)
    assert (before[f"{vf} node GUID"], before[f"{vf} port GUID"]) == (NO_GUID, NO_GUID)
    reply = sriov.refused("c1", pods[0], deviceID=vf)
    assert (reply.document["code"], f"VF {vf} has no valid GUID" in reply.text) == (7, True)
    config: dict[str, Any] = {"deviceID": vf, "runtimeConfig": {"infinibandGUID": POD_GUID}}
    sriov.add("c1", pods[0], **config)
    assert guid_in(pods[0]) == POD_GUID
    sriov.delete("c1", pods[0], **config)
    after = ib.state(hca)
    shown = {key for key in before if before[key] != after[key]}
    assert shown == {f"{hca.pf} VF 5 node guid", f"{hca.pf} VF 5 port guid"}
    assert {after[key] for key in shown} == {NO_GUID}
    assert sriov.leftovers() == []


def test_guid_that_the_host_has_set_for_the_pod_needs_no_binding(
    sriov: SriovNode, pods: list[str], hca: Card, unchanged: dict[str, str]
) -> None:
    vf = hca.vfs[0]
    index = Path("/sys/class/net", cards.netdev_of(vf), "ifindex")
    before = index.read_text()
    sriov.add("c1", pods[0], deviceID=vf)
    assert guid_in(pods[0]) == PORT_GUID
    sriov.delete("c1", pods[0], deviceID=vf)
    assert index.read_text() == before


@pytest.mark.parametrize(
    ("asked", "shown", "plugged", "active"),
    [
        ("auto", "auto", True, True),
        ("auto", "auto", False, False),
        ("enable", "enable", False, True),
        ("disable", "disable", True, False),
        (None, "disable", True, False),
    ],
)
def test_link_state_governs_the_port_and_goes_again(
    sriov: SriovNode,
    pods: list[str],
    hca: Card,
    unchanged: dict[str, str],
    asked: str | None,
    shown: str,
    plugged: bool,
    active: bool,
) -> None:
    """It starts at "disable", which firmware may give a new VF; the PF's cable matters only for
    "auto"."""
    vf, state = hca.vfs[0], [IP, "link", "set", hca.pf, "vf", "0", "state"]
    run(*state, "disable")
    ib.plug(hca.address, connected=plugged)
    before = ib.state(hca)
    config: dict[str, Any] = {"deviceID": vf, "link_state": asked, "ipam": ipam("10.5.0.0/24")}
    reply = sriov.add("c1", pods[0], **config)
    assert cards.setting(vf, "link_state") == shown
    assert ib.port_state(vf) == ("ACTIVE" if active else "DOWN")
    await_carrier(pods[0], present=active)
    assert difference(sriov, pods[0], reply, **config) == ""
    if asked:
        run(*state, "enable" if asked == "disable" else "disable")
        assert "link_state" in difference(sriov, pods[0], reply, **config)
        run(*state, asked)
    sriov.delete("c1", pods[0], **config)
    assert ib.state(hca) == before
    ib.plug(hca.address, connected=True)
    run(*state, "auto")


def test_link_follows_the_cable_of_the_pf_while_the_pod_runs(
    sriov: SriovNode, pods: list[str], hca: Card, unchanged: dict[str, str]
) -> None:
    config: dict[str, Any] = {"deviceID": hca.vfs[0], "link_state": "auto"}
    sriov.add("c1", pods[0], **config)
    for connected in (True, False, True):
        ib.plug(hca.address, connected=connected)
        await_carrier(pods[0], present=connected)
    sriov.delete("c1", pods[0], **config)
    igb.await_carrier(hca.pf)


def test_pods_reach_each_other_and_their_pf_counts_it(
    sriov: SriovNode, pods: list[str], hca: Card, unchanged: dict[str, str]
) -> None:
    vf = hca.vfs[0]
    received = packets_received(hca, 0)
    config: dict[str, Any] = {"deviceID": vf, "ipam": ipam("10.5.0.0/24")}
    first = sriov.add("c1", pods[0], **config)
    second = sriov.add("c2", pods[1], master=hca.pf, ipam=ipam("10.5.0.0/24"))
    assert second.interface["pciID"] == hca.vfs[1]
    assert pings(pods[0], second.addresses[0])
    assert pings(pods[1], first.addresses[0])
    assert packets_received(hca, 0) > received
    sriov.delete("c2", pods[1], master=hca.pf, ipam=ipam("10.5.0.0/24"))
    sriov.delete("c1", pods[0], **config)


def test_pods_at_once_keep_their_uverbs_devices(
    sriov: SriovNode, pods: list[str], hca: Card, unchanged: dict[str, str]
) -> None:
    """Each pod has a GUID: no binding takes another VF's number."""
    named = [
        (f"c{index}", pods[index], {"deviceID": vf, "guid": GUIDS[index]})
        for index, vf in enumerate(hca.vfs[:3])
    ]
    adds = [partial(sriov.add, cid, netns, **config) for cid, netns, config in named]
    assert in_processes(adds) == [0, 0, 0]
    assert [guid_in(netns) for netns in pods] == GUIDS
    uverbs = [pci.uverbs_of(Paths(), ib.rdma_device(vf)) for vf in hca.vfs]
    assert uverbs == [unchanged[f"{vf} uverbs"] for vf in hca.vfs]
    deletes = [partial(sriov.delete, cid, netns, **config) for cid, netns, config in named]
    assert in_processes(deletes) == [0, 0, 0]


def test_partition_that_the_subnet_manager_gives_a_guid_is_the_pods(
    sriov: SriovNode,
    pods: list[str],
    hca: Card,
    unchanged: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The third pod's partition appears while the pod is running."""
    with ib.partitioned({GUIDS[0]: 0x8001, GUIDS[1]: 0x8001}):
        addresses = []
        for index, vf in enumerate(hca.vfs[:3]):
            config = {"deviceID": vf, "guid": GUIDS[index], "ipam": ipam("10.5.0.0/24")}
            reply = sriov.add(f"c{index}", pods[index], pkey="0x8001", **config)
            addresses += reply.addresses
        assert [pkey_in(netns) for netns in pods] == [0x8001, 0x8001, 0xFFFF]
        noted = f'device {hca.vfs[2]} has P_Key 0xffff, but "pkey" is 0x8001'
        assert [noted in line for line in capfd.readouterr().err.splitlines()] == [True]
        assert pings(pods[0], addresses[1])
        assert not pings(pods[0], addresses[2], tries=2)
        with ib.partitioned({GUIDS[2]: 0x8001}):
            until(lambda: pkey_in(pods[2]) == 0x8001)
            assert pings(pods[0], addresses[2], tries=30)
        for index, vf in enumerate(hca.vfs[:3]):
            config = {"deviceID": vf, "guid": GUIDS[index], "ipam": ipam("10.5.0.0/24")}
            sriov.delete(f"c{index}", pods[index], pkey="0x8001", **config)


def test_private_range_counts_in_the_partition_of_the_pods_guid(
    sriov: SriovNode, pods: list[str], hca: Card, unchanged: dict[str, str]
) -> None:
    """No pod is a member of the partition that the VF had before its GUID was set."""
    theirs: dict[str, Any] = {"name": "theirs", "ipam": ipam("10.5.0.0/24")}
    mine: dict[str, Any] = {"name": "mine", "ipam": ipam("10.5.0.0/24", network_name="apart")}
    theirs |= {"deviceID": hca.vfs[0], "guid": GUIDS[0]}
    other = mine | {"deviceID": hca.vfs[1], "guid": GUIDS[1]}
    same = mine | {"deviceID": hca.vfs[2], "guid": GUIDS[2]}
    with ib.partitioned({GUIDS[0]: 0x8001, GUIDS[1]: 0x8002, GUIDS[2]: 0x8001}):
        sriov.add("c1", pods[0], **theirs)
        assert sriov.add("c2", pods[1], **other).addresses == ["10.5.0.1"]
        reply = sriov.call("ADD", "c3", pods[2], **same)
        assert (reply.document["code"], "0x8001" in reply.text) == (121, True), reply
        sriov.delete("c2", pods[1], **other)
        sriov.delete("c1", pods[0], **theirs)


def test_binding_that_would_give_another_uverbs_device_is_an_error(
    sriov: SriovNode, pods: list[str], hca: Card
) -> None:
    """A lower number has become free since the container got its device."""
    first, vf = hca.vfs[0], hca.vfs[1]
    before = ib.state(hca)
    igb.unbind(first)
    lower = before[f"{first} uverbs"]
    reply = sriov.refused("c1", pods[0], deviceID=vf, guid=POD_GUID)
    changed = f"(before: {before[f'{vf} uverbs']}, now: {lower})"
    assert (reply.document["code"], changed in reply.text) == (100, True)
    assert ib.node_guid(vf) == before[f"{vf} node GUID"]
    igb.unbind(vf)
    for function in (first, vf):
        igb.bind(function, ib.DRIVER)
        cards.await_netdev(function)


def test_check_names_another_guid(
    sriov: SriovNode, pods: list[str], hca: Card, unchanged: dict[str, str]
) -> None:
    config: dict[str, Any] = {"deviceID": hca.vfs[0], "guid": POD_GUID}
    reply = sriov.add("c1", pods[0], **config)
    for kind, named in (("node_guid", "guid"), ("port_guid", "guid of the port")):
        run(IP, "link", "set", hca.pf, "vf", "0", kind, PORT_GUID)
        assert f"{named} " in difference(sriov, pods[0], reply, **config)
        run(IP, "link", "set", hca.pf, "vf", "0", kind, POD_GUID)
    assert difference(sriov, pods[0], reply, **config) == ""
    sriov.delete("c1", pods[0], **config)


REFUSED: dict[str, dict[str, Any]] = {
    '"vlan"': {"vlan": 5},
    '"mac"': {"mac": "02:00:00:00:00:01"},
    '"spoofchk"': {"spoofchk": "on"},
    '"trust"': {"trust": "off"},
    '"max_tx_rate"': {"max_tx_rate": 100},
    '"guid"': {"guid": NO_GUID},
    '"pkey"': {"pkey": 0},
    "dhcp": {"ipam": {"type": "dhcp"}},
    "shared mode": {"rdmaIsolation": True},
}


def test_refused_before_anything_changes(
    sriov: SriovNode, pods: list[str], hca: Card, unchanged: dict[str, str]
) -> None:
    for named, config in REFUSED.items():
        reply = sriov.refused("c1", pods[0], deviceID=hca.vfs[0], **config)
        assert (reply.document["code"], named in reply.text) == (7, True), reply


def test_vf_of_a_program_gets_its_guid_from_the_pf_alone(
    sriov: SriovNode, pods: list[str], hca: Card, unchanged: dict[str, str]
) -> None:
    vf = hca.vfs[0]
    with cards.at_vfio(vf):
        config: dict[str, Any] = {"deviceID": vf, "guid": POD_GUID, "link_state": "enable"}
        reply = sriov.add("c1", pods[0], **config)
        assert reply.interface["mtu"] == 2044
        shown = cards.shown(hca.pf, 0)
        assert (shown["port guid"], shown["link_state"]) == (POD_GUID, "enable")
        assert difference(sriov, pods[0], reply, **config) == ""
        sriov.delete("c1", pods[0], **config)


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damaged_journal_gives_the_vf_another_guid_than_the_pods(
    sriov: SriovNode, pods: list[str], hca: Card, damage: str
) -> None:
    """Its earlier GUID is unknown then, but the next pod must not have this pod's."""
    vf, name = hca.vfs[0], cards.netdev_of(hca.vfs[0])
    config: dict[str, Any] = {"deviceID": vf, "guid": POD_GUID, "link_state": "enable"}
    sriov.add("c1", pods[0], **config)
    file = sriov.journal_file("c1")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    sriov.delete("c1", pods[0], **config)
    made = cards.netdev_of(vf)
    assert Path("/sys/class/net", made, "address").read_text().strip()[-23:] == NO_GUID
    assert cards.setting(vf, "link_state") == "auto"
    ib.set_guids(hca, 0, NODE_GUID, PORT_GUID)
    ib.rebind(vf)
    assert cards.netdev_of(vf) == name
    assert [left for left in sriov.leftovers() if ".damaged" not in left] == []


def test_example_gives_the_vf_of_the_pod_with_the_guid_of_its_annotation(
    hca: Card, unchanged: dict[str, str]
) -> None:
    """With the example's own pool, and a kubelet that allocates from it; two pods, one VF."""
    (definition,), (example,) = runtime.definitions(EXAMPLE), runtime.pods(EXAMPLE)
    (network,) = json.loads(example["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"])
    (resource,) = (key for key in example["spec"]["containers"][0]["resources"]["limits"])
    with igb.exclusive_rdma(), pool_node(*pools_of_the_example(hca)) as node, pod("worker") as name:
        node.await_healthy(resource, len(hca.vfs))
        for uid in range(2):
            worker = node.admit(name, resource)
            (vf,) = worker.containers["main"].ids[resource]
            config = definition.config | {
                "deviceID": vf,
                "runtimeConfig": {"infinibandGUID": network["infiniband-guid"]},
            }
            reply = node.add(node.sriov, worker, **config)
            assert (uid, guid_in(name)) == (uid, network["infiniband-guid"])
            assert cards.setting(vf, "link_state") == "enable"
            assert beside(name) == uverbs_numbers(worker)
            inside = run(IP, "netns", "exec", name, igb.RDMA, "dev").split()
            assert inside[1].rstrip(":") == reply.interface["rdmaDevice"]
            node.plugin.look()
            node.await_healthy(resource, len(hca.vfs))
            node.delete(node.sriov, worker, **config)
            node.kubelet.remove(worker)
        assert node.sriov.leftovers() == []


def pools_of_the_example(card: Card) -> tuple[PoolConfig, ...]:
    """The pool in the example's comment, with the device id of this machine's VFs."""
    lines = EXAMPLE.read_text().splitlines()
    first = lines.index("#   pools:")
    text = "\n".join(line.removeprefix("#") for line in lines[first : first + 2])
    own = (DEVICES / card.vfs[0] / "device").read_text().strip().removeprefix("0x")
    assert "101e" in text
    return formats.parse(text.replace("101e", own).encode(), "config.yaml").pools
