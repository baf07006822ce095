"""Compile the launcher, a static executable, if its sources or flags have changed."""

import argparse
import hashlib
import os
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
SOURCES = CHECKOUT / "cni/launcher"
FLAGS = [
    *("-std=gnu11", "-O2", "-static", "-s"),
    *("-Wall", "-Wextra", "-Werror"),
    *("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now,-z,noexecstack"),
]


def build(target: str = "", output: Path | None = None) -> Path:
    """The launcher for this machine, or for a GNU triplet (aarch64-linux-gnu); its path.

    Raises SystemExit, after the compiler's own words, if it does not compile.
    """
    compiler = f"{target}-gcc" if target else "gcc"
    if output is None:
        output = CHECKOUT / "build/cni" / "-".join(filter(None, ("launcher", target)))
    sources = sorted(SOURCES.glob("*.c"))
    command = [compiler, *FLAGS, *(str(source) for source in sources)]
    stamp = output.with_name(f".{output.name}.built-from")
    state = _state(command)
    if output.exists() and stamp.exists() and stamp.read_text() == state:
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        done = subprocess.run([*command, "-o", str(temporary)], check=False)
    except FileNotFoundError:
        raise SystemExit(f"no compiler {compiler}: run `tools/setup.sh base`") from None
    if done.returncode != 0:
        raise SystemExit(f"{compiler} failed with exit code {done.returncode}")
    temporary.replace(output)
    stamp.write_text(state)
    return output


def _state(command: list[str]) -> str:
    """A hash of the command and the sources."""
    made_of = hashlib.sha256("\0".join(command).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        made_of.update(source.read_bytes())
    return made_of.hexdigest()


def main() -> None:
    """Build one for another machine, or to a path: the image is made so."""
    parser = argparse.ArgumentParser(description="compile the launcher")
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--target", default="", help="a GNU triplet, as aarch64-linux-gnu")
    arguments = parser.parse_args()
    print(build(arguments.target, arguments.output))


if __name__ == "__main__":
    main()
