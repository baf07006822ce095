"""Builds msgspec's decoders before a process starts threads."""

from contextlib import suppress

import msgspec


def build(of: type[msgspec.Struct] = msgspec.Struct) -> None:
    """Build a decoder for every Struct class that is imported.

    msgspec analyses a type at its first decoding, and two threads that do so at the same time
    crash the process (msgspec 0.22). Call it again after further imports.
    """
    for struct in of.__subclasses__():
        with suppress(TypeError):  # some classes cannot be decoded; they only hold values
            msgspec.json.Decoder(struct)
        build(struct)
