"""Decoders, built before there are threads."""

from contextlib import suppress

import msgspec


def build(of: type[msgspec.Struct] = msgspec.Struct) -> None:
    """Have msgspec know every Struct that is there by now.

    It works out a type at its first decoding, and two threads that do so at the same time crash
    the process (msgspec 0.22). Again, for what was imported since, is fine.
    """
    for shape in of.__subclasses__():
        with suppress(TypeError):  # some cannot be decoded, and are for values alone
            msgspec.json.Decoder(shape)
        build(shape)
