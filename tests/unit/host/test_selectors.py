"""Selectors: the rows of the SR-IOV network device plugin's and the Mellanox plugin's own tests."""

import pytest

from base.documents import DocumentError
from host.sysfs import selectors
from host.sysfs.discovery import HCA
from host.sysfs.selectors import Selector, match, parse, ranges, why_not
from tests.unit.deviceplugin.cards import card, port, rdma, rxe, sf, vf

ENS0 = card("0000:3b:00.0", netdevs=("ens0",), link_types=("ether",))
ENS1 = card("0000:5e:00.0", netdevs=("ens2f0",), num_vfs=8)
ENS2 = card("0000:5e:00.1", netdevs=("ens2f1",), num_vfs=8)
SF = sf(ENS0, 88)


def takes(hca: HCA, **keys: object) -> bool:
    given = {key: value if value is True else [value] for key, value in keys.items()}
    return match([parse(given, "f")], hca) is not None


@pytest.mark.parametrize(
    ("changed", "taken", "left"),
    [
        ({"vendor": "8086"}, {"vendors": "8086"}, {"vendors": "15b3"}),
        ({"vendor": "8086"}, {"vendors": "0x8086"}, {"vendors": "8087"}),
        ({"device": "154c"}, {"devices": "154C"}, {"devices": "1017"}),
        ({"driver": "vfio-pci"}, {"drivers": "vfio-pci"}, {"drivers": "mlx5_core"}),
        ({}, {"pciAddresses": "3B:00.0"}, {"pciAddresses": "0001:3b:00.0"}),
        ({"acpi_index": "101"}, {"acpiIndexes": "101"}, {"acpiIndexes": "1"}),
        ({"netdevs": ("a", "b")}, {"ifNames": "b"}, {"ifNames": "c"}),
        ({"link_types": ("ether",)}, {"linkTypes": "ether"}, {"linkTypes": "infiniband"}),
        ({"aux_type": "sf"}, {"auxTypes": "sf"}, {"devices": "ffff"}),
        ({"rdma_names": ("mlx5_7",)}, {"rdmaDevices": "mlx5_7"}, {"rdmaDevices": "mlx5_0"}),
        ({"rdma_names": ("mlx5_7",)}, {"isRdma": True}, {"isRdma": True, "vendors": "8086"}),
    ],
)
def test_every_key_takes_what_it_names_and_nothing_else(
    changed: dict[str, object], taken: dict[str, object], left: dict[str, object]
) -> None:
    hca = card("0000:3b:00.0", **changed)
    assert takes(hca, **taken)
    assert not takes(hca, **left)


@pytest.mark.parametrize(
    ("pf", "index", "taken"),
    [
        *((ENS0, index, True) for index in range(3)),
        *((ENS1, index, index == 1) for index in range(8)),
        *((ENS2, index, index in (0, 3, 4, 5, 7)) for index in range(8)),
    ],
)
def test_pf_names_and_root_devices_take_ranges_of_vfs(pf: HCA, index: int, taken: bool) -> None:
    """SR-IOV plugin, deviceSelectors_test.go: ens2f1's VFs 1, 2, 6 are not selected."""
    by_name = Selector(pfNames=("ens0", "ens2f0#1", "ens2f1#0,3-5,7"))
    by_address = Selector(rootDevices=("0000:3b:00.0", "0000:5e:00.0#1", "0000:5e:00.1#0,3-5,7"))
    for selector in (by_name, by_address):
        assert (match([selector], vf(pf, index)) is not None) is taken


def test_a_pf_name_takes_the_pf_itself_but_not_with_a_range() -> None:
    for name in ("ens0", "3b:00.0"):
        key = "pfNames" if name == "ens0" else "rootDevices"
        assert takes(ENS0, **{key: name})
        assert takes(SF, **{key: name})
        assert not takes(ENS0, **{key: f"{name}#0-7"})
        assert not takes(ENS1, **{key: name})


