"""One run of the machine: start QEMU, pass the command's output on, evaluate the end."""

import os
import re
import selectors
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from . import layout

MSIZE = 512000
GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GUEST_RESULTS = Path("/run/podfabric-vm")
STARTED = b"guest: command starts"  # guest.sh writes this to the kernel's log
# A machine of two CPUs was once seen to stop for good while it booted. Normally it is up after 7 to
# 60 s, later on a busy host.
UP_WITHIN = 240.0  # seconds
BOOTS = 3


class _NotUpError(Exception):
    """The machine has not reached the command."""


COMPLAINTS = re.compile(
    r"BUG:|WARNING:|Oops|refcount_t|possible circular locking|general protection fault"
    r"|Kernel panic|kernel BUG at|INFO: task .* blocked|list_(add|del) corruption"
)
"""What the kernel says on its console when something is wrong: any of it fails the run."""


@dataclass(frozen=True)
class Machine:
    """The hardware.

    `devices` are further QEMU arguments.
    """

    cpus: int = field(default_factory=lambda: int(os.environ.get("PODFABRIC_VM_CPUS", "1")))
    """More than one is for tests of what happens at once.

    With one the emulator does without atomic instructions, and the guest without moving from CPU
    to CPU, whose caches of translated code are cold each time: a third less work.
    """
    memory_mib: int = 4096
    timeout: float = 600
    devices: Sequence[str] = ()
    append: str = field(default_factory=lambda: os.environ.get("PODFABRIC_VM_APPEND", ""))
    """Further words for the kernel command line, such as `slub_debug=FZP`."""
    kvm: bool = field(default_factory=lambda: os.environ.get("PODFABRIC_VM_KVM") == "1")
    """A stock kernel may hang in a nested KVM without a word, so it is asked for, not found."""

    def arguments(self, share: Path, output: int, wire: tuple[int, int]) -> list[str]:
        """QEMU's command line.

        The command's output goes to the file descriptor `output`; `wire` is a pair of connected
        datagram sockets, for frames.
        """
        # With 35 bits the registers of virtual functions lie below 4 GiB. Above that, in QEMU
        # 10.0.2 of Debian 12's backports, no device answers. Mailbox and carrier are missing,
        # and each probe takes 2.5 s.
        cpu = "host,arch-capabilities=off,host-phys-bits-limit=35"
        accelerator = ["-accel", "kvm", "-cpu", cpu]
        if not self.kvm:
            # Only the features that the kernel and Python need. Additional ones of `max` are slow
            # to emulate: five levels of page tables, AVX in every string function, XSAVE at every
            # switch.
            cpu = "Nehalem,phys-bits=35"
            accelerator = ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", cpu]
        return [
            *("qemu-system-x86_64", "-M", "q35", *accelerator),
            *("-smp", str(self.cpus), "-m", str(self.memory_mib)),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", str(layout.VMLINUX)),
            *("-initrd", str(layout.INITRAMFS), "-append", self._kernel_command_line()),
            *("-serial", f"file:{share / 'console.log'}"),
            *("-chardev", f"file,id=out,path=/dev/fd/{output}"),
            *("-device", "virtio-serial-pci", "-device", "virtserialport,chardev=out,nr=1"),
            *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,"
              "multidevs=remap"),
            *("-virtfs", f"local,path={share},mount_tag=share,security_model=none"),
            *_sriov(wire),
            *self.devices,
        ]  # fmt: skip

    def _kernel_command_line(self) -> str:
        words = [
            "console=ttyS0",
            "loglevel=5",  # warnings and worse; dmesg.log has all messages
            "panic=-1",  # with -no-reboot: a panic ends QEMU
            "mitigations=off",
            # Before QEMU 8, TCG translates code once for each of its virtual addresses.
            "norandmaps",
            "intel_iommu=on",
            "iommu=pt",  # only functions at vfio are translated
            # Otherwise non-Intel CPUs, or a slow host, make the kernel read the HPET, which leaves
            # the translated code at each read of the clock.
            "tsc=reliable",
            _tsc_frequency(),
            # Otherwise a slow host makes the kernel panic at boot: "timer doesn't work through
            # Interrupt-remapped IO-APIC".
            "no_timer_check",
            "nowatchdog",  # a slow host is not a lockup of the guest
            "rcupdate.rcu_cpu_stall_suppress=1",
            f"podfabric.checkout={layout.CHECKOUT}",
            f"podfabric.msize={MSIZE}",
            self.append,
        ]
        return " ".join(word for word in words if word)


