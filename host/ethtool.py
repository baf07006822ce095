"""Reads and restores driver settings, as in ethtool(8) -k, -l, -g, -c (linux/ethtool.h).

A pod may change these settings, and a move of the interface does not reset them. This module uses
ioctl(2), because a struct that was read can be written back.
"""

import ctypes
import fcntl
import struct
from collections.abc import Mapping

import msgspec

from host.errors import explained
from host.netlink.sockets import Rtnetlink

SIOCETHTOOL = 0x8946
_IFREQ = struct.Struct("=16sQ16x")  # struct ifreq: the name, the address of the command
_COMMAND = struct.Struct("=I")
_FEATURES = 0x3A, 0x3B  # ETHTOOL_GFEATURES, ETHTOOL_SFEATURES
_BLOCKS = 2  # of 32 features each, also in later kernels
# struct ethtool_gfeatures, ethtool_sfeatures: command, number of blocks
_HEAD = struct.Struct("=II")
_GET_BLOCK = struct.Struct("=IIII")  # available, requested, active, never changed
_SET_BLOCK = struct.Struct("=II")  # which, on


class _StructCommands(msgspec.Struct, frozen=True):
    """Two commands with the same struct: `get` reads the struct, `set` writes it."""

    get: int
    set: int
    size: int  # of the struct, in bytes


_COMMANDS = {
    "channels": _StructCommands(0x3C, 0x3D, 36),  # struct ethtool_channels
    "ring": _StructCommands(0x10, 0x11, 36),  # struct ethtool_ringparam
    "coalesce": _StructCommands(0x0E, 0x0F, 92),  # struct ethtool_coalesce
    "private flags": _StructCommands(0x27, 0x28, 8),  # struct ethtool_value
}
FEATURES = "features"


def settings(route: Rtnetlink, name: str) -> dict[str, str]:
    """The driver settings of an interface in the socket's namespace. Values are hexadecimal."""
    found = {}
    for setting in (FEATURES, *_COMMANDS):
        try:
            found[setting] = _read(route, name, setting).hex()
        except OSError:  # the driver does not have this setting
            continue
    return found


def restore(route: Rtnetlink, name: str, earlier: Mapping[str, str]) -> list[str]:
    """Restore each setting that differs from `earlier`. Returns a text for each refused setting."""
    refusals = []
    for setting, value in earlier.items():
        try:
            now, then = _read(route, name, setting), bytes.fromhex(value)
            if now != then:
                _write(route, name, setting, now, then)
        except OSError as error:
            text = f'restoring the {setting} of "{name}" (see ethtool)'
            refusals.append(str(explained(text, error.errno or 0)))
    return refusals


def _read(route: Rtnetlink, name: str, setting: str) -> bytes:
    """The struct of a setting, without the command. For features: the requested bits."""
    if setting != FEATURES:
        command = _COMMANDS[setting]
        return _ioctl(route, name, command.get, bytes(command.size - _COMMAND.size))
    blocks = _feature_blocks(route, name)
    return b"".join(_COMMAND.pack(requested) for _, requested, _, _ in blocks)


def _write(route: Rtnetlink, name: str, setting: str, now: bytes, then: bytes) -> None:
    if setting != FEATURES:
        _ioctl(route, name, _COMMANDS[setting].set, then)
        return
    pairs = zip(
        _feature_blocks(route, name),
        _COMMAND.iter_unpack(now),
        _COMMAND.iter_unpack(then),
        strict=False,  # the earlier kernel may have had another number of blocks
    )
    changes = [
        _SET_BLOCK.pack(available & (is_on ^ was_on), was_on)
        for (available, *_), (is_on,), (was_on,) in pairs
    ]
    head = _COMMAND.pack(len(changes))
    _ioctl(route, name, _FEATURES[1], head + b"".join(changes))


def _feature_blocks(route: Rtnetlink, name: str) -> list[tuple[int, ...]]:
    size = _HEAD.size - _COMMAND.size + _BLOCKS * _GET_BLOCK.size
    answer = _ioctl(route, name, _FEATURES[0], _COMMAND.pack(_BLOCKS).ljust(size, b"\0"))
    (blocks,) = _COMMAND.unpack_from(answer)
    listed = answer[_COMMAND.size :][: min(blocks, _BLOCKS) * _GET_BLOCK.size]
    return list(_GET_BLOCK.iter_unpack(listed))


def _ioctl(route: Rtnetlink, name: str, command: int, rest: bytes) -> bytes:
    """Pass the kernel a struct of `command` and `rest`. Returns `rest` as the kernel changed it."""
    passed = ctypes.create_string_buffer(_COMMAND.pack(command) + rest, _COMMAND.size + len(rest))
    encoded = name.encode(errors="surrogateescape")
    fcntl.ioctl(route, SIOCETHTOOL, _IFREQ.pack(encoded, ctypes.addressof(passed)))
    return passed.raw[_COMMAND.size :]
