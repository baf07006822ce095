"""A tenant tries to evade its rules: by spelling, by other plugins, and while no agent runs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from base.pod import Pod
from cni.rdma.plugin import Rdma
from cni.spec.dispatch import answer
from ipam.store.reservations import Reservation
from ipam.store.sqlite_store import SqliteStore
from policy import stored_policies
from policy.stored_policies import ClusterPolicies, StoredPolicy
from tests.attacks.node import OTHER, PASSED, TENANT, Attacked
from tests.attacks.test_policy import OWN, RANGE, RULES, THEIRS, node
from tests.netns import namespace
from tests.runtime import Runtime

__all__ = ["node"]


MAPPED = {"type": "podfabric-ipam", "range": "::ffff:10.2.0.0/112"}
SPELT: list[tuple[int, dict[str, Any]]] = [
    (121, {"pkey": 0x8002}),
    (121, {"pkey": "32770"}),
    (121, {"pkey": "0X8002"}),
    (7, {"pkey": "0x18001"}),
    (7, {"pkey": "0x8000"}),
    (7, {"pkey": " 0x8001"}),
    (7, {"vlan": 4095}),
    (7, {"vlan": -1}),
    (121, {"vLaN": 200}),
    (121, {"mac": "02-00-00-00-01-00"}),
    (121, {"Mac": "02:00:00:00:01:00"}),
    (121, {"Trust": "on"}),
    (121, {"PFONLY": True}),
    (121, {"Match_Device": False}),
    (7, {"deviceID": OWN, "runtimeConfig": {"deviceID": THEIRS}}),
    (121, {"deviceID": THEIRS, "capabilities": {"deviceID": True}}),
    (121, {"deviceID": THEIRS, "prevResult": {"cniVersion": "1.1.0", "interfaces": []}}),
    (121, {"deviceID": THEIRS, "policy": {"rules": []}, "plugins": [{"deviceID": OWN}]}),
    (121, {"ipam": {**RANGE, "type": "Podfabric-IPAM"}}),
    (121, {"ipam": {**RANGE, "type": "podfabric-ipam "}}),
    (121, {"ipam": {**RANGE, "type": "podfabric-ipam\u200b"}}),
    (121, {"ipam": {**RANGE, "type": "../podfabric-ipam"}}),
    (121, {"ipam": {**RANGE, "type": "nv-ipam"}}),
    (121, {"ipam": {**RANGE, "network_name": "Tenant-1"}}),
    (7, {"ipam": {**RANGE, "network_name": " tenant-1"}}),
    (121, {"ipam": MAPPED}),
    (121, {"ipam": {**MAPPED, "range": "0:0:0:0:0:ffff:a02:0/112"}}),
    (7, {"ipam": RANGE, "IPAM": {**RANGE, "range": "10.2.0.0/24"}}),
    (7, {"ipam": {**RANGE, "Range": "10.2.0.0/24"}}),
]


@pytest.mark.parametrize(("code", "config"), SPELT, ids=str)
def test_no_spelling_gets_what_the_rules_do_not_have(
    node: Attacked, code: int, config: dict[str, Any]
) -> None:
    reply = node.call(**{"deviceID": OWN, **config})
    assert reply.code == code, reply.text
    assert not [path for path in node.touched() if path.startswith("attachments")]


@pytest.mark.parametrize(
    "keys",
    [
        '"pkey":"0x8001","pkey":"0x8002"',
        '"pkey":"0x8002","pkey":"0x8001"',
        '"ipam":{"type":"podfabric-ipam","range":"10.1.0.0/24","range":"10.2.0.0/24"}',
    ],
)
def test_duplicate_key_is_refused(node: Attacked, keys: str) -> None:
    text = f'{{"cniVersion":"1.1.0","name":"fabric","type":"sriov","deviceID":"{OWN}",{keys}}}'
    assert node.call(raw=text.encode()).code == 7


@pytest.mark.parametrize("config", [{"PKEY": "0x8002"}, {"Master": "ib0"}, {"Proxy_ARP": True}])
def test_a_key_of_ipoib_in_other_letters_is_refused(node: Attacked, config: dict[str, Any]) -> None:
    assert node.call(plugin="ipoib", **{"master": "ib0", **config}).code == 7


def test_a_result_that_a_tenant_wrote_moves_no_rdma_device(node: Attacked) -> None:
    """`rdma` as the first plugin of a definition, with the result of a plugin that never ran."""
    interface = {"name": "net1", "pciID": THEIRS, "sandbox": "/nowhere"}
    document = {
        "cniVersion": "1.1.0",
        "name": "fabric",
        "type": "rdma",
        "deviceID": THEIRS,
        "prevResult": {"cniVersion": "1.1.0", "interfaces": [interface], "ips": []},
    }
    environ = {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "attacker",
        "CNI_IFNAME": "net1",
        "CNI_PATH": "/nowhere",
        "CNI_ARGS": f"K8S_POD_NAMESPACE={TENANT.namespace};K8S_POD_NAME={TENANT.name}",
    }
    with namespace() as netns:
        environ["CNI_NETNS"] = str(netns)
        reply = answer(lambda: Rdma(node.paths), environ, lambda: json.dumps(document).encode())
    error = json.loads(reply.document or b"{}")
    assert (error["code"], "did not make attachment" in error["msg"]) == (7, True)


def test_a_rule_for_everybody_that_lists_nothing_refuses_what_no_other_rule_has(
    node: Attacked,
) -> None:
    node.allow(rules=[*RULES, {"name": "nothing", "subjects": [{"namespaces": ["*"]}]}])
    assert PASSED in node.call(deviceID=OWN).text
    assert node.call(deviceID=THEIRS).code == 121
    stranger = Pod("strangers", "pod", "uid")
    assert node.call(pod=stranger, deviceID=OWN).code == 121
    assert PASSED in node.call(pod=OTHER, deviceID=THEIRS, vlan=200).text


OF_A = {
    "name": "a",
    "subjects": [{"namespaces": [TENANT.namespace]}],
    "use": {"ipamTypes": ["podfabric-ipam"], "ranges": ["10.10.0.0/16"]},
}


def test_an_executable_goes_by_the_policies_that_the_agent_saw_last_or_by_none_at_all(
    tmp_path: Path,
) -> None:
    paths = Paths(state=tmp_path / "state", etc=tmp_path / "etc")
    paths.etc.mkdir()
    paths.config.write_text(json.dumps({"policy": {"cluster": True}}))
    roots = {f"PODFABRIC_{name.upper()}": str(tmp_path / name) for name in ("run", "state", "etc")}
    runtime = Runtime(environ={"PATH": os.environ["PATH"], **roots})
    ipam = {"type": "podfabric-ipam", "range": "10.9.0.0/26"}
    config = {"cniVersion": "1.0.0", "name": "n1", "type": "podfabric-ipam", "ipam": ipam}
    args = f"K8S_POD_NAMESPACE={TENANT.namespace};K8S_POD_NAME=p;K8S_POD_UID=u"

    def code(command: str = "ADD") -> int:
        done = runtime.call(command, config, container_id="c1", netns="/none", args=args)
        return int(json.loads(done.stdout or "{}").get("code", 0))

    def policies(*rules: dict[str, Any]) -> None:
        stored = StoredPolicy(name="p", uid="u", generation=1, rules=list(rules))
        written = ClusterPolicies(policies=(stored,), namespaces=None)
        stored_policies.save(paths.cluster_policies, written)

    def held() -> list[Reservation]:
        return SqliteStore(paths.ipam, "").reservations() if paths.ipam.exists() else []

    assert code() == 11  # no policies were ever seen
    policies(OF_A)
    assert code() == 121
    path = paths.cluster_policies
    path.write_bytes(path.read_bytes()[:-7])
    assert code() == 11  # the file is damaged
    assert held() == []
    policies(OF_A | {"use": {"ipamTypes": ["podfabric-ipam"], "ranges": ["10.9.0.0/16"]}})
    assert code() == 0
    path.unlink()
    assert code("DEL") == 0
    assert held() == []
