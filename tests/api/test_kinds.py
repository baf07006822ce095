"""The API server refuses objects that would make an address non-unique, and gives the reason."""

import copy
from typing import Any

import pytest

from tests.api.server import OURS, ApiServer, Document

Changes = dict[str, Any]
GONE = object()
"""In a table: the field is left out."""

POOL: Document = {
    "apiVersion": "ipam.podfabric.io/v1alpha1",
    "kind": "AddressPool",
    "metadata": {"name": "kinds-10.7.0.0-16"},
    "spec": {"range": "10.7.0.0/16", "networkName": "kinds"},
}
BLOCK: Document = {
    "apiVersion": "ipam.podfabric.io/v1alpha1",
    "kind": "AddressBlock",
    "metadata": {"name": "kinds.10.7.0.64-27"},
    "spec": {
        "pool": "kinds-10.7.0.0-16",
        "range": "10.7.0.64/27",
        "holder": {"instance": "i", "node": "n", "nodeUID": "u", "boot": "b"},
    },
}
RESERVATION: Document = {
    "apiVersion": "ipam.podfabric.io/v1alpha1",
    "kind": "AddressReservation",
    "metadata": {"name": "kinds", "namespace": "default"},
    "spec": {"pool": "kinds-10.7.0.0-16", "owner": {"kind": "Pod", "name": "trainer-0"}},
}


def changed(document: Document, changes: Changes) -> Document:
    """The document with other values at paths such as "spec.holder.node"."""
    made = copy.deepcopy(document)
    for path, value in changes.items():
        *parents, last = path.split(".")
        inner = made
        for parent in parents:
            inner = inner.setdefault(parent, {})
        if value is GONE:
            del inner[last]
        else:
            inner[last] = value
    return made


def path(document: Document, one: bool = False) -> str:
    """The path of the objects of the document's kind, or of this object."""
    namespace = document["metadata"].get("namespace")
    where = f"{OURS}/namespaces/{namespace}" if namespace else OURS
    where = f"{where}/{document['kind'].lower()}s"
    return f"{where}/{document['metadata']['name']}" if one else where


def create(server: ApiServer, document: Document) -> tuple[int, str]:
    """The status and message of a create with dry-run."""
    query = "?dryRun=All&fieldValidation=Strict"
    status, answer = server.send("POST", f"{path(document)}{query}", document)
    return status, answer.get("message", "")


def pool(range_: str, network_name: str = "kinds", **spec: object) -> Changes:
    """A pool with the name that its range requires."""
    part = range_.replace(":", "-").replace("/", "-")
    prefix = f"{network_name}-" if network_name else ""
    return {
        "metadata.name": f"{prefix}{part}",
        "spec": {"range": range_, "networkName": network_name, **spec},
    }


def block(first: str, prefix: int, **spec: object) -> Changes:
    """A block with the name that its addresses require."""
    return {
        "metadata.name": f"kinds.{first.replace(':', '-')}-{prefix}",
        "spec": {**BLOCK["spec"], "range": f"{first}/{prefix}", **spec},
    }


LONG = "n" * 60
STICKY = {"reservation": "a/web", "pod": "web-0", "ifname": "net1", "address": "10.7.0.70"}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (POOL, {}),
        (POOL, pool("10.7.0.0/16", "")),
        (POOL, pool("2001:db8:7::1:0/112")),
        (POOL, pool("10.7.0.5/32", blockSize=1)),
        (POOL, pool("10.7.0.0/24", blockSize=256)),
        (POOL, pool("0.0.0.0/0")),
        (POOL, {"metadata.name": "kinds-2001-db8-7--0-64", "spec.range": "2001:db8:7::/64"}),
        (POOL, {"metadata.name": "kinds-0--0-0", "spec.range": "::/0"}),
        (POOL, {"metadata.name": "kinds-10.7.0.0-16-private", "spec.shared": False}),
        (POOL, {"metadata.name": "n-0123456789-10.7.0.0-16", "spec.networkName": "Blue_1"}),
        (POOL, {"metadata.name": "n-0123456789-10.7.0.0-16", "spec.networkName": LONG}),
        (POOL, {"spec.exclude": ["10.7.0.1", "10.7.0.0/28", "10.7.0.9-10.7.0.20"]}),
        (POOL, {"spec.reclaim": {"nodeGoneAfter": "1h30m", "maxOffline": "1.5s"}}),
        (BLOCK, {}),
        (BLOCK, block("10.7.0.0", 24)),
        (BLOCK, block("10.7.0.1", 32)),
        (BLOCK, block("2001:db8:7::1:0", 120)),
        (
            BLOCK,
            {
                "metadata.name": "kinds.2001-db8--0-120",
                "spec.range": "2001:db8::/120",
            },
        ),
        (BLOCK, {"metadata.name": "kinds.0--1-128", "spec.range": "::1/128"}),
        (
            BLOCK,
            {
                "metadata.name": "kinds.2001-db8--7-128",
                "spec.range": "2001:db8::7/128",
            },
        ),
        (BLOCK, {"spec.sticky": STICKY}),
        (BLOCK, {"spec.holder": {"instance": "i", "node": "n"}}),
        (BLOCK, {"spec.probe": True}),
        (RESERVATION, {}),
        (RESERVATION, {"spec.owner": {"kind": "StatefulSet", "name": "t", "ifname": "net1"}}),
    ],
)
def test_a_right_object_is_accepted(server: ApiServer, kind: Document, changes: Changes) -> None:
    assert create(server, changed(kind, changes)) == (201, "")


