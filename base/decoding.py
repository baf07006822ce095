"""Decodes JSON that a tenant, another program or a torn write may have made.

msgspec raises three kinds of errors for text that it cannot read. This module raises one kind, so
that no caller forgets another. An uncaught RecursionError would end a loop.
"""

from contextlib import suppress
from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode(content: bytes | str | msgspec.Raw, shape: type[T]) -> T:
    """The JSON value as `shape`. Raises msgspec.MsgspecError for any defect."""
    try:
        return msgspec.json.decode(content, type=shape)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None


def build_decoders(of: type[msgspec.Struct] = msgspec.Struct) -> None:
    """Build a decoder for every imported Struct class, before threads start.

    msgspec analyses a type at its first decoding, and two threads that do so at the same time crash
    the process (msgspec 0.22). Call it again after further imports.
    """
    for struct in of.__subclasses__():
        with suppress(TypeError):  # some classes cannot be decoded; they only hold values
            msgspec.json.Decoder(struct)
        build_decoders(struct)
