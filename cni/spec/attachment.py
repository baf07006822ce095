"""The attachment of a CNI call: one interface of one container on one network."""

import hashlib
from functools import lru_cache

import msgspec

from cni.spec.errors import CNIError, Code
from cni.spec.request import Request


class Attachment(msgspec.Struct, frozen=True, order=True):
    """Identifies everything that an ADD makes (SPEC.md 1.1.0, section 2, "attachment")."""

    network: str
    container_id: str
    ifname: str

    @classmethod
    def of(cls, request: Request) -> "Attachment":
        """The attachment of a request. Raises CNIError 4 for texts that are not UTF-8."""
        texts = {"IFNAME": request.ifname, "NETNS": request.netns, "ARGS": request.args}
        for name, text in {**texts, "PATH": ":".join(request.path)}.items():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise CNIError(
                    Code.INVALID_ENVIRONMENT, f"CNI_{name} is not UTF-8: let the runtime pass UTF-8"
                ) from None
        return cls(request.network, request.container_id, request.ifname)

    @property
    def key(self) -> str:
        """32 hex digits that stand for the attachment in file names and marks."""
        return _key(self)

    def __str__(self) -> str:
        return f"{self.network}/{self.container_id}/{self.ifname}"


@lru_cache(1024)  # one call needs a key about ten times
def _key(attachment: Attachment) -> str:
    text = "\n".join((attachment.network, attachment.container_id, attachment.ifname))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
