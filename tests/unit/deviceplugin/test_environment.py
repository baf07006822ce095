"""The variables that a container gets."""

import json
import subprocess
from collections.abc import Sequence

import pytest

from deviceplugin.allocate.environment import (
    Given,
    environment,
    nccl,
    of_libraries,
    ucx,
    variable,
)
from host.device_nodes import DeviceNode
from host.sysfs.discovery import HCA, RdmaDevice
from tests.unit.deviceplugin.made import hca, pool, port, rdma

CARD, VF, SF = "0000:3b:00.0", "0000:af:06.1", "mlx5_core.sf.4"


def _node(path: str) -> DeviceNode:
    return DeviceNode(path=path, host=path, major=0, minor=0)


def _given(*hcas: HCA, more: Sequence[str] = ()) -> Given:
    """With the verbs devices of all of them."""
    return {
        of.id: (
            of,
            [
                *(_node(f"/dev/infiniband/{each.uverbs.name}") for each in of.rdma if each.uverbs),
                *map(_node, more),
            ],
        )
        for of in hcas
    }


@pytest.mark.parametrize(
    ("resource", "name"),
    [
        ("rdma/hca", "PCIDEVICE_RDMA_HCA"),
        ("intel.com/sriov-net_0", "PCIDEVICE_INTEL_COM_SRIOV_NET_0"),
        ("3com.example/0", "PCIDEVICE_3COM_EXAMPLE_0"),
        ("ib.plugin/infini.Band", "PCIDEVICE_IB_PLUGIN_INFINI_BAND"),
    ],
)
def test_a_shell_can_refer_to_the_resources_variable(resource: str, name: str) -> None:
    of = pool([hca(CARD)], resource=resource).config
    assert variable(of) == name
    envs = environment(of, _given(hca(CARD)))
    echo = f'echo "${name}" && echo "${name}_INFO"'
    shown = subprocess.run(["/bin/sh", "-uc", echo], env=envs, capture_output=True, text=True)
    assert shown.stdout.splitlines() == [
        CARD,
        f'{{"{CARD}":{{"generic":{{"deviceID":"{CARD}"}}}}}}',
    ]


def test_addresses_are_sorted() -> None:
    of = pool([], resource="a.b/c").config
    given = _given(*(hca(id_) for id_ in (VF, SF, CARD, "rxe0")))
    envs = environment(of, given)
    assert envs["PCIDEVICE_A_B_C"] == f"{CARD},{VF},{SF},rxe0"
    assert list(envs) == ["PCIDEVICE_A_B_C", "PCIDEVICE_A_B_C_INFO"]
    assert of_libraries(of, given) == {}  # no RDMA, nothing for NCCL


def test_the_details_are_in_the_sriov_plugins_format() -> None:
    extra = {"*": {"rail": "0", "site": "b"}, CARD: {"rail": "3"}}
    of = pool([], resource="a.b/c", additional_info=extra).config
    inside = ("umad3", "issm3", "umad4", "rdma_cm")
    whole = _given(hca(CARD, rdma(3)), more=[f"/dev/infiniband/{name}" for name in inside])
    bound = _given(hca(VF), more=["/dev/vfio/vfio", "/dev/vfio/37"])
    envs = environment(of, {**bound, **whole})
    assert json.loads(envs["PCIDEVICE_A_B_C_INFO"]) == {
        CARD: {
            "extra": {"rail": "3", "site": "b"},
            "generic": {"deviceID": CARD},
            "rdma": {
                "issm": "/dev/infiniband/issm3",
                "rdma_cm": "/dev/infiniband/rdma_cm",
                "rdma_dev": "mlx5_3",
                "umad": "/dev/infiniband/umad3",
                "uverbs": "/dev/infiniband/uverbs3",
            },
        },
        VF: {
            "extra": {"rail": "0", "site": "b"},
            "generic": {"deviceID": VF},
            "vfio": {"dev-mount": "/dev/vfio/37", "mount": "/dev/vfio/vfio"},
        },
    }


def test_variables_for_nccl_and_ucx_and_no_two_pools_share_a_name() -> None:
    given = _given(hca(CARD, rdma(3)), hca(VF, rdma(0)))
    libraries = of_libraries(pool([]).config, given)
    assert libraries["NCCL_IB_HCA"] == "=mlx5_3,mlx5_0"  # by address, as all the rest
    assert libraries["UCX_NET_DEVICES"] == "mlx5_3:1,mlx5_0:1"
    first = environment(pool([], resource="rdma/hca").config, given)
    second = environment(pool([], resource="rdma/vf").config, given)
    assert not set(first) & set(second)
    assert list(first) == sorted(first)


@pytest.mark.parametrize(
    ("devices", "for_nccl", "for_ucx"),
    [
        pytest.param([rdma(0)], "=mlx5_0", "mlx5_0:1", id="one port"),
        pytest.param(
            [rdma(0, port(1), port(2))], "=mlx5_0", "mlx5_0:1,mlx5_0:2", id="two that work"
        ),
        pytest.param(
            [rdma(0, port(1, "DOWN"), port(2)), rdma(1)],
            "=mlx5_0:2,mlx5_1",
            "mlx5_0:2,mlx5_1:1",
            id="one of two works",
        ),
        pytest.param([rdma(0, port(1, "DOWN"))], "=mlx5_0", "mlx5_0:1", id="none works"),
        pytest.param(
            [rdma(0, port(1, "INIT"), port(2, "DOWN"))],
            "=mlx5_0",
            "mlx5_0:1,mlx5_0:2",
            id="none of two",
        ),
    ],
)
def test_ports_that_carry_no_traffic_are_left_out(
    devices: list[RdmaDevice], for_nccl: str, for_ucx: str
) -> None:
    assert (nccl(devices), ucx(devices)) == (for_nccl, for_ucx)
