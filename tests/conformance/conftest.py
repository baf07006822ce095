"""Fixtures: the node of a test, its executables and namespaces."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conformance import fabric
from tests.conformance.node import CNI_BIN, Delegate, Node
from tests.conformance.subject import EVERY, OURS, RDMA
from tests.conftest import IN_VM
from tests.netns import ip, namespace
from tests.plugins import CHECKOUT, install_noop
from tests.plugins.service import Service, install_launchers

# Importing is slow in the virtual machine.
HERE = Path(__file__).resolve().parent
collect_ignore = [
    str(path) for path in HERE.glob("test_*.py") if IN_VM and "mark.kernel" not in path.read_text()
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the virtual machine, run most rows through an agent only.

    An interpreter takes 3 to 5 seconds to start there. The rows marked `as_process` show that a
    process does the same. On the host, all rows of the other executables run both ways.
    """
    if not IN_VM:
        return
    slow = [
        item
        for item in items
        if "[process-" in item.name and item.get_closest_marker("as_process") is None
    ]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session", params=[False, True], ids=["process", "agent"])
def through_agent(request: pytest.FixtureRequest) -> bool:
    """Whether the executables are launchers for an agent. Every test runs both ways."""
    return bool(request.param)


@pytest.fixture(scope="session")
def executables(through_agent: bool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """CNI_PATH: our executables (built if they are missing) and the test doubles.

    With an agent all of them are launchers.
    """
    if not all((CNI_BIN / subject.name).exists() for subject in (*OURS, RDMA)):
        command = [sys.executable, "-m", "tools.make_cni", str(CNI_BIN)]
        subprocess.run(command, check=True, cwd=CHECKOUT, stdout=subprocess.DEVNULL)
    doubles = tmp_path_factory.mktemp("doubles")
    if through_agent:
        install_launchers(doubles, [subject.name for subject in (*EVERY, RDMA)])
        return (doubles,)
    install_noop(doubles)
    return CNI_BIN, doubles


@pytest.fixture(scope="session")
def surroundings(
    through_agent: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, str]]:
    """The variables by which launchers find the agent, if there is one."""
    if not through_agent:
        yield {}
        return
    root = tmp_path_factory.mktemp("agent")
    (root / "etc").mkdir()
    # A sweep would remove other nodes' interfaces on this host, because it does not see their
    # journals.
    (root / "etc/config.yaml").write_text('agent: {listen: "", sweep: false}\n')
    service = Service(root)
    service.keep_alive()
    service.wait_until_ready()
    yield {"PODFABRIC_SOCKET": str(service.socket)}
    service.stop()


@pytest.fixture
def node(
    tmp_path: Path,
    executables: tuple[Path, ...],
    surroundings: Mapping[str, str],
    through_agent: bool,
) -> Node:
    """A fresh node."""
    return Node(tmp_path, executables, surroundings, through_agent)


@pytest.fixture
def delegate(node: Node) -> Delegate:
    """The recording IPAM plugin `double`, which the node allows."""
    node.allow(use={"ipamTypes": ["podfabric-ipam", "double"]})
    return Delegate.install(node.delegates)


@pytest.fixture
def netns() -> Iterator[Path]:
    """A network namespace for a pod."""
    with namespace() as path:
        yield path


@pytest.fixture
def no_strays(netns: Path) -> Iterator[None]:
    """Remove the leftovers of a failed test: its interfaces return to the host with the
    namespace."""
    yield
    if (netns.exists() and len(fabric.links(netns)) > 1) or fabric.strays():
        ip("netns", "delete", netns.name)
        time.sleep(3)
        for name in fabric.strays():
            ip("link", "delete", name)
