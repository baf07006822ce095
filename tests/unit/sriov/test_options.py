"""The configuration of `sriov`: what it means, and what each mistake is told."""

import json
from typing import Any

import pytest

from cni.spec.arguments import Pod
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.spec.result import DNS
from cni.sriov import options
from cni.sriov.options import Vlan

BDF = "0000:af:06.1"
MACS = [f"02:00:00:00:00:0{n}" for n in range(5)]
GUIDS = [f"02:00:00:00:00:00:00:0{n}" for n in range(4)]
CONFIGURED = {"mellanox.infiniband.app": "configured"}


def _request(config: bytes, cni_args: str = "") -> Request:
    return Request(command="ADD", args=cni_args, config=config, network="n")


def _read(cni_args: str = "", **config: Any) -> options.Options:  # noqa: ANN401
    document = {"cniVersion": "1.0.0", "name": "n", "type": "sriov", "deviceID": BDF} | config
    return options.read(_request(json.dumps(document).encode(), cni_args))


def _refusal(cni_args: str = "", **config: Any) -> CNIError:  # noqa: ANN401
    with pytest.raises(CNIError) as caught:
        _read(cni_args, **config)
    return caught.value


def test_nothing_given_leaves_everything_untouched() -> None:
    assert _read() == options.Options(
        device=BDF,
        device_id="",
        masters=(),
        pf_only=False,
        match_device=True,
        vlan=None,
        mac="",
        spoofchk=None,
        trust=None,
        link_state="",
        min_tx_rate=None,
        max_tx_rate=None,
        guid="",
        pkey=None,
        rdma_isolation=False,
        vfio_pci_mode=None,
        mtu=None,
        allmulti=None,
        promisc=None,
        ipam_type="",
        dns=DNS(),
        pod=Pod(),
    )


@pytest.mark.parametrize("known", ["0", "rxe_v0", "rxe_v0-3"])
def test_device_id_that_is_no_address_is_left_to_the_match(known: str) -> None:
    pod = "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b"
    read = _read(pod, deviceID=known, pciBusID=known, runtimeConfig={"deviceID": known}, master="e")
    assert (read.device, read.device_id, read.masters) == ("", known, ())
    refusal = _refusal(pod, deviceID=known, pciBusID=BDF)
    assert (refusal.code, refusal.message.startswith(f'"deviceID": "{known}" is no')) == (7, True)
    assert options.device_of(_request(json.dumps({"deviceID": known}).encode())) == ""


def test_match_is_made_unless_the_configuration_says_no() -> None:
    assert _read(match_device=True).match_device
    assert not _read(match_device=False).match_device
    assert '"match_device": Expected' in _refusal(match_device="no").message


def test_named_pod_needs_no_device() -> None:
    pod = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME=worker-0"
    read = _read(pod, deviceID=None)
    assert (read.device, read.masters, read.pod.name) == ("", (), "worker-0")


def test_null_is_as_good_as_not_given() -> None:
    nulls: dict[str, Any] = dict.fromkeys(options.KNOWN - {"deviceID"} | {"args", "runtimeConfig"})
    assert _read(**nulls) == _read()
    mac = {"mac": None}
    assert _read(runtimeConfig=mac, args={"cni": mac}, ipam={"type": None}) == _read()


def test_empty_texts_mean_not_given() -> None:
    keys = ("pciBusID", "master", "mac", "MAC", "spoofchk", "trust", "link_state", "guid", "pkey")
    assert _read(**dict.fromkeys(keys, ""), ipam={}) == _read()


