"""The files of the Mellanox shared plugin and the SR-IOV plugin, read as they are."""

import json

import pytest

from deviceplugin.pools.formats import parse
from deviceplugin.pools.pool_config import ConfigError, DevicePluginConfig, PoolConfig
from host.sysfs.selectors import Selector


def mellanox(**changed: object) -> dict[str, object]:
    """One entry of a configList; None takes a key out."""
    whole: dict[str, object] = {
        "resourceName": "hca_shared_devices_a",
        "rdmaHcaMax": 1000,
        "selectors": {"vendors": ["15b3"], "deviceIDs": ["1017"]},
        **changed,
    }
    return {key: value for key, value in whole.items() if value is not None}


def read_mellanox(*entries: dict[str, object], **top: object) -> DevicePluginConfig:
    return parse(json.dumps({"configList": entries, **top}).encode(), "f")


def sriov(**changed: object) -> dict[str, object]:
    """One entry of a resourceList."""
    whole = {"resourceName": "sriov_net", "selectors": {"vendors": ["15b3"]}, **changed}
    return {key: value for key, value in whole.items() if value is not None}


def read_sriov(*entries: dict[str, object], **keys: str) -> tuple[PoolConfig, ...]:
    return parse(json.dumps({"resourceList": entries}).encode(), "f", **keys).pools  # type: ignore[arg-type]


def test_a_mellanox_file_is_read_as_it_is() -> None:
    """Its README's example: two pools, an interval."""
    second = mellanox(
        resourceName="hca_shared_devices_b",
        resourcePrefix="example.com",
        rdmaHcaMax=500,
        selectors={
            "vendors": ["15b3"],
            "deviceIDs": ["1018"],
            "drivers": ["mlx5_core"],
            "ifNames": ["ib1", "ib2"],
            "linkTypes": ["infiniband"],
        },
    )
    assert read_mellanox(mellanox(), second, periodicUpdateInterval=300) == DevicePluginConfig(
        pools=(
            PoolConfig(
                resource="rdma/hca_shared_devices_a",
                mode="all",
                amount=1000,
                selectors=(Selector(vendors=("15b3",), devices=("1017",)),),
                functions="pci",
                overlap=True,
            ),
            PoolConfig(
                resource="example.com/hca_shared_devices_b",
                mode="all",
                amount=500,
                selectors=(
                    Selector(
                        vendors=("15b3",),
                        devices=("1018",),
                        drivers=("mlx5_core",),
                        ifNames=("ib1", "ib2"),
                        linkTypes=("infiniband",),
                    ),
                ),
                functions="pci",
                overlap=True,
            ),
        ),
    )


@pytest.mark.parametrize(
    ("entry", "selector", "amount"),
    [
        (mellanox(selectors=None, devices=["ib0", "ib1"]), Selector(ifNames=("ib0", "ib1")), 1000),
        (mellanox(selectors={}, devices=["ib0"]), Selector(ifNames=("ib0",)), 1000),
        (mellanox(devices=[]), Selector(vendors=("15b3",), devices=("1017",)), 1000),
        (mellanox(rdmaHcaMax=0), Selector(vendors=("15b3",), devices=("1017",)), 0),
        (mellanox(rdmaHcaMax=None), Selector(vendors=("15b3",), devices=("1017",)), 0),
    ],
    ids=["devices only", "devices only, empty selectors", "selectors only", "max 0", "no max"],
)
def test_mellanox_validation_ok(entry: dict[str, object], selector: Selector, amount: int) -> None:
    (pool,) = read_mellanox(entry).pools
    assert (pool.selectors, pool.amount, pool.mode) == ((selector,), amount, "all")


