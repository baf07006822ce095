"""The page of the node and of all nodes, through the kubectl plugin, in a browser."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.browser import Tab, chromium
from tests.cluster import programs
from tests.cluster.cluster import PATIENCE, Cluster, Namespace
from tests.cluster.configurations import ipoib
from tests.cluster.installation import HCA
from tests.plugins import CHECKOUT
from tests.waiting import until

PLUGIN = CHECKOUT / "deploy/kubectl-podfabric"


@pytest.fixture
def environ(cluster: Cluster) -> dict[str, str]:
    """The environment of an administrator with kubectl."""
    version = os.environ.get("KUBERNETES", programs.KUBERNETES)
    (kubernetes,) = (one for one in programs.programs(version) if one.name == "kubernetes")
    path = f"{kubernetes.directory()}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "KUBECONFIG": str(cluster.plane.kubeconfig("admin"))}


@contextmanager
def forwarded(environ: dict[str, str], *node: str) -> Iterator[None]:
    """The plugin's forwarding of the page's port, for the block."""
    process = subprocess.Popen(
        [PLUGIN, "page", *node], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("Forwarding from 127.0.0.1") for line in lines)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def shows(tab: Tab, *texts: str) -> bool:
    shown = tab.run("document.body.innerText")
    return all(text in shown for text in texts)


def test_the_pages_show_the_pod_and_the_plugin_explains_it(
    cluster: Cluster, namespace: Namespace, environ: dict[str, str], tmp_path: Path
) -> None:
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    namespace.pod("one", networks="fabric", devices={HCA: 1})
    namespace.running("one")
    node, pod = cluster.node.name, f"{namespace.name}/one"
    address = namespace.address("one")

    def run(*words: str) -> str:
        done = subprocess.run([PLUGIN, *words], env=environ, stdout=subprocess.PIPE, check=True)
        return done.stdout.decode()

    assert address in run("explain", "one", "-n", namespace.name)
    with chromium() as tab:
        for port, words in ((9810, [node]), (9812, [])):
            with forwarded(environ, *words):
                tab.open(f"http://localhost:{port}/")
                expected = (node, pod, address, "net1", "live")
                until(lambda: shows(tab, *expected), PATIENCE, f"the page at port {port}")  # noqa: B023
                assert tab.violations() == []
                tab.picture(tmp_path / f"{port}.png")
    run("sysdump", str(tmp_path / "dump"), node)
    status = json.loads((tmp_path / f"dump/{node}/status.json").read_text())
    assert pod in {one["pod"] for one in status["attachments"]}
    assert "serving" in (tmp_path / f"dump/{node}/agent.log").read_text()
    assert "FabricNode" in (tmp_path / f"dump/{node}/fabricnode.yaml").read_text()
