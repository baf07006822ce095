"""Which HCAs get into which pool, and the ids that the kubelet sees."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.paths import Paths
from base.types import DeviceId
from deviceplugin.kubelet.extended_resources import MOST_IDS
from deviceplugin.pools.formats import parse
from deviceplugin.pools.pool import Pool, Slot, pools, used_netdevs
from deviceplugin.pools.pool_config import DEFAULT, DevicePluginConfig, PoolConfig
from host.sysfs.discovery import HCA
from host.sysfs.selectors import Selector
from tests.unit.deviceplugin.cards import card, port, rdma, rxe, sf, vf

A = card("0000:3b:00.0", rdma("mlx5_0"), netdevs=("ib0",), numa=0)
B = card("0000:5e:00.0", rdma("mlx5_1"), netdevs=("ib1",), numa=1)
PF = card("0000:86:00.0", rdma("mlx5_2"), netdevs=("ens1",), num_vfs=2, numa=None)
VF0, VF1 = vf(PF, 0, rdma("mlx5_3")), vf(PF, 1, rdma("mlx5_4"))
SF = sf(A, 4, rdma("mlx5_5"))
NIC = card("0000:01:00.0", driver="igb", vendor="8086", netdevs=("eno1",))
RXE = rxe("rxe0", "eno1")


def config(*several: PoolConfig) -> DevicePluginConfig:
    return DevicePluginConfig(pools=several)


def pool_of(pool: PoolConfig, found: Sequence[HCA], **keys: Sequence[str]) -> Pool:
    (made,) = pools(config(pool), found, **keys)  # type: ignore[arg-type]
    return made


def ids(pool: PoolConfig, *found: HCA, **keys: Sequence[str]) -> list[str]:
    return [hca.id for hca in pool_of(pool, found, **keys).hcas]


EXCLUSIVE = PoolConfig(resource="a/b", mode="exclusive", used="named")
SHARED = PoolConfig(resource="a/b", slots=2)


@pytest.mark.parametrize("amount", [0, 1, 100])
def test_tokens_are_as_many_as_configured_and_give_every_hca(amount: int) -> None:
    """Mellanox plugin, server_test.go "Server construction": no HCA, no token, and no error."""
    pool = PoolConfig(resource="rdma/test_server", mode="all", amount=amount)
    assert pool_of(pool, [B, A]).slots == tuple(
        Slot(DeviceId(str(n)), ("0000:3b:00.0", "0000:5e:00.0"), (0, 1)) for n in range(amount)
    )
    assert pool_of(pool, [NIC]).slots == ()
    assert pool_of(pool, []).slots == ()


def test_exclusive_ids_are_the_hcas() -> None:
    assert pool_of(EXCLUSIVE, [B, SF, A]).slots == (
        Slot(DeviceId("0000:3b:00.0"), ("0000:3b:00.0",), (0,)),
        Slot(DeviceId("0000:5e:00.0"), ("0000:5e:00.0",), (1,)),
        Slot(DeviceId("mlx5_core.sf.4"), ("mlx5_core.sf.4",), (0,)),
    )


def test_shared_ids_are_hca_and_slot() -> None:
    made = pool_of(SHARED, [B, A])
    assert [slot.id for slot in made.slots] == [
        "0000:3b:00.0-0",
        "0000:3b:00.0-1",
        "0000:5e:00.0-0",
        "0000:5e:00.0-1",
    ]
    assert made.slot("0000:5e:00.0-1") == Slot(DeviceId("0000:5e:00.0-1"), (B.id,), (1,))
    assert made.slot("0000:5e:00.0-2") is None
    assert made.hca(A.id) is A
    assert made.hca("0000:5e:00.0-1") is None


def test_ids_do_not_depend_on_the_order_or_the_names_of_rdma_devices() -> None:
    renamed = msgspec.structs.replace(A, rdma=(rdma("mlx5_9"),), rdma_names=("mlx5_9",))
    assert pool_of(SHARED, [A, B]).slots == pool_of(SHARED, [B, renamed]).slots


@pytest.mark.parametrize(
    ("numa", "wanted", "told"),
    [(None, True, ()), (-1, True, ()), (0, True, (0,)), (3, True, (3,)), (3, False, ())],
)
def test_numa_nodes_are_told_if_known_and_wanted(
    numa: int | None, wanted: bool, told: tuple[int, ...]
) -> None:
    """SR-IOV plugin "NUMA": missing and -1 are no topology, excludeTopology is none."""
    hca = msgspec.structs.replace(A, numa=numa)
    for mode in ("all", "exclusive", "shared"):
        pool = PoolConfig(resource="a/b", mode=mode, numa=wanted)
        assert {slot.numa for slot in pool_of(pool, [hca]).slots} == {told}


def test_a_list_too_long_for_the_kubelet_has_fewer_slots_of_each_and_says_so() -> None:
    many = [card(f"{n:04x}:00:00.0", rdma("mlx5_0")) for n in range(1, 101)]
    made = pool_of(PoolConfig(resource="a/b", slots=1000), many)
    assert len(made.slots) == MOST_IDS // 100 * 100 <= MOST_IDS
    assert made.problem is not None
    assert made.problem.startswith("a/b: 1000 slots of 100 HCAs are more ids than the kubelet")
    assert pool_of(PoolConfig(resource="a/b", slots=1000), many[:52]).problem is None


def test_the_first_pool_that_selects_an_hca_has_it() -> None:
    first = PoolConfig(resource="a/first", selectors=(Selector(pciAddresses=(B.id,)),))
    rest = PoolConfig(resource="a/rest")
    made = pools(config(first, rest), [A, B])
    assert [[hca.id for hca in pool.hcas] for pool in made] == [[B.id], [A.id]]
    assert [
        (pool.config.resource, hca_id, why)
        for pool in pools(config(first, rest), [A, B])
        for hca_id, why in pool.left.items()
    ] == [
        ("a/first", A.id, f"address is {A.id}, not one of {B.id}"),
        ("a/rest", B.id, "pool a/first has it"),
    ]


def test_a_later_pool_that_may_overlap_has_it_as_well() -> None:
    first = PoolConfig(resource="a/first")
    again = PoolConfig(resource="a/again", overlap=True)
    third = PoolConfig(resource="a/third")
    made = pools(config(first, again, third), [A])
    assert [len(pool.hcas) for pool in made] == [1, 1, 0]


def test_what_is_held_stays_in_its_pool_when_selectors_change() -> None:
    now = PoolConfig(resource="a/now")
    then = PoolConfig(resource="a/then", selectors=(Selector(vendors=("ffff",)),))
    gone = msgspec.structs.replace(B, rdma=(), rdma_names=())
    kept = {"a/then": frozenset((B.id,)), "a/removed": frozenset((VF0.id,))}
    made = pools(config(now, then), [A, gone, VF0], kept)
    assert [[hca.id for hca in pool.hcas] for pool in made] == [[A.id], [B.id]]
    why = {
        (pool.config.resource, hca_id): why
        for pool in pools(config(now), [VF0], kept)
        for hca_id, why in pool.left.items()
    }
    assert why == {("a/now", VF0.id): "pool a/removed has it"}


def test_an_rdma_pool_takes_an_hca_with_an_rdma_device_in_any_namespace() -> None:
    """SR-IOV plugin, devices/rdma_test.go: a device that moved into a pod still counts as RDMA."""
    moved = card("0000:5e:00.1", rdma_names=("mlx5_8",))
    assert ids(SHARED, A, NIC, moved) == [A.id, moved.id]
    without = msgspec.structs.replace(SHARED, rdma=False)
    assert ids(without, A, NIC, moved) == [NIC.id, A.id, moved.id]


def test_of_a_pool_with_two_kinds_of_selectors_only_one_needs_rdma() -> None:
    pool = msgspec.structs.replace(
        SHARED, selectors=(Selector(vendors=("8086",)), Selector(isRdma=True))
    )
    plain = card("0000:02:00.0")
    assert ids(pool, A, NIC, plain) == [NIC.id, A.id]


def test_a_function_without_a_driver_is_no_device() -> None:
    """SR-IOV plugin, manager_test.go "Discovery": an unbound PF is not an error."""
    pool = PoolConfig(resource="a/b", mode="exclusive", rdma=False)
    unbound = card("0000:02:00.0", driver="")
    assert ids(pool, unbound, vf(PF, 3, driver="igb_uio")) == ["0000:86:02.3"]
    assert pool_of(pool, []).slots == ()


@pytest.mark.parametrize(
    ("functions", "taken"),
    [("any", [A.id, SF.id]), ("pci", [A.id]), ("auxiliary", [SF.id])],
)
def test_the_kind_of_function(functions: str, taken: list[str]) -> None:
    pool = msgspec.structs.replace(SHARED, functions=functions)
    assert ids(pool, A, SF) == taken


@pytest.mark.parametrize(
    ("selectors", "taken"),
    [
        ((), False),
        ((Selector(linkTypes=("ether",)),), False),
        ((Selector(rdmaDevices=("rxe0",)),), True),
        ((Selector(ifNames=("eno1",)),), True),
        ((Selector(drivers=("rdma_rxe",)),), True),
        ((Selector(isRdma=True), Selector(rdmaDevices=("rxe0",))), False),
    ],
)
def test_software_is_offered_only_if_it_is_named(
    selectors: tuple[Selector, ...], taken: bool
) -> None:
    pool = msgspec.structs.replace(SHARED, selectors=selectors)
    assert (RXE.id in ids(pool, RXE, A)) is taken


def test_the_default_pool_offers_what_works_or_has_worked() -> None:
    down = card("0000:af:00.0", rdma("mlx5_6", port(state="DOWN")))
    assert ids(DEFAULT, A, down, RXE, NIC) == [A.id, RXE.id]
    assert ids(DEFAULT, A, down, worked=[down.id]) == [A.id, down.id]
    assert ids(SHARED, A, down) == [A.id, down.id]


@pytest.mark.parametrize(
    ("selector", "taken"),
    [
        (None, [VF0.id, VF1.id]),
        (Selector(pfNames=("ens1",)), [VF0.id, VF1.id]),
        (Selector(pfNames=("ens1#1",)), [VF1.id]),
        (Selector(devices=("101b",)), [PF.id]),  # not its VFs: the PF is what is wanted
        (Selector(pciAddresses=(PF.id, VF0.id)), [PF.id, VF0.id]),
        (Selector(rdmaDevices=("mlx5_2",)), [PF.id]),
        (Selector(ifNames=("ens1",)), [PF.id]),
    ],
)
def test_an_exclusive_pool_leaves_the_pf_out_whose_vfs_it_takes(
    selector: Selector | None, taken: list[str]
) -> None:
    pool = msgspec.structs.replace(EXCLUSIVE, selectors=(selector,) if selector else ())
    assert sorted(ids(pool, PF, VF0, VF1)) == sorted(taken)


def test_a_pf_is_offered_if_none_of_its_vfs_can_be() -> None:
    bound = vf(PF, 0, driver="vfio-pci")
    assert ids(EXCLUSIVE, PF, bound) == [PF.id]


def test_a_shared_pool_offers_the_pf_beside_its_vfs() -> None:
    assert sorted(ids(SHARED, PF, VF0)) == [PF.id, VF0.id]


@pytest.mark.parametrize(
    ("used", "selector", "taken"),
    [
        ("offered", Selector(), True),
        ("named", Selector(), False),
        ("named", Selector(ifNames=("ib0",)), True),
        ("left", Selector(), False),
        ("left", Selector(pciAddresses=(A.id,)), False),
    ],
)
def test_the_hca_of_the_default_route(used: str, selector: Selector, taken: bool) -> None:
    """SR-IOV plugin: what the host's IPv4 default route is over is left out."""
    pool = msgspec.structs.replace(EXCLUSIVE, used=used, selectors=(selector,))
    assert (A.id in ids(pool, A, used=["ib0"])) is taken
    assert ids(pool, A, used=["ib7"]) == [A.id]


