"""Limits for tests."""

from gpu.limits.limits_file import Limit

A = "GPU-00000000-0000-0000-0000-00000000000a"
B = "GPU-00000000-0000-0000-0000-00000000000b"
GIB = 1 << 30


def limit(uuid: str = A, memory: int = GIB, share: float = 1.0) -> Limit:
    return Limit(uuid, memory, share)
