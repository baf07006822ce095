"""C programs that use the driver's library, built once for each content of their sources."""

from pathlib import Path

from tools.compiling import CHECKOUT, compiled

HERE = Path(__file__).parent
BUILT = CHECKOUT / "build/gpu/programs"
FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-rdynamic", "-pthread"]


def program(name: str, *flags: str, output: str = "") -> Path:
    """The executable of NAME.c; `output` names another one, with other flags."""
    source = HERE / f"{name}.c"
    sources = [source, HERE / "driver.h"]
    return compiled(["gcc", *FLAGS, str(source), *flags], BUILT / (output or name), sources)