@pytest.mark.parametrize(
    ("config", "vlan"),
    [
        pytest.param({"vlan": 100}, Vlan(100, 0, "802.1q"), id="SC4"),
        pytest.param({"vlan": 100, "vlanProto": "802.1Q"}, Vlan(100, 0, "802.1q"), id="SC10"),
        pytest.param({"vlan": 100, "vlanProto": "802.1ad"}, Vlan(100, 0, "802.1ad"), id="SC11"),
        pytest.param(
            {"vlan": 0, "vlanQoS": 0, "vlanProto": "802.1Q"}, Vlan(0, 0, "802.1q"), id="SC14"
        ),
        pytest.param({"vlan": 4094, "vlanQoS": 7}, Vlan(4094, 7, "802.1q"), id="highest"),
        pytest.param({"vlan": 0}, Vlan(0, 0, "802.1q"), id="0-is-not-unset"),
        pytest.param({"vlan": None}, None, id="null-is-unset"),
    ],
)
def test_vlan(config: dict[str, Any], vlan: Vlan | None) -> None:
    assert _read(**config).vlan == vlan


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param({"vlan": 5000}, '"vlan": 5000 is out of range: 1 to 4094', id="SC5"),
        pytest.param({"vlan": 0, "vlanQoS": 1}, '"vlanQoS": 1 needs a "vlan" of 1', id="SC6"),
        pytest.param(
            {"vlan": 0, "vlanProto": "802.1ad"}, '"vlanProto": "802.1ad" needs a "vlan"', id="SC7"
        ),
        pytest.param(
            {"vlan": 100, "vlanQoS": 10}, '"vlanQoS": 10 is out of range: 0 to 7', id="SC8"
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
        ({"vlan": "100"}, '"vlan": Expected int | null, got str'),
        ({"vlan": True}, '"vlan": Expected int | null, got bool'),
        ({"vlan": 100, "vlanQoS": -1}, '"vlanQoS": -1 is out of range'),
        ({"trust": 1}, '"trust": Expected'),
        ({"link_state": "up"}, '"link_state": "up" is not "auto", "enable" or "disable"'),
        ({"min_tx_rate": -1}, '"min_tx_rate": -1 is out of range: Mbit/s'),
        ({"max_tx_rate": 2**32}, '"max_tx_rate": 4294967296 is out of range'),
        ({"min_tx_rate": 200, "max_tx_rate": 100}, '"min_tx_rate": 200 is more than'),
        ({"mac": "e4:11:22:33:44"}, '"mac": "e4:11:22:33:44" is no MAC address: give 6 bytes'),
        ({"mac": "e4:11:22:33:44:55:66:77"}, '"mac": "e4:11:22:33:44:55:66:77" is no MAC'),
        ({"MAC": "nonsense"}, '"MAC": "nonsense" is no MAC address'),
        ({"mac": "01:00:5e:00:00:01"}, '"mac": 01:00:5e:00:00:01 is no interface\'s own'),
        ({"mac": "00:00:00:00:00:00"}, "not all zeros"),
        ({"mac": MACS[1], "MAC": MACS[2]}, f'"mac" is {MACS[1]}, but "MAC" is {MACS[2]}'),
        ({"runtimeConfig": {"mac": "x"}}, '"runtimeConfig.mac": "x" is no MAC address'),
        ({"runtimeConfig": {"mac": 5}}, '"runtimeConfig.mac": Expected str'),
        ({"args": {"cni": {"mac": "x"}}}, '"args.cni.mac": "x" is no MAC address'),
        ({"args": {"cni": {"guid": 5}}}, '"args.cni.guid": Expected str, got int'),
        pytest.param({"guid": "invalid GUID"}, '"guid": "invalid GUID" is no GUID', id="B5-text"),
        pytest.param({"guid": "02:00:00:00:00:00:01"}, "give 8 bytes", id="B5-7-bytes"),
        pytest.param({"guid": "00:" * 7 + "00"}, "means that there is none", id="B5-all-0"),
        pytest.param({"guid": "ff:" * 7 + "FF"}, "means that there is none", id="B5-all-F"),
        pytest.param({"guid": "02:00:00-00:00:00:00:01"}, "is no GUID", id="B5-mixed"),
        (
            {"runtimeConfig": {"infinibandGUID": "x"}},
            '"runtimeConfig.infinibandGUID": "x" is no GUID',
        ),
        ({"args": {"cni": {"guid": "x"}}}, '"args.cni.guid": "x" is no GUID'),
        ({"pkey": "ten"}, '"pkey": "ten" is no P_Key'),
        ({"pkey": "0x8000"}, '"pkey": 0x8000 is out of range'),
        ({"pkey": 65536}, '"pkey": 65536 is out of range'),
        ({"mtu": 67}, '"mtu": 67 is out of range: 68 to 65535'),
        ({"mtu": 65536}, '"mtu": 65536 is out of range'),
        ({"allmulti": "on"}, '"allmulti": Expected bool'),
        ({"master": "averyveryverylongname"}, '"master": "averyveryverylongname" cannot be'),
        ({"master": ["eth0", ""]}, '"master": "" cannot be the name'),
        ({"master": "a/b"}, '"master": "a/b" cannot be the name'),
        ({"master": 5}, '"master": Expected'),
        ({"deviceID": "eth0"}, '"deviceID": "eth0" is no device: give a PCI address'),
        ({"runtimeConfig": {"deviceID": "eth0"}}, '"runtimeConfig.deviceID": "eth0" is no device'),
        ({"pciBusID": "af:06"}, '"pciBusID": "af:06" is no device'),
        (
            {"pciBusID": "0000:af:06.0"},
            f'"deviceID" is {BDF}, but "pciBusID" is 0000:af:06.0',
        ),
        (
            {"runtimeConfig": {"deviceID": "0000:af:06.0"}},
            f'"deviceID" is {BDF}, but "runtimeConfig.deviceID" is 0000:af:06.0',
        ),
        ({"ipam": {"type": 5}}, '"ipam.type": Expected str'),
        ({"dns": {"nameservers": "1.1.1.1"}}, '"dns.nameservers": Expected array'),
        ({"args": {"cni": []}}, '"args.cni": Expected object'),
    ],
)
def test_mistake_is_named_with_its_key(config: dict[str, Any], text: str) -> None:
    refusal = _refusal(**config)
    assert refusal.code == 7
    assert text in refusal.message


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"mac": MACS[1], "guid": GUIDS[1]}, '"mac": that is of Ethernet, but "guid" is of'),
        ({"vlan": 0, "pkey": "0x8001"}, '"vlan": that is of Ethernet, but "pkey" is of'),
        (
            {"vlan": 100, "runtimeConfig": {"infinibandGUID": GUIDS[1]}},
            '"vlan": that is of Ethernet, but "runtimeConfig.infinibandGUID"',
        ),
        ({"spoofchk": "off", "guid": GUIDS[1]}, '"spoofchk": that is of Ethernet'),
        ({"vfioPciMode": True, "mtu": 1500}, '"mtu": that is of an interface, and with "vfioPci'),
        ({"vfioPciMode": True, "allmulti": False}, '"allmulti": that is of an interface'),
        ({"vfioPciMode": True, "promisc": True}, '"promisc": that is of an interface'),
        ({"guid": GUIDS[1], "ipam": {"type": "dhcp"}}, 'InfiniBand, which "guid" asks for'),
        ({"pkey": 5, "ipam": {"type": "dhcp"}}, '"ipam.type": dhcp cannot serve InfiniBand'),
        ({"ibKubernetesEnabled": True, "guid": GUIDS[1]}, '"ibKubernetesEnabled": "args.cni" has'),
        (
            {"ibKubernetesEnabled": True, "args": {"cni": {"mellanox.infiniband.app": True}}},
            '"ibKubernetesEnabled": "args.cni" has no "mellanox.infiniband.app": "configured"',
        ),
        (
            {"ibKubernetesEnabled": True, "args": {"cni": CONFIGURED}},
            '"ibKubernetesEnabled": ib-kubernetes gave no GUID',
        ),
    ],
)
def test_what_does_not_go_together(config: dict[str, Any], text: str) -> None:
    refusal = _refusal(**config)
    assert refusal.code == 7
    assert text in refusal.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vlan", 0),
        ("vlan", 100),
        ("mac", MACS[1]),
        ("spoofchk", "off"),
        ("trust", False),
        ("link_state", "auto"),
        ("min_tx_rate", 0),
        ("max_tx_rate", 100),
        ("guid", GUIDS[1]),
    ],
)
def test_option_of_a_vf_does_not_go_with_the_pf(key: str, value: Any) -> None:  # noqa: ANN401
    refusal = _refusal(pfOnly=True, **{key: value})
    assert refusal.code == 7
    assert f'"{key}": a VF has that, but "pfOnly" asks for the PF itself' in refusal.message


