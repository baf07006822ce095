"""Helm's commands against a real API server without a node: no pod starts."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import programs
from tests.cluster.control_plane import control_plane
from tests.kernel.vm import layout
from tests.waiting import until
from tools import manifests
from tools.manifests import CHART, CHECKOUT, KUSTOMIZE

NAMESPACE = "podfabric"
MADE_BY_KUBERNETES = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
FOREIGN = {"ServiceMonitor", "SecurityContextConstraints"}  # kinds of other projects


@dataclass
class Client:
    """helm and kubectl of an administrator."""

    kubeconfig: Path
    kubectl_program: Path

    def helm(self, *words: str) -> str:
        """Run helm."""
        tool = str(CHECKOUT / "tools/go_tool.sh")
        return self._run(tool, "helm", *words, "--namespace", NAMESPACE)

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Run kubectl."""
        return self._run(str(self.kubectl_program), *words, stdin=stdin)

    def objects(self) -> set[str]:
        """Every object in podfabric's namespace that the chart may create, as kind/name."""
        kinds = "daemonsets,deployments,configmaps,serviceaccounts,services,networkpolicies"
        kinds = f"{kinds},roles,secrets"
        listed = json.loads(self.kubectl("get", kinds, "-n", NAMESPACE, "-o", "json"))["items"]
        names = {f"{one['kind'].lower()}/{one['metadata']['name']}" for one in listed}
        return {name for name in names - MADE_BY_KUBERNETES if "/sh.helm.release" not in name}

    def daemons(self) -> dict[str, Any]:
        """The spec of the agent's or the custodian's DaemonSet."""
        text = self.kubectl("get", "daemonset", "podfabric", "-n", NAMESPACE, "-o", "json")
        spec: dict[str, Any] = json.loads(text)["spec"]
        return spec

    def _run(self, *command: str, stdin: str | None = None) -> str:
        done = subprocess.run(
            command,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of a control plane without nodes."""
    wanted = {
        one.name: one
        for one in programs.programs(os.environ.get("KUBERNETES", programs.KUBERNETES))
        if one.name in ("etcd", "kubernetes")
    }
    programs.build(list(wanted.values()))
    kubernetes, etcd = (wanted[name].directory() for name in ("kubernetes", "etcd"))
    with control_plane(kubernetes, etcd, layout.BUILD / "results-helm") as plane:
        yield Client(plane.kubeconfig("admin"), kubernetes / "kubectl")


@pytest.fixture
def empty(client: Client) -> Iterator[Client]:
    """The client, and an empty namespace, which is deleted afterwards."""
    client.kubectl("create", "namespace", NAMESPACE)
    until(lambda: _has_account(client), what="service account of the namespace")
    yield client
    client.kubectl("delete", "namespace", NAMESPACE)


def _has_account(client: Client) -> bool:
    listed = client.kubectl("get", "serviceaccounts", "-n", NAMESPACE, "-o", "name")
    return "serviceaccount/default" in listed


def _install(client: Client, *words: str) -> None:
    client.helm("install", "podfabric", str(CHART), *manifests.IMAGE, *words)


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("-f", str(CHART / "values-openshift.yaml")),
        ("--set", "metrics.proxy.enabled=true,metrics.serviceMonitor.enabled=true"),
        ("--set-json", 'host.extraDirectories=[{"path":"/var/log/podfabric"}]'),
        ("--set-json", 'nodeSelector={"a":"b"}', "--set-json", 'imagePullSecrets=[{"name":"x"}]'),
        ("--set", "config.agent.listen=[::1]:9810,config.agent.grace=10"),
        ("--set-json", 'config.gpus=[{"mode":"units"}]', "--set", "gpu.runtimeClassName=nvidia"),
    ],
    ids=["defaults", "openshift", "metrics", "directories", "selector", "agent", "gpus"],
)
def test_api_server_accepts_every_field(empty: Client, values: tuple[str, ...]) -> None:
    """Hooks too: `helm template` prints them."""
    rendered = yaml.safe_load_all(manifests.template(*values))
    ours = [one for one in rendered if one and one["kind"] not in FOREIGN]
    assert "post-delete" in str(ours)
    for one in ours:  # one by one, because the custodian has the agent's name
        text = yaml.safe_dump(one)
        apply = ("apply", "--dry-run=server", "--validate=strict", "-f", "-")
        assert "server dry run" in empty.kubectl(*apply, stdin=text)


def test_api_server_accepts_the_kustomize_base(empty: Client) -> None:
    for folder in ("base", "custodian"):
        apply = ("apply", "--dry-run=server", "--validate=strict", "-k", str(KUSTOMIZE / folder))
        assert "daemonset.apps/podfabric" in empty.kubectl(*apply)


def test_nodes_are_offered_one_more_pod_in_an_update(empty: Client) -> None:
    _install(empty)
    update = empty.daemons()["updateStrategy"]["rollingUpdate"]
    assert update == {"maxSurge": 1, "maxUnavailable": 0}
    containers = empty.daemons()["template"]["spec"]["containers"]
    assert not any("ports" in container for container in containers)
    empty.helm("uninstall", "podfabric")


def test_uninstall_leaves_the_custodian_and_nothing_else(empty: Client) -> None:
    _install(empty)
    assert empty.objects() == {
        *("daemonset/podfabric", "configmap/podfabric"),
        *("serviceaccount/podfabric", "networkpolicy/podfabric"),
        *(f"{kind}/podfabric-controller" for kind in ("deployment", "role", "serviceaccount")),
    }
    empty.helm("uninstall", "podfabric")
    assert empty.objects() == {"daemonset/podfabric", "serviceaccount/podfabric"}
    pod = empty.daemons()["template"]["spec"]
    assert pod["containers"][0]["args"] == ["agent", "--until-empty"]
    assert "initContainers" not in pod
    assert empty.helm("list", "--short").strip() == ""
    empty.kubectl("delete", "daemonset,serviceaccount", "podfabric", "-n", NAMESPACE)
    assert empty.objects() == set()


def test_install_takes_the_custodian_over(empty: Client) -> None:
    _install(empty)
    fresh = empty.daemons()
    empty.helm("uninstall", "podfabric")
    _install(empty)
    assert empty.daemons() == fresh
    empty.helm("uninstall", "podfabric")
    _install(empty, "--set", "config.agent.grace=300")
    assert empty.daemons()["template"]["spec"]["terminationGracePeriodSeconds"] == 330
    empty.helm("uninstall", "podfabric")
    assert empty.objects() == {"daemonset/podfabric", "serviceaccount/podfabric"}


def test_uninstall_without_a_custodian_leaves_nothing(empty: Client) -> None:
    _install(empty, "--set", "uninstall.custodian=false")
    empty.helm("uninstall", "podfabric")
    assert empty.objects() == set()


def test_upgrade_changes_the_configuration_and_no_pod(empty: Client) -> None:
    _install(empty)
    before = empty.daemons()["template"]
    pools = 'config={"pools":[{"name":"rdma/vf","mode":"exclusive"}]}'
    empty.helm("upgrade", "podfabric", str(CHART), *manifests.IMAGE, "--set-json", pools)
    text = empty.kubectl("get", "configmap", "podfabric", "-n", NAMESPACE, "-o", "json")
    written = yaml.safe_load(json.loads(text)["data"]["config.yaml"])
    of_chart = {"ipam": {"scope": "cluster"}, "policy": {"cluster": True}}
    assert written == json.loads(pools[7:]) | of_chart
    assert empty.daemons()["template"] == before
    empty.helm("uninstall", "podfabric")
