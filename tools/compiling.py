"""Compiles C, unless the output was made from the same sources and command.

It uses only the standard library, because the image's build runs it too.
"""

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def compiled(command: list[str], output: Path, sources: Iterable[Path]) -> Path:
    """Compile `output` from `sources` and the files that they include; returns its path.

    Raises SystemExit, after the compiler's messages, if it does not compile.
    """
    stamp = output.with_name(f".{output.name}.built-from")
    state = _state(command, sources)
    if output.exists() and stamp.exists() and stamp.read_text() == state:
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        done = subprocess.run([*command, "-o", str(temporary)], check=False)
    except FileNotFoundError:
        raise SystemExit(f"no compiler {command[0]}: run `tools/setup.sh base`") from None
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed with exit code {done.returncode}")
    temporary.replace(output)
    stamp.write_text(state)
    return output


def _state(command: list[str], sources: Iterable[Path]) -> str:
    """A hash of the command and the sources."""
    made_of = hashlib.sha256("\0".join(command).encode())
    for source in sorted(sources):
        made_of.update(source.read_bytes())
    return made_of.hexdigest()
