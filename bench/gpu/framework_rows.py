"""Rows of bench/gpu.sh that need NVIDIA's tools, PyTorch or CuPy. They report missing programs."""

import json
import os
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

from bench.gpu.place import CONTEXT, LIMIT, PIECE, BenchGroup, Place, finished, line
from tests.standin.gpus import GIB, MIB

TOLERANCE = 0.01  # of the limit, plus 64 MiB: the watch tolerates that much
FRAMEWORKS = Path(__file__).with_name("frameworks.py")
NO_GPU = "it needs a real GPU"
ALLOCATORS = {
    "plain": "",
    "expandable segments": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}
TOOLS = {
    "compute-sanitizer": ("compute-sanitizer", "--error-exitcode", "9"),
    "ncu": (
        "ncu",
        "--target-processes",
        "all",
        "--launch-count",
        "5",
    ),  # else each of 2000 is replayed
    "cuda-gdb": ("cuda-gdb", "-batch", "-ex", "run", "--args"),
}


class ToolRows:
    """Rows that need more than a driver."""

    def __init__(self, place: Place, *, short: bool) -> None:
        self.place = place
        self.short = short
        self.python = os.environ.get("BENCH_PYTHON", "python3")

    def g3t(self) -> None:
        """PyTorch's three allocators stop at the limit, and show it as the total."""
        if why := self._lacks("torch"):
            line("G3", "PyTorch at a limit", "-", "the limit", why)
            return
        for name, conf in ALLOCATORS.items():
            group = self._group(f"g3-{name.split()[0]}")
            found = self._framework(group, "fill", PYTORCH_CUDA_ALLOC_CONF=conf)
            well = (
                0.9 * LIMIT <= found["bytes"] + CONTEXT <= 1.05 * LIMIT and found["total"] == LIMIT
            )
            value = f"{found['bytes'] / GIB:.2f} GiB, total {found['total'] / GIB:.2f} GiB"
            line("G3", f"PyTorch, {name}, at {LIMIT / GIB:.0f} GiB", value, "the limit", well)

    def g4(self) -> None:
        """Try CuPy's pools, managed memory and textures, and a PyTorch graph that allocates."""
        if why := self._lacks("cupy"):
            line("G4", "CuPy: pools, managed, textures", "-", "the limit", why)
        else:
            for kind, got in self._framework(self._group("g4"), "cupy").items():
                well = 0.9 * LIMIT <= got + CONTEXT <= 1.05 * LIMIT
                line("G4", f"CuPy, {kind}", f"{got / GIB:.2f} GiB", "the limit", well)
        if why := self._lacks("torch"):
            line("G4", "PyTorch: a graph that allocates", "-", "right results", why)
        else:
            well = self._framework(self._group("g4-graph"), "graph")["ok"]
            line("G4", "PyTorch: a graph that allocates", str(well), "right results", well)

    def g5(self) -> None:
        """Compare nvidia-smi's figure with the limit, for a process that has filled its group."""
        if why := self._lacks_tool("nvidia-smi"):
            line("G5", "physical use at a limit", "-", "the limit", why)
            return
        process = self._group("g5").start("fill", "alloc", str(PIECE))
        assert process.stdout is not None
        got = int(process.stdout.readline().split()[0])
        query = [
            "nvidia-smi",
            "--query-compute-apps=pid,used_memory",
            "--format=csv,noheader,nounits",
        ]
        rows = subprocess.check_output(query, text=True).splitlines()
        finished(process)
        used = {int(pid): int(mib) * MIB for pid, mib in (row.split(",") for row in rows)}
        mine = used.get(process.pid) or max(used.values(), default=0)  # in a pid namespace
        value = f"{mine / GIB:.2f} GiB, of which {(mine - got) / MIB:.0f} MiB are not allocations"
        well = 0 < mine <= LIMIT * (1 + TOLERANCE) + PIECE
        line("G5", f"physical use at {LIMIT / GIB:.0f} GiB", value, "the limit, 1 %, 64 MiB", well)

    def g11(self) -> None:
        """Check that NVIDIA's tools start a program that uses the shim."""
        for name, command in TOOLS.items():
            if why := self._lacks_tool(name):
                line("G11", f"{name} over the shim", "-", "starts", why)
                continue
            words = [*command, str(self.place.program), "launch", "2000"]
            try:
                finished(self._group(f"g11-{name}").popen(words), patience=60)
                line("G11", f"{name} over the shim", "it ran", "starts", True)
            except RuntimeError as error:
                line("G11", f"{name} over the shim", str(error), "starts", False)

    def g12(self) -> None:
        """Measure a training step of a transformer, alternately with and without the shim."""
        if why := self._lacks("torch"):
            line("G12", "training step with the whole GPU", "-", "x1.01", why)
            return
        group = self.place.group("g12")
        count = "5" if self.short else "30"
        ratios = []
        for _ in range(2 if self.short else 5):
            with_shim = self._framework(group, "step", count)
            ratios.append(with_shim / self._framework(group, "step", count, shim=False))
        ratio = statistics.median(ratios)
        line("G12", "training step with the whole GPU", f"x{ratio:.3f}", "x1.01", ratio <= 1.01)

    def _group(self, name: str) -> BenchGroup:
        return self.place.group(name, memory=LIMIT, context=CONTEXT)

    def _framework(
        self, group: BenchGroup, *words: str, shim: bool = True, **variables: str
    ) -> Any:  # noqa: ANN401 - JSON
        command = [self.python, str(FRAMEWORKS), *words]
        return json.loads(finished(group.popen(command, shim=shim, **variables)))

    def _lacks(self, module: str) -> str:
        """The reason why a framework cannot be used; "" if it can."""
        if self.place.real is None:
            return NO_GPU
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        done = subprocess.run([self.python, "-c", code], check=False)
        return "" if done.returncode == 0 else f"{self.python} has no {module}"

    def _lacks_tool(self, name: str) -> str:
        if self.place.real is None:
            return NO_GPU
        return "" if shutil.which(name) else f"{name} is not installed"
