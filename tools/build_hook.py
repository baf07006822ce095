"""Compile gpu-limit, the hook of container runtimes: a static executable."""

from pathlib import Path

from tools.build_launcher import FLAGS
from tools.compiling import CHECKOUT, compiled

SOURCE = CHECKOUT / "gpu/hook/gpu_limit.c"


def build(target: str = "", output: Path | None = None) -> Path:
    """The hook for this machine, or for a GNU triplet (aarch64-linux-gnu); its path.

    Raises SystemExit, after the compiler's own words, if it does not compile.
    """
    compiler = f"{target}-gcc" if target else "gcc"
    if output is None:
        output = CHECKOUT / "build/gpu" / "-".join(filter(None, ("gpu-limit", target)))
    return compiled([compiler, *FLAGS, str(SOURCE)], output, [SOURCE])