@pytest.mark.parametrize(
    ("text", "name", "indexes"),
    [
        ("ens0", "ens0", None),
        ("ens0#0", "ens0", {0}),
        ("ens0#0,2-4,9", "ens0", {0, 2, 3, 4, 9}),
        ("ens0#65535", "ens0", {65535}),
    ],
)
def test_a_range_is_read(text: str, name: str, indexes: set[int] | None) -> None:
    assert ranges(text) == (name, indexes)


@pytest.mark.parametrize(
    "text", ["#1", "a#", "a#x", "a#3-1", "a#-1", "a#1-", "a#1,,2", "a#1-2-3", "a#1#2", "a#65536"]
)
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match=r"^f\.pfNames\[0\]: "):
        parse({"pfNames": [text]}, "f")


@pytest.mark.parametrize(
    ("pkeys", "layer", "wanted", "taken"),
    [
        ((0x0001,), "InfiniBand", "0x1", True),
        ((0x0002, 0x0003), "InfiniBand", "0x0002", True),
        ((0x0002, 0x0003), "InfiniBand", "0x3", False),  # not the first
        ((0x0003,), "InfiniBand", "0x1", False),
        ((0x8001,), "InfiniBand", "0x8001", True),
        ((0x8001,), "InfiniBand", "0x0001", False),  # full members are not limited ones
        ((0x8001,), "Ethernet", "0x8001", False),
    ],
)
def test_the_first_pkey_of_an_infiniband_port_counts(
    pkeys: tuple[int, ...], layer: str, wanted: str, taken: bool
) -> None:
    """SR-IOV plugin: 0x1 and 0x2 match, 0x3 does not."""
    hca = card("0000:3b:00.0", rdma("mlx5_0", port(layer, pkeys=pkeys)))
    assert takes(hca, pKeys=wanted) is taken


@pytest.mark.parametrize(("layer", "kind"), [("Ethernet", "ether"), ("InfiniBand", "infiniband")])
def test_without_a_netdev_the_ports_tell_the_link_type(layer: str, kind: str) -> None:
    hca = card("0000:3b:00.0", rdma("mlx5_0", port(layer)))
    assert takes(hca, linkTypes=kind)
    other = {"ether": "infiniband", "infiniband": "ether"}[kind]
    assert not takes(hca, linkTypes=other)
    netdev = card("0000:3b:00.0", rdma("mlx5_0", port(layer)), link_types=(other,))
    assert takes(netdev, linkTypes=other)


def test_keys_are_and_and_values_are_or() -> None:
    """Mellanox plugin, resources_manager_test.go "Filter": exactly the first two of five."""
    nics = [
        card("0000:02:00.0", vendor="15b3", device="1017", netdevs=("enp2s0f0",)),
        card("0000:02:00.1", vendor="8080", device="2031", driver="igb", netdevs=("enp2s0f1",)),
        card("0000:03:00.0", vendor="15b3", device="1017", netdevs=("enp3s0f0",)),
        card("0000:03:00.1", vendor="8086", device="1017", netdevs=("enp3s0f1",)),
        card("0000:04:00.0", vendor="15b3", device="1017", netdevs=("enp4s0f0",)),
    ]
    kinds = ("ether", "ether", "ether", "ether", "infiniband")
    found = [
        card(nic.id, **{**_shape(nic), "link_types": (kind,)})
        for nic, kind in zip(nics, kinds, strict=True)
    ]
    selector = parse(
        {
            "vendors": ["15b3", "8080"],
            "devices": ["1017", "2031"],
            "drivers": ["mlx5_core", "igb"],
            "ifNames": ["enp2s0f0", "enp2s0f1", "enp4s0f0"],
            "linkTypes": ["ether"],
        },
        "f",
    )
    assert [hca.id for hca in found if match([selector], hca)] == ["0000:02:00.0", "0000:02:00.1"]


def _shape(nic: HCA) -> dict[str, object]:
    keys = ("vendor", "device", "driver", "netdevs")
    return {key: getattr(nic, key) for key in keys}