def _tsc_frequency() -> str:
    """The option with the frequency of the host's TSC; "" if the host changes it.

    Without it the kernel compares the TSC with a timer. On a busy host that goes wrong, and the
    guest's clock runs several times too fast.
    """
    found = re.search(r"^cpu MHz\s*: ([\d.]+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if found is None or Path("/sys/devices/system/cpu/cpu0/cpufreq").exists():
        return ""
    return f"tsc_early_khz={1000 * float(found[1]):.0f}"


def _sriov(wire: tuple[int, int]) -> Iterator[str]:
    """Two network cards with seven virtual functions each, one at either end of a wire.

    Tests that need their driver load it: that takes seconds. The IOMMU is for vfio-pci.
    """
    yield from ("-global", "q35-pcihost.pci-hole64-size=1G")  # so that 35 bits are enough
    yield from ("-device", "intel-iommu")
    for pf, end in enumerate(wire):
        yield from ("-netdev", f"dgram,id=end{pf},local.type=fd,local.str={end}")
        yield from ("-device", f"pcie-root-port,id=port{pf},slot={pf + 1}")
        yield from ("-device", f"igb,bus=port{pf},netdev=end{pf},mac=02:1b:10:00:00:0{pf + 1}")


def run(command: Sequence[str], machine: Machine) -> int:
    """Boot the machine, run `command` in the checkout as root, and return its exit status.

    The command's output is written to stdout immediately. 124: it timed out. 125: the machine
    failed (no status, or the kernel logged a complaint). Afterwards `build/vm/results` holds the
    files that the command left in `$PODFABRIC_VM_RESULTS`, and the logs.
    """
    started = time.monotonic()
    with _share() as share:
        _write_command(share, command)
        with (share / "output.log").open("wb") as log:
            timed_out = _booted(machine, share, log.fileno())
        status = _status(share)
    if timed_out:
        _report(f"no end after {machine.timeout:.0f} s", _kernel_log("console.log")[-60:])
        return 124
    if status is None:
        _report("the machine ended without the command's status", _kernel_log("console.log")[-60:])
        return 125
    if complaint := _complaint():
        _report("the kernel complained", complaint)
        return status or 125
    _say(f"status {status} after {time.monotonic() - started:.1f} s")
    return status


def _booted(machine: Machine, share: Path, log: int) -> bool:
    """Call `_boot`, and once more if the machine does not come up."""
    for left in reversed(range(BOOTS)):
        try:
            return _boot(machine, share, log)
        except _NotUpError:
            again = "once more" if left else "it is given up"
            _say(f"the machine did not come up: {again}")
    return False


def _boot(machine: Machine, share: Path, log: int) -> bool:
    """Run QEMU until its end or the timeout; returns whether it timed out.

    Raises _NotUpError if the machine did not reach the command.
    """
    began = time.monotonic()
    deadline = began + machine.timeout
    up = False
    source, sink = os.pipe()
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    wire = (ends[0].fileno(), ends[1].fileno())
    # If this process is killed, the kernel ends QEMU with it.
    command = ["setpriv", "--pdeathsig", "KILL", "--", *machine.arguments(share, sink, wire)]
    with (
        os.fdopen(source, "rb", buffering=0) as output,
        ends[0],
        ends[1],
        subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[sink, *wire]) as qemu,
        selectors.DefaultSelector() as selector,
    ):
        os.close(sink)
        selector.register(output, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                up = up or _is_up(share)
                if not up and time.monotonic() - began > UP_WITHIN:
                    raise _NotUpError
                if not selector.select(left if up else min(left, 1.0)):
                    continue
                chunk = output.read(65536)
                if not chunk:
                    failed = qemu.wait(max(deadline - time.monotonic(), 0)) != 0
                    # QEMU sometimes fails one of its assertions while the machine boots. A panic of
                    # the guest ends QEMU with status 0: that is a result.
                    if failed and not _is_up(share):
                        raise _NotUpError
                    return False
                os.write(log, chunk)
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
        except subprocess.TimeoutExpired:
            pass
        finally:
            qemu.kill()
    return True


@contextmanager
def _share() -> Iterator[Path]:
    """A fresh directory for the guest to write to, which then becomes `build/vm/results`."""
    share = Path(tempfile.mkdtemp(prefix="share-", dir=layout.BUILD))
    share.chmod(0o755)
    try:
        yield share
    finally:
        shutil.rmtree(layout.RESULTS, ignore_errors=True)
        share.rename(layout.RESULTS)


def _is_up(share: Path) -> bool:
    """Whether the guest has started the command."""
    console = share / "console.log"
    return console.exists() and STARTED in console.read_bytes()


def _write_command(share: Path, command: Sequence[str]) -> None:
    environment = {
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PATH": GUEST_PATH,
        "PODFABRIC_VM": "1",
        "PODFABRIC_VM_RESULTS": str(GUEST_RESULTS),
    }
    variables = [f"{name}={value}" for name, value in environment.items()]
    line = shlex.join(["/usr/bin/env", "-i", *variables, *command])
    script = f"cd {shlex.quote(str(layout.CHECKOUT))} && exec {line}\n"
    (share / "command.sh").write_text(script)


def _status(share: Path) -> int | None:
    try:
        return int((share / "status").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _kernel_log(name: str) -> list[str]:
    path = layout.RESULTS / name
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _complaint() -> list[str]:
    """The kernel's first complaint with the trace that follows it.

    dmesg.log ends before the machine does, and may lack its beginning; the console has both.
    """
    for lines in map(_kernel_log, ("dmesg.log", "console.log")):
        for number, line in enumerate(lines):
            if COMPLAINTS.search(line):
                return lines[number : number + 60]
    return []


def _report(reason: str, kernel_said: Sequence[str]) -> None:
    _say(reason)
    print(*(f"  {line}" for line in kernel_said), sep="\n", file=sys.stderr)
    _say(f"the logs are in {layout.RESULTS}")


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"vm: {text}", file=sys.stderr, flush=True)
