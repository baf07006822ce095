"""The uncompressed kernel inside a bzImage: under TCG, unpacking it costs the guest 4 s a boot."""

import lzma
import struct
import subprocess
from pathlib import Path

# Offsets in the setup header (kernel: Documentation/arch/x86/boot.rst).
SETUP_SECTS = 0x1F1
PAYLOAD_OFFSET = 0x248
PAYLOAD_LENGTH = 0x24C

XZ_MAGIC = b"\xfd7zXZ\0"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def extract(image: Path, vmlinux: Path) -> None:
    """Write the ELF kernel of `image`, which QEMU boots by its PVH entry point."""
    content = image.read_bytes()
    sectors = content[SETUP_SECTS] or 4
    (offset,) = struct.unpack_from("<I", content, PAYLOAD_OFFSET)
    (length,) = struct.unpack_from("<I", content, PAYLOAD_LENGTH)
    start = (sectors + 1) * 512 + offset
    payload = content[start : start + length]  # followed by the unpacked size, 4 bytes
    if payload.startswith(XZ_MAGIC):
        vmlinux.write_bytes(lzma.LZMADecompressor().decompress(payload))
    elif payload.startswith(ZSTD_MAGIC):
        command = ["zstd", "--decompress", "--stdout", "--quiet"]
        done = subprocess.run(command, check=True, input=payload[:-4], stdout=subprocess.PIPE)
        vmlinux.write_bytes(done.stdout)
    else:
        raise SystemExit(f"vm: {image} is compressed in an unknown way: {payload[:6]!r}")
