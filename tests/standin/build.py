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
LINK = ["-shared", "-pthread", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-Bsymbolic"]

# File name, folders of sources, further sources
LIBRARIES = (
    ("libcuda.so.1", ("node", "cuda"), ()),
    ("libnvidia-ml.so.1", ("node", "nvml"), ()),
    ("liboracle.so", ("node",), ("oracle.c",)),
)


@functools.cache
def libraries() -> Path:
    """The directory of the built libraries, to be put into LD_LIBRARY_PATH."""
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
    for name, folders, further in LIBRARIES:
        sources = [path for folder in folders for path in sorted((HERE / folder).glob("*.c"))]
        sources += [HERE / source for source in further]
        include = [f"-I{HERE / 'node'}", f"-I{HERE / 'cuda'}"]
        output = ["-o", str(directory / name), f"-Wl,-soname,{name}"]
        command = ["gcc", *FLAGS, *include, *map(str, sources), *LINK, *output]
        subprocess.run(command, check=True)
    stress = ["-pthread", str(HERE / "stress.c"), f"-I{HERE / 'cuda'}", f"-L{directory}"]
    output = ["-l:libcuda.so.1", "-o", str(directory / "stress")]
    subprocess.run(["gcc", *FLAGS, *stress, *output], check=True)


def _place(made: Path, wanted: Path) -> None:
    """Another worker may have been first."""
    made.chmod(0o755)
    copy = made.with_name(f"{made.name}.done")
    shutil.copytree(made, copy)
    try:
        copy.rename(wanted)
    except OSError:
        shutil.rmtree(copy)
