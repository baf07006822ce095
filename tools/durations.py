"""Compares a suite's durations with the recorded ones: `python -m tools.durations SUITE`.

`--record` writes the durations of each suite's last run to RECORDED. They come from pytest's JUnit
files. Machines differ and are busy, so a longer duration is printed and fails nothing.
"""

import json
import sys
from collections import defaultdict
from xml.etree import ElementTree

from tools.compiling import CHECKOUT

RECORDED = CHECKOUT / "tests/durations.json"
BUILD = CHECKOUT / "build"
REPORTS = {
    "host": [BUILD / "durations/host.xml"],
    "kernel": [BUILD / "vm/results/junit.xml", BUILD / "vm/results-2/junit.xml"],
    "nodes": [BUILD / "durations/nodes.xml"],
    "api": [BUILD / "durations/api.xml"],
}
"""The reports of each suite. Those of one suite were written side by side."""
SHORT = 5  # seconds: quicker files are not recorded

Durations = tuple[float, dict[str, float]]
"""Seconds of a suite from its start to its end, and of each file's tests together."""


def main() -> None:
    """Show a suite's durations, or record all."""
    if sys.argv[1:] == ["--record"]:
        record()
    elif len(sys.argv) == 2 and sys.argv[1] in REPORTS:
        show(sys.argv[1])
    else:
        raise SystemExit(f"usage: python -m tools.durations --record|{'|'.join(REPORTS)}")


def measured(suite: str) -> Durations:
    """The durations of the suite's last run."""
    whole, files = 0.0, defaultdict[str, float](float)
    for report in REPORTS[suite]:
        if report.exists():
            for tests in ElementTree.parse(report).iter("testsuite"):
                whole = max(whole, float(tests.attrib["time"]))
                for test in tests.iter("testcase"):
                    file = f"{test.attrib['classname'].replace('.', '/')}.py"
                    files[file] += float(test.attrib["time"])
    return whole, files


def record() -> None:
    """Record the last runs; suites that did not run keep their durations."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for suite in REPORTS:
        whole, files = measured(suite)
        if whole:
            slow = {file: round(seconds) for file, seconds in files.items() if seconds >= SHORT}
            recorded[suite] = {"seconds": round(whole), "files": slow}
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def show(suite: str) -> None:
    """Print the suite's duration, and the files that take twice as long as recorded.

    If the machine makes the whole suite slower than recorded, each file may be slower too.
    """
    whole, files = measured(suite)
    recorded = json.loads(RECORDED.read_text()).get(suite) if RECORDED.exists() else None
    if recorded is None:
        print(f"suite {suite}: {whole:.0f} s (none recorded)")
        return
    print(f"suite {suite}: {whole:.0f} s (recorded {recorded['seconds']} s)")
    busy = max(1.0, whole / recorded["seconds"])
    for file, seconds in sorted(files.items()):
        before = recorded["files"].get(file)
        if seconds > 2 * busy * (before or SHORT):
            print(f"  {file}: {seconds:.0f} s (recorded {before or f'less than {SHORT}'} s)")


if __name__ == "__main__":
    main()
