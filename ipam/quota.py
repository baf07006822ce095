"""How many addresses a pod and its namespace may have on a node: counted with the reservation."""

from collections.abc import Iterable, Sequence

from cni.policy.allowance import NotAllowed
from ipam.allocation import AddressChoice
from ipam.store import Owner, Quota, Reservation
from ipam.tables import Tables


def require(tables: Tables, owner: Owner, choices: Sequence[AddressChoice], boot: str) -> None:
    """Raise NotAllowed if the owner's pod or namespace would have too many with these.

    What a former sandbox of the pod held, and these replace, does not count twice.
    """
    quota, pod = owner.quota, owner.pod
    if quota is None or not pod.name:
        return
    replaced = _of_boot((choice.replaced for choice in choices), boot)
    if quota.of_namespace is not None:
        held = tables.count_of_namespace(pod.namespace, boot) - sum(
            each.namespace == pod.namespace for each in replaced
        )
        _require(
            held,
            len(choices),
            quota.of_namespace,
            quota,
            "addressesPerNamespace",
            "the pods of this namespace have",
            "delete pods that no longer need one",
        )
    if quota.of_pod is not None:
        held = len(_of_boot(tables.of_whole_pod(pod), boot)) - len(replaced)
        _require(
            held,
            len(choices),
            quota.of_pod,
            quota,
            "addressesPerPod",
            "this pod has",
            "give it fewer networks",
        )


def _of_boot(reservations: Iterable[Reservation | None], boot: str) -> list[Reservation]:
    return [each for each in reservations if each is not None and each.boot == boot]


def _require(
    held: int, more: int, most: int, quota: Quota, key: str, who: str, remedy: str
) -> None:
    if held + more > most:
        titles = ", ".join(quota.rules[:8])
        raise NotAllowed(
            f'"{key}": {who} {held} addresses on this node, this attachment asks for {more}, and '
            f"the rules ({titles}) allow {most}: {remedy}, or ask the administrator",
            key,
            str(held + more),
            quota.rules,
        )
