"""Leave the CNI executables in a directory, so that they work with an agent and without one.

Under each plugin's name is the launcher; below `.podfabric` is what it becomes if there is no
agent: the plugin by this interpreter. The launcher alone is in build/cni, for `podfabric install`.
"""

import argparse
from pathlib import Path

from cli import executables
from cli.executables import EVERY, FALLBACK
from tools import build_launcher


def main() -> None:
    """Build for this machine, or for another one, into the directory that is named first."""
    parser = argparse.ArgumentParser(description="make the CNI executables")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("build/cni/bin"))
    parser.add_argument("--target", default="", help="a GNU triplet, as aarch64-linux-gnu")
    arguments = parser.parse_args()
    launcher = build_launcher.build(arguments.target).read_bytes()
    directory: Path = arguments.directory
    fallback = directory / FALLBACK
    fallback.mkdir(parents=True, exist_ok=True)
    contents = {fallback / name: executables.script(name, development=True) for name in EVERY}
    contents |= {directory / name: launcher for name in EVERY}
    with executables.locked(directory):
        executables.install(contents)
    for name in EVERY:
        print(directory / name)


if __name__ == "__main__":
    main()