@pytest.mark.parametrize("given", [{}, {"deviceID": "", "master": "enp175s0f1"}])
def test_pf_with_options_of_its_own(given: dict[str, Any]) -> None:
    read = _read(pfOnly=True, mtu=9000, allmulti=True, promisc=False, **given)
    assert (read.pf_only, read.mtu, read.allmulti, read.promisc) == (True, 9000, True, False)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(b'{"deviceID": "0000:af:06.1"', id="SC3"),
        pytest.param(b"[]", id="array"),
        pytest.param(b"null", id="null"),
    ],
)
def test_broken_configuration(config: bytes) -> None:
    with pytest.raises(CNIError, match="invalid configuration") as caught:
        options.read(_request(config))
    assert caught.value.code == 7


@pytest.mark.parametrize("pf_only", [False, True])
@pytest.mark.parametrize("empty", [{}, {"deviceID": ""}, {"master": ""}, {"master": []}])
def test_missing_device_tells_of_multus_annotation(empty: dict[str, Any], pf_only: bool) -> None:
    refusal = _refusal(**{"deviceID": None, "pfOnly": pf_only, **empty})
    assert refusal.code == 7
    assert '"deviceID" is missing: Multus passes it only if' in refusal.message
    assert "k8s.v1.cni.cncf.io/resourceName" in refusal.message
    assert 'set "master" to' in refusal.message


