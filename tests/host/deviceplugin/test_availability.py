"""The whole device plugin while hardware is present and not ready: fresh VFs, a boot, one HCA under
two names, ports that fail without an event. The log and the commands report these states.
"""

import functools
import json
import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from base.paths import Paths, boot_id_of
from deviceplugin import availability, checkpoint, plugin
from deviceplugin.availability import StartupGrace
from deviceplugin.kubelet import records
from deviceplugin.kubelet.plugin_server import Rejected
from deviceplugin.kubelet.registration import PluginServer
from deviceplugin.ledger import Ledger
from deviceplugin.pools.formats import parse
from deviceplugin.pools.pool_config import DEFAULT, DevicePluginConfig, PoolConfig
from host.sysfs.discovery import hcas
from host.sysfs.selectors import Selector
from tests.host.deviceplugin.node import FIRST, HCA, Node, config, container, keep_allocations
from tests.kubelet import Kubelet, Pod, PodRejected
from tests.unit.cli.commands import short_path
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree
from tests.waiting import PATIENCE

GRACE = 10 * PATIENCE
ALONE = PoolConfig(resource=HCA, mode="exclusive")
BOTH = config(
    PoolConfig(resource="tencent.com/rdma", mode="exclusive"),
    PoolConfig(resource="rdma/shared", slots=2, overlap=True),
    PoolConfig(resource="rdma/one", mode="exclusive", overlap=True),
)

Boot = Callable[[Paths], None]


@pytest.fixture
def card() -> Iterator[Paths]:
    """VFs and an SF without configuration: RoCE's interfaces are down, InfiniBand's VFs lack a
    GUID.

    The ports of both PFs are ACTIVE.
    """
    with short_path() as root:
        paths = servers.vfs(root, nodes=True)
        boot_id = paths.proc / "sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True)
        boot_id.write_text("a-boot\n")
        for hca in hcas(paths):
            if hca.pf:
                port(paths, hca.rdma[0].name, "1: DOWN", "3: Disabled")
        yield paths


def port(paths: Paths, rdma: str, state: str = "4: ACTIVE", physical: str = "5: LinkUp") -> None:
    tree = Tree(paths.sys, paths)
    tree.write(f"class/infiniband/{rdma}/ports/1/state", state)
    tree.write(f"class/infiniband/{rdma}/ports/1/phys_state", physical)


@contextmanager
def serving(paths: Paths, kubelet: Kubelet, configuration: DevicePluginConfig) -> Iterator[Node]:
    node = Node(paths, configuration)
    try:
        names = [pool.resource for pool in configuration.pools]
        kubelet.wait(lambda: all(kubelet.capacity(name) for name in names))
        yield node
    finally:
        node.plugin.close()


def resources(**selectors: object) -> Mapping[str, Any]:
    """A file of sriov-network-device-plugin's with one resource."""
    kind = selectors.pop("deviceType", "netDevice")
    entry = {"resourceName": "vf", "deviceType": kind, "selectors": selectors}
    return {"resourceList": [{"resourcePrefix": "rdma", **entry}]}


@pytest.mark.parametrize(
    ("file", "number", "pf"),
    [
        (resources(pfNames=["enp59s0f1np0"], drivers=["mlx5_core"], isRdma=True), 4, "mlx5_1"),
        (resources(pfNames=["ib0"], linkTypes=["infiniband"], isRdma=True), 4, "mlx5_0"),
        (resources(deviceType="auxNetDevice", auxTypes=["sf"], isRdma=True), 1, "mlx5_1"),
        (
            {
                "pools": [
                    {"name": "rdma/vf", "mode": "exclusive", "selectors": {"pfNames": ["ib0#0-1"]}}
                ]
            },
            2,
            "mlx5_0",
        ),
    ],
)
def test_function_that_is_set_up_with_its_pod_is_healthy_while_its_pf_is(
    card: Paths, file: Mapping[str, Any], number: int, pf: str
) -> None:
    configuration = parse(json.dumps(file).encode(), "file")
    (pool,) = configuration.pools
    with Kubelet(card.kubelet) as kubelet, serving(card, kubelet, configuration):
        kubelet.wait(lambda: kubelet.allocatable(pool.resource) == number)
        kubelet.admit("worker-0", [container(pool.resource)])
        port(card, pf, "1: DOWN", "2: Polling")
        kubelet.wait(lambda: kubelet.allocatable(pool.resource) == 0)
        assert kubelet.capacity(pool.resource) == number


