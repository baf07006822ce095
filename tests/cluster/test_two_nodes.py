"""The page, status and conditions of a cluster of two nodes."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node import conditions
from tests.browser import chromium
from tests.cluster.cluster import (
    PATIENCE,
    Cluster,
    Namespace,
    is_ready,
    pod,
    second_node,
)
from tests.cluster.configurations import ipoib
from tests.cluster.installation import HCA, agents
from tests.cluster.test_page import environ, forwarded, shows
from tests.kernel.vm import layout
from tests.waiting import until

# `PICTURES=docs/pictures pytest tests/cluster/test_two_nodes.py` writes the picture of docs.
PICTURES = os.environ.get("PICTURES", "")

__all__ = ["environ"]  # a fixture


@pytest.fixture
def other(cluster: Cluster) -> Iterator[Cluster]:
    """The second node, with an agent that offers HCAs."""
    with second_node(cluster) as made:
        until(lambda: made.allocatable(HCA), PATIENCE, "HCAs of the second node", pause=0.5)
        yield made
    until(
        lambda: (
            [each.spec.node_name for each in agents(cluster) if is_ready(each)]
            == [cluster.node.name]
        ),
        PATIENCE,
        "end of the second node's agent",
        pause=1,
    )


@pytest.mark.long
def test_the_page_and_status_show_both_nodes_and_the_fault_of_one(
    cluster: Cluster,
    other: Cluster,
    namespace: Namespace,
    environ: dict[str, str],
    tmp_path: Path,
) -> None:
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    both = {"first": cluster, "second": other}
    for name, on in both.items():
        document = pod(name, networks="fabric", devices={HCA: 1})
        document["spec"]["nodeSelector"] = {"kubernetes.io/hostname": on.node.name}
        namespace.apply(document)
    namespace.running(*both)
    pods = [f"{namespace.name}/{name}" for name in both]
    nodes = [on.node.name for on in both.values()]

    def status() -> str:
        command = [str(layout.PYTHON.with_name("podfabric")), "status", "--cluster"]
        return subprocess.run(command, env=environ, check=True, capture_output=True).stdout.decode()

    def faulty() -> list[str]:
        found = {
            node.metadata.name: [
                each.status for each in node.status.conditions if each.type == conditions.TYPE
            ]
            for node in cluster.core.list_node().items
        }
        return [name for name, values in found.items() if values == ["True"]]

    with chromium() as tab, forwarded(environ):
        tab.open("http://localhost:9812/")
        until(lambda: shows(tab, *nodes, *pods, "live"), PATIENCE, "both nodes on the page")
        assert tab.violations() == []
        knob = "/sys/class/infiniband/ibloop0/ibloop/port"
        other.node.run(f"echo down > {knob}")
        try:
            until(lambda: shows(tab, "ibloop0 is DOWN"), PATIENCE, "the fault on the page")
            until(lambda: faulty() == [other.node.name], PATIENCE, "the condition", pause=0.5)
            assert "ibloop0" in status()
            tab.picture(Path(PICTURES or tmp_path) / "cluster.png")
            for name in nodes:
                tab.open(f"http://localhost:9812/?node={name}")
                assert shows(tab, "NUMA node") and shows(tab, name)
                assert shows(tab, "ibloop0 is DOWN") is (name == other.node.name)
        finally:
            other.node.run(f"echo up > {knob}")
        until(lambda: not faulty(), PATIENCE, "the end of the condition", pause=1)
    namespace.delete(*both)
