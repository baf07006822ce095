"""The kubectl plugin, with a kubectl that prints its arguments and answers like a small cluster."""

import subprocess
from pathlib import Path

import pytest

PLUGIN = Path(__file__).resolve().parents[2] / "deploy/kubectl-podfabric"
KUBECTL = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
*"nodeName=node-b"*) ;;
*"get pods"*) echo pod/podfabric-x ;;
*"config view"*) printf ml ;;
*"get pod waiting"*) ;;
*"get pod "*) printf node-a ;;
*"exec"*doctor*) echo "doctor found a fault"; exit 1 ;;
*exec* | *logs* | *fabricnode*) echo "answer to $*" ;;
esac
"""


class Plugin:
    def __init__(self, directory: Path) -> None:
        self._log = directory / "log"
        kubectl = directory / "kubectl"
        kubectl.write_text(KUBECTL)
        kubectl.chmod(0o755)
        self.environ = {"PATH": f"{directory}:/usr/bin:/bin", "LOG": str(self._log)}

    def __call__(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [PLUGIN, *words], env=self.environ, capture_output=True, text=True, check=False
        )

    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


@pytest.mark.parametrize(
    "words", [["worker-0"], ["-n", "ml", "worker-0"], ["worker-0", "-n", "ml"]]
)
def test_explain_asks_the_agent_of_the_pods_node(plugin: Plugin, words: list[str]) -> None:
    assert plugin("explain", *words).returncode == 0
    assert (
        plugin.calls()[-1]
        == "-n podfabric exec pod/podfabric-x -c agent -- podfabric explain ml/worker-0"
    )
    assert any("spec.nodeName=node-a" in call for call in plugin.calls())


def test_explain_asks_the_controller_about_a_job(plugin: Plugin) -> None:
    assert plugin("explain", "--job", "app in (a)").returncode == 0
    assert plugin.calls()[-1] == (
        "-n podfabric exec deployment/podfabric-controller -c controller -- "
        "podfabric explain --job=app in (a) -n ml"
    )


def test_explain_asks_with_the_users_rights_if_podfabric_is_installed(
    plugin: Plugin, tmp_path: Path
) -> None:
    local = tmp_path / "podfabric"
    local.write_text('#!/bin/sh\necho "podfabric $*" >> "$LOG"\n')
    local.chmod(0o755)
    for variables, file in (
        ({"HOME": "/h"}, "/h/.kube/config"),
        ({"KUBECONFIG": "/a:/b"}, "/a:/b"),
    ):
        plugin.environ |= variables
        assert plugin("explain", "--job", "app in (a)").returncode == 0
        assert plugin.calls()[-1] == f"podfabric explain --job=app in (a) -n ml --kubeconfig {file}"


def test_a_command_runs_on_a_node_with_its_options(plugin: Plugin) -> None:
    assert plugin("status", "node-a", "-o", "json").returncode == 0
    assert plugin.calls()[-1].endswith("-- podfabric status -o json")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["explain", "waiting"], "pod ml/waiting has no node yet"),
        (["top", "node-b"], "node node-b has no podfabric pod in namespace podfabric"),
        (["explain"], "explain POD"),
        (["explain", "a", "b"], "explain POD"),
        (["explain", "a", "--job", "b"], "explain POD"),
        (["remove", "x"], "explain POD"),
        ([], "explain POD"),
    ],
)
def test_a_wrong_call_fails_with_the_reason(plugin: Plugin, words: list[str], error: str) -> None:
    done = plugin(*words)
    assert done.returncode != 0
    assert error in done.stderr
    assert not any("exec" in call for call in plugin.calls())


def test_page_forwards_the_port_of_a_node_or_of_the_controller(plugin: Plugin) -> None:
    assert plugin("page").returncode == 0
    assert (
        plugin.calls()[-1] == "-n podfabric port-forward deployment/podfabric-controller 9812:9812"
    )
    assert plugin("page", "node-a").returncode == 0
    assert plugin.calls()[-1] == "-n podfabric port-forward pod/podfabric-x 9810:9810"


def test_sysdump_collects_what_fails_too(plugin: Plugin, tmp_path: Path) -> None:
    done = plugin("sysdump", str(tmp_path / "dump"), "node-a")
    assert done.returncode == 0, done.stderr
    found = {file.name: file.read_text() for file in (tmp_path / "dump/node-a").iterdir()}
    assert found["doctor.json"] == "doctor found a fault\n"
    assert {"status.json", "devices.json", "ipam.json", "fabricnode.yaml", "agent.log"} <= set(
        found
    )
    assert not any("secret" in call for call in plugin.calls())