def test_rdma_ports_are_nothing_to_a_pool_that_asks_for_no_rdma(card: Paths) -> None:
    file = resources(pfNames=["enp59s0f1np0"], drivers=["mlx5_core"])
    for pf in ("mlx5_0", "mlx5_1"):
        port(card, pf, "1: DOWN", "2: Polling")
    with (
        Kubelet(card.kubelet) as kubelet,
        serving(card, kubelet, parse(json.dumps(file).encode(), "file")),
    ):
        kubelet.wait(lambda: kubelet.allocatable("rdma/vf") == 4)
        kubelet.admit("worker-0", [container("rdma/vf")])


def test_vf_for_many_holders_must_be_well_itself(card: Paths) -> None:
    """The VF is not configured when a pod gets it."""
    shared = PoolConfig(resource=HCA, slots=2, selectors=(Selector(pfNames=("ib0#0-1",)),))
    port(card, "mlx5_2")
    with Kubelet(card.kubelet) as kubelet, serving(card, kubelet, config(shared)):
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 2 and kubelet.capacity(HCA) == 4)
        assert [device_id for device_id, (well, _) in kubelet.devices(HCA).items() if well] == [
            f"{servers.VFS[0]}-{slot}" for slot in (0, 1)
        ]


# A node that boots.


def no_drivers(paths: Paths) -> None:
    for part in ("infiniband", "infiniband_verbs", "infiniband_mad"):
        shutil.rmtree(paths.sys / "class" / part)
        (paths.sys / "class" / part).mkdir()


def no_functions(paths: Paths) -> None:
    no_drivers(paths)
    for hca in servers.DGX_HCAS:
        (paths.sys / "bus/pci/devices" / hca).unlink()


def no_subnet_manager(paths: Paths) -> None:
    for number in range(8):
        port(paths, f"mlx5_{number}", "2: INIT")


def no_link(paths: Paths) -> None:
    for number in range(8):
        port(paths, f"mlx5_{number}", "1: DOWN", "2: Polling")


def rebooted(
    paths: Paths,
    kubelet: Kubelet,
    configuration: DevicePluginConfig,
    boot: Boot,
    *,
    cut: bool = False,
) -> Pod:
    """A pod from before a reboot; the kubelet runs again, and the hardware is not ready yet.

    With `cut`, the checkpoint has lost its allocations.
    """
    with serving(paths, kubelet, configuration):
        kubelet.wait(lambda: kubelet.allocatable(HCA))
        pod = kubelet.admit("worker-0", [container()])
    kubelet.restart()
    (paths.proc / "sys/kernel/random/boot_id").write_text("the-next-boot\n")
    boot_id_of.cache_clear()
    shutil.rmtree(paths.devinfo)  # /var/run is a tmpfs
    shutil.copytree(paths.sys, f"{paths.sys}.ready", symlinks=True)
    boot(paths)
    if cut:
        keep_allocations(paths, 0)
    return pod


def get_ready(paths: Paths) -> None:
    shutil.rmtree(paths.sys)
    Path(f"{paths.sys}.ready").rename(paths.sys)


@pytest.mark.parametrize("boot", [no_drivers, no_functions, no_subnet_manager, no_link])
@pytest.mark.parametrize("pool", [DEFAULT, ALONE])
@pytest.mark.parametrize("cut", [False, True], ids=["reboot", "checkpoint lost"])
def test_pod_is_taken_up_again_before_its_hca_is_ready(
    server: Paths, pool: PoolConfig, boot: Boot, cut: bool
) -> None:
    with Kubelet(server.kubelet) as kubelet:
        pod = rebooted(server, kubelet, config(pool), boot, cut=cut)
        with serving(server, kubelet, config(pool)) as node:
            kubelet.wait(lambda: kubelet.allocatable(HCA) == 1)
            kubelet.readmit(pod)
            with pytest.raises(Rejected) as refused:
                node.plugin.services[HCA].allocate(pod.containers["main"].ids[HCA])
            assert refused.value.code.name == "FAILED_PRECONDITION"
            get_ready(server)
            node.plugin.look()
            every = 8 * (pool.slots if pool.mode == "shared" else 1)
            kubelet.wait(lambda: kubelet.allocatable(HCA) == every)
            node.plugin.compare()
            (allocation,) = checkpoint.read(server).allocations
            (rdma,) = allocation.devices[0].rdma
            assert rdma.uverbs is not None
            assert rdma.uverbs.path in pod.containers["main"].devices


