"""One evaluation of the policy for an ADD, with 200 rules of 20 namespaces, or all for one.

    .venv/bin/python -m bench.policy

The ratio is to the copy of one dict with 200 keys, in the same run. The target is 500 µs.
"""

import statistics
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

from base.pod import Pod
from host.sysfs.discovery import HCA
from policy import allowance
from policy.allowance import Device
from policy.document import rules_of
from policy.rules import Policy
from tests.unit.deviceplugin.cards import card, rdma, vf

RULES = 200
ROUNDS = 2000
VFS = 16
NAMESPACES = 20


def main() -> None:
    """Print the table."""
    pf = card("0000:3b:00.0", rdma("mlx5_0"), netdevs=("ens1f0",))
    devices = [vf(pf, index, rdma(f"mlx5_{index + 1}")) for index in range(VFS)]
    floor = _median(dict.fromkeys(range(RULES)).copy)
    print(f"{'200 rules':44}{'µs':>10}{'ratio':>8}   target")
    for count in (NAMESPACES, 1):
        policy, name = _policy(count), f"of {count} namespaces"
        target = 500 if count > 1 else None
        _row(f"{name}: one device", _median(partial(_evaluate, policy, devices[0])), floor, target)
        _row(f"{name}: 16 devices", _median(partial(_evaluate, policy, *devices)), floor)


def _policy(namespaces: int) -> Policy:
    rules = [_rule(index, f"team-{index % namespaces}") for index in range(RULES)]
    return Policy(rules=rules_of(rules, "rules"))


def _rule(index: int, namespace: str) -> dict[str, Any]:
    return {
        "name": f"rule-{index}",
        "subjects": [{"namespaces": [namespace]}],
        "use": {
            "devices": [{"pfNames": ["ens1f0#0-63"]}],
            "pkeys": [f"{0x8001 + index:#06x}", "0x9000"],
            "ipamTypes": ["podfabric-*"],
            "networkNames": ["team-a-*"],
            "ranges": ["10.1.0.0/16"],
            "addressesPerAttachment": 4,
        },
        "set": {"trust": [True], "mtu": ["72-4092"]},
    }


def _evaluate(policy: Policy, *devices: HCA, namespace: str = "team-0") -> None:
    mine = allowance.of_pod(policy, Pod(namespace, "pod-0"))
    mine.require_option("trust", True, "trust", "on")
    mine.require_option("mtu", 4092, "mtu", 4092)
    base = (0xFFFF << 32) | 0x0A010000
    mine = (
        mine.using("pkeys", 0x9000, "pkey", "0x9000")
        .using("ipamTypes", "podfabric-ipam", "ipam.type", "podfabric-ipam")
        .using("networkNames", "team-a-1", "ipam.network_name", "team-a-1")
        .within(((base, base + 255),), "ipam.range", str)
        .using("addressesPerAttachment", 1, "ipam", 1)
    )
    for device in devices:
        mine.using("devices", Device(device), "master", device.id)


def _median(call: Callable[[], object]) -> float:
    return statistics.median(timeit.repeat(call, number=1, repeat=ROUNDS))


def _row(name: str, seconds: float, floor: float, target: int | None = None) -> None:
    wanted = "" if target is None else f"   {target} µs"
    print(f"{name:44}{seconds * 1e6:10.1f}{seconds / floor:8.1f}{wanted}")


if __name__ == "__main__":
    main()
