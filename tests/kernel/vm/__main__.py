"""`python3 -m tests.kernel.vm prepare | run -- COMMAND... | pytest ARGUMENTS...`, in the checkout.

prepare  installs the host's tools, unpacks the kernel, builds the module and the initramfs
run      runs a command in the guest; its output is shown as it comes, its status is ours
pytest   runs the checkout's pytest in the guest; junit.xml comes back in build/vm/results.
         `pytest ARGUMENTS --and ARGUMENTS` runs two guests at once, for a guest keeps one CPU
         busy; the second's output follows the first's, its results are in build/vm/results-2.
         ARGUMENTS may begin with `--cpus N`

All three prepare what is missing first. Environment: PODFABRIC_VM_TIMEOUT (seconds, default 600),
PODFABRIC_VM_CPUS (the guest's, default 1), PODFABRIC_VM_KVM=1 (default: TCG), PODFABRIC_VM_APPEND
(more kernel command line), PODFABRIC_FAILED (see tests/conftest.py).
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from . import debian, initramfs, layout, module, qemu

PYTEST = (str(layout.PYTHON), "-m", "pytest", "--disable-plugin-autoload", "-p", "pytest_timeout")
"""Without what else is installed for it: in the guest each plugin costs seconds."""


def main(arguments: list[str]) -> int:
    """Run one of the subcommands; returns the exit status."""
    match arguments:
        case ["prepare"]:
            prepare()
            return 0
        case ["run", "--", *command] if command:
            return _run(command)
        case ["pytest", *rest]:
            return _pytest(rest)
    print(__doc__, file=sys.stderr)
    return 2


def prepare() -> None:
    """Get and build a run's needs; this costs almost nothing if all of it exists."""
    layout.BUILD.mkdir(parents=True, exist_ok=True)
    with layout.LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in layout.BUILD.glob(f"{layout.UNFINISHED}*"):
            shutil.rmtree(leftover)  # of a killed `prepare`
        debian.install(debian.TOOLS)
        debian.install_qemu()
        debian.unpack_kernel()
        debian.install(debian.compiler())
        module.build()
        initramfs.build()


def _pytest(arguments: list[str]) -> int:
    if "--and" in arguments:
        first = arguments.index("--and")
        return _both(arguments[:first], arguments[first + 1 :])
    if arguments[:1] == ["--cpus"]:
        os.environ["PODFABRIC_VM_CPUS"] = arguments[1]
        arguments = arguments[2:]
    _rewrite_assertions(arguments)
    junit = f"--junitxml={qemu.GUEST_RESULTS / 'junit.xml'}"
    failed = os.environ.get("PODFABRIC_FAILED")
    variables = ["env", f"PODFABRIC_FAILED={qemu.GUEST_RESULTS / 'failed'}"] if failed else []
    status = _run([*variables, *PYTEST, junit, *arguments])
    if failed and (there := layout.RESULTS / "failed").exists():
        with Path(failed).open("a") as file:
            file.writelines(f"in-vm {test}\n" for test in there.read_text().splitlines())
    return status


def _both(here: list[str], beside: list[str]) -> int:
    prepare()
    command = [sys.executable, "-m", "tests.kernel.vm", "pytest", *beside]
    environment = {**os.environ, "PODFABRIC_VM_NAME": "-2"}
    with (
        (layout.BUILD / "beside.log").open("w+b") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as other,
    ):
        try:
            status = _pytest(here)
            status = other.wait() or status
        finally:
            other.terminate()  # a SIGTERM ends its QEMU too
        log.seek(0)
        sys.stdout.buffer.write(log.read())
        sys.stdout.buffer.flush()
    return status


def _run(command: list[str]) -> int:
    prepare()
    compile_python()
    timeout = float(os.environ.get("PODFABRIC_VM_TIMEOUT", "600"))
    return qemu.run(command, qemu.Machine(timeout=timeout))


def compile_python() -> None:
    """Byte-compile on the host, because the guest would compile again in each run and lose the
    result."""
    if layout.PYTHON.exists():
        directories = [str(path) for path in layout.CHECKOUT.iterdir() if path.is_dir()]
        skipped = r"/(\.git|build|__pycache__)/"
        command = [str(layout.PYTHON), "-m", "compileall", "-q", "-x", skipped, *directories]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)


def _rewrite_assertions(arguments: list[str]) -> None:
    """Let pytest compile the test modules with its asserts on the host, like `compile_python`."""
    environment = {**os.environ, "PODFABRIC_VM": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [*PYTEST, "--collect-only", "-qq", *arguments]
    subprocess.run(
        command, check=False, env=environment, cwd=layout.CHECKOUT, stdout=subprocess.DEVNULL
    )


def end(signum: int, frame: FrameType | None) -> NoReturn:
    """Turn a request to end into an exception, so that QEMU ends too and the logs are kept."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    sys.exit(main(sys.argv[1:]))