def test_health_is_reported_after_the_grace_period(
    server: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    expected = StartupGrace.expected_at_start

    def told(grace: StartupGrace, *given: Any) -> frozenset[str]:  # noqa: ANN401 - as the method
        *state, now = given
        given = (*state, now + GRACE if over.is_set() else now)
        return expected(grace, *given)

    monkeypatch.setattr(availability, "GRACE", GRACE)
    monkeypatch.setattr(StartupGrace, "expected_at_start", told)
    with Kubelet(server.kubelet) as kubelet:
        pod = rebooted(server, kubelet, config(ALONE), no_link)
        with serving(server, kubelet, config(ALONE)):
            kubelet.wait(lambda: kubelet.allocatable(HCA) == 1)
            over.set()
            kubelet.wait(lambda: kubelet.allocatable(HCA) == 0)
            with pytest.raises(PodRejected):
                kubelet.readmit(pod)


def test_hca_that_fails_within_the_grace_period_is_reported_at_once(server: Paths) -> None:
    with Kubelet(server.kubelet) as kubelet, serving(server, kubelet, config(ALONE)) as node:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 8)
        kubelet.admit("worker-0", [container(count=8)])
        node.restart()
        kubelet.wait(lambda: kubelet.count("Register", HCA) == 2 and kubelet.allocatable(HCA) == 8)
        port(server, "mlx5_0", "1: DOWN", "2: Polling")
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 7)


# One HCA under several names.


@pytest.mark.parametrize("other", ["rdma/one", "rdma/shared"])
def test_hca_that_one_resource_has_alone_is_withdrawn_from_the_others(
    server: Paths, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    with Kubelet(server.kubelet) as kubelet, serving(server, kubelet, BOTH) as node:
        before = {"rdma/one": 8, "rdma/shared": 16}
        kubelet.wait(lambda: kubelet.allocatable(other) == before[other])
        pod = kubelet.admit("worker-0", [container("tencent.com/rdma")])
        (held,) = pod.containers["main"].ids["tencent.com/rdma"]
        kubelet.wait(lambda: kubelet.allocatable(other) == before[other] * 7 // 8)
        assert not any(
            well for device_id, (well, _) in kubelet.devices(other).items() if held in device_id
        )
        assert kubelet.allocatable("tencent.com/rdma") == 8
        kubelet.remove(pod)
        kubelet.held()
        monkeypatch.setattr(
            Ledger, "drop_unknown", functools.partialmethod(Ledger.drop_unknown, age=-1.0)
        )
        node.plugin.compare()  # the kubelet writes its checkpoint with the lists that this sends
        kubelet.wait(lambda: records.from_checkpoint(server) == [])
        node.plugin.compare()
        kubelet.wait(lambda: kubelet.allocatable(other) == before[other])


def test_exclusive_id_of_an_hca_that_is_shared_under_another_name_is_withdrawn(
    server: Paths,
) -> None:
    with Kubelet(server.kubelet) as kubelet, serving(server, kubelet, BOTH):
        kubelet.wait(lambda: kubelet.allocatable("rdma/shared") == 16)
        kubelet.admit("worker-0", [container("rdma/shared")])
        kubelet.wait(lambda: kubelet.allocatable("rdma/one") == 7)
        kubelet.wait(lambda: kubelet.allocatable("tencent.com/rdma") == 7)
        assert kubelet.allocatable("rdma/shared") == 16


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("tencent.com/rdma", FIRST), ("rdma/one", FIRST)),
        (("tencent.com/rdma", FIRST), ("rdma/shared", f"{FIRST}-0")),
        (("rdma/shared", f"{FIRST}-0"), ("rdma/one", FIRST)),
    ],
)
def test_no_hca_is_given_twice_between_two_comparisons(
    server: Paths,
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[str, str],
    second: tuple[str, str],
) -> None:
    with Kubelet(server.kubelet) as kubelet, serving(server, kubelet, BOTH) as node:
        monkeypatch.setattr(node.plugin, "look", lambda **_: None)
        services = node.plugin.services
        assert services[first[0]].allocate([first[1]]).devices
        with pytest.raises(Rejected) as refused:
            services[second[0]].allocate([second[1]])
        assert refused.value.code.name == "FAILED_PRECONDITION"
        assert f"is held by id {first[1]} of {first[0]}" in str(refused.value)
        assert [allocation.resource for allocation in checkpoint.read(server).allocations] == [
            first[0]
        ]