def test_an_sriov_file_takes_no_pf_that_has_vfs_and_the_first_match_wins() -> None:
    text = b"""{"resourceList": [
        {"resourceName": "a", "selectors": [{"pfNames": ["ens1#1"]}, {"vendors": ["8086"]}]},
        {"resourceName": "b", "selectors": {"isRdma": true}}]}"""
    made = pools(parse(text, "f"), [PF, VF0, VF1, SF, RXE, A, NIC])
    assert [[slot.id for slot in pool.slots] for pool in made] == [
        [NIC.id, VF1.id],
        [A.id, VF0.id],
    ]


def test_a_pool_of_ours_without_rdma_offers_vfs_with_and_without_an_rdma_device() -> None:
    port = card("0000:01:00.0", vendor="8086", driver="igb", netdevs=("eno1",), num_vfs=2)
    plain = [vf(port, 0, driver="igbvf"), vf(port, 1, driver="vfio-pci")]
    entry = "{name: example.com/eth, mode: exclusive, %s selectors: {pfNames: [eno1, ens1]}}"

    def offered(rdma: str) -> list[str]:
        (made,) = pools(parse(f"pools: [{entry % rdma}]".encode(), "f"), [PF, VF0, port, *plain])
        return [slot.id for slot in made.slots]

    assert offered("rdma: false,") == [plain[0].id, plain[1].id, VF0.id]
    assert offered("") == [VF0.id]


