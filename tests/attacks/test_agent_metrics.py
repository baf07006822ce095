"""A pod in the host's network reads the agent's metrics. They reveal nothing about other
tenants."""

import http.client
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.attacks.agent_clients import Caller, network
from tests.plugins.service import Service, install_launchers
from tests.unix_http import UnixHTTPConnection
from tests.waiting import PATIENCE, until

NETWORKS = 40


@contextmanager
def running(root: Path, listen: str) -> Iterator[Caller]:
    (root / "etc").mkdir(parents=True)
    (root / "etc/config.yaml").write_text(
        f'{{"agent": {{"listen": "{listen}"}}, "policy": {{"set": {{"private_ranges": [true]}}}}}}'
    )
    install_launchers(root / "bin", ["podfabric-ipam"])
    podfabric = Path(sys.executable).with_name("podfabric")
    service = Service(root, command=[str(podfabric), "agent"])
    service.wait_until_ready()
    try:
        yield Caller(service, root / "bin", root / "state")
    finally:
        service.stop()


def attach_tenants(caller: Caller) -> None:
    for number in range(NETWORKS):
        ipam = {
            "type": "podfabric-ipam",
            "range": f"10.77.{number}.0/24",
            "network_name": f"secret-domain-{number}",
            "enable_overlapping_ranges": False,
        }
        config = network(f"secret-network-{number}", "podfabric-ipam", ipam=ipam)
        reply = caller.ask("podfabric-ipam", "ADD", f"secret-container-{number}", config)
        assert reply.exit_code == 0, reply.stdout


def scrape(connection: http.client.HTTPConnection) -> str:
    """The metrics after the tenants' addresses are counted: an answer may be a second old."""

    def ask() -> str:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    line = f'podfabric_ipam_addresses{{family="ipv4",state="used"}} {NETWORKS}.0'
    until(lambda: line in ask())
    return ask()


@contextmanager
def free_port() -> Iterator[int]:
    """A port for the agent that no other process gets meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        yield port


def test_metrics_on_loopback_have_no_name_and_no_range_of_a_tenant(tmp_path: Path) -> None:
    with free_port() as port, running(tmp_path, f"127.0.0.1:{port}") as caller:
        attach_tenants(caller)
        text = scrape(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE))
    assert "secret" not in text
    assert "10.77" not in text
    assert f'podfabric_ipam_ranges{{state="open"}} {NETWORKS}.0' in text


def test_metrics_on_the_unix_socket_are_for_root_and_have_each_range(tmp_path: Path) -> None:
    path = tmp_path / "http"
    with running(tmp_path, f"unix:{path}") as caller:
        attach_tenants(caller)
        assert path.stat().st_mode & 0o777 == 0o600
        text = scrape(UnixHTTPConnection(path))
    assert len(re.findall("^podfabric_ipam_range_addresses{", text, re.M)) == 2 * NETWORKS
    assert re.search(r'\{domain=".*secret.*",range="10\.77\.0\.0/24",state="used"\} 1\.0', text)
