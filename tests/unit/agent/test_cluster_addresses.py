"""The agent's lessee: there where the scope is the cluster, and never in the agent's way."""

import logging
from pathlib import Path

import pytest

from agent.leasing import lessee_of
from agent.settings import load
from base.paths import Paths
from ipam.leases.lessee import Lessee
from ipam.store.store_files import StoreFiles
from ipam.store_choice import AddressSettings

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: here, user: me}}]
clusters: [{name: here, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: me, user: {token: abc}}]
"""


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("boot-1\n")
    return Paths(proc=tmp_path / "proc", state=tmp_path / "state")


def made(paths: Paths, environ: dict[str, str], scope: str = "cluster") -> Lessee | None:
    settings = AddressSettings(scope="cluster" if scope == "cluster" else "node")
    return lessee_of(paths, StoreFiles(paths.ipam, kept=False), settings, environ)


def test_a_node_of_its_own_has_no_lessee(paths: Paths) -> None:
    assert made(paths, {"NODE_NAME": "node-a"}, scope="node") is None


@pytest.mark.parametrize(
    ("environ", "says"),
    [({}, "NODE_NAME"), ({"NODE_NAME": "node-a"}, "PODFABRIC_KUBECONFIG")],
)
def test_an_agent_without_a_cluster_says_so_and_serves(
    paths: Paths, environ: dict[str, str], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert made(paths, environ) is None
    assert says in caplog.text


@pytest.mark.parametrize("written", ["{", "[1, 2]", "clusters: 5", "a: b", ""])
def test_an_agent_serves_although_its_kubeconfig_is_none(
    paths: Paths, tmp_path: Path, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config").write_text(written)
    environ = {"NODE_NAME": "node-a", "PODFABRIC_KUBECONFIG": str(tmp_path / "config")}
    assert made(paths, environ) is None
    assert f"no API server in {tmp_path}/config" in caplog.text


def test_a_lessee_starts_and_ends_while_the_api_server_is_away(
    paths: Paths, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    environ = {"NODE_NAME": "node-a", "PODFABRIC_KUBECONFIG": str(tmp_path / "config")}
    lessee = made(paths, environ)
    assert lessee is not None
    lessee.start()
    assert lessee.counted().confirmed is None
    lessee.close()


def test_config_yaml_says_the_scope(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert load(path).settings.ipam.scope == "node"
    path.write_text("ipam: {scope: cluster}\n")
    assert load(path).settings.ipam.scope == "cluster"
    path.write_text("ipam: {scope: global}\n")
    assert "ipam.scope" in load(path).mistakes["ipam"]