@pytest.mark.parametrize(
    ("config", "device", "masters"),
    [
        ({"deviceID": "0000:AF:06.1"}, BDF, ()),
        ({"deviceID": "af:06.1"}, BDF, ()),
        ({"deviceID": "0000:af:06.1-12"}, BDF, ()),
        ({"deviceID": "mlx5_core.sf.6-0"}, "mlx5_core.sf.6", ()),
        ({"deviceID": "0000:af:06.1-3", "pciBusID": BDF}, BDF, ()),
        ({"deviceID": "mlx5_core.sf.6"}, "mlx5_core.sf.6", ()),
        ({"deviceID": "10000:01:00.0"}, "10000:01:00.0", ()),
        ({"deviceID": None, "runtimeConfig": {"deviceID": BDF}}, BDF, ()),
        ({"deviceID": None, "pciBusID": BDF}, BDF, ()),
        (
            {"pciBusID": "AF:06.1", "runtimeConfig": {"deviceID": "0000:AF:06.1"}},
            BDF,
            (),
        ),
        ({"deviceID": None, "master": "enp175s0f1"}, "", ("enp175s0f1",)),
        ({"deviceID": None, "master": ["a", "b"]}, "", ("a", "b")),
        ({"master": "enp175s0f1"}, BDF, ()),
    ],
)
def test_device_or_masters(config: dict[str, Any], device: str, masters: tuple[str, ...]) -> None:
    read = _read(**config)
    assert (read.device, read.masters) == (device, masters)


@pytest.mark.parametrize(
    ("given", "meant"), [("on", True), ("off", False), (True, True), (False, False), ("", None)]
)
def test_switches(given: str | bool, meant: bool | None) -> None:
    read = _read(spoofchk=given, trust=given)
    assert (read.spoofchk, read.trust) == (meant, meant)


