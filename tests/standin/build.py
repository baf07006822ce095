"""Compiles the stand-ins with gcc, once for each content of their sources."""

import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build/standin"
FLAGS = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"]
LINK = ["-shared", "-pthread", "-Wl,-z,defs", "-Wl,-z,now"]

OWN_CALLS = "-Wl,-Bsymbolic"  # calls of a library's own exports cannot be interposed

# Path, folders of sources, further sources, further flags
LIBRARIES = (
    ("libcuda.so.1", ("node", "cuda"), (), (OWN_CALLS,)),
    ("interposable/libcuda.so.1", ("node", "cuda"), (), ()),
    ("libnvidia-ml.so.1", ("node", "nvml"), (), (OWN_CALLS,)),
    ("liboracle.so", ("node",), ("oracle.c",), (OWN_CALLS,)),
)


@functools.cache
def libraries() -> Path:
    """The directory of the built libraries, for LD_LIBRARY_PATH.

    Its directory `interposable` has a libcuda whose calls of its own exports another library can
    interpose, like those of a library linked without -Bsymbolic.
    """
    sources = sorted(path for path in HERE.rglob("*") if path.suffix in (".c", ".h", ".def"))
    content = hashlib.sha256(repr((FLAGS, LINK, LIBRARIES)).encode())
    for path in sources:
        content.update(f"{path.relative_to(HERE)}\0".encode() + path.read_bytes())
    wanted = BUILT / content.hexdigest()[:16]
    if not wanted.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as made:
            _compile(Path(made))
            _place(Path(made), wanted)
    return wanted


def _compile(directory: Path) -> None:
    include = [f"-I{HERE / 'node'}", f"-I{HERE / 'cuda'}"]
    folders_of_sources = ("node", "cuda", "nvml")
    objects = {folder: _objects(folder, include, directory) for folder in folders_of_sources}
    for path, folders, further, flags in LIBRARIES:
        (directory / path).parent.mkdir(exist_ok=True)
        parts = [name for folder in folders for name in objects[folder]]
        parts += [str(HERE / source) for source in further]
        output = ["-o", str(directory / path), f"-Wl,-soname,{Path(path).name}"]
        command = ["gcc", *FLAGS, *include, *parts, *LINK, *flags, *output]
        subprocess.run(command, check=True)
    shutil.rmtree(directory / "objects")


def _objects(folder: str, include: list[str], directory: Path) -> list[str]:
    made = directory / "objects" / folder
    made.mkdir(parents=True)
    sources = [str(path) for path in sorted((HERE / folder).glob("*.c"))]
    subprocess.run(["gcc", *FLAGS, *include, "-c", *sources], cwd=made, check=True)
    return [str(path) for path in sorted(made.glob("*.o"))]


def _place(made: Path, wanted: Path) -> None:
    """Move the directory into place, unless another worker was faster."""
    made.chmod(0o755)
    copy = made.with_name(f"{made.name}.done")
    shutil.copytree(made, copy)
    try:
        copy.rename(wanted)
    except OSError:
        shutil.rmtree(copy)
