"""Values of a configuration of `sriov`, and the error for each wrong one."""

from typing import Any

import pytest

from tests.unit.sriov.configuration import GUIDS, read, refusal


@pytest.mark.parametrize(
    ("config", "vlan"),
    [
        pytest.param({"vlan": 100}, (100, 0, "802.1q"), id="SC4"),
        pytest.param({"vlan": 100, "vlanProto": "802.1Q"}, (100, 0, "802.1q"), id="SC10"),
        pytest.param({"vlan": 100, "vlanProto": "802.1ad"}, (100, 0, "802.1ad"), id="SC11"),
        pytest.param({"vlan": 0, "vlanQoS": 0, "vlanProto": "802.1Q"}, (0, 0, "802.1q"), id="SC14"),
        pytest.param({"vlan": 4094, "vlanQoS": 7}, (4094, 7, "802.1q"), id="highest"),
        pytest.param({"vlan": 0}, (0, 0, "802.1q"), id="0-is-not-unset"),
        pytest.param({"vlan": None}, None, id="null-is-unset"),
    ],
)
def test_vlan(config: dict[str, Any], vlan: tuple[int, int, str] | None) -> None:
    keys = ("vlan", "vlanQoS", "vlanProto")
    assert read(**config).vf == (dict(zip(keys, vlan, strict=True)) if vlan else {})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param({"vlan": 5000}, '"vlan": 5000 is out of range: use 1 to 4094', id="SC5"),
        pytest.param({"vlan": 0, "vlanQoS": 1}, '"vlanQoS": 1 needs a "vlan" of 1', id="SC6"),
        pytest.param(
            {"vlan": 0, "vlanProto": "802.1ad"}, '"vlanProto": "802.1ad" needs a "vlan"', id="SC7"
        ),
        pytest.param(
            {"vlan": 100, "vlanQoS": 10}, '"vlanQoS": 10 is out of range: use 0 to 7', id="SC8"
        ),
        pytest.param(
            {"vlan": 100, "vlanProto": "802"},
            '"vlanProto": "802" is not "802.1q" or "802.1ad"',
            id="SC9",
        ),
        pytest.param({"vlanQoS": 1}, '"vlanQoS" needs "vlan"', id="SC12"),
        pytest.param({"vlanQoS": 0}, '"vlanQoS" needs "vlan"', id="SC12-even-0"),
        pytest.param({"vlanProto": "802.1ad"}, '"vlanProto" needs "vlan"', id="SC13"),
        pytest.param({"spoofchk": "banana"}, '"spoofchk": "banana" is not "on" or "off"', id="S9"),
        pytest.param({"trust": "yes"}, '"trust": "yes" is not "on" or "off"', id="S9-trust"),
        ({"vlan": -1}, '"vlan": -1 is out of range'),
        ({"vlan": 100, "vlanQoS": -1}, '"vlanQoS": -1 is out of range'),
        ({"link_state": "up"}, '"link_state": "up" is not "auto", "enable" or "disable"'),
        ({"min_tx_rate": -1}, '"min_tx_rate": -1 is out of range: use 1 to'),
        ({"max_tx_rate": 2**32}, '"max_tx_rate": 4294967296 is out of range'),
        (
            {"min_tx_rate": 200, "max_tx_rate": 100},
            '"min_tx_rate" (200) exceeds "max_tx_rate"',
        ),
        ({"mac": "e4:11:22:33:44"}, '"mac": "e4:11:22:33:44" is not a MAC address: give 6 bytes'),
        ({"mac": "e4:11:22:33:44:55:66:77"}, '"mac": "e4:11:22:33:44:55:66:77" is not a MAC'),
        ({"MAC": "nonsense"}, '"MAC": "nonsense" is not a MAC address'),
        ({"mac": "01:00:5e:00:00:01"}, '"mac": 01:00:5e:00:00:01 is not a unicast address'),
        ({"mac": "00:00:00:00:00:00"}, "not all zeros"),
        ({"runtimeConfig": {"mac": "x"}}, '"runtimeConfig.mac": "x" is not a MAC address'),
        ({"args": {"cni": {"mac": "x"}}}, '"args.cni.mac": "x" is not a MAC address'),
        pytest.param(
            {"guid": "invalid GUID"}, '"guid": "invalid GUID" is not a GUID', id="B5-text"
        ),
        pytest.param({"guid": "02:00:00:00:00:00:01"}, "give 8 bytes", id="B5-7-bytes"),
        pytest.param({"guid": "00:" * 7 + "00"}, "is not a valid GUID", id="B5-all-0"),
        pytest.param({"guid": "ff:" * 7 + "FF"}, "is not a valid GUID", id="B5-all-F"),
        pytest.param({"guid": "02:00:00-00:00:00:00:01"}, "is not a GUID", id="B5-mixed"),
        (
            {"runtimeConfig": {"infinibandGUID": "x"}},
            '"runtimeConfig.infinibandGUID": "x" is not a GUID',
        ),
        ({"args": {"cni": {"guid": "x"}}}, '"args.cni.guid": "x" is not a GUID'),
        ({"mtu": 67}, '"mtu": 67 is out of range: use 68 to 65535'),
        ({"mtu": 65536}, '"mtu": 65536 is out of range'),
        ({"master": "averyveryverylongname"}, '"master": "averyveryverylongname" cannot be'),
        ({"master": ["eth0", ""]}, '"master": "" cannot be the name'),
        ({"master": "a/b"}, '"master": "a/b" cannot be the name'),
    ],
)
def test_wrong_value_is_named_with_its_key(config: dict[str, Any], text: str) -> None:
    refused = refusal(**config)
    assert refused.code == 7
    assert text in refused.message


@pytest.mark.parametrize(
    ("written", "meant"), [("on", True), ("off", False), (True, True), (False, False), ("", None)]
)
def test_switches(written: str | bool, meant: bool | None) -> None:
    wanted = read(spoofchk=written, trust=written)
    assert (wanted.vf.get("spoofchk"), wanted.vf.get("trust")) == (meant, meant)


@pytest.mark.parametrize("state", ["auto", "enable", "disable"])
def test_link_state(state: str) -> None:
    assert read(link_state=state, guid=GUIDS[1]).vf["link_state"] == state


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        ({"min_tx_rate": 100}, (100, 0)),
        ({"max_tx_rate": 100}, (0, 100)),
        ({"min_tx_rate": 100, "max_tx_rate": 100}, (100, 100)),
        ({"min_tx_rate": 100, "max_tx_rate": 0}, (100, 0)),
        ({"min_tx_rate": 0, "max_tx_rate": 0}, (0, 0)),
    ],
)
def test_rates(config: dict[str, Any], rates: tuple[int, int]) -> None:
    vf = read(**config).vf
    assert (vf["min_tx_rate"], vf["max_tx_rate"]) == rates


@pytest.mark.parametrize("key", ["mac", "MAC"])
@pytest.mark.parametrize("mac", ["E4:11:22:33:44:55", "e4-11-22-33-44-55"])
def test_mac_is_read_in_lower_case(key: str, mac: str) -> None:
    assert read(**{key: mac}).vf["mac"] == "e4:11:22:33:44:55"
