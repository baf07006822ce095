"""Reads how limits of GPUs are kept: the part `gpuLimits` of config.yaml.

docs/gpu-limits.md describes every key.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from base import documents
from base.documents import DocumentError
from deviceplugin.pools.gpu_pool import GpuPoolConfig
from gpu.settings import CONTEXT_RESERVE, Action, GpuLimitSettings

PART = "gpuLimits"
KEYS: Mapping[str, object] = {
    "driverRoot": str,
    "onOveruse": Action,
}


def parse(value: object, where: str) -> GpuLimitSettings:
    """The settings in the part `gpuLimits`. Raises DocumentError."""
    values = documents.fields(value, KEYS, where)
    fields: dict[str, Any] = {}
    if "onOveruse" in values:
        fields["on_overuse"] = values["onOveruse"]
    if "driverRoot" in values:
        fields["driver_root"] = _root(values["driverRoot"], f"{where}.driverRoot")
    return GpuLimitSettings(**fields)


def clash(pools: Sequence[GpuPoolConfig]) -> str | None:
    """Why no container could start a program that uses CUDA; None if some can.

    The first context on a GPU is charged with the reserve until the agent has measured it, so a
    limit must be above that. In mode units a container may ask for several units, so that is
    checked when it is admitted.
    """
    for number, pool in enumerate(pools):
        for n, shape in enumerate(pool.shapes if pool.mode == "slices" else ()):
            if shape.memory <= CONTEXT_RESERVE:
                return (
                    f"gpus[{number}].shapes[{n}].memory: {shape.memory >> 20}Mi is not enough for "
                    f"a CUDA context, which is charged with {CONTEXT_RESERVE >> 20}Mi: write more"
                )
    return None


def _root(text: str, where: str) -> Path:
    path = PurePosixPath(text)
    if not path.is_absolute() or ".." in path.parts:
        raise DocumentError(
            f"{where}: {documents.shown(text)}: expected the path of a directory of the host, from "
            '"/" on and without ".."'
        )
    return Path(path)
