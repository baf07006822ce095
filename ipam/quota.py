"""How many addresses a namespace may have on this node: counted with the reservation."""

from collections.abc import Sequence

from cni.policy.allowance import NotAllowed
from ipam.allocation import AddressChoice
from ipam.store import Owner
from ipam.tables import Tables

KEY = "addressesPerNamespace"


def require(tables: Tables, owner: Owner, choices: Sequence[AddressChoice], boot: str) -> None:
    """Raise NotAllowed if the owner's namespace would have too many with these.

    What a former sandbox of the pod held, and these replace, does not count twice.
    """
    quota, namespace = owner.quota, owner.pod.namespace
    if quota is None or not owner.pod.name:
        return
    former = sum(
        choice.replaced is not None
        and choice.replaced.boot == boot
        and choice.replaced.namespace == namespace
        for choice in choices
    )
    held = tables.count_of_namespace(namespace, boot) - former
    if held + len(choices) > quota.addresses:
        titles = ", ".join(quota.rules[:8])
        raise NotAllowed(
            f'"{KEY}": the pods of this namespace have {held} addresses on this node, and its '
            f"rules ({titles}) allow {quota.addresses}: delete pods that no longer need one, or "
            "ask the administrator",
            KEY,
            str(held + len(choices)),
            quota.rules,
        )
