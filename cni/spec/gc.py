"""The attachments that a GC request lists as still valid.

The key is `cni.dev/valid-attachments`; the text tagged 1.1.0 called it `cni.dev/attachments`, and
libraries send either or both. Null and [] mean that no attachment is valid (CRI-O sends null for a
network without pods). A missing key means that the caller did not say, and nothing may be removed.
"""

import msgspec

from cni.spec.config import NetworkConfig
from cni.spec.errors import CNIError, invalid_config

KEYS = ("cni.dev/valid-attachments", "cni.dev/attachments")


class ValidAttachment(msgspec.Struct, frozen=True):
    """One attachment that the runtime still knows."""

    containerID: str
    ifname: str


_ValidAttachments = tuple[ValidAttachment, ...] | None


def valid_attachments(config: NetworkConfig) -> frozenset[tuple[str, str]] | None:
    """(container id, ifname) of every valid attachment; None if the request does not say.

    Raises CNIError 7 for a list of another shape.
    """
    for key in KEYS:
        if key in config.keys:
            return _read(key, config.keys[key])
    return None


def _read(key: str, value: object) -> frozenset[tuple[str, str]]:
    valid: _ValidAttachments
    try:
        if isinstance(value, msgspec.Raw):  # of a configuration that was not decoded as a whole
            valid = msgspec.json.decode(value, type=_ValidAttachments)
        else:
            valid = msgspec.convert(value, type=_ValidAttachments)
    except msgspec.MsgspecError as error:
        raise _unreadable(key, error) from None
    return frozenset((attachment.containerID, attachment.ifname) for attachment in valid or ())


def _unreadable(key: str, error: msgspec.MsgspecError) -> CNIError:
    return invalid_config(f'"{key}": {error}: nothing was removed')
