"""How limits of GPUs are kept on a node: the part `gpuLimits` of config.yaml."""

from pathlib import Path
from typing import Literal

import msgspec

from gpu import layout

CONTEXT_RESERVE = 400 << 20  # bytes, for a CUDA context that is not measured yet

Action = Literal["report", "throttle", "kill"]
"""What is done about a group that uses more memory than it may."""


ManagedMemory = Literal["charge", "ignore", "deny"]
"""What the shim does with memory whose pages move between host and GPU (cuMemAllocManaged)."""

ExternalMemory = Literal["allow", "deny"]
"""Whether a process may map GPU memory of another process, which pays for it."""

UnknownVersion = Literal["deny", "warn"]
"""Whether newer versions of functions than the shim knows are handed out, and counted."""

OnError = Literal["deny", "allow"]
"""Whether a process that cannot register, or finds no region, may use the GPU, counted alone."""


class GpuLimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How limits of GPUs are kept. docs/gpu-limits.md has the table."""

    driver_root: Path = Path("/")  # of the host, where NVIDIA's driver is installed
    on_overuse: Action = "report"
    kill_unaccounted: bool = False
    context_reserve: int = CONTEXT_RESERVE  # bytes
    managed: ManagedMemory = "charge"
    external: ExternalMemory = "allow"
    unknown: UnknownVersion = "deny"
    on_error: OnError = "deny"
    alnair_metrics: bool = False  # Alnair's names of metrics, beside ours

    @property
    def policy(self) -> int:
        """The bits of layout.h that tell shims of this."""
        bits = (
            (self.managed == "ignore", layout.MANAGED_IGNORE),
            (self.managed == "deny", layout.MANAGED_DENY),
            (self.external == "deny", layout.EXTERNAL_DENY),
            (self.unknown == "warn", layout.UNKNOWN_WARN),
            (self.on_error == "allow", layout.ERROR_ALLOW),
        )
        return sum(bit for is_set, bit in bits if is_set)
