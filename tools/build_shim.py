"""Compile the libraries of gpu/shim, which replace NVIDIA's in a container.

Each library is linked with the library that it replaces, under its name in the container. The
original does not exist on the build machine: the linker gets an empty library of that name.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools.compiling import CHECKOUT, compiled

SOURCES = CHECKOUT / "gpu/shim"
ACCOUNT = ("group", "slots", "join", "say", "table")
DRIVER = ("addresses", "arrays", "contexts", "devices", "graphs", "handles", "launches", "memory")
COMPUTE = ("gate", "estimates", "timings")
# Output, the name that programs load, the name of the original library, sources
LIBRARIES = (
    (
        "libpfcuda.so",
        "libcuda.so.1",
        "libpfcuda-real.so.1",
        ("stubs", *ACCOUNT, *DRIVER, *COMPUTE, "pools"),
    ),
    (
        "libpfnvml.so",
        "libnvidia-ml.so.1",
        "libpfnvidia-ml-real.so.1",
        ("nvml", *ACCOUNT),
    ),
)
FLAGS = [
    *("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"),
    *("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2"),
    *("-Wl,-z,defs,-z,now,-z,relro,-z,noexecstack,-z,nodelete", "-Wl,-Bsymbolic"),
    "-Wl,--enable-new-dtags,-rpath,/usr/lib/podfabric:$ORIGIN",
    "-Wl,--no-as-needed",
]
# Old C libraries have these functions in separate files; new ones have empty files of these names.
OLD_GLIBC = ("libdl.so.2", "libpthread.so.0")


def build(
    target: str = "", directory: Path | None = None, defines: Sequence[str] = ()
) -> list[Path]:
    """Build the libraries for this machine, or for a GNU triplet (aarch64-linux-gnu); returns their
    paths.

    `defines` are those of tests: PF_DIRECTORY="…" (layout.h), PF_STEPS (process.h).
    Raises SystemExit, after the compiler's messages, if one does not compile.
    """
    compiler = f"{target}-gcc" if target else "gcc"
    if directory is None:
        directory = CHECKOUT / "build/gpu" / "-".join(filter(None, ("shim", target)))
    paths = []
    for output, soname, real, names in LIBRARIES:
        empty = [_empty(compiler, directory / "empty" / name) for name in (real, *OLD_GLIBC)]
        sources = [SOURCES / f"{name}.c" for name in names]
        command = [compiler, *FLAGS, f"-Wl,-soname,{soname}", *(f"-D{one}" for one in defines)]
        command += [str(path) for path in (*sources, *empty)]
        paths.append(compiled(command, directory / output, SOURCES.glob("*.[ch]")))
    return paths


def _empty(compiler: str, path: Path) -> Path:
    flags = ["-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-x", "c", "/dev/null"]
    return compiled([compiler, *flags], path, ())


def main() -> None:
    """Build for another machine, or into a given directory, as the image's build does."""
    parser = argparse.ArgumentParser(description="compile the libraries of gpu/shim")
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--target", default="", help="a GNU triplet, as aarch64-linux-gnu")
    arguments = parser.parse_args()
    for path in build(arguments.target, arguments.directory):
        print(path)


if __name__ == "__main__":
    main()
