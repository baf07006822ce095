"""A kubelet and plugins that end with the test."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from base.paths import Paths
from deviceplugin.kubelet import registration
from deviceplugin.kubelet.plugin_server import ServedPool
from deviceplugin.kubelet.registration import PluginServer
from tests.host.deviceplugin.processes import made_server
from tests.kubelet import Kubelet
from tests.kubelet.patience import kubelet_may_take_its_time
from tests.waiting import PATIENCE

__all__ = ["kubelet_may_take_its_time"]

Serve = Callable[..., PluginServer]


@pytest.fixture
def root() -> Iterator[Path]:
    """The kubelet's root directory, which does not exist yet. pytest's paths are too long for
    sockets."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "k"


@pytest.fixture
def server() -> Iterator[Paths]:
    """A simulated server of eight HCAs, with all of its roots."""
    with tempfile.TemporaryDirectory(prefix="pf-") as directory:
        yield made_server(Path(directory))


@pytest.fixture
def kubelet(root: Path) -> Iterator[Kubelet]:
    """A kubelet, not started."""
    kubelet = Kubelet(root)
    yield kubelet
    kubelet.stop()


@pytest.fixture
def serve(root: Path) -> Iterator[Serve]:
    """A function that starts a plugin of a resource."""
    with ExitStack() as stack:

        def start(resource: ServedPool) -> PluginServer:
            server = PluginServer(Paths(kubelet=root), resource)
            stack.callback(server.close)
            server.start()
            return server

        yield start


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten delays of seconds to tenths of seconds."""
    monkeypatch.setattr(registration, "WATCHDOG", 0.3)
    monkeypatch.setattr(registration, "LOOK_EVERY", 0.2)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make events the only reason for the plugin to look again; nothing times out before the
    test."""
    for name in ("TIMEOUT", "WATCHDOG", "LOOK_EVERY"):
        monkeypatch.setattr(registration, name, 10 * PATIENCE)


def plugin_threads() -> list[str]:
    """The names of the plugins' running threads."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(("registration-", "kubelet-rdma"))]
