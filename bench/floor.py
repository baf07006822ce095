"""The floor: what the kernel alone needs for an ADD and a DEL, done by `floor.c`."""

import os
import subprocess
from pathlib import Path

from bench.processes import Call

SOURCE = Path(__file__).with_name("floor.c")
ADDRESS = "10.255.0.1/8"


def build(directory: Path) -> Path:
    """Compile the program into a directory."""
    program = directory / "floor"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(SOURCE)]
    subprocess.run(command, check=True)
    return program


def call(program: Path, verb: str, netns: str, device: str) -> Call:
    """Its process for a verb, "ADD" or "DEL".

    The answer has the nanoseconds of wall time and of CPU, without the start of the process.
    """
    arguments = (verb.lower(), netns, device, "net1", ADDRESS)
    return Call(program, {"PATH": os.environ["PATH"]}, arguments=arguments)
