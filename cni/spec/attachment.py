"""What a runtime attaches and detaches: one interface of one container on one network."""

import hashlib

import msgspec


class Attachment(msgspec.Struct, frozen=True, order=True):
    """Identifies everything that an ADD makes (SPEC.md 1.1.0, section 2, "attachment")."""

    network: str
    container_id: str
    ifname: str

    @property
    def key(self) -> str:
        """32 hex digits that stand for the attachment in file names and marks."""
        text = "\n".join((self.network, self.container_id, self.ifname))
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]

    def __str__(self) -> str:
        return f"{self.network}/{self.container_id}/{self.ifname}"
