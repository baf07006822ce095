"""The stand-in for libcuda: its table of entry points, compared with CUDA's header."""

import re
import subprocess
from importlib.metadata import files
from pathlib import Path

from tests.standin import build
from tests.standin.gpus import table

# Names that the runtimes look up and cuda.h lacks: graphics, the profiler, and parts of unknown
# use.
ELSEWHERE = re.compile(r"cu(GL|EGL|Graphics|VDPAU|Profiler|Subgrid)")


def _file(package: str, name: str) -> Path:
    [found] = [path for path in files(package) or () if path.name == name]
    return Path(str(found.locate()))


def test_every_abi_of_the_header_is_in_the_table_and_no_other() -> None:
    text = _file("nvidia-cuda-runtime", "cudaTypedefs.h").read_text()
    header = {
        (base, int(version), bool(own))
        for base, version, own in re.findall(r"\*PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)", text)
    }
    rows = {(base, version, own) for base, version, _, own in table()}
    assert len(header) > 600
    assert header <= rows
    assert all(ELSEWHERE.match(base) for base, _, _ in rows - header)


def test_symbols_are_those_of_the_header() -> None:
    text = _file("nvidia-cuda-runtime", "cuda.h").read_text()
    names = set(re.findall(r"\bcu[A-Z]\w+", text))
    for base, _, symbol, own in table():
        assert own == symbol.endswith(("_ptsz", "_ptds"))
        plain = symbol.removesuffix("_ptsz").removesuffix("_ptds")
        assert plain in names or ELSEWHERE.match(base)
        assert re.fullmatch(rf"{base}(_v\d+|WithFlags)?", plain)


def test_the_library_exports_the_tables_symbols_and_no_other() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", str(build.libraries() / "libcuda.so.1")],
        capture_output=True,
        text=True,
        check=True,
    )
    exported = {line.split()[0] for line in listed.stdout.splitlines()}
    assert exported == {symbol for _, _, symbol, _ in table()}
