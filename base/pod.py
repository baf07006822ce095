"""The names of a pod in Kubernetes."""

import msgspec


class Pod(msgspec.Struct, frozen=True):
    """A pod that CNI_ARGS or the kubelet names. An unknown part is ""."""

    namespace: str = ""
    name: str = ""
    uid: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