def test_holder_of_all_gets_the_hcas_that_are_not_held_exclusively(server: Paths) -> None:
    everything = PoolConfig(resource="rdma/all", mode="all", amount=2, overlap=True)
    with Kubelet(server.kubelet) as kubelet, serving(server, kubelet, config(ALONE, everything)):
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 8)
        alone = kubelet.admit("worker-0", [container()]).containers["main"]
        every = kubelet.admit("worker-1", [container("rdma/all")]).containers["main"]
        both = set(alone.devices) & set(every.devices)
        assert both == {"/dev/infiniband/rdma_cm"}
        assert len([path for path in every.devices if "uverbs" in path]) == 7
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 1, 30.0)  # its own; before a comparison
        assert kubelet.allocatable("rdma/all") == 2


def test_holder_of_all_goes_without_what_a_pod_of_an_earlier_resource_has_alone(
    server: Paths,
) -> None:
    everything = PoolConfig(resource="rdma/all", mode="all", amount=2, overlap=True)
    with Kubelet(server.kubelet) as kubelet, serving(server, kubelet, config(ALONE)) as node:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 8)
        alone = kubelet.admit("worker-0", [container()]).containers["main"]
        node.plugin.reconfigure(config(everything))
        kubelet.wait(lambda: kubelet.allocatable("rdma/all") == 2)
        every = kubelet.admit("worker-1", [container("rdma/all")]).containers["main"]
        assert set(alone.devices) & set(every.devices) == {"/dev/infiniband/rdma_cm"}
        assert len([path for path in every.devices if "uverbs" in path]) == 7


def test_new_pool_is_served_after_the_other_pools_have_excluded_its_hcas(
    server: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = PoolConfig(resource="rdma/new", mode="exclusive", overlap=True)
    refused: list[str] = []
    with Kubelet(server.kubelet) as kubelet, serving(server, kubelet, config(ALONE)) as node:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 8)
        start = PluginServer.start

        def served(server: PluginServer) -> None:
            start(server)
            kubelet.wait(lambda: kubelet.allocatable("rdma/new") == 8)
            pod = kubelet.admit("worker-0", [container("rdma/new")])
            with pytest.raises(Rejected) as error:
                node.plugin.services[HCA].allocate(list(pod.containers["main"].ids["rdma/new"]))
            refused.append(str(error.value))

        monkeypatch.setattr(PluginServer, "start", served)
        node.plugin.reconfigure(config(new, msgspec.structs.replace(ALONE, overlap=True)))
    assert len(refused) == 1
    assert "of rdma/new" in refused[0]


# Ports that fail without an event, and the reports about them.


@pytest.mark.parametrize(
    ("attribute", "text"), [("state", "2: INIT"), ("rate", "100 Gb/sec (1X NDR)")]
)
def test_port_that_fails_beneath_its_carrier_is_seen_at_once(
    server: Paths, monkeypatch: pytest.MonkeyPatch, attribute: str, text: str
) -> None:
    monkeypatch.setattr(plugin, "RATES_EVERY", 0.5)
    monkeypatch.setattr(plugin, "RESCAN_EVERY", math.inf)
    tree = Tree(server.sys, server)
    for number in range(8):
        tree.write(f"class/net/ib{number}/carrier", "1")
    with Kubelet(server.kubelet) as kubelet, serving(server, kubelet, config(ALONE)):
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 8)
        tree.write(f"class/infiniband/mlx5_0/ports/1/{attribute}", text)
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 7)


def test_log_says_once_why_an_id_is_unfit_and_when_it_is_fit_again(
    server: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deviceplugin.plugin")
    shared = PoolConfig(resource=HCA, slots=2, memlock="")
    with Kubelet(server.kubelet) as kubelet, serving(server, kubelet, config(shared)) as node:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == 16)
        assert caplog.messages == []
        (server.sys / "class/infiniband/mlx5_0").rename(server.sys / "away")
        for _ in range(3):
            node.plugin.look()
        (server.sys / "away").rename(server.sys / "class/infiniband/mlx5_0")
        node.plugin.look()
    ids = f"{HCA}: {FIRST}-0 and 1 more"
    assert caplog.messages == [
        f"{ids}: the RDMA device of {FIRST} is in another network namespace: it is back when "
        "that namespace is gone",
        f"{ids}: healthy",
    ]
