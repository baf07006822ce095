"""Every example definition for `sriov`, read as Multus would pass it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from cni.spec.config import decode
from cni.spec.request import Request
from cni.sriov import options
from cni.sriov.options import SriovOptions
from ipam.config import options as ipam_options
from tests.runtime import CHECKOUT

POOL = "rdma/vf"  # of the pod whose device the plugin finds itself
RESOURCE = "k8s.v1.cni.cncf.io/resourceName"
NETWORKS = "k8s.v1.cni.cncf.io/networks"
BDF = "0000:af:06.1"
GIVEN = {"mac": "02:00:00:00:00:01", "infinibandGUID": "02:00:00:00:00:00:00:01"}
OF_MULTUS = {  # NetworkSelectionElement in pkg/types/types.go of multus-cni 4
    *("name", "namespace", "ips", "mac", "infiniband-guid", "interface", "portMappings"),
    *("bandwidth", "cni-args", "default-route", "ipam-claim-reference"),
}
FILES = [
    path
    for path in sorted((CHECKOUT / "netattach-examples").glob("*.yaml"))
    if '"type": "sriov"' in path.read_text()
]


def _documents(path: Path, kind: str) -> list[dict[str, Any]]:
    return [
        document for document in yaml.safe_load_all(path.read_text()) if document["kind"] == kind
    ]


def _definitions(path: Path) -> list[dict[str, Any]]:
    return _documents(path, "NetworkAttachmentDefinition")


def _named(document: dict[str, Any]) -> str:
    return str(document["metadata"]["name"])


EVERY = {_named(definition): definition for path in FILES for definition in _definitions(path)}


def _resource(definition: dict[str, Any]) -> str:
    return str(definition["metadata"].get("annotations", {}).get(RESOURCE, ""))


def _selected(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """The networks of a pod's annotation, in either of its forms."""
    text = pod["metadata"]["annotations"][NETWORKS].strip()
    if text.startswith("["):
        return list(json.loads(text))
    return [{"name": name.strip()} for name in text.split(",")]


def _as_multus_calls(definition: dict[str, Any], selection: dict[str, Any]) -> Request:
    """The request that Multus sends: the values that the pod selects and for which the definition
    has the capability.

    Has the device, if the definition names its resource.
    """
    config = json.loads(definition["spec"]["config"])
    able = {key for key, on in config.get("capabilities", {}).items() if on}
    runtime = {key: selection[key] for key in GIVEN if key in able and key in selection}
    config["runtimeConfig"] = runtime
    if _resource(definition):
        config |= {"deviceID": BDF, "pciBusID": BDF}
    return Request(
        command="ADD",
        container_id="c1",
        ifname="net1",
        args="IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_INFRA_CONTAINER_ID=c1",
        config=decode(json.dumps(config).encode()),
        network=config["name"],
    )


def _read(name: str, selection: dict[str, Any] | None = None) -> SriovOptions:
    return options.read(_as_multus_calls(EVERY[name], selection or {}))


def test_there_are_examples() -> None:
    assert len(FILES) == 8


def test_annotations_have_the_keys_that_multus_reads() -> None:
    """Multus ignores any other key, and the pod gets less than it asked for."""
    asked = [
        element
        for path in (CHECKOUT / "netattach-examples").glob("**/*.yaml")
        for document in yaml.safe_load_all(path.read_text())
        for written in [document["metadata"].get("annotations", {}).get(NETWORKS, "")]
        if "[" in written
        for element in json.loads(written)
    ]
    assert any("infiniband-guid" in element for element in asked)
    assert [element for element in asked if not element.keys() <= OF_MULTUS] == []


@pytest.mark.parametrize("name", sorted(EVERY))
def test_definition_is_accepted(name: str) -> None:
    definition = EVERY[name]
    config = json.loads(definition["spec"]["config"])
    assert (config["name"], config["type"]) == (name, "sriov")
    read = _read(name, GIVEN)
    assert (read.masters, read.pod.name) == ((), "b")
    assert read.device == (BDF if _resource(definition) else "")
    assert "infinibandGUID" not in config.get("capabilities", {}) or "guid" in read.vf
    if "ipam" in config:
        assert read.ipam_type == "podfabric-ipam"
        assert ipam_options.read(decode(json.dumps(config).encode())).sets


def test_definitions_mean_what_their_comments_say() -> None:
    vlan = _read("sriov-vlan").vf
    assert (vlan["vlan"], vlan["vlanQoS"]) == (100, 3)
    assert (vlan["spoofchk"], vlan["max_tx_rate"]) == (True, 10000)
    trunk = _read("sriov-trunk")
    assert trunk.vf == {"trust": True, "spoofchk": False}
    assert (trunk.promisc, trunk.allmulti, trunk.ipam_type) == (True, True, "")
    assert _read("sriov-roce").rdma_isolation
    dpdk = _read("sriov-dpdk", GIVEN)
    assert (dpdk.vfio_pci_mode, dpdk.vf["mac"], dpdk.ipam_type) == (True, GIVEN["mac"], "")
    infiniband = _read("sriov-infiniband", GIVEN)
    assert infiniband.vf == {"link_state": "enable", "guid": GIVEN["infinibandGUID"]}
    assert infiniband.rdma_isolation


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_pods_name_definitions_and_request_a_device_for_each(path: Path) -> None:
    here = {_named(definition): definition for definition in _definitions(path)}
    (pod,) = _documents(path, "Pod")
    selected = _selected(pod)
    assert {definition["name"] for definition in selected} == set(here)
    wanted = Counter(_resource(here[definition["name"]]) or POOL for definition in selected)
    (container,) = pod["spec"]["containers"]
    for amounts in (container["resources"]["requests"], container["resources"]["limits"]):
        devices = {key: int(value) for key, value in amounts.items() if "/" in key}
        assert devices == wanted
    for definition in selected:
        options.read(_as_multus_calls(here[definition["name"]], definition))


def test_rails_are_of_different_resources_and_ranges() -> None:
    rails = [EVERY[name] for name in ("sriov-rail-0", "sriov-rail-1")]
    assert len({definition["metadata"]["annotations"][RESOURCE] for definition in rails}) == 2
    assert (
        len({json.loads(definition["spec"]["config"])["ipam"]["range"] for definition in rails})
        == 2
    )


def test_names_of_networks_are_their_own() -> None:
    names = [_named(definition) for path in FILES for definition in _definitions(path)]
    assert len(names) == len(set(names))
