"""Every table."""

import tempfile
from pathlib import Path

from bench import attach, cpu, devices, ipam

if __name__ == "__main__":
    attach.measure()
    cpu.measure()
    with tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp") as name:
        ipam.library(Path(name), rounds=30)
    devices.measure()
