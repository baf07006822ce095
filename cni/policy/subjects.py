"""Who asks for an attachment, as far as a rule's subject looks at that.

A pod's namespace comes from the runtime. The labels of the namespace and the pod's service account
come from the API server, so a source is asked for them only where a rule looks at them.
"""

from collections.abc import Callable, Mapping

import msgspec

from base.pod import Pod


class CallingPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod, and what the API server says of it. None: this node does not know it."""

    namespace: str = ""
    name: str = ""
    uid: str = ""
    labels: Mapping[str, str] | None = None  # of the namespace
    service_account: str | None = None


class Facts(msgspec.Struct, frozen=True):
    """Which of the API server's facts the rules look at."""

    labels: bool = False
    service_account: bool = False


Subjects = Callable[[Pod, Facts], CallingPod]
"""The pod with the facts that are asked for. CNIError 11 if they cannot be known now."""


def nothing_known(pod: Pod, wanted: Facts) -> CallingPod:
    """The source of a node that does not ask the API server."""
    return CallingPod(namespace=pod.namespace, name=pod.name, uid=pod.uid)