CANONICAL = "a network in canonical form"
NAMED = "metadata.name must"
EXCLUDE = "exclude must name"


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (POOL, {"spec.range": GONE}, "spec.range: Required"),
        (BLOCK, {"spec.sticky": {**STICKY, "address": "10.7.0.1"}}, "an address of the block"),
        (BLOCK, {"spec.sticky": {**STICKY, "address": ""}}, "or nothing"),
        (BLOCK, {"spec.sticky": {**STICKY, "pod": ""}}, "or nothing"),
        (BLOCK, {"spec.sticky": {**STICKY, "reservation": ""}}, "or nothing"),
        (POOL, pool("10.7.0.0"), CANONICAL),
        (POOL, pool("10.7.0.1/16"), CANONICAL),
        (POOL, pool("10.7.0.0/33"), CANONICAL),
        (POOL, pool("010.7.0.0/16"), CANONICAL),
        (POOL, pool("2001:DB8::1:0/112") | {"metadata.name": "kinds-x"}, CANONICAL),
        (POOL, pool("2001:db8:0::1:0/112"), CANONICAL),
        (POOL, {"metadata.name": "other-10.7.0.0-16"}, NAMED),
        (POOL, {"metadata.name": "10.7.0.0-16"}, NAMED),
        (POOL, {"metadata.name": "kinds-10.7.0.0-17"}, NAMED),
        (POOL, {"spec.shared": False}, NAMED),
        (POOL, {"metadata.name": "kinds-10.7.0.0-16-private"}, NAMED),
        (POOL, {"metadata.name": "mine", "spec.networkName": "Blue_1"}, NAMED),
        (POOL, {"spec.blockSize": 3}, "spec.blockSize: Unsupported value"),
        (POOL, {"spec.blockSize": 512}, "spec.blockSize: Unsupported value"),
        (POOL, pool("10.7.0.0/28", blockSize=32), "a block is larger than the range"),
        (POOL, pool("2001:db8::1:0/124", blockSize=32), "a block is larger than the range"),
        (POOL, {"spec.exclude": ["10.8.0.1"]}, EXCLUDE),
        (POOL, {"spec.exclude": ["10.0.0.0/8"]}, EXCLUDE),
        (POOL, {"spec.exclude": ["10.7.0.9-10.8.0.1"]}, EXCLUDE),
        (POOL, {"spec.exclude": ["10.7.0.9-"]}, EXCLUDE),
        (POOL, {"spec.exclude": ["gateway"]}, EXCLUDE),
        (POOL, {"spec.exclude": ["10.7.0.9", "10.7.0.9"]}, "Duplicate value"),
        (POOL, {"spec.exclude": [f"10.7.0.{each}" for each in range(65)]}, "at most 64 items"),
        (POOL, {"spec.state": "Paused"}, "spec.state: Unsupported value"),
        (POOL, {"spec.reclaim": {"maxOffline": "30 minutes"}}, "spec.reclaim.maxOffline"),
        (POOL, {"spec.reclaim": {"nodeGoneAfter": "-1m"}}, "spec.reclaim.nodeGoneAfter"),
        (POOL, {"spec.maxBlocksPerNode": -1}, "spec.maxBlocksPerNode"),
        (POOL, {"spec.lanes": []}, 'unknown field "spec.lanes"'),
        (BLOCK, {"metadata.name": "kinds.10.7.0.64-28"}, NAMED),
        (BLOCK, {"metadata.name": "Blue_1.10.7.0.64-27"}, "metadata.name"),
        (BLOCK, {"metadata.name": "kinds.10.7.0.96-27"}, NAMED),
        (
            BLOCK,
            {
                "metadata.name": "kinds.2001-db8---120",
                "spec.range": "2001:db8::/120",
            },
            "Invalid value",
        ),
        (BLOCK, block("10.7.0.65", 27), CANONICAL),
        (BLOCK, block("10.7.0.0", 23), "1 to 256 addresses"),
        (BLOCK, block("10.7.0.0", 33), CANONICAL),
        (BLOCK, block("2001:db8:1::", 64), "1 to 256 addresses"),
        (BLOCK, block("2001:db8::1:0", 129), CANONICAL),
        (BLOCK, block("010.7.0.64", 27), CANONICAL),
        (BLOCK, block("2001:db8:0::1:0", 120), CANONICAL),
        (BLOCK, block("10.7.0.64/27", 27) | {"metadata.name": "kinds.x"}, "canonical form"),
        (BLOCK, {"spec.holder": GONE}, "spec.holder: Required"),
        (BLOCK, {"spec.holder": {"instance": "i"}}, "spec.holder.node: Required"),
        (BLOCK, {"spec.holder.instance": ""}, "spec.holder.instance"),
        (BLOCK, {"spec.state": "Free"}, "spec.state: Unsupported value"),
        (BLOCK, {"spec.epoch": 0}, "spec.epoch"),
        (BLOCK, {"spec.shared": True}, 'unknown field "spec.shared"'),
        (RESERVATION, {"spec.owner": {"kind": "Deployment", "name": "x"}}, "spec.owner.kind"),
        (RESERVATION, {"spec.owner": GONE}, "spec.owner: Required"),
    ],
)
def test_a_wrong_object_is_refused_with_the_reason(
    server: ApiServer, kind: Document, changes: Changes, said: str
) -> None:
    status, message = create(server, changed(kind, changes))
    assert status in (400, 422), message
    assert said in message


