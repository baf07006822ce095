"""Compile the launcher, a static executable, if its sources or flags have changed."""

import argparse
from pathlib import Path

from tools.compiling import CHECKOUT, compiled

SOURCES = CHECKOUT / "cni/launcher"
FLAGS = [
    *("-std=gnu11", "-O2", "-static", "-s"),
    *("-Wall", "-Wextra", "-Werror"),
    *("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now,-z,noexecstack"),
]


def build(target: str = "", output: Path | None = None) -> Path:
    """Build the launcher for this machine, or for a GNU triplet (aarch64-linux-gnu); returns its
    path.

    Raises SystemExit, after the compiler's messages, if it does not compile.
    """
    compiler = f"{target}-gcc" if target else "gcc"
    if output is None:
        output = CHECKOUT / "build/cni" / "-".join(filter(None, ("launcher", target)))
    sources = sorted(SOURCES.glob("*.c"))
    command = [compiler, *FLAGS, *(str(source) for source in sources)]
    return compiled(command, output, SOURCES.glob("*.[ch]"))


def main() -> None:
    """Build for another machine, or to a given path, as the image's build does."""
    parser = argparse.ArgumentParser(description="compile the launcher")
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--target", default="", help="a GNU triplet, as aarch64-linux-gnu")
    arguments = parser.parse_args()
    print(build(arguments.target, arguments.output))


if __name__ == "__main__":
    main()
