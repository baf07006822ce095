"""Settings for the limits of GPUs: `gpuLimits` of config.yaml (docs/gpu-limits.md)."""

from pathlib import Path
from typing import Literal

import msgspec

CONTEXT_RESERVE = 400 << 20  # bytes charged for a CUDA context until it is measured

Action = Literal["report", "kill"]  # for a group that uses more memory than its limit


class GpuLimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How this node enforces limits."""

    driver_root: Path = Path("/")  # the host's directory where NVIDIA's driver is installed
    on_overuse: Action = "report"
