"""The page of a real agent in a real browser: it is live, accessible, and safe."""

import http.client
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from base.paths import Paths
from tests.browser import Tab, chromium
from tests.host.deviceplugin.processes import configure, made_server, running
from tests.kubelet import Kubelet
from tests.unit.node.test_fabric_node import attach
from tests.waiting import until

POOL = {"name": "rdma/hca", "mode": "exclusive"}
HOSTILE = "<img src=x onerror=document.title='hacked'>"
# `PICTURES=docs/pictures pytest tests/host/agent/test_page.py` writes the pictures of docs.
PICTURES = os.environ.get("PICTURES", "")


@pytest.fixture
def server() -> Iterator[Paths]:
    with tempfile.TemporaryDirectory(prefix="pf-") as root:
        yield made_server(Path(root))


@pytest.fixture
def address(server: Paths) -> Iterator[str]:
    """The address of the page, with pods of all kinds on the node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    configure(server, POOL, agent={"listen": address, "sweep": False})
    for number in range(3):
        attach(server, f"worker-{number}", f"ib{number}")
    with running(server, "agent"), Kubelet(server.kubelet) as kubelet:
        kubelet.wait(lambda: kubelet.allocatable("rdma/hca") == 8)
        kubelet.admit("worker-0", [{"name": "main", "limits": {"rdma/hca": 1}}], namespace="ml")
        yield address


@pytest.fixture
def tab() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


def set_port(server: Paths, state: str, physical: str) -> None:
    port = server.sys / "class/infiniband/mlx5_7/ports/1"
    (port / "state").write_text(f"{state}\n")
    (port / "phys_state").write_text(f"{physical}\n")


def text(tab: Tab) -> str:
    shown = tab.run("document.body.innerText")
    assert isinstance(shown, str)
    return shown


def test_the_page_follows_a_port_and_breaks_no_rule(
    server: Paths, address: str, tab: Tab, tmp_path: Path
) -> None:
    tab.look(1200)
    tab.open(f"http://{address}/")
    until(lambda: "live" in tab.run("document.getElementById('live').textContent"))
    until(lambda: "1 of 8" in text(tab))  # the pool
    assert "8 of 8 ports active" in text(tab)
    assert tab.violations() == []
    set_port(server, "1: DOWN", "3: Disabled")
    until(lambda: "7 of 8 ports active" in text(tab) and "mlx5_7 is DOWN" in text(tab))
    tab.look(1200)
    tab.picture(Path(PICTURES or tmp_path) / "page.png")
    tab.look(1200, dark=True)
    assert tab.violations() == []
    tab.look(360)
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    set_port(server, "4: ACTIVE", "5: LinkUp")
    until(lambda: "8 of 8 ports active" in text(tab) and "mlx5_7 is DOWN" not in text(tab))


def test_a_hostile_name_runs_no_script(server: Paths, address: str, tab: Tab) -> None:
    attach(server, HOSTILE)
    tab.open(f"http://{address}/")
    until(lambda: HOSTILE in text(tab))
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert "hacked" not in tab.run("document.title")
    inserted = "const s = document.createElement('script'); s.text = 'document.title = `hacked`';"
    tab.run(f"(() => {{ {inserted} document.body.append(s); }})()")
    assert "hacked" not in tab.run("document.title")  # the content security policy forbids it


def test_without_scripts_the_filter_works_by_keyboard(address: str, tab: Tab) -> None:
    tab.open(f"http://{address}/?q=worker-1", scripts=False)
    assert "ml/worker-1" in tab.run("document.getElementById('attachments').parentNode.innerText")
    assert "worker-2" not in tab.run("document.getElementById('attachments').parentNode.innerText")
    tab.open(f"http://{address}/")
    tab.press("Tab")
    assert tab.run("document.activeElement.name") == "q"


def test_a_foreign_name_of_this_host_gets_no_page(address: str) -> None:
    """The name of a foreign site can resolve to 127.0.0.1."""
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", "/", headers={"Host": "evil.example"})
    answer = connection.getresponse()
    assert answer.status == 403
    assert b"worker" not in answer.read()
