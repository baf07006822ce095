"""What a GC request says is still alive.

The key is `cni.dev/valid-attachments`; the text tagged 1.1.0 called it `cni.dev/attachments`,
and libraries send either or both. Null and [] mean that nothing is alive (CRI-O sends null for a
network without pods); a missing key means that the caller did not say, and nothing may go.
"""

import msgspec

from cni.spec.errors import CNIError, invalid_config

KEYS = ("cni.dev/valid-attachments", "cni.dev/attachments")


class ValidAttachment(msgspec.Struct, frozen=True):
    """One attachment that the runtime still knows."""

    containerID: str
    ifname: str


def valid_attachments(config: bytes) -> frozenset[tuple[str, str]] | None:
    """(container id, ifname) of every live attachment; None where the request does not say.

    Raises CNIError 7 for a list of another shape.
    """
    document = msgspec.json.decode(config, type=dict[str, msgspec.Raw])
    for key in KEYS:
        if key in document:
            return _decode(key, document[key])
    return None


def _decode(key: str, raw: msgspec.Raw) -> frozenset[tuple[str, str]]:
    try:
        alive = msgspec.json.decode(raw, type=tuple[ValidAttachment, ...] | None)
    except msgspec.MsgspecError as error:
        raise _unreadable(key, error) from None
    return frozenset((one.containerID, one.ifname) for one in alive or ())


def _unreadable(key: str, error: msgspec.MsgspecError) -> CNIError:
    return invalid_config(f'"{key}": {error}: nothing was removed')