@pytest.mark.parametrize(
    ("whole", "error"),
    [
        ({"configList": []}, "f: configList: no resources configuration found"),
        ({"configList": None}, "f: configList: expected a list of pools, got None"),
        (
            {"configList": [mellanox(resourceName="test_config$$")]},
            "f: configList[0].resourceName: 'test_config$$': contains invalid characters",
        ),
        (
            {"configList": [mellanox(resourceName="a-b")]},
            "f: configList[0].resourceName: 'a-b': contains invalid characters",
        ),
        (
            {"configList": [mellanox(resourceName=None)]},
            "f: configList[0].resourceName: is required",
        ),
        (
            {"configList": [mellanox(), mellanox()]},
            "f: rdma/hca_shared_devices_a: two pools have this resource",
        ),
        (
            {"configList": [mellanox(rdmaHcaMax=-100)]},
            "f: configList[0].rdmaHcaMax: -100: is below 0",
        ),
        (
            {"configList": [mellanox(rdmaHcaMax=100_000)]},
            "f: configList[0].rdmaHcaMax: 100000: is more than the kubelet accepts (52428)",
        ),
        (
            {"configList": [mellanox(devices=["ib0"])]},
            "f: configList[0]: both selectors and devices are set: remove devices",
        ),
        (
            {"configList": [mellanox(selectors=None)]},
            "f: configList[0].selectors: is missing or empty: write a key",
        ),
        (
            {"configList": [mellanox(selectors={"vendors": []})]},
            "f: configList[0].selectors: is missing or empty: write a key",
        ),
        (
            {"configList": [mellanox()], "periodicUpdateInterval": -10},
            "f: periodicUpdateInterval: -10: expected int >= 0",
        ),
        (
            {"configList": [mellanox(selectors={"devices": ["1017"]})]},
            'f: configList[0].selectors.devices: unknown key: did you mean "deviceIDs"?',
        ),
        (
            {"configList": [mellanox(rdmaHcaMaxx=3)]},
            'f: configList[0].rdmaHcaMaxx: unknown key: did you mean "rdmaHcaMax"?',
        ),
        (
            {"configList": [mellanox(devices=[3], selectors=None)]},
            "f: configList[0].devices[0]: 3: expected str, got int",
        ),
        (
            {"configList": [mellanox(resourcePrefix="Bad_Domain")]},
            "f: configList[0].resourceName: 'Bad_Domain/hca_shared_devices_a': \"Bad_Domain\" is",
        ),
        ({"configList": [mellanox(), 3]}, "f: configList[1]: expected keys with values, got 3"),
        ({"configList": [mellanox()], "configlist": []}, "f: configlist: appears twice"),
        (
            {"configList": [mellanox(ResourceName="a")]},
            "f: configList[0].ResourceName: appears twice, in upper and lower case",
        ),
    ],
)
def test_mellanox_validation_errors(whole: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(json.dumps(whole).encode(), "f")
    assert str(raised.value).startswith(error)


def test_a_name_may_be_there_again_with_another_prefix() -> None:
    found = read_mellanox(mellanox(), mellanox(resourcePrefix="example.com")).pools
    assert [pool.resource.partition("/")[0] for pool in found] == ["rdma", "example.com"]


def test_broken_json_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^f: line 1, column \d+: neither YAML nor JSON"):
        parse(b'{"configList": [', "f")


def test_keys_are_matched_as_go_does() -> None:
    entry = {
        "ResourceName": "a",
        "RDMAHCAMAX": 3,
        "selectors": {"Vendors": ["15b3"], "deviceIds": None},
        "resourcePrefix": None,
    }
    (pool,) = parse(json.dumps({"ConfigList": [entry]}).encode(), "f").pools
    assert (pool.resource, pool.amount) == ("rdma/a", 3)
    assert pool.selectors == (Selector(vendors=("15b3",)),)


def test_the_other_plugins_lists_stand_beside_our_parts_and_take_our_nodes() -> None:
    text = """
agent: {workers: 3}
configList:
  - {resourceName: a, rdmaHcaMax: 1, devices: [ib0], nodes: [umad]}
"""
    config = parse(text.encode(), "f")
    assert (config.pools[0].umad, config.pools[0].issm) == (True, False)


def test_an_sriov_file_is_read_as_it_is() -> None:
    found = read_sriov(
        sriov(
            resourceName="mlnx_sriov-rdma",
            resourcePrefix="nvidia.com",
            excludeTopology=True,
            selectors={
                "vendors": ["15b3"],
                "devices": ["1018"],
                "drivers": ["mlx5_core"],
                "pciAddresses": ["0000:03:02.0"],
                "acpiIndexes": ["101"],
                "pfNames": ["enp0s0f0#0,3-5"],
                "rootDevices": ["0000:86:00.0#1-2"],
                "linkTypes": ["infiniband"],
                "pKeys": ["0x1"],
                "isRdma": True,
                "needVhostNet": False,
            },
            additionalInfo={"*": {"token": "3e49019f"}, "0000:03:02.0": {"token": "b"}},
        ),
        sriov(
            resourceName="sf",
            deviceType="auxNetDevice",
            selectors=[
                {"auxTypes": ["sf"], "pfNames": ["p0#1"]},
                {"auxTypes": ["sf"], "isRdma": True},
            ],
        ),
    )
    assert found == (
        PoolConfig(
            resource="nvidia.com/mlnx_sriov-rdma",
            mode="exclusive",
            numa=False,
            functions="pci",
            used="left",
            additional_info={"*": {"token": "3e49019f"}, "0000:03:02.0": {"token": "b"}},
            selectors=(
                Selector(
                    vendors=("15b3",),
                    devices=("1018",),
                    drivers=("mlx5_core",),
                    pciAddresses=("0000:03:02.0",),
                    acpiIndexes=("101",),
                    pfNames=("enp0s0f0#0,3-5",),
                    rootDevices=("0000:86:00.0#1-2",),
                    linkTypes=("infiniband",),
                    pKeys=("0x0001",),
                    isRdma=True,
                ),
            ),
        ),
        PoolConfig(
            resource="intel.com/sf",
            mode="exclusive",
            functions="auxiliary",
            used="left",
            selectors=(
                Selector(auxTypes=("sf",), pfNames=("p0#1",)),
                Selector(auxTypes=("sf",), isRdma=True),
            ),
        ),
    )


def test_the_prefix_of_the_command_line_is_for_entries_without_one() -> None:
    found = read_sriov(sriov(), sriov(resourcePrefix="own.io"), prefix="nvidia.com")
    assert [pool.resource for pool in found] == ["nvidia.com/sriov_net", "own.io/sriov_net"]


def test_rdma_is_given_only_where_a_selector_asks() -> None:
    (without,) = read_sriov(sriov(selectors={}))
    assert (without.rdma, without.selectors) == (False, (Selector(),))
    (with_rdma,) = read_sriov(sriov(selectors=[{}, {"isRdma": True}]))
    assert with_rdma.rdma


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([], "f: resourceList: no resources configuration found"),
        (
            [sriov(resourceName="junk.net.0")],
            "f: resourceList[0].resourceName: 'junk.net.0': contains",
        ),
        ([sriov(), sriov()], "f: intel.com/sriov_net: two pools have this resource"),
        (
            [sriov(), sriov(resourceName="sriov-net")],
            "f: intel.com/sriov_net and intel.com/sriov-net: both would use",
        ),
        ([sriov(selectors=None)], "f: resourceList[0].selectors: is required"),
        ([sriov(selectors=[])], "f: resourceList[0].selectors: is empty"),
        ([sriov(deviceType="accelerator")], "f: resourceList[0].deviceType: 'accelerator': accel"),
        ([sriov(deviceType="disk")], "f: resourceList[0].deviceType: 'disk': expected one of"),
        (
            [sriov(selectors={"isRdma": True, "vdpaType": "vhost"})],
            "f: resourceList[0].selectors.vdpaType: is not supported: vDPA",
        ),
        (
            [sriov(selectors=[{"isRdma": True}, {"vdpaType": "vhost"}])],
            "f: resourceList[0].selectors[1].vdpaType: is not supported: vDPA",
        ),
        (
            [sriov(selectors={"NeedVhostNet": True})],
            "f: resourceList[0].selectors.NeedVhostNet: is not supported: pods do not get",
        ),
        (
            [sriov(selectors={"ddpProfiles": ["GTPv1-C/U IPv4/IPv6 payload"]})],
            "f: resourceList[0].selectors.ddpProfiles: is not supported: DDP",
        ),
        (
            [sriov(selectors=[{}, {"pfname": ["a"]}])],
            'f: resourceList[0].selectors[1].pfname: unknown key: did you mean "pfNames"?',
        ),
        (
            [sriov(selectors={"auxTypes": ["sf"]})],
            "f: resourceList[0].selectors.auxTypes: is for deviceType auxNetDevice",
        ),
        (
            [sriov(deviceType="auxNetDevice")],
            "f: resourceList[0].selectors.auxTypes: is required for auxNetDevice",
        ),
        (
            [sriov(deviceType="auxNetDevice", selectors={"auxTypes": ["eth"]})],
            "f: resourceList[0].selectors.auxTypes[0]: 'eth': sf is the only",
        ),
        (
            [sriov(deviceType="auxNetDevice", selectors={"auxTypes": ["sf"], "pKeys": ["0x1"]})],
            "f: resourceList[0].selectors.pKeys: is not for auxNetDevice",
        ),
        (
            [sriov(additionalInfo={"eth0": {"a": "b"}})],
            'f: resourceList[0].additionalInfo.eth0: is neither a PCI address nor "*"',
        ),
    ],
)
def test_sriov_config_errors(entries: list[dict[str, object]], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_sriov(*entries)
    assert str(raised.value).startswith(error)


def all_forms(*keys: str) -> bytes:
    """A file with pools in all three forms, with its keys in that order."""
    forms = {
        "pools": [{"name": "example.com/eth", "mode": "exclusive", "rdma": False}],
        "resourceList": [sriov()],
        "configList": [mellanox()],
    }
    return json.dumps({key: forms[key] for key in keys}).encode()


@pytest.mark.parametrize(
    "keys",
    [("pools", "resourceList", "configList"), ("configList", "pools", "resourceList")],
)
def test_one_file_may_have_pools_of_every_form(keys: tuple[str, ...]) -> None:
    """Their order is not that of the keys, which programs that write YAML sort."""
    expected = (
        PoolConfig(resource="example.com/eth", mode="exclusive", used="named", rdma=False),
        *read_sriov(sriov()),
        *read_mellanox(mellanox()).pools,
    )
    assert parse(all_forms(*keys), "f").pools == expected


def test_a_resource_may_be_there_once_in_all_forms_together() -> None:
    text = {"pools": [{"name": "intel.com/sriov_net"}], "resourceList": [sriov()]}
    with pytest.raises(
        ConfigError, match=r"^f: intel\.com/sriov_net: two pools have this resource"
    ):
        parse(json.dumps(text).encode(), "f")


def test_the_prefix_of_the_command_line_leaves_our_names_alone() -> None:
    found = parse(all_forms("pools", "resourceList", "configList"), "f", prefix="nvidia.com").pools
    assert [pool.resource for pool in found] == [
        "example.com/eth",
        "nvidia.com/sriov_net",
        "nvidia.com/hca_shared_devices_a",
    ]


def test_the_interval_of_a_mellanox_file_may_stand_beside_our_pools() -> None:
    text = {
        "pools": [{"name": "rdma/a"}],
        "configList": [mellanox()],
        "periodicUpdateInterval": 30,
    }
    assert len(parse(json.dumps(text).encode(), "f").pools) == 2