def test_the_first_selector_that_matches_is_told() -> None:
    first, second = Selector(vendors=("8086",)), Selector(isRdma=False)
    assert match([first, second], ENS0) is second
    assert match([], ENS0) == Selector()
    assert match([first], ENS0) is None


@pytest.mark.parametrize(
    ("selector", "hca", "text"),
    [
        (
            Selector(drivers=("mlx5_core",)),
            card("a", driver="igb"),
            "driver is igb, not one of mlx5_core",
        ),
        (Selector(drivers=("a", "b")), card("a", driver=""), "driver is unknown, not one of a, b"),
        (Selector(pfNames=("ens0#1",)), vf(ENS0, 2), "PF is ens0#2, not one of ens0#1"),
        (
            Selector(pKeys=("0x8001",)),
            card("a", rdma("m0")),
            "first P_Key is 0xffff, not one of 0x8001",
        ),
        (Selector(isRdma=True), card("a"), "it has no RDMA device"),
        (Selector(), rxe("rxe0", "eth0"), None),
    ],
)
def test_why_an_hca_is_not_selected_is_told(selector: Selector, hca: HCA, text: str | None) -> None:
    assert why_not([selector], hca) == text


def test_of_several_selectors_each_says_why() -> None:
    several = [Selector(vendors=("8086",)), Selector(devices=("1017",))]
    assert why_not(several, ENS0) == (
        "selector 0: vendor is 15b3, not one of 8086; selector 1: device is 101b, not one of 1017"
    )


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"pfName": ["a"]}, 'f.pfName: unknown key: did you mean "pfNames"?'),
        ({"deviceIDs": ["a"]}, 'f.deviceIDs: unknown key: did you mean "devices"?'),
        ({"vendors": "15b3"}, "f.vendors: '15b3': expected a list, got str"),
        (
            {"devices": ["101b", 1017]},
            "f.devices[1]: 1017: expected str, got int: put it in quotes",
        ),
        ({"pciAddresses": [300.0]}, "f.pciAddresses[0]: 300.0: expected str, got float: put it in"),
        ({"vendors": ["mellanox"]}, "f.vendors[0]: 'mellanox': write four hexadecimal digits"),
        ({"pKeys": ["8001"]}, "f.pKeys[0]: '8001': write a P_Key as sysfs does"),
        ({"pKeys": ["0x8000"]}, "f.pKeys[0]: '0x8000': write a P_Key"),
        ({"pciAddresses": ["eth0"]}, "f.pciAddresses[0]: 'eth0': write an address such as"),
        ({"rootDevices": ["eth0#1"]}, "f.rootDevices[0]: 'eth0#1': write an address such as"),
        ({"linkTypes": ["ib"]}, "f.linkTypes[0]: 'ib': expected one of ether, infiniband"),
        (
            {"auxTypes": ["eth"]},
            "f.auxTypes[0]: 'eth': sf is the only supported auxiliary type",
        ),
        ({"pfNames": ["ens.*"]}, "f.pfNames[0]: 'ens.*': is not an interface name (patterns"),
        ({"ifNames": [""]}, "f.ifNames[0]: '': is empty, or begins or ends with a blank"),
        ({"isRdma": 1}, "f.isRdma: 1: expected bool, got int"),
        ([], "f: expected keys with values, got []"),
    ],
)
def test_a_selector_that_is_wrong_is_refused(given: object, error: str) -> None:
    with pytest.raises(DocumentError) as raised:
        parse(given, "f")
    assert str(raised.value).startswith(error)


def test_values_are_brought_to_the_form_that_sysfs_has() -> None:
    assert parse(
        {"vendors": ["0x15B3"], "pciAddresses": ["3B:00.1"], "rootDevices": ["3B:00.0#1"]}, "f"
    ) == Selector(
        vendors=("15b3",), pciAddresses=("0000:3b:00.1",), rootDevices=("0000:3b:00.0#1",)
    )


def test_names_of_the_very_hca_are_told_from_kinds() -> None:
    assert selectors.names(Selector(ifNames=("ib0",)))
    assert not selectors.names(Selector(pfNames=("ib0",), vendors=("15b3",)))
