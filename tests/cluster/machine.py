"""The node's virtual machine, in a separate process: `python -m tests.cluster.machine ...`.

It ends at SIGTERM, or when the server in the guest ends. Its status is 125 if the guest's kernel
logged a complaint.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

SERVER_PORT = 7070
FOREVER = 6 * 3600.0  # seconds
HERE = Path(__file__).parent


def arguments(disk: Path, server_port: int, kubelet_port: int) -> list[str]:
    """The command that runs the machine, whose ports are reached at these ports of the loopback."""
    module = ["-m", "tests.cluster.machine"]
    return [sys.executable, *module, str(disk), str(server_port), str(kubelet_port)]


def main(disk: str, server_port: str, kubelet_port: str) -> int:
    """Run the machine until it ends."""
    from tests.kernel.vm import __main__ as vm
    from tests.kernel.vm import qemu

    signal.signal(signal.SIGTERM, vm.end)
    forwards = {server_port: SERVER_PORT, kubelet_port: kubelet_port}
    network = "".join(f",hostfwd=tcp:127.0.0.1:{port}-:{to}" for port, to in forwards.items())
    devices: Sequence[str] = [
        *("-netdev", f"user,id=management{network}"),
        *("-device", "virtio-net-pci,netdev=management"),
        *("-drive", f"file={disk},if=none,id=disk,format=raw,cache=unsafe"),
        *("-device", "virtio-blk-pci,drive=disk"),
    ]
    cpus = int(os.environ.get("PODFABRIC_VM_CPUS", "2"))
    machine = qemu.Machine(cpus=cpus, memory_mib=6144, timeout=FOREVER, devices=devices)
    vm.prepare()
    vm.compile_python()
    command = ["/bin/sh", str(HERE / "node.sh"), str(HERE / "node_server.py"), str(SERVER_PORT)]
    return qemu.run(command, machine)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
