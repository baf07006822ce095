"""The configuration of `sriov`: its options, and the error for each mistake."""

import json
from typing import Any

import pytest

from base.pod import Pod
from base.types import Bdf, DeviceId
from cni.spec.config import decode
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.spec.result import DNS
from cni.sriov import options
from tests.unit.sriov.configuration import BDF, GUIDS, MACS, read, refusal, request

CONFIGURED = {"mellanox.infiniband.app": "configured"}


def test_empty_configuration_changes_nothing() -> None:
    assert read() == options.SriovOptions(
        device=Bdf(BDF),
        device_key="deviceID",
        device_id=DeviceId(""),
        masters=(),
        pf_only=False,
        match_device=True,
        vf={},
        pkey=None,
        rdma_isolation=False,
        vfio_pci_mode=None,
        mtu=None,
        allmulti=None,
        promisc=None,
        accept_ra=False,
        ipam_type="",
        dns=DNS(),
        pod=Pod(),
    )


@pytest.mark.parametrize("device_id", ["0", "rxe_v0", "rxe_v0-3"])
def test_device_id_without_an_address_is_left_to_the_match(device_id: str) -> None:
    pod = "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b"
    wanted = read(
        pod,
        deviceID=device_id,
        pciBusID=device_id,
        runtimeConfig={"deviceID": device_id},
        master="e",
    )
    assert (wanted.device, wanted.device_id, wanted.masters) == ("", device_id, ())
    refused = refusal(pod, deviceID=device_id, pciBusID=BDF)
    assert (refused.code, refused.message.startswith(f'"deviceID": "{device_id}" is no')) == (
        7,
        True,
    )
    assert options.device_of(request(json.dumps({"deviceID": device_id}).encode())) == ""


def test_match_device_is_on_by_default() -> None:
    assert read(match_device=True).match_device
    assert not read(match_device=False).match_device
    assert '"match_device": Expected' in refusal(match_device="no").message


def test_named_pod_needs_no_device() -> None:
    pod = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME=worker-0"
    wanted = read(pod, deviceID=None)
    assert (wanted.device, wanted.masters, wanted.pod.name) == ("", (), "worker-0")


def test_null_means_not_set() -> None:
    nulls: dict[str, Any] = dict.fromkeys(options.KNOWN - {"deviceID"} | {"args", "runtimeConfig"})
    assert read(**nulls) == read()
    mac = {"mac": None}
    assert read(runtimeConfig=mac, args={"cni": mac}, ipam={"type": None}) == read()


