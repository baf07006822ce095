"""A pod, as Kubernetes names it."""

import msgspec


class Pod(msgspec.Struct, frozen=True):
    """A pod as CNI_ARGS or the kubelet name it; "" for unknown parts."""

    namespace: str = ""
    name: str = ""
    uid: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