@pytest.mark.parametrize("state", ["auto", "enable", "disable"])
def test_link_state(state: str) -> None:
    assert _read(link_state=state, guid=GUIDS[1]).link_state == state


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        ({"min_tx_rate": 100}, (100, None)),
        ({"max_tx_rate": 100}, (None, 100)),
        ({"min_tx_rate": 100, "max_tx_rate": 100}, (100, 100)),
        ({"min_tx_rate": 100, "max_tx_rate": 0}, (100, 0)),
        ({"min_tx_rate": 0, "max_tx_rate": 0}, (0, 0)),
    ],
)
def test_rates(config: dict[str, Any], rates: tuple[int | None, int | None]) -> None:
    read = _read(**config)
    assert (read.min_tx_rate, read.max_tx_rate) == rates


@pytest.mark.parametrize(
    ("places", "mac"),
    [
        (("runtime", "CNI_ARGS", "args.cni", "mac"), MACS[1]),
        (("CNI_ARGS", "args.cni", "mac"), MACS[2]),
        (("args.cni", "mac"), MACS[3]),
        (("mac",), MACS[4]),
        ((), ""),
    ],
)
def test_precedence_of_the_mac(places: tuple[str, ...], mac: str) -> None:
    config: dict[str, Any] = {}
    if "runtime" in places:
        config["runtimeConfig"] = {"mac": MACS[1]}
    if "args.cni" in places:
        config["args"] = {"cni": {"mac": MACS[3]}}
    if "mac" in places:
        config["mac"] = MACS[4]
    assert _read(f"MAC={MACS[2]}" if "CNI_ARGS" in places else "", **config).mac == mac


@pytest.mark.parametrize(
    ("config", "guid"),
    [
        (
            {
                "runtimeConfig": {"infinibandGUID": GUIDS[1]},
                "args": {"cni": {"guid": GUIDS[2]}},
                "guid": GUIDS[3],
            },
            GUIDS[1],
        ),
        ({"args": {"cni": {"guid": GUIDS[2]}}, "guid": GUIDS[3]}, GUIDS[2]),
        ({"guid": GUIDS[3]}, GUIDS[3]),
        ({"guid": "02:00:00:00:00:AB:CD:EF"}, "02:00:00:00:00:ab:cd:ef"),
        ({}, ""),
    ],
)
def test_precedence_of_the_guid(config: dict[str, Any], guid: str) -> None:
    assert _read(**config).guid == guid


@pytest.mark.parametrize("key", ["mac", "MAC"])
@pytest.mark.parametrize("mac", ["E4:11:22:33:44:55", "e4-11-22-33-44-55"])
def test_mac_is_read_in_lower_case(key: str, mac: str) -> None:
    assert _read(**{key: mac}).mac == "e4:11:22:33:44:55"


def test_cni_args() -> None:  # S14
    assert _read("IgnoreUnknown=1;VLAN=5;MAC=E4:11:22:33:44:55").mac == "e4:11:22:33:44:55"
    refusal = _refusal("VLAN=5")
    assert (refusal.code, refusal.message) == (4, 'ARGS: unknown args ["VLAN=5"]')
    pod = _read("IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=c").pod
    assert (pod.namespace, pod.name, pod.uid) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("mac", "config", "text"),
    [
        ("x", {}, 'CNI_ARGS MAC: "x" is no MAC address'),
        (MACS[1], {"pfOnly": True}, 'CNI_ARGS MAC: a VF has that, but "pfOnly"'),
        (MACS[1], {"guid": GUIDS[1]}, 'CNI_ARGS MAC: that is of Ethernet, but "guid"'),
    ],
)
def test_mistake_in_cni_args(mac: str, config: dict[str, Any], text: str) -> None:
    refusal = _refusal(f"MAC={mac}", **config)
    assert refusal.code == 4
    assert text in refusal.message


