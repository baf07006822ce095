"""Whether a pod may have a device. Everything that decides it is here; nothing is changed.

| a device that                          | with match_device        | with "match_device": false |
|----------------------------------------|--------------------------|----------------------------|
| this pod was given, or is of no pool   | may be attached          | may be attached            |
| another pod has for itself             | 120                      | 121 (`unassigned_devices`) |
| a pool offers, or other pods share     | 121                      | may be attached            |
|                                        | (`unassigned_devices`)   |                            |

121 holds unless the rules have that setting. `ipoib` takes nothing away from the host, so only the
second line is for it. The pod's own HCA comes before all of it (`Match.refusal`, 120).

A configuration may say `"match_device": false` or `"pfOnly": true` only where the rules allow
that, too. What pods were given and pools offer is told by `deviceplugin.assigned`.
"""

from collections.abc import Iterable

import msgspec

from cni.policy import rules
from cni.policy.rules import Policy
from cni.spec.errors import CNIError, Code
from deviceplugin.assigned import OfOtherPods

_OWN = "have the pod request a device of its own (resources.limits)"


def require_allowed(policy: Policy, *, match_device: bool, pf_only: bool = False) -> None:
    """Raise CNIError 121 for what the rules of the node do not let a configuration say."""
    if not match_device and not policy.unmatched_devices:
        raise rules.not_allowed('"match_device": false', "unmatched_devices")
    if pf_only and not policy.whole_pfs:
        raise rules.not_allowed('"pfOnly": true', "whole_pfs")


class Denied(msgspec.Struct, frozen=True):
    """A device that is for other pods, and the resource that it is of."""

    device: str
    resource: str
    held: bool  # another pod has it for itself


class Entitlement(msgspec.Struct, frozen=True):
    """What one attachment of a pod may have."""

    others: OfOtherPods = OfOtherPods()  # what is for other pods than this one
    policy: Policy = Policy()
    match_device: bool = True

    def held(self, names: Iterable[str]) -> Denied | None:
        """That another pod has a device for itself; `names` are its address and RDMA devices."""
        if self.policy.unassigned_devices and not self.match_device:
            return None
        return next(
            (Denied(one, self.others.held[one], True) for one in names if one in self.others.held),
            None,
        )

    def denied(self, names: Iterable[str]) -> Denied | None:
        """Why a device may not be taken away from the host for this pod; None if it may."""
        names = tuple(names)
        held = self.held(names)
        if held is not None or self.policy.unassigned_devices or not self.match_device:
            return held
        pooled = self.others.pooled
        return next((Denied(one, pooled[one], False) for one in names if one in pooled), None)

    def error(self, denied: Denied, key: str, what: str) -> CNIError:
        """The error for it: `key` of the configuration led to the device, which `what` names."""
        if denied.held and self.match_device:
            return CNIError(
                Code.DEVICE_MISMATCH,
                f"{what} is on HCA {denied.device}, which the kubelet gave to another pod as "
                f"{denied.resource}: {_OWN}, and let Multus pass its id",
            )
        whose = "another pod has" if denied.held else "is not this pod's"
        return rules.not_allowed(
            f'"{key}": {what}, a device of resource {denied.resource} that {whose},',
            "unassigned_devices",
            f"{_OWN}, and remove the key",
        )
