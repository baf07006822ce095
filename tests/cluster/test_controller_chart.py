"""The controller in the chart: its rights, its processes, its alerts. No cluster is needed."""

import re
import subprocess
from collections.abc import Iterable
from typing import Any

import pytest
import yaml

from ipam.controller.exposition import exposition
from ipam.controller.leader import ControllerProcess
from kube.informer import Polled
from kube.leadership import Leadership
from tests.fake_api import FakeApi
from tests.unit.ipam.controller.cluster import Cluster
from tools import manifests
from tools.manifests import CHECKOUT

Manifest = dict[str, Any]

SCRAPED = ("--set", "metrics.proxy.enabled=true,metrics.serviceMonitor.enabled=true")
ALERTS = (*SCRAPED, "--set", "alerts.enabled=true")


def _objects(*arguments: str) -> dict[tuple[str, str], Manifest]:
    rendered = yaml.safe_load_all(manifests.template("--no-hooks", *arguments))
    return {(one["kind"], one["metadata"]["name"]): one for one in rendered if one}


def _controllers(objects: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(kind, name) for kind, name in objects if "controller" in name}


def test_scope_node_has_no_controller() -> None:
    assert _controllers(_objects())
    assert not _controllers(_objects("--set", "ipam.scope=node", *ALERTS))


def test_the_pod_has_no_rights_on_its_node() -> None:
    pod = _objects(*SCRAPED)["Deployment", "podfabric-controller"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert "hostNetwork" not in pod
    assert "volumes" not in pod
    assert [container["name"] for container in pod["containers"]] == ["controller", "proxy"]
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize(
    ("arguments", "user"), [((), 65532), (("--set", "openshift.enabled=true"), None)]
)
def test_openshift_chooses_the_controllers_user(
    arguments: tuple[str, ...], user: int | None
) -> None:
    deployment = _objects(*arguments)["Deployment", "podfabric-controller"]
    context = deployment["spec"]["template"]["spec"]["securityContext"]
    assert (context.get("runAsUser"), context.get("runAsGroup")) == (user, user)
    assert context["runAsNonRoot"] is True


def test_its_rights_at_the_api_server_are_those_that_it_uses() -> None:
    objects = _objects()
    rules = objects["ClusterRole", "podfabric-controller"]["rules"]
    rights = {
        f"{resource}: {' '.join(rule['verbs'])}" for rule in rules for resource in rule["resources"]
    }
    assert rights == {
        "network-attachment-definitions: list watch",
        "addresspools: get list watch create delete",
        "addresspools/status: update",
        "addressblocks: get list watch update delete",
        "addressblocks/status: update",
        "addressreservations: get list watch",
        "addressreservations/status: update",
        "nodes: list",
        "nodes/status: patch",
        "fabricnodes: list watch",
        "pods: list",
        "events: create",
    }
    own = objects["Role", "podfabric-controller"]["rules"]
    assert [(rule.get("resourceNames"), rule["verbs"]) for rule in own] == [
        (None, ["create"]),
        (["podfabric-controller"], ["get", "update"]),
    ]


def test_its_probes_ask_where_it_listens_and_its_lease_is_the_one_it_may_write() -> None:
    deployment = _objects()["Deployment", "podfabric-controller"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f"--health=:{ports['health']}" in container["args"]
    assert "--namespace=podfabric" in container["args"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "health"
    assert deployment["spec"]["replicas"] == 2


def test_the_other_pod_stays_in_a_drain_and_is_on_another_node() -> None:
    objects = _objects()
    template = objects["Deployment", "podfabric-controller"]["spec"]["template"]
    budget = objects["PodDisruptionBudget", "podfabric-controller"]["spec"]
    assert budget["selector"]["matchLabels"] == template["metadata"]["labels"]
    (term,) = template["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["podAffinityTerm"]["labelSelector"] == budget["selector"]


def _rules(*arguments: str) -> list[Manifest]:
    groups = _objects(*ALERTS, *arguments)["PrometheusRule", "podfabric"]["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_need_a_service_monitor() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        _objects("--set", "alerts.enabled=true")
    assert "alerts.enabled needs metrics.serviceMonitor.enabled" in refused.value.stderr


def test_each_alert_is_about_metrics_of_the_controller_or_of_agents() -> None:
    cluster = Cluster()
    cluster.pool()
    process = ControllerProcess(
        cluster.client, Leadership(FakeApi(), "podfabric", "controller", "only")
    )
    process.leadership.step()
    process.seen = cluster.round()
    process.polled = Polled((), 0.0, 0.0)
    text = exposition(process)().decode()
    families = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    families |= set(
        re.findall(r"podfabric_\w+", (CHECKOUT / "docs/reference/metrics.md").read_text())
    )
    for rule in _rules():
        used = set(re.findall(r"podfabric_\w+", rule["expr"]))
        assert used, rule["alert"]
        assert used <= families, rule["alert"]


def test_each_alert_has_a_section_that_says_what_to_do() -> None:
    page = (CHECKOUT / "docs/operate/alerts.md").read_text()
    sections = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    rules = _rules("--set", "ipam.nv_ipam=true")
    assert sections == [rule["alert"] for rule in rules]
