"""Decodes JSON from tenants, from other programs, and from files that may be damaged.

msgspec raises MsgspecError, RecursionError or UnicodeDecodeError for text that it cannot decode.
This module raises only MsgspecError, so that a caller catches every defect.
"""

from contextlib import suppress
from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode(content: bytes | str | msgspec.Raw, shape: type[T]) -> T:
    """Decode JSON into a value of the type `shape`. Raises msgspec.MsgspecError for any defect."""
    try:
        return msgspec.json.decode(content, type=shape)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None


def build_decoders(of: type[msgspec.Struct] = msgspec.Struct) -> None:
    """Build a decoder for every imported Struct class, before threads start.

    msgspec analyses a type when it first decodes the type. The process crashes if two threads do
    this at the same time (msgspec 0.22). Call this again after further imports.
    """
    for struct in of.__subclasses__():
        with suppress(TypeError):  # a class that only holds values has no decoder
            msgspec.json.Decoder(struct)
        build_decoders(struct)
