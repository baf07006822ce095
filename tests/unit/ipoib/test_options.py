"""The configuration of `ipoib`: its meaning, and the error text of each mistake."""

import json
from typing import Any

import pytest

from cni.ipoib import options
from cni.spec.config import decode, decode_for_removal
from cni.spec.errors import CNIError
from cni.spec.request import Request


def _read(cni_args: str = "", **config: Any) -> options.IpoibOptions:  # noqa: ANN401
    document = {"cniVersion": "1.0.0", "name": "n", "type": "ipoib", "master": "ib0"} | config
    network = decode(json.dumps(document).encode())
    return options.read(Request(command="ADD", args=cni_args, config=network, network="n"))


def test_defaults_leave_the_choice_to_the_parent() -> None:
    read = _read()
    assert (read.masters, read.pkey, read.mode, read.mtu) == (("ib0",), None, None, None)
    assert (read.umcast, read.proxy_arp, read.carrier_wait, read.ipam_type) == (
        False,
        False,
        5.0,
        "",
    )


@pytest.mark.parametrize(
    ("given", "pkey"),
    [
        ("0x8001", 0x8001),
        ("0x1", 0x8001),
        ("0X7FFF", 0xFFFF),
        (32769, 0x8001),
        ("5", 0x8005),
        (8001, 0x9F41),
    ],
)
def test_pkey_is_a_full_members_however_it_is_written(given: int | str, pkey: int) -> None:
    assert _read(pkey=given).pkey == pkey


@pytest.mark.parametrize(
    ("given", "seconds"), [(True, 5.0), (False, 0.0), (0, 0.0), (2.5, 2.5), (60, 60.0)]
)
def test_carrier_wait(given: bool | float, seconds: float) -> None:
    assert _read(wait_carrier=given).carrier_wait == seconds


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"master": ""}, '"master" is missing'),
        ({"master": []}, '"master" is missing'),
        ({"master": ["ib0", ""]}, '"master" is missing'),
        ({"master": ["ib0", "auto"]}, '"master": "auto" must be the only entry'),
        ({"master": "averyveryverylongname"}, "cannot be the name of an interface"),
        ({"master": 5}, '"master": Expected'),
        ({"pkey": "0x18001"}, '"pkey": "0x18001" is not a P_Key'),
        ({"pkey": "8001"}, 'write "0x8001" if the digits are hexadecimal, "0x1f41" if'),
        ({"pkey": "ten"}, '"pkey": "ten" is not a P_Key'),
        ({"pkey": 0}, '"pkey": 0 is out of range'),
        ({"pkey": 65536}, '"pkey": 65536 is out of range'),
        ({"pkey": "0x8000"}, "out of range"),
        ({"mode": "Datagram"}, '"mode": "Datagram" is not "datagram" or "connected"'),
        ({"mode": "vepa"}, '"vepa" is not "datagram" or "connected"'),
        ({"mtu": "2044"}, '"mtu": Expected int | null, got str'),
        ({"mtu": -1}, '"mtu": -1 is out of range'),
        ({"mtu": 65521}, '"mtu": 65521 is out of range'),
        ({"proxy_arp": 1}, '"proxy_arp": Expected bool'),
        ({"wait_carrier": -1}, '"wait_carrier": -1 is out of range'),
        ({"wait_carrier": "5"}, '"wait_carrier": Expected'),
        ({"ipam": []}, '"ipam": Expected'),
        ({"ipam": {"type": 5}}, '"ipam.type": Expected str'),
        ({"ipam": {"type": "dhcp"}}, "dhcp plugin cannot serve IPoIB"),
        ({"dns": {"nameservers": "1.1.1.1"}}, '"dns.nameservers": Expected array'),
        ({"proxyArp": True}, 'unknown key "proxyArp": did you mean "proxy_arp"?'),
        ({"pkeys": 1}, 'unknown key "pkeys": did you mean "pkey"?'),
        ({"wait-carrier": 1}, 'did you mean "wait_carrier"?'),
        ({"match_device": "no"}, '"match_device": Expected bool'),
        ({"matchDevice": False}, 'did you mean "match_device"?'),
        (
            {"deviceID": "0000:3b:00.0-3", "runtimeConfig": {"deviceID": "0000:3b:00.0"}},
            "write one device into all these keys",
        ),
        ({"mac": "02:00:00:00:00:01"}, '"mac": the hardware address of an IPoIB interface'),
        ({"runtimeConfig": {"infinibandGUID": "02:00:00:00:00:00:00:01"}}, "infinibandGUID"),
        ({"args": {"cni": {"guid": "02:00:00:00:00:00:00:01"}}}, '"args.cni.guid"'),
    ],
)
def test_mistake_is_named_with_its_key(config: dict[str, Any], text: str) -> None:
    with pytest.raises(CNIError) as caught:
        _read(**config)
    assert caught.value.code == 7
    assert text in caught.value.message


@pytest.mark.parametrize("master", ["auto", ["auto"]])
def test_auto_leaves_the_choice_to_the_pods_hca(master: str | list[str]) -> None:
    read = _read(master=master)
    assert (read.masters, read.device_id, read.match_device) == ((), "", True)


@pytest.mark.parametrize(
    "config",
    [
        {"deviceID": "0000:3b:00.0-3"},
        {"pciBusID": "0000:3b:00.0-3", "deviceID": ""},
        {"runtimeConfig": {"deviceID": "0000:3b:00.0-3"}},
        {"deviceID": "0000:3b:00.0-3", "runtimeConfig": {"deviceID": "0000:3b:00.0-3"}},
    ],
)
def test_device_id_is_the_kubelets_wherever_it_stands(config: dict[str, Any]) -> None:
    assert _read(**config).device_id == "0000:3b:00.0-3"


def test_zero_mtu_and_empty_mode_mean_the_parents() -> None:
    assert (_read(mtu=0).mtu, _read(mode="").mode) == (None, None)


def test_unknown_keys_that_resemble_none_pass() -> None:
    passing: dict[str, Any] = {"vendor": {"deep": 1}, "cni.dev/x": 1}
    assert _read(**passing) == _read()


def test_mac_in_cni_args_is_refused() -> None:
    with pytest.raises(CNIError, match="CNI_ARGS MAC") as caught:
        _read(cni_args="IgnoreUnknown=1;MAC=02:00:00:00:00:01")
    assert caught.value.code == 4


def test_pod_is_taken_from_cni_args() -> None:
    pod = _read(cni_args="IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=c").pod
    assert (pod.namespace, pod.name, pod.uid) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (b'{"ipam":{"type":"x"}}', "x"),
        (b'{"ipam":null}', ""),
        (b'{"ipam":5}', ""),
        (b'{"mtu":"broken","ipam":{"type":"x"}}', "x"),
    ],
)
def test_delete_learns_the_ipam_plugin_from_any_configuration(config: bytes, named: str) -> None:
    assert decode_for_removal(config).ipam.type == named
