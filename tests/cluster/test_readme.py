"""README's "Use it", as a new user follows it: every command, unchanged.

The last run leaves the output of the commands in build/vm/use-it.txt.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import PATIENCE, Cluster
from tests.cluster.installation import await_agent, await_nothing_left, helm, uninstall
from tests.kernel.vm import layout
from tools.use_it import PRINTED, RECORD, commands, outputs, without_chance

POD = "hca-worker-0"
IMAGE = "image.repository=podfabric,image.pullPolicy=Never"
REGISTRY = "registry.example/"  # in README; the node has the image already


@pytest.fixture
def shell(cluster: Cluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of an administrator: kubectl, helm and a kubeconfig. Nothing is installed."""
    helm_program = subprocess.run(
        ["tools/go_tool.sh", "--path", "helm"],
        cwd=layout.CHECKOUT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    programs = {
        "helm": Path(helm_program),
        "kubectl": cluster.node.programs["kubernetes"] / "kubectl",
    }
    for name, program in programs.items():
        (tmp_path / name).symlink_to(program)
    # The kubelet records late that ids of other tests' pods are free: a new agent shows them.
    await_nothing_left(cluster, allocations=True)
    uninstall(cluster)
    kubeconfig = str(cluster.plane.kubeconfig("admin"))
    yield {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "KUBECONFIG": kubeconfig}
    cluster.core.delete_namespaced_pod(POD, "default", grace_period_seconds=0)
    await_nothing_left(cluster)
    # The other tests' installation: the same release, with their values.
    helm(cluster, "upgrade", "podfabric", "deploy/chart", "--set", IMAGE)
    await_agent(cluster)


def _words(text: str) -> list[str]:
    """The words of an output, without the numbers, which differ between runs on a cluster."""
    return re.sub(r"\d+", "N", without_chance(text)).split()


def test_commands_of_use_it_work(shell: dict[str, str]) -> None:
    printed = {}
    for command in commands():
        # Only the time that kubectl waits is changed: this node is emulated.
        patient = command.replace("kubectl wait", f"kubectl wait --timeout={PATIENCE:.0f}s")
        patient = patient.replace(REGISTRY, "")
        done = subprocess.run(
            ["/bin/sh", "-c", patient],
            cwd=layout.CHECKOUT,
            env=shell,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        printed[command] = done.stdout
    PRINTED.write_text("\n".join(f"$ {command}\n{output}" for command, output in printed.items()))
    for command, output in printed.items():
        if " -- podfabric " in command:
            assert _words(output) == _words(outputs(RECORD.read_text())[command]), command
    explained = next(output for command, output in printed.items() if " explain " in command)
    interface = printed[commands()[-1]]
    (address,) = re.findall(r"inet (10\.56\.\d+\.\d+)/16", interface)
    assert address in explained
    assert "rdma/hca" in explained
