"""SIGTERM that comes while the main thread is anywhere in Python's `threading`.

Its handler runs in the main thread, between two lines: one that needs a lock that the interrupted
line holds never ends. `wait` of a threading.Event holds the one that `set` needs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[3]

_INTERRUPT = """
import signal, sys, threading
from types import SimpleNamespace

def interrupt(frame, event, argument):
    if frame.f_code.co_filename != threading.__file__:
        return None
    if event == "line" and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        signal.raise_signal(signal.SIGTERM)
    return interrupt

"""

CONTROLLER = """
from cli.main import main
from kube import transport
from tests.fake_api import FakeApi, FakeClient

class Client(FakeClient):
    def close(self):
        pass

server = FakeApi()
transport.KubernetesApi = lambda *_, **__: Client(server, "only")
sys.argv = ["podfabric", "controller", "--metrics", ""]
sys.settrace(interrupt)
main()
"""

DEVICE_PLUGIN = """
from cli.main import main

sys.argv = ["podfabric", "device-plugin"]
sys.settrace(interrupt)
main()
"""


@pytest.mark.parametrize("program", [CONTROLLER, DEVICE_PLUGIN], ids=["controller", "device"])
def test_sigterm_at_any_line_of_threading_ends_the_process(program: str, tmp_path: Path) -> None:
    roots = {
        f"PODFABRIC_{root.upper()}": str(tmp_path / root)
        for root in ("run", "state", "etc", "kubelet", "sys")
    }
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPT + program],
        cwd=CHECKOUT,
        env={**os.environ, **roots},
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped" in done.stderr