def test_empty_texts_mean_not_set() -> None:
    keys = ("pciBusID", "master", "mac", "MAC", "spoofchk", "trust", "link_state", "guid", "pkey")
    assert read(**dict.fromkeys(keys, ""), ipam={}) == read()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"vlan": "100"}, '"vlan": Expected int | null, got str'),
        ({"vlan": True}, '"vlan": Expected int | null, got bool'),
        ({"trust": 1}, '"trust": Expected'),
        ({"mac": MACS[1], "MAC": MACS[2]}, f'"mac" is {MACS[1]}, but "MAC" is {MACS[2]}'),
        ({"runtimeConfig": {"mac": 5}}, '"runtimeConfig.mac": Expected str'),
        ({"args": {"cni": {"guid": 5}}}, '"args.cni.guid": Expected str, got int'),
        ({"pkey": "ten"}, '"pkey": "ten" is not a P_Key'),
        ({"pkey": "0x8000"}, '"pkey": 0x8000 is out of range'),
        ({"pkey": 65536}, '"pkey": 65536 is out of range'),
        ({"allmulti": "on"}, '"allmulti": Expected bool'),
        ({"master": 5}, '"master": Expected'),
        ({"deviceID": "eth0"}, '"deviceID": "eth0" is not a device: give a PCI address'),
        (
            {"runtimeConfig": {"deviceID": "eth0"}},
            '"runtimeConfig.deviceID": "eth0" is not a device',
        ),
        ({"pciBusID": "af:06"}, '"pciBusID": "af:06" is not a device'),
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
    refused = refusal(**config)
    assert refused.code == 7
    assert text in refused.message


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"mac": MACS[1], "guid": GUIDS[1]}, '"mac": this is an Ethernet option, but "guid" is an'),
        ({"vlan": 0, "pkey": "0x8001"}, '"vlan": this is an Ethernet option, but "pkey" is an'),
        (
            {"vlan": 100, "runtimeConfig": {"infinibandGUID": GUIDS[1]}},
            '"vlan": this is an Ethernet option, but "runtimeConfig.infinibandGUID"',
        ),
        ({"spoofchk": "off", "guid": GUIDS[1]}, '"spoofchk": this is an Ethernet option'),
        ({"vfioPciMode": True, "mtu": 1500}, '"mtu" needs an interface, but with "vfio'),
        ({"vfioPciMode": True, "allmulti": False}, '"allmulti" needs an interface'),
        ({"vfioPciMode": True, "promisc": True}, '"promisc" needs an interface'),
        ({"vfioPciMode": True, "accept_ra": True}, '"accept_ra" needs an interface'),
        ({"guid": GUIDS[1], "ipam": {"type": "dhcp"}}, 'InfiniBand, which "guid" asks for'),
        (
            {"pkey": 5, "ipam": {"type": "dhcp"}},
            '"ipam.type": the dhcp plugin cannot serve InfiniBand',
        ),
        ({"ibKubernetesEnabled": True, "guid": GUIDS[1]}, "ib-kubernetes has not set"),
        (
            {"ibKubernetesEnabled": True, "args": {"cni": {"mellanox.infiniband.app": True}}},
            'not set "mellanox.infiniband.app" in "args.cni" to "configured"',
        ),
        (
            {"ibKubernetesEnabled": True, "args": {"cni": CONFIGURED}},
            '"ibKubernetesEnabled": ib-kubernetes gave no GUID',
        ),
    ],
)
def test_conflicting_options(config: dict[str, Any], text: str) -> None:
    refused = refusal(**config)
    assert refused.code == 7
    assert text in refused.message


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
    refused = refusal(pfOnly=True, **{key: value})
    assert refused.code == 7
    assert f'"{key}": this is an option for VFs, but "pfOnly" asks for the PF' in refused.message


@pytest.mark.parametrize("config", [{}, {"deviceID": "", "master": "enp175s0f1"}])
def test_pf_with_options_of_its_own(config: dict[str, Any]) -> None:
    wanted = read(pfOnly=True, mtu=9000, allmulti=True, promisc=False, **config)
    assert (wanted.pf_only, wanted.mtu) == (True, 9000)
    assert (wanted.allmulti, wanted.promisc) == (True, False)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(b'{"deviceID": "0000:af:06.1"', id="SC3"),
        pytest.param(b"[]", id="array"),
    ],
)
def test_broken_configuration(config: bytes) -> None:
    with pytest.raises(CNIError, match="cannot be read as a JSON object") as caught:
        options.read(request(config))
    assert caught.value.code == 6


@pytest.mark.parametrize("pf_only", [False, True])
@pytest.mark.parametrize("empty", [{}, {"deviceID": ""}, {"master": ""}, {"master": []}])
def test_missing_device_tells_of_multus_annotation(empty: dict[str, Any], pf_only: bool) -> None:
    refused = refusal(**{"deviceID": None, "pfOnly": pf_only, **empty})
    assert refused.code == 7
    assert '"deviceID" is missing: Multus passes it only if' in refused.message
    assert "k8s.v1.cni.cncf.io/resourceName" in refused.message
    assert 'set "master" to' in refused.message


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
    wanted = read(**config)
    assert (wanted.device, wanted.masters) == (device, masters)


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
    assert read(f"MAC={MACS[2]}" if "CNI_ARGS" in places else "", **config).vf.get("mac", "") == mac


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
    assert read(**config).vf.get("guid", "") == guid


