"""The order of a container's HCAs: by rail, by address, by GUID, by name."""

import random

import msgspec
import pytest

from deviceplugin import checkpoint, rails
from deviceplugin.allocate.container_devices import recorded
from deviceplugin.allocate.environment import environment, of_libraries
from deviceplugin.checkpoint import AllocatedHCA
from deviceplugin.pools import formats
from deviceplugin.pools.pool_config import ConfigError
from host.device_nodes import DeviceNode
from host.sysfs.discovery import HCA
from host.sysfs.selectors import Selector
from tests.unit.deviceplugin.made import hca, pool, port, rdma

A, B, FAR = "0000:3b:00.0", "0000:af:00.0", "10000:01:00.0"
RAILS = (Selector(pciAddresses=(B,)), Selector(ifNames=("ib0",)), Selector(rdmaDevices=("mlx5_7",)))


def vf(address: str, pf: str, **of_pf: tuple[str, ...]) -> HCA:
    return hca(address, pf=pf, index=1, **of_pf)


def test_hcas_without_rails_are_ordered_by_address_then_guid_then_name() -> None:
    ordered = [
        hca(A),
        hca(B),
        hca(FAR),  # a domain of five digits
        hca("mlx5_core.sf.4"),
        hca("mlx5_core.sf.12"),
        hca("rxe9", rdma(0, port(guid="0002:c903:0000:0001"))),
        hca("rxe1", rdma(1, port(guid="0002:c903:0000:0002"))),
        hca("siw10"),
        hca("siw2"),
    ]
    shuffled = random.Random(4).sample(ordered, len(ordered))
    found = sorted(shuffled, key=lambda each: rails.place(each, rails.number((), each)))
    assert [each.id for each in found] == [each.id for each in ordered]
    of_record = sorted(
        (recorded(pool([]), each) for each in shuffled), key=lambda it: rails.place(it, it.rail)
    )
    assert [each.id for each in of_record] == [each.id for each in ordered]


@pytest.mark.parametrize(
    ("of", "rail"),
    [
        (hca(B), 0),
        (hca(A, netdevs=("ib0",)), 1),
        (hca(A, netdevs=("ib1",)), None),
        (vf("0000:af:06.1", B), 0),
        (vf("0000:3b:06.1", A, pf_netdevs=("ib0",)), 1),
        (vf("0000:3b:06.1", A, pf_rdma_names=("mlx5_7",)), 2),
        (vf("0000:3b:06.1", A, netdevs=("ib0",)), 1),
        (vf("0000:3b:06.1", A), None),
    ],
)
def test_selector_of_a_rail_matches_an_hca_or_its_pf(of: HCA, rail: int | None) -> None:
    assert rails.number(RAILS, of) == rail


def test_container_and_checkpoint_have_the_hcas_in_the_order_of_rails() -> None:
    hcas = [hca(A, rdma(0)), hca(B, rdma(1)), hca(FAR, rdma(2))]
    of = pool(hcas, rails=(Selector(pciAddresses=(FAR,)), Selector(pciAddresses=(B,))))
    given = {
        each.id: (each, [DeviceNode(path=f"/dev/infiniband/uverbs{n}", host="", major=0, minor=0)])
        for n, each in enumerate(hcas)
    }
    envs = environment(of.config, given) | of_libraries(of.config, given)
    assert envs["PCIDEVICE_RDMA_HCA"] == f"{FAR},{B},{A}"
    assert envs["NCCL_IB_HCA"] == "=mlx5_2,mlx5_1,mlx5_0"
    assert envs["UCX_NET_DEVICES"] == "mlx5_2:1,mlx5_1:1,mlx5_0:1"
    assert [recorded(of, each).rail for each in hcas] == [None, 1, 0]


def test_checkpoint_of_an_earlier_version_has_no_rails() -> None:
    earlier = b'{"id":"0000:3b:00.0","address":"0000:3b:00.0","netdevs":[],"rdma":[]}'
    assert msgspec.json.decode(earlier, type=AllocatedHCA).rail is None
    assert checkpoint.VERSION == 1


def test_rails_of_the_file_apply_to_each_pool() -> None:
    content = b"rails: [{ifNames: [ib0]}, {ifNames: [ib1]}]"
    (default,) = formats.parse(content, "f").pools
    assert default.rails == (Selector(ifNames=("ib0",)), Selector(ifNames=("ib1",)))
    content += b"\npools: [{name: rdma/a}, {name: rdma/b}]"
    assert [len(each.rails) for each in formats.parse(content, "f").pools] == [2, 2]


@pytest.mark.parametrize(
    ("written", "error"),
    [
        ("{ifNames: [ib0]}", "f: rails: expected a list of selectors, got "),
        ("[{ifnames: [ib0]}]", "f: rails[0].ifnames: unknown key"),
        ("[{}, {pciAddresses: [x]}]", "f: rails[1].pciAddresses[0]: 'x': write an address"),
    ],
)
def test_wrong_rails_are_refused_as_selectors_of_pools(written: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        formats.parse(f"rails: {written}".encode(), "f")
    assert str(caught.value).startswith(error)