def test_pools_of_all_forms_in_one_file_share_the_hcas_out() -> None:
    """Ours choose first. Those of a Mellanox file also offer HCAs of other pools."""
    text = b"""
configList: [{resourceName: all, rdmaHcaMax: 1, selectors: {vendors: ["15b3"]}}]
resourceList: [{resourceName: vf, selectors: {pfNames: [ens1], isRdma: true}}]
pools: [{name: a/one, mode: exclusive, selectors: {pfNames: ["ens1#1"]}}]
"""
    made = pools(parse(text, "f"), [PF, VF0, VF1, A])
    assert [(pool.config.resource, [hca.id for hca in pool.hcas]) for pool in made] == [
        ("a/one", [VF1.id]),
        ("intel.com/vf", [VF0.id]),
        ("rdma/all", [A.id, PF.id, VF0.id, VF1.id]),
    ]


def test_two_pools_of_a_mellanox_file_may_share_an_hca() -> None:
    entry = '{"resourceName": "%s", "rdmaHcaMax": 2, "selectors": {"vendors": ["15b3"]}}'
    text = f'{{"configList": [{entry % "a"}, {entry % "b"}]}}'
    made = pools(parse(text.encode(), "f"), [PF, VF0, SF, NIC])
    expected = [Slot(DeviceId(str(n)), (PF.id, VF0.id), (0,)) for n in range(2)]
    assert [list(pool.slots) for pool in made] == [expected, expected]


