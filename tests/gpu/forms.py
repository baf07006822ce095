"""Structures that calls of the driver take."""

from tests.standin.driver import packed

FLOAT, ON_DEVICE, ON_HOST = 0x20, 1, 2
ON_HOST_NODE, ON_OWN_HOST_NODE, IN_DOMAIN = 3, 4, 6


def on_device(gpu: int, kind: int = ON_DEVICE) -> bytes:
    """CUmemAllocationProp of pinned memory."""
    return packed("4iQQ", 1, 1, kind, gpu, 0, 0)


def pool_on(gpu: int, kind: int = ON_DEVICE) -> bytes:
    """CUmemPoolProps."""
    return packed("4iQQ56x", 1, 0, kind, gpu, 0, 0)


def array(width: int, height: int, depth: int = 0, flags: int = 0, form: int = FLOAT) -> bytes:
    """CUDA_ARRAY3D_DESCRIPTOR of one channel."""
    return packed("3QiII4x", width, height, depth, form, 1, flags)