def test_cni_args() -> None:  # S14
    assert read("IgnoreUnknown=1;VLAN=5;MAC=E4:11:22:33:44:55").vf["mac"] == "e4:11:22:33:44:55"
    refused = refusal("VLAN=5")
    assert (refused.code, refused.message) == (4, 'ARGS: unknown args ["VLAN=5"]')
    pod = read("IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=c").pod
    assert (pod.namespace, pod.name, pod.uid) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("mac", "config", "text"),
    [
        ("x", {}, 'CNI_ARGS MAC: "x" is not a MAC address'),
        (MACS[1], {"pfOnly": True}, 'CNI_ARGS MAC: this is an option for VFs, but "pfOnly"'),
        (MACS[1], {"guid": GUIDS[1]}, 'CNI_ARGS MAC: this is an Ethernet option, but "guid"'),
    ],
)
def test_mistake_in_cni_args(mac: str, config: dict[str, Any], text: str) -> None:
    refused = refusal(f"MAC={mac}", **config)
    assert refused.code == 4
    assert text in refused.message


@pytest.mark.parametrize(
    ("written", "pkey"), [("0x8001", 0x8001), ("0x1", 0x0001), (32769, 0x8001), ("0X7FFF", 0x7FFF)]
)
def test_pkey_stays_as_written(written: int | str, pkey: int) -> None:
    assert read(pkey=written).pkey == pkey


def test_ib_kubernetes_with_everything_it_sets() -> None:
    wanted = read(
        ibKubernetesEnabled=True,
        rdmaIsolation=True,
        args={"cni": {**CONFIGURED, "guid": GUIDS[1], "someone's": {"deep": [1]}, "n": 5}},
    )
    assert (wanted.rdma_isolation, wanted.vf) == (True, {"guid": GUIDS[1]})


def test_keys_of_ipam_and_others_pass() -> None:
    wanted = read(
        runtimeConfig={"ips": ["10.0.0.1/24"], "portMappings": []},
        args={"cni": {"ips": ["10.0.0.1"]}, "example.com": 5},
        ipam={"type": "podfabric-ipam", "ranges": []},
        dns={"nameservers": ["1.1.1.1"]},
        logLevel="debug",
        logFile="/var/log/x",
    )
    assert (wanted.ipam_type, wanted.dns.nameservers) == ("podfabric-ipam", ("1.1.1.1",))


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
    refused = refusal(**config)
    assert refused.code == 7
    assert f'unknown key "{key}": did you mean "{meant}"?' in refused.message


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
    assert read(**config) == read()


def test_status_does_not_check_ib_kubernetes() -> None:
    config = decode(json.dumps({"type": "sriov", "ibKubernetesEnabled": True}).encode())
    status = Request(command="STATUS", config=config, network="n")
    assert options.read(status, needs_device=False).device == ""


@pytest.mark.parametrize(
    ("config", "vf"),
    [
        ({"VLAN": 100}, {"vlan": 100, "vlanQoS": 0, "vlanProto": "802.1q"}),
        ({"spoofChk": "off"}, {"spoofchk": False}),
        ({"Trust": "on"}, {"trust": True}),
        ({"Mac": "02:00:00:00:00:01"}, {"mac": "02:00:00:00:00:01"}),
        ({"GUID": "02:00:00:00:00:00:00:01"}, {"guid": "02:00:00:00:00:00:00:01"}),
        ({"vlan": 5, "VLAN": 6}, {"vlan": 5, "vlanQoS": 0, "vlanProto": "802.1q"}),
        ({"vlan": 5, "vlanProto": ""}, {"vlan": 5, "vlanQoS": 0, "vlanProto": "802.1q"}),
        ({"mtu": 0}, {}),
        ({"uuid": "of another plugin"}, {}),
    ],
    ids=str,
)
def test_keys_match_in_any_case(config: dict[str, Any], vf: dict[str, Any]) -> None:
    wanted = read(**config)
    assert (wanted.vf, wanted.mtu) == (vf, None)