HCAS = st.lists(st.sampled_from([A, B, PF, VF0, VF1, SF, NIC, RXE]), unique_by=lambda hca: hca.id)
CONFIGS = st.lists(
    st.builds(
        PoolConfig,
        resource=st.sampled_from(["a/a", "a/b", "a/c"]),
        mode=st.sampled_from(["all", "exclusive", "shared"]),
        slots=st.integers(1, 3),
        rdma=st.booleans(),
        used=st.sampled_from(["offered", "named", "left"]),
        selectors=st.sampled_from(
            [
                (),
                (Selector(isRdma=True),),
                (Selector(pfNames=("ens1",)), Selector(drivers=("igb",))),
            ]
        ),
    ),
    unique_by=lambda pool: pool.resource,
)


@given(HCAS, CONFIGS)
def test_without_overlap_no_hca_is_in_two_pools(
    found: list[HCA], several: list[PoolConfig]
) -> None:
    made = pools(config(*several), found)
    taken = [hca.id for pool in made for hca in pool.hcas]
    assert len(taken) == len(set(taken))
    left = {
        (pool.config.resource, hca_id)
        for pool in pools(config(*several), found)
        for hca_id, why in pool.left.items()
        if why
    }
    assert len(left) + len(taken) == len(found) * len(several)
    for pool in made:
        known = [slot.id for slot in pool.slots]
        assert len(known) == len(set(known))


ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
bond0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth9\t00000000\t00000000\t0201\t0\t0\t0\t00000000\t0\t0\t0
eth8\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000080\t0\t0\t0
ib0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0
broken
"""


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        (ROUTES, {"bond0", "ens1", "ens1.5"}),
        (ROUTES.replace("bond0", "ens3"), {"ens3"}),
        ("", set()),
    ],
)
def test_the_interfaces_of_the_default_route(
    tmp_path: Path, routes: str, expected: set[str]
) -> None:
    """True only with a default route; a bond's members count, and what they are on."""
    paths = Paths(proc=tmp_path / "proc", sys=tmp_path / "sys")
    assert used_netdevs(paths) == frozenset()
    (paths.proc / "net").mkdir(parents=True)
    (paths.proc / "net/route").write_text(routes)
    for name, below in (("bond0", "ens1.5"), ("ens1.5", "ens1")):
        (paths.sys / "class/net" / name / f"lower_{below}").mkdir(parents=True)
    assert used_netdevs(paths) == expected
