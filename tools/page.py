"""The output of a demonstration: titles, text, and steps that must succeed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PODFABRIC = str(Path(sys.prefix) / "bin/podfabric")
COLOUR = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
WIDTH = 150  # characters, of tables


class Page:
    """The output of a demonstration."""

    def __init__(self) -> None:
        self._failures: list[str] = []
        self._steps = 0
        self._started = time.monotonic()

    def title(self, text: str) -> None:
        print(f"\n{_painted(text, '1;36')}", flush=True)

    def text(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def step(self, what: str, good: bool, seconds: float | None = None, output: str = "") -> bool:
        """Print one step that must succeed; returns whether it did."""
        self._steps += 1
        mark = _painted("ok", "32") if good else _painted("FAILED", "1;31")
        took = _painted(f"  {seconds:.2f} s", "2") if seconds is not None else ""
        print(f"  {mark}  {what}{took}", flush=True)
        if not good:
            self._failures.append(what)
            if output.strip():
                self.text(output.strip())
        return good

    def command(self, *arguments: str) -> None:
        """Run podfabric with these arguments, and show its output."""
        started = time.monotonic()
        wide = {**os.environ, "COLUMNS": str(WIDTH)}
        done = subprocess.run([PODFABRIC, *arguments], capture_output=True, text=True, env=wide)
        for line in done.stdout.splitlines():
            self.text(line.rstrip())
        what = f"podfabric {' '.join(arguments)}"
        self.step(what, done.returncode == 0, time.monotonic() - started, done.stderr)

    def timed(self, what: str, action: Callable[[], str]) -> None:
        """Print a step. `action` returns its output, or raises CalledProcessError."""
        started = time.monotonic()
        try:
            seen, good = action(), True
        except subprocess.CalledProcessError as error:
            seen, good = str(error.stdout), False
        self.step(f"{what}  {seen if good else ''}", good, time.monotonic() - started, seen)

    def verdict(self) -> int:
        seconds = time.monotonic() - self._started
        if self._failures:
            print(_painted(f"\n{len(self._failures)} of {self._steps} steps failed", "1;31"))
            return 1
        print(_painted(f"\nall {self._steps} steps as they must be", "1;32"), f"({seconds:.1f} s)")
        return 0


def _painted(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOUR else text
