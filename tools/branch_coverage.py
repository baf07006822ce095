"""Branch coverage of a command and of every Python process that it starts, in virtual machines too.

`python -m tools.branch_coverage [--append] COMMAND...` prints the coverage of each package, and the
error paths that never ran. --append adds to the coverage of an earlier command. Coverage of a
killed process is lost, and so is that of containers: the image has no coverage.py.
"""

import argparse
import ast
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage

from tests.kernel.vm import layout, qemu
from tools.make_cni import MEASURED

CHECKOUT = layout.CHECKOUT
PRODUCT = (
    "agent",
    "base",
    "cli",
    "cni",
    "deviceplugin",
    "gpu",
    "host",
    "ipam",
    "kube",
    "node",
    "policy",
)
DIRECTORY = CHECKOUT / "build/coverage"
DATA = DIRECTORY / "data"
CONFIGURATION = DIRECTORY / "configuration"
REPORT = DIRECTORY / "report.json"

# The content of MEASURED: the variables that coverage.py's own file, `a1_coverage.pth`, reads.
# Tests start processes with environments of their own, which lack these variables.
_MEASURED = """\
import os; os.environ.update(COVERAGE_PROCESS_START={configuration!r}, \
COVERAGE_FILE={guest!r} if os.path.isdir({share!r}) else {host!r})
"""
_CONFIGURATION = """\
[run]
branch = true
parallel = true
patch = _exit
include = {include}
"""
_COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def main() -> int:
    """Run the command, print the report, and give the command's status."""
    parser = argparse.ArgumentParser(prog="tools.branch_coverage")
    parser.add_argument("--append", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.append:
        shutil.rmtree(DIRECTORY, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that MEASURED is removed
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    DIRECTORY.chmod(0o1777)  # for processes that are not root
    include = ",".join(f"{CHECKOUT / package}/*" for package in PRODUCT)
    CONFIGURATION.write_text(_CONFIGURATION.format(include=include))
    MEASURED.write_text(
        _MEASURED.format(
            configuration=str(CONFIGURATION),
            share=str(qemu.GUEST_RESULTS),
            guest=str(qemu.GUEST_RESULTS / DATA.name),
            host=str(DATA),
        )
    )
    try:
        status = subprocess.run(arguments.command, cwd=CHECKOUT, check=False).returncode
    finally:
        MEASURED.unlink()
    _report(shlex.join(arguments.command))
    return status


def _report(command: str) -> None:
    measured = coverage.Coverage(data_file=str(DATA), config_file=str(CONFIGURATION))
    measured.load()
    measured.combine([str(path) for path in (DIRECTORY, *layout.BUILD.glob("results*"))])
    modules = [str(path) for path in _modules()]
    measured.get_data().touch_files(modules)  # includes modules that no process has imported
    measured.save()
    measured.json_report(modules, outfile=str(REPORT))
    files = json.loads(REPORT.read_text())["files"]
    print(f"\nbranch coverage of: {command}")
    for package in (*PRODUCT, "all"):
        counts: Counter[str] = Counter()
        for path, file in files.items():
            if package == "all" or path.startswith(f"{package}/"):
                counts.update({key: file["summary"][key] for key in _COUNTS})
        lines, covered, branches, taken = (counts[key] for key in _COUNTS)
        print(
            f"{package:12} lines {covered / lines:6.1%} of {lines:5}"
            f"   branches {taken / branches:6.1%} of {branches:5}"
        )
    print("\nerror paths that were not covered:")
    for path, file in sorted(files.items()):
        text = (CHECKOUT / path).read_text()
        lines = text.splitlines()
        for number in _error_paths(ast.parse(text), set(file["missing_lines"])):
            print(f"{path}:{number}: {lines[number - 1].strip()}")


def _modules() -> Iterator[Path]:
    for package in PRODUCT:
        for path in (CHECKOUT / package).rglob("*.py"):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):  # generated
                yield path


def _error_paths(node: ast.AST, missing: set[int]) -> Iterator[int]:
    """Lines that raise an exception, or begin to handle one, and never ran."""
    for child in ast.iter_child_nodes(node):
        first: Any = child.body[0] if isinstance(child, ast.ExceptHandler) else child
        if isinstance(child, ast.ExceptHandler | ast.Raise) and first.lineno in missing:
            yield child.lineno
        else:
            yield from _error_paths(child, missing)


if __name__ == "__main__":
    sys.exit(main())
