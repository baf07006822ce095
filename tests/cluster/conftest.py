"""Fixtures of the tests on a cluster: one cluster for all of them, a namespace for each."""

import os
import re
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, Namespace, namespaces
from tests.cluster.cluster import cluster as make_cluster
from tests.cluster.installation import await_nothing_left, install
from tests.cluster.programs import KUBERNETES


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure immediately: a run takes long, and its output is lost until its end."""
    if report.failed:
        print(f"\n{report.longreprtext[-4000:]}", file=sys.stderr, flush=True)


@pytest.fixture(scope="session")
def bare() -> Iterator[Cluster]:
    """A cluster with Multus, without podfabric."""
    with make_cluster(os.environ.get("KUBERNETES", KUBERNETES)) as made:
        yield made


@pytest.fixture(scope="session")
def cluster(bare: Cluster) -> Iterator[Cluster]:
    """The cluster with podfabric installed. At the end, no device may be allocated."""
    install(bare)
    yield bare
    await_nothing_left(bare, allocations=True)


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """A namespace for one test. Afterwards its pods are deleted, and nothing of them is left."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:50].strip("-")
    with namespaces(cluster, [name]) as (made,):
        yield made
    await_nothing_left(cluster)


@pytest.fixture
def scaling() -> tuple[int, int]:
    """The size of a scaled deployment, and the number of rounds: PODFABRIC_CLUSTER_SCALING=20x5."""
    replicas, _, times = os.environ.get("PODFABRIC_CLUSTER_SCALING", "20x5").partition("x")
    return int(replicas), int(times)
