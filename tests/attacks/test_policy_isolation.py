"""The example of docs/policy.md for tenants that share nothing: each tries what the other has."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from base.pod import Pod
from tests.attacks.node import PASSED, Attacked
from tests.netns import namespace
from tests.runtime import CHECKOUT
from tests.unit.host import servers

MASTER = "enp59s0f1np0"
VFS = servers.VFS_ETHERNET
SECTION = (CHECKOUT / "docs/policy.md").read_text().partition("## Isolation on the fabric")[2]
EXAMPLE: list[dict[str, Any]] = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", SECTION, re.S)[0])[
    "policy"
]["rules"]
TENANTS = {name: Pod(name, "pod", f"uid-{name}") for name in ("team-a", "team-b")}
OTHER = {"team-a": "team-b", "team-b": "team-a"}


def own(tenant: str) -> dict[str, Any]:
    """What the tenant has: a value of each kind, as definitions have it."""
    letter, number = tenant[-1], 1 if tenant == "team-a" else 2
    ipam = {"type": "podfabric-ipam", "network_name": f"{tenant}-1", "range": f"10.{number}.0.0/24"}
    return {
        "deviceID": VFS[0] if tenant == "team-a" else VFS[3],
        "pkey": f"0x800{number}",
        "vlan": 100 * number,
        "guid": f"02:00:00:00:00:0{letter}:00:01",
        "mac": f"02:0{letter}:00:00:00:01",
        "ipam": ipam,
    }


@pytest.fixture
def node() -> Iterator[Attacked]:
    """A card with four VFs, of which each tenant of the example has two."""
    with tempfile.TemporaryDirectory(prefix="pf-") as root, namespace() as netns:
        made = Attacked(servers.vfs(Path(root)), netns)
        text = str(EXAMPLE).replace("ens1f0#0-3", f"{MASTER}#0-1")
        made.allow(rules=yaml.safe_load(text.replace("ens1f0#4-7", f"{MASTER}#2-3")))
        yield made


@pytest.mark.parametrize("tenant", TENANTS)
@pytest.mark.parametrize("key", ["pkey", "vlan", "guid", "mac", "ipam"])
def test_a_tenant_gets_its_own_and_nothing_of_the_other(
    node: Attacked, tenant: str, key: str
) -> None:
    mine, theirs, pod = own(tenant), own(OTHER[tenant]), TENANTS[tenant]
    device = mine["deviceID"]
    assert PASSED in node.call(pod=pod, deviceID=device, **{key: mine[key]}).text
    reply = node.call(pod=pod, deviceID=device, **{key: theirs[key]})
    assert reply.code == 121, (key, reply.text)
    assert f"({tenant})" in reply.text
    assert OTHER[tenant] not in reply.text.replace(str(theirs[key]), "").replace(
        f"{OTHER[tenant]}-1", ""
    )


@pytest.mark.parametrize("tenant", TENANTS)
def test_a_tenant_gets_no_vf_of_the_other(node: Attacked, tenant: str) -> None:
    reply = node.call(pod=TENANTS[tenant], deviceID=own(OTHER[tenant])["deviceID"])
    assert (reply.code, '"use.devices"' in reply.text) == (121, True)