@pytest.mark.parametrize(
    ("given", "pkey"), [("0x8001", 0x8001), ("0x1", 0x0001), (32769, 0x8001), ("0X7FFF", 0x7FFF)]
)
def test_pkey_stays_as_written(given: int | str, pkey: int) -> None:
    assert _read(pkey=given).pkey == pkey


def test_ib_kubernetes_with_everything_it_sets() -> None:
    read = _read(
        ibKubernetesEnabled=True,
        rdmaIsolation=True,
        args={"cni": {**CONFIGURED, "guid": GUIDS[1], "someone's": {"deep": [1]}, "n": 5}},
    )
    assert (read.rdma_isolation, read.guid) == (True, GUIDS[1])


def test_what_ipam_and_others_read_passes() -> None:
    read = _read(
        runtimeConfig={"ips": ["10.0.0.1/24"], "portMappings": []},
        args={"cni": {"ips": ["10.0.0.1"]}, "example.com": 5},
        ipam={"type": "podfabric-ipam", "ranges": []},
        dns={"nameservers": ["1.1.1.1"]},
        logLevel="debug",
        logFile="/var/log/x",
    )
    assert (read.ipam_type, read.dns.nameservers) == ("podfabric-ipam", ("1.1.1.1",))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max-tx-rate", "max_tx_rate"),
        ("minTxRate", "min_tx_rate"),
        ("linkState", "link_state"),
        ("vlanId", "vlan"),
        ("spoofCheck", "spoofchk"),
        ("trusted", "trust"),
        ("pkeys", "pkey"),
        ("rdma_isolation", "rdmaIsolation"),
        ("vfio-pci-mode", "vfioPciMode"),
        ("all_multi", "allmulti"),
        ("promiscMode", "promisc"),
    ],
)
def test_misspelt_key(key: str, meant: str) -> None:
    config: dict[str, Any] = {key: 1}
    refusal = _refusal(**config)
    assert refusal.code == 7
    assert f'unknown key "{key}": did you mean "{meant}"?' in refusal.message


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("vf", id="SC1"),
        "capabilities",
        "prevResult",
        "disableCheck",
        "resourceName",
        "dpdk",
        "l2enable",
        "if0",
        "mode",
        "hairpinMode",
        "isGateway",
        "linkInContainer",
        "hwaddr",
        "kernelpath",
        "sysctl",
        "txQLen",
        "vlanTrunk",
        "umcast",
        "proxy_arp",
        "wait_carrier",
        "tags",
        "example.com/mtus",
        "vendor",
    ],
)
def test_keys_of_others_pass(key: str) -> None:
    config: dict[str, Any] = {key: {"deep": 1}}
    assert _read(**config) == _read()


def test_status_does_not_ask_what_ib_kubernetes_gave_a_pod() -> None:
    config = json.dumps({"type": "sriov", "ibKubernetesEnabled": True}).encode()
    request = Request(command="STATUS", config=config, network="n")
    assert options.read(request, needs_device=False).device == ""


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({"VLAN": 100}, "vlan", Vlan(100, 0, "802.1q")),
        ({"spoofChk": "off"}, "spoofchk", False),
        ({"Trust": "on"}, "trust", True),
        ({"Mac": "02:00:00:00:00:01"}, "mac", "02:00:00:00:00:01"),
        ({"GUID": "02:00:00:00:00:00:00:01"}, "guid", "02:00:00:00:00:00:00:01"),
        ({"vlan": 5, "VLAN": 6}, "vlan", Vlan(5, 0, "802.1q")),
        ({"vlan": 5, "vlanProto": ""}, "vlan", Vlan(5, 0, "802.1q")),
        ({"mtu": 0}, "mtu", None),
        ({"uuid": "of another plugin"}, "guid", ""),
    ],
    ids=str,
)
def test_what_gos_decoder_takes_is_taken(config: dict[str, Any], field: str, value: object) -> None:
    assert getattr(_read(**config), field) == value
