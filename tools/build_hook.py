"""Compile gpu-limit, the hook of container runtimes: a static executable."""

import argparse
from pathlib import Path

from tools.build_launcher import FLAGS
from tools.compiling import CHECKOUT, compiled

SOURCE = CHECKOUT / "gpu/hook/gpu_limit.c"
NAME = "gpu-limit"


def build(target: str = "", directory: Path | None = None) -> Path:
    """The hook for this machine, or for a GNU triplet (aarch64-linux-gnu); its path.

    It is beside the libraries of gpu/shim, with which it is installed. Raises SystemExit, after the
    compiler's own words, if it does not compile.
    """
    compiler = f"{target}-gcc" if target else "gcc"
    if directory is None:
        directory = CHECKOUT / "build/gpu" / "-".join(filter(None, ("shim", target)))
    return compiled([compiler, *FLAGS, str(SOURCE)], directory / NAME, [SOURCE])


def main() -> None:
    """Build for another machine, or into a directory: the image is made so."""
    parser = argparse.ArgumentParser(description="compile the hook gpu-limit")
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--target", default="", help="a GNU triplet, as aarch64-linux-gnu")
    arguments = parser.parse_args()
    print(build(arguments.target, arguments.directory))


if __name__ == "__main__":
    main()