HOLDER = {"instance": "j", "node": "n", "nodeUID": "u", "boot": "b"}


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (POOL, {"spec.range": "10.7.0.0/17"}, "a pool keeps its range"),
        (POOL, {"spec.networkName": "other"}, "a pool keeps its network name"),
        (POOL, {"spec.shared": False}, "a pool stays shared or private"),
        (POOL, {"spec.blockSize": 16, "spec.exclude": ["10.7.0.1"]}, ""),
        (BLOCK, {"spec.pool": "other"}, "a block keeps its pool"),
        (BLOCK, {"spec.range": "10.7.0.96/27"}, "a block keeps its range"),
        (BLOCK, {"spec.sticky": STICKY}, "a block keeps the pod that it is for"),
        (BLOCK, {"spec.holder": HOLDER}, "epoch must grow by 1"),
        (BLOCK, {"spec.holder": HOLDER, "spec.epoch": 3}, "epoch must grow by 1"),
        (BLOCK, {"spec.holder.boot": "c"}, "epoch must grow by 1"),
        (BLOCK, {"spec.epoch": 3}, "epoch must grow by 1"),
        (BLOCK, {"spec.holder": HOLDER, "spec.epoch": 2}, ""),
        (BLOCK, {"spec.epoch": 2}, ""),
        (BLOCK, {"spec.state": "Reclaiming", "spec.maxOfflineSeconds": 1800}, ""),
        (RESERVATION, {"spec.owner.name": "trainer-1"}, "a reservation keeps its pool and owner"),
    ],
)
def test_identifying_fields_are_immutable(
    server: ApiServer, kind: Document, changes: Changes, said: str
) -> None:
    stored = server.make(path(kind), kind)
    where = path(kind, one=True)
    query = "?dryRun=All&fieldValidation=Strict"
    status, answer = server.send("PUT", f"{where}{query}", changed(stored, changes))
    server.send("DELETE", where)
    assert status == (422 if said else 200), answer
    assert said in answer.get("message", "")


def test_epoch_never_decreases(server: ApiServer) -> None:
    first = changed(BLOCK, {"spec.epoch": 5})
    stored = server.make(path(first), first)
    where = path(first, one=True)
    status, answer = server.send("PUT", where, changed(stored, {"spec.epoch": 4}))
    server.send("DELETE", where)
    assert status == 422, answer
    assert "epoch must grow by 1" in answer["message"]


def test_defaults_are_written_into_objects(server: ApiServer) -> None:
    stored = server.make(path(POOL), POOL)
    server.send("DELETE", path(POOL, one=True))
    assert stored["spec"] == {
        "range": "10.7.0.0/16",
        "networkName": "kinds",
        "shared": True,
        "exclude": [],
        "blockSize": 0,
        "maxBlocksPerNode": 0,
        "state": "Active",
        "reclaim": {"nodeGoneAfter": "10m", "maxOffline": "30m"},
    }


def test_server_warns_about_no_expression_of_ours(server: ApiServer) -> None:
    _, crds = server.send("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    for crd in crds["items"]:
        if crd["spec"]["group"] == "ipam.podfabric.io":
            conditions = {each["type"]: each["status"] for each in crd["status"]["conditions"]}
            assert conditions["Established"] == "True"
            assert conditions.get("NonStructuralSchema", "False") == "False"
    group = "/apis/admissionregistration.k8s.io/v1"
    _, policies = server.send("GET", f"{group}/validatingadmissionpolicies")
    names = {each["metadata"]["name"] for each in policies["items"]}
    assert "podfabric-own-blocks" in names
