"""Each launch of a program is counted once, on the GPU that it is for."""

import time
from collections.abc import Callable

import pytest

from tests.gpu import group as groups
from tests.gpu.conftest import Place
from tests.gpu.drivers import not_symbolic
from tests.gpu.group import hooked
from tests.gpu.launcher import FORMER, LAUNCHES, Launcher
from tests.standin.gpus import Behaviour

Make = Callable[..., Place]
COARSE = 20_000_000  # ns that the clock of a launch may be behind


def test_each_function_that_launches_is_tried() -> None:
    assert {*LAUNCHES, *FORMER} == {name for name in hooked() if "Launch" in name}


@pytest.mark.parametrize("symbolic", [True, False])
def test_each_launch_is_counted_once(place: Make, symbolic: bool) -> None:
    """Also by a driver that calls its own functions, of which the shim stands in for some."""
    here = place(behaviour=Behaviour(reenter=True))
    if not symbolic:
        here.libraries = groups.libraries(real=str(not_symbolic()))
    launcher = Launcher(here.started(), "work_1us")

    def launched() -> int:
        return here.node.read().process(launcher.driver.pid).gpus[0].launches

    for symbol in LAUNCHES:
        use, before = here.group.use(), launched()
        begun = time.monotonic_ns()
        for _ in range(3):
            launcher.launch(symbol)
        after = here.group.use()
        assert after.launches - use.launches == launched() - before == 3, symbol
        assert begun - COARSE <= after.last_launch <= time.monotonic_ns(), symbol
