"""Decodes JSON that a tenant, another program or a torn write may have made.

msgspec raises three kinds of errors for text that it cannot read. Here they are one, so that no
caller can forget one of them: a RecursionError that nothing catches ends a loop.
"""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode(content: bytes | str | msgspec.Raw, shape: type[T]) -> T:
    """The JSON value as `shape`. Raises msgspec.MsgspecError, whatever is wrong with it."""
    try:
        return msgspec.json.decode(content, type=shape)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
