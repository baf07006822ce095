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
    replacing = _of_boot((choice.replaced for choice in choices), boot)
    if quota.of_namespace is not None:
        replaced = sum(each.namespace == pod.namespace for each in replacing)
        held = tables.count_of_namespace(pod.namespace, boot) - replaced
        who = "the pods of this namespace have"
        _require(quota, "addressesPerNamespace", quota.of_namespace, held, len(choices), who)
    if quota.of_pod is not None:
        held = len(_of_boot(tables.of_whole_pod(pod), boot)) - len(replacing)
        _require(quota, "addressesPerPod", quota.of_pod, held, len(choices), "this pod has")


def _of_boot(reservations: Iterable[Reservation | None], boot: str) -> list[Reservation]:
    return [each for each in reservations if each is not None and each.boot == boot]


def _require(quota: Quota, key: str, most: int, held: int, more: int, who: str) -> None:
    if held + more > most:
        raise NotAllowed(
            f'"{key}": {who} {held} addresses on this node, this attachment asks for {more}, and '
            f"the rules ({', '.join(quota.rules[:8])}) allow {most}: have fewer networks or pods, "
            "or ask the administrator",
            key,
            str(held + more),
            quota.rules,
        )
