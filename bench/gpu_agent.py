"""What the agent's part of GPU limits needs: CPU time, and memory for each container.

    .venv/bin/python -m bench.gpu_agent [--tenants 64] [--seconds 20]

Eight GPUs of the stand-in for the driver, of which the containers have equal parts. Each container
has a process with a context. The service runs in this process: its watch looks each second, and
corrects shares each half second.
"""

import argparse
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from base.pod import Pod
from bench.gpu_place import Place
from gpu.group_limits import Limit
from gpu.service import GpuService
from gpu.settings import GpuLimitSettings
from gpu.tenants import Tenant
from tests.host.gpu.driver_root import environment_of_tenant, installed, paths_with
from tests.host.gpu.pods import made_container
from tests.standin.gpus import GIB, MIB, Behaviour, Node, gpus
from tests.unit.gpu.groups import PlainRooms

EIGHT = gpus(8, bytes=64 * GIB, context_bytes=300 * MIB)


def _resident() -> int:
    """KiB of this process."""
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    ]
    return int(line.split()[1])


def _service(directory: Path, tenants: list[Tenant]) -> GpuService:
    settings = GpuLimitSettings(driver_root=directory / "driver")
    return GpuService(paths_with(directory, EIGHT), lambda: tenants, settings, rooms=PlainRooms())


def _waiting(node: Node, device: int, program: Path, stack: ExitStack) -> "subprocess.Popen[bytes]":
    """A process with a context on a device, which waits."""
    process = stack.enter_context(
        subprocess.Popen(
            [str(program), "fill", "alloc", str(65 * GIB)],  # which it does not get
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment_of_tenant(node), "CUDA_VISIBLE_DEVICES": str(device)},
        )
    )
    stack.callback(process.kill)
    return process


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description="Measure the agent's part of GPU limits.")
    parser.add_argument("--tenants", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    arguments = parser.parse_args()
    count: int = arguments.tenants
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        (directory / "bench").mkdir()
        place = Place(directory / "bench", None)
        stack.callback(place.close)
        node = stack.enter_context(installed(directory / "driver", EIGHT, Behaviour()))
        tenants: list[Tenant] = []
        service = _service(directory, tenants)
        stack.callback(service.close)
        service.start()
        before = _resident()
        for number in range(count):
            container = stack.enter_context(made_container())
            uid = container.container.pod_uid
            tenants.append(
                Tenant(group=f"g{number}", pod=Pod("default", f"p{number}", uid), container="main")
            )
            device = number % len(EIGHT)
            limit = Limit(EIGHT[device].uuid, GIB, len(EIGHT) / count)
            service.groups.make(f"g{number}", [limit])
            container.take(_waiting(node, device, place.program, stack).pid)
        time.sleep(3)
        began, clock = time.process_time(), time.monotonic()
        time.sleep(arguments.seconds)
        spent = (time.process_time() - began) / (time.monotonic() - clock)
        grown = (_resident() - before) / count
    print(f"{count} containers on 8 GPUs: {spent:.1%} of a CPU, {grown:.0f} KiB for each")


if __name__ == "__main__":
    main()
