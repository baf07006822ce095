"""How limits of GPUs are kept on a node: the part `gpuLimits` of config.yaml."""

from pathlib import Path
from typing import Literal

import msgspec

CONTEXT_RESERVE = 400 << 20  # bytes, for a CUDA context that is not measured yet

Action = Literal["report", "kill"]
"""What is done about a group that uses more memory than it may."""


class GpuLimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How limits of GPUs are kept. docs/gpu-limits.md has the table."""

    driver_root: Path = Path("/")  # of the host, where NVIDIA's driver is installed
    on_overuse: Action = "report"
