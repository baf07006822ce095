"""deploy/chart and deploy/kustomize: the output of Helm and kustomize. No cluster is needed."""

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent import settings
from cli.fabric_check.command import add_arguments
from cli.setup.executables import EVERY, PLUGINS
from gpu.gpu_pool import GpuLimitSettings
from ipam import store_choice
from tools import manifests
from tools.manifests import CHART, CHECKOUT, KUSTOMIZE

Manifest = dict[str, Any]

OPENSHIFT = ("-f", str(CHART / "values-openshift.yaml"))
METRICS = ("--set", "metrics.proxy.enabled=true,metrics.serviceMonitor.enabled=true")
ALERTS = (*METRICS, "--set", "alerts.enabled=true")
CUSTODIAN = ("-s", "templates/custodian.yaml")
ADDRESSES = ("addressblocks", "addresspools", "addressreservations")
POLICIES = ("podfabric-own-blocks",)
CONTROLLERS = (
    *("Deployment", "PodDisruptionBudget", "ServiceAccount"),
    *("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
)
NO_POLICIES = ("--set", "policy.enabled=false")
PER_NODE = ("--set", "ipam.scope=node", *NO_POLICIES)
PARTS_OF_GPUS = ("--set-json", 'config.gpus=[{"mode":"replicas"},{"mode":"units"}]')
WHOLE_GPUS = ("--set-json", 'config.gpus=[{"mode":"replicas","name":"a/b","replicas":2}]')


def _objects(*arguments: str) -> dict[tuple[str, str], Manifest]:
    """The objects by kind and name; hooks only if `arguments` select their file."""
    arguments = arguments if "-s" in arguments else ("--no-hooks", *arguments)
    return _by_name(manifests.template(*arguments))


def _by_name(text: str) -> dict[tuple[str, str], Manifest]:
    found = [one for one in yaml.safe_load_all(text) if one]
    objects = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(objects) == len(found)
    return objects


def _pod(objects: dict[tuple[str, str], Manifest]) -> Manifest:
    spec: Manifest = objects["DaemonSet", "podfabric"]["spec"]["template"]["spec"]
    return spec


def _pods(objects: dict[tuple[str, str], Manifest]) -> list[Manifest]:
    """The pod templates of every workload."""
    specs = [
        one["spec"] for (kind, _), one in objects.items() if kind in ("DaemonSet", "Deployment")
    ]
    return [spec["template"]["spec"] for spec in specs]


def _agent(*arguments: str) -> Manifest:
    agent: Manifest = _pod(_objects(*arguments))["containers"][0]
    return agent


def _installed(container: Manifest) -> set[str]:
    """The names that the init container installs."""
    command, plugins = container["args"]
    assert command == "install"
    return set(plugins.removeprefix("--plugins=").split(","))


EVENTS = {
    *((kind, "podfabric-events") for kind in ("ClusterRole", "ClusterRoleBinding")),
    ("ValidatingAdmissionPolicy", "podfabric-own-events"),
    ("ValidatingAdmissionPolicyBinding", "podfabric-own-events"),
}
"""What every installation has whose agents write events."""
FABRIC_NODES = {
    ("CustomResourceDefinition", "fabricnodes.fabric.podfabric.io"),
    ("ClusterRole", "podfabric-view"),
    *((kind, "podfabric-fabricnodes") for kind in ("ClusterRole", "ClusterRoleBinding")),
    ("ValidatingAdmissionPolicy", "podfabric-own-fabricnode"),
    ("ValidatingAdmissionPolicyBinding", "podfabric-own-fabricnode"),
}
"""What every installation has whose agents use the API server."""


def _kustomize(folder: Path) -> dict[tuple[str, str], Manifest]:
    command = [str(CHECKOUT / "tools/go_tool.sh"), "kustomize", "build", str(folder)]
    return _by_name(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _refused(*values: str) -> str:
    """Helm's reason to refuse these values."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        _objects(*(word for value in values for word in ("--set-json", value)))
    text: str = refused.value.stderr
    return text


def test_helm_lint_is_clean() -> None:
    said = manifests.helm("lint", "--strict", str(CHART), *manifests.IMAGE)
    assert "WARNING" not in said and "ERROR" not in said


def test_helm_test_checks_the_network_with_few_rights() -> None:
    values = "check.network=ml/fabric,check.isolatedFrom=ops/other"
    objects = _objects("--set", values, "-s", "templates/check.yaml")
    assert {one["metadata"]["annotations"]["helm.sh/hook"] for one in objects.values()} == {"test"}
    pod = objects["Pod", "podfabric-check"]["spec"]
    (container,) = pod["containers"]
    words = [word for word in container["args"] if not word.startswith("--image=")]
    parsed = _parsed(*words)
    assert (parsed.network, parsed.isolated_from) == ("ml/fabric", "ops/other")
    assert parsed.timeout < 300  # helm's
    role = objects["Role", "podfabric-check"]
    assert role["metadata"]["namespace"] == "ml"
    assert [rule["resources"] for rule in role["rules"]] == [["pods"], ["configmaps"]]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert "podfabric-check" not in manifests.template()
    assert "/check/network" in _refused('check.network="fabric"')


def _parsed(command: str, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert command == "check"
    return parser.parse_args(words)


def test_addresses_per_node_need_no_right() -> None:
    objects = _objects(*PER_NODE)
    assert {kind for kind, _ in objects} == {
        *("DaemonSet", "ConfigMap", "ServiceAccount", "NetworkPolicy")
    }
    assert objects["ServiceAccount", "podfabric"]["automountServiceAccountToken"] is False
    assert _pod(objects)["automountServiceAccountToken"] is False
    assert "egress" not in objects["NetworkPolicy", "podfabric"]["spec"]


def test_addresses_of_the_cluster_need_kinds_and_a_token_in_the_agents_pod_only() -> None:
    objects = _objects(*NO_POLICIES)
    assert objects.keys() - _objects(*PER_NODE).keys() == {
        *(("CustomResourceDefinition", f"{kind}.ipam.podfabric.io") for kind in ADDRESSES),
        ("ClusterRole", "podfabric-agent"),
        ("ClusterRoleBinding", "podfabric-agent"),
        *(("ValidatingAdmissionPolicy", name) for name in POLICIES),
        *(("ValidatingAdmissionPolicyBinding", name) for name in POLICIES),
        *((kind, "podfabric-controller") for kind in CONTROLLERS),
        ("ValidatingAdmissionPolicy", "podfabric-controller-nodes"),
        ("ValidatingAdmissionPolicyBinding", "podfabric-controller-nodes"),
        *EVENTS,
        *FABRIC_NODES,
    }
    assert objects["ServiceAccount", "podfabric"]["automountServiceAccountToken"] is False
    assert _pod(objects)["automountServiceAccountToken"] is True
    assert objects["NetworkPolicy", "podfabric"]["spec"]["egress"]


def test_policies_of_the_cluster_need_to_be_read_and_nothing_else() -> None:
    per_node = ("--set", "ipam.scope=node")
    objects = _objects(*per_node)
    assert objects.keys() - _objects(*PER_NODE).keys() == {
        ("CustomResourceDefinition", "fabricpolicies.fabric.podfabric.io"),
        *((kind, "podfabric-policy") for kind in ("ClusterRole", "ClusterRoleBinding")),
        ("ValidatingAdmissionPolicy", "podfabric-policy-ranges"),
        ("ValidatingAdmissionPolicyBinding", "podfabric-policy-ranges"),
        *EVENTS,
        *FABRIC_NODES,
    }
    assert _pod(objects)["automountServiceAccountToken"] is True

    rights = {
        rule["resources"][0]: rule["verbs"]
        for rule in objects["ClusterRole", "podfabric-policy"]["rules"]
    }
    assert rights == {"fabricpolicies": ["list", "watch"], "namespaces": ["list", "watch"]}


@pytest.mark.parametrize("values", [PER_NODE, NO_POLICIES, ("--set", "ipam.scope=node"), ()])
def test_agents_with_parts_of_gpus_may_write_events_in_every_installation(
    values: tuple[str, ...],
) -> None:
    objects = _objects(*values, *PARTS_OF_GPUS)
    assert _pod(objects)["automountServiceAccountToken"] is True
    assert objects["NetworkPolicy", "podfabric"]["spec"]["egress"]
    roles = {
        one["roleRef"]["name"]
        for (kind, _), one in objects.items()
        if kind == "ClusterRoleBinding" and one["subjects"][0]["name"] == "podfabric"
    }
    rules = [rule for role in roles for rule in objects["ClusterRole", role]["rules"]]
    assert {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]} in rules
    if values == PER_NODE:
        rights = {(one["resources"][0], *one["verbs"]) for one in rules}
        assert rights == {
            ("events", "create"),
            ("fabricnodes", "get", "create"),
            ("fabricnodes/status", "update"),
            ("nodes", "get"),
        }
        assert ("ClusterRole", "podfabric-events") not in _objects(*values, *WHOLE_GPUS)


def test_serving_nv_ipams_pools_needs_rights_in_their_namespace_and_the_executable() -> None:
    nv = ("--set", "ipam.nv_ipam=true,ipam.nv_ipam_namespace=nv")
    objects = _objects(*nv)
    assert objects.keys() - _objects().keys() == {
        ("Role", "podfabric-nv-ipam"),
        ("RoleBinding", "podfabric-nv-ipam"),
    }
    role, binding = (objects[kind, "podfabric-nv-ipam"] for kind in ("Role", "RoleBinding"))
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "nv"
    (rule,) = role["rules"]
    assert (rule["resources"], rule["verbs"]) == (["ippools", "cidrpools"], ["list", "watch"])
    assert [each["name"] for each in binding["subjects"]] == ["podfabric", "podfabric-controller"]
    written = yaml.safe_load(objects["ConfigMap", "podfabric"]["data"]["config.yaml"])
    assert written["ipam"]["nv_ipam"] is True
    assert written["ipam"]["nv_ipam_namespace"] == "nv"
    deployment = objects["Deployment", "podfabric-controller"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--nv-ipam=nv" in container["args"]
    (install,) = _pod(objects)["initContainers"]
    assert _installed(install) == {*PLUGINS, "nv-ipam"}

    def pool_verbs(*sets: str) -> list[str]:
        rules = _objects(*sets)["ClusterRole", "podfabric-controller"]["rules"]
        (verbs,) = (rule["verbs"] for rule in rules if rule["resources"] == ["addresspools"])
        return list(verbs)

    assert pool_verbs() == ["get", "list", "watch", "create", "delete"]
    assert pool_verbs(*nv) == ["get", "list", "watch", "create", "delete", "update"]
    assert "needs ipam.scope cluster" in _refused("ipam.nv_ipam=true", 'ipam.scope="node"')
    assert "nv_ipam" not in _objects("--set", "ipam.nv_ipam=null")["ConfigMap", "podfabric"]["data"]


def test_uninstall_keeps_the_kinds_and_so_the_leases_of_running_pods() -> None:
    """FabricNodes are of no use without agents."""
    for (kind, name), one in _objects().items():
        kept = one["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
        is_kind = kind == "CustomResourceDefinition"
        assert kept is (is_kind and name != "fabricnodes.fabric.podfabric.io")


def test_policies_are_of_the_service_account_of_the_agents_pod() -> None:
    objects = _by_name(manifests.template("--no-hooks", "--namespace", "other"))
    account = f"system:serviceaccount:other:{_pod(objects)['serviceAccountName']}"
    for name in POLICIES:
        spec = objects["ValidatingAdmissionPolicy", name]["spec"]
        (condition,) = spec["matchConditions"]
        assert condition["expression"] == f"request.userInfo.username == '{account}'"
        assert spec["failurePolicy"] == "Fail"
        binding = objects["ValidatingAdmissionPolicyBinding", name]["spec"]
        assert binding == {"policyName": name, "validationActions": ["Deny", "Audit"]}


def test_agent_has_the_capabilities_that_security_md_lists_and_no_other() -> None:
    page = (CHECKOUT / "docs/operate/security.md").read_text()
    section = page.partition("## What the agent may do")[2]
    listed = re.findall(r"^\| `CAP_(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    listed, of_gpus = listed[:-2], listed[-2:]
    unit = (CHECKOUT / "agent/units/podfabric-agent.service").read_text()
    (bounding,) = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    scc = _objects(*OPENSHIFT)["SecurityContextConstraints", "podfabric"]
    context = _agent()["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": listed}
    assert bounding.split() == [f"CAP_{name}" for name in listed]
    assert scc["allowedCapabilities"] == listed
    assert _agent(*WHOLE_GPUS)["securityContext"] == context
    gpus = _agent(*PARTS_OF_GPUS)["securityContext"]
    assert gpus["capabilities"]["add"] == [*listed, *of_gpus] == [*listed, "SYS_CHROOT", "KILL"]


def test_no_container_is_privileged_or_writes_to_its_root() -> None:
    for objects in (_objects(*METRICS), _objects(*CUSTODIAN), _objects(*PARTS_OF_GPUS)):
        for (kind, _), one in objects.items():
            if kind != "DaemonSet":
                continue
            pod = one["spec"]["template"]["spec"]
            for container in (*pod["containers"], *pod.get("initContainers", [])):
                context = container["securityContext"]
                assert not context.get("privileged"), container["name"]
                assert context["allowPrivilegeEscalation"] is False, container["name"]
                assert context["readOnlyRootFilesystem"] is True, container["name"]
                assert context["capabilities"]["drop"] == ["ALL"], container["name"]


def test_the_page_lists_every_mount_and_every_volume_is_mounted() -> None:
    page = (CHECKOUT / "docs/start/cluster.md").read_text()
    section = page.partition("## What the agent's pod has")[2]
    row = re.compile(r"^\| `(/[^`]*)` \| (read|write) \|", re.MULTILINE)
    every, _, of_gpus = section.partition("### Rights for shared GPUs")
    for values, listed in (
        ((), every),
        (PARTS_OF_GPUS, every + of_gpus),
    ):
        pod = _pod(_objects(*values))
        host = {
            volume["name"]: volume["hostPath"]["path"]
            for volume in pod["volumes"]
            if "hostPath" in volume
        }
        mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts.keys() == host.keys() | {"config"}
        assert {
            path: "read" if mounts[name].get("readOnly") else "write" for name, path in host.items()
        } == dict(row.findall(listed))


def test_parts_of_gpus_need_the_driver_and_no_other_pool_does() -> None:
    plain, parts = _pod(_objects()), _pod(_objects(*PARTS_OF_GPUS))
    assert _pod(_objects(*WHOLE_GPUS)) == plain
    assert plain["hostPID"] is True  # for the pids of the owners of RDMA objects
    # The agent mounts the containers' libraries on the host, and must see these mounts.
    (run,) = (each for each in parts["containers"][0]["volumeMounts"] if each["name"] == "run")
    assert run["mountPropagation"] == "HostToContainer"
    (install,) = parts["initContainers"]
    assert install["args"] == ["install", "--gpu"]
    assert {mount["mountPath"] for mount in install["volumeMounts"]} == {
        *("/opt/cni/bin", "/var/lib/podfabric")
    }
    assert parts["volumes"][-1] == {
        "name": "driver",
        "hostPath": {"path": "/", "type": "DirectoryOrCreate"},
    }
    elsewhere = ("--set", "config.gpuLimits.driverRoot=/run/nvidia/driver")
    pod = _pod(_objects(*PARTS_OF_GPUS, *elsewhere))
    assert pod["volumes"][-1]["hostPath"]["path"] == "/run/nvidia/driver"
    (agent,) = pod["containers"]
    (root,) = (each["value"] for each in agent["env"] if each["name"] == "PODFABRIC_HOST")
    assert agent["volumeMounts"][-1] == {
        "name": "driver",
        "mountPath": f"{root}/run/nvidia/driver",
        "readOnly": True,
        "mountPropagation": "HostToContainer",
    }


def test_nvidias_runtime_lets_the_agent_ask_the_driver() -> None:
    runtime = ("--set", "gpu.runtimeClassName=nvidia")
    assert "runtimeClassName" not in _pod(_objects(*runtime))
    pod = _pod(_objects(*runtime, *PARTS_OF_GPUS))
    assert pod["runtimeClassName"] == "nvidia"
    variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    (install,) = pod["initContainers"]
    assert "env" not in install


def test_probes_ask_the_address_at_which_the_agent_listens() -> None:
    for listen, host, port in (("", "127.0.0.1", 9810), ("[::1]:99", "::1", 99)):
        arguments = ("--set", f"config.agent.listen={listen}") if listen else ()
        agent = _agent(*arguments)
        for probe, path in (
            ("livenessProbe", "/healthz"),
            ("readinessProbe", "/readyz"),
        ):
            assert agent[probe]["httpGet"] == {"host": host, "port": port, "path": path}


def test_agent_of_a_busy_node_stays_ready_for_a_minute() -> None:
    """Kubernetes ends an agent that is not ready before the next one of an update has started."""
    for probe in ("livenessProbe", "readinessProbe"):
        values = _agent()[probe]
        assert values["periodSeconds"] * values["failureThreshold"] >= 60
        assert values["timeoutSeconds"] >= 30


def test_end_of_the_agent_may_take_as_long_as_its_calls() -> None:
    assert _pod(_objects())["terminationGracePeriodSeconds"] == 90
    longer = _pod(_objects("--set", "config.agent.grace=300"))
    assert longer["terminationGracePeriodSeconds"] == 330


def test_configuration_comes_to_the_nodes_as_it_is_written() -> None:
    config = {"agent": {"workers": 8}, "pools": [{"name": "rdma/vf", "mode": "exclusive"}]}
    objects = _objects("--set-json", f"config={json.dumps(config)}")
    written = yaml.safe_load(objects["ConfigMap", "podfabric"]["data"]["config.yaml"])
    values = yaml.safe_load((CHART / "values.yaml").read_text())["ipam"]
    assert values["scope"] == "cluster"
    for key in ("whereabouts", "nv_ipam", "nv_ipam_namespace"):  # not for agents, or not followed
        values.pop(key, None)
    assert store_choice.of(values, "values.yaml").scope == "cluster"  # an agent can read it
    assert written == {**config, "ipam": values, "policy": {"cluster": True}}
    (data,) = _objects(*PER_NODE)["ConfigMap", "podfabric"]["data"].values()
    assert yaml.safe_load(data) == {"ipam": {**values, "scope": "node"}}


def _replaced_by(*values: str) -> bool:
    """Whether an upgrade to these values replaces the agents."""
    templates = [
        _objects(*(word for value in each for word in ("--set-json", value)))[
            "DaemonSet", "podfabric"
        ]["spec"]["template"]
        for each in ((), values)
    ]
    return bool(templates[0] != templates[1])


def test_what_agents_read_at_their_start_only_replaces_them() -> None:
    assert _replaced_by("ipam.nv_ipam=true")
    assert _replaced_by("config.agent.sweep=false")
    assert not _replaced_by("config.agent.workers=8", 'config.pools=[{"name":"rdma/vf"}]')
    at_start = {"ipam", *settings.Settings.__struct_fields__} & settings.AT_START_ONLY
    assert at_start == {"ipam", "listen", "sweep"}  # those that the chart's checksum covers
    assert set(GpuLimitSettings.__struct_fields__) == {"driver_root", "on_overuse"}
    assert _replaced_by('config.gpuLimits.onOveruse="kill"')


def test_the_controller_alone_may_touch_whereabouts_objects_where_it_is_to_look_there() -> None:
    rights: dict[str, set[str]] = {}
    for value in ("None", "Read", "Coexist"):
        objects = _objects("--set", f"ipam.whereabouts={value}")
        for role in ("podfabric-agent", "podfabric-controller"):
            rules = objects["ClusterRole", role]["rules"]
            theirs = [rule for rule in rules if "whereabouts.cni.cncf.io" in rule["apiGroups"]]
            rights[f"{role} {value}"] = {verb for rule in theirs for verb in rule["verbs"]}
    own = {"get", "list", "create", "patch"}
    assert {role: verbs for role, verbs in rights.items() if verbs} == {
        "podfabric-controller Read": own,
        "podfabric-controller Coexist": own,
    }


def test_the_launcher_is_whereabouts_too_where_its_objects_are_looked_at() -> None:
    for value in ("Read", "Coexist"):
        (install,) = _pod(_objects("--set", f"ipam.whereabouts={value}"))["initContainers"]
        assert _installed(install) == {*PLUGINS, "whereabouts"}
    own = ("--set", "ipam.whereabouts=Read,ipam.nv_ipam=true,ipam.nv_ipam_namespace=nv")
    (install,) = _pod(_objects(*own))["initContainers"]
    assert _installed(install) == set(EVERY) - {"macvlan", "ipvlan"}
    (install,) = _pod(_objects())["initContainers"]
    assert install["args"] == ["install"]


@pytest.mark.parametrize("values", [(), PARTS_OF_GPUS], ids=["hcas", "gpus"])
def test_custodian_is_the_agent_with_another_argument(values: tuple[str, ...]) -> None:
    """`helm install` can take it over: a patch of one DaemonSet's lists makes the other's.

    Its readiness probe differs: the previous agent, which still ends, answers the other probes.
    """
    agents = _objects(*values)["DaemonSet", "podfabric"]
    left = _objects(*values, *CUSTODIAN)["DaemonSet", "podfabric"]
    annotations = left["metadata"].pop("annotations")
    assert annotations["meta.helm.sh/release-name"] == "podfabric"
    assert annotations["helm.sh/hook"] == "post-delete"
    pod = agents["spec"]["template"]["spec"]
    del pod["initContainers"]
    pod["containers"][0]["args"].append("--until-empty")
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    mounts["cni-bin"]["readOnly"] = False
    pod["containers"][0]["readinessProbe"]["httpGet"]["path"] = "/removed"
    assert left == agents


def test_custodian_needs_nothing_that_uninstall_deletes() -> None:
    objects = _objects(*OPENSHIFT, *CUSTODIAN)
    assert objects.keys() == {
        ("ServiceAccount", "podfabric"),
        ("DaemonSet", "podfabric"),
        ("SecurityContextConstraints", "podfabric"),
    }
    (config,) = (one for one in _pod(objects)["volumes"] if one["name"] == "config")
    assert config["configMap"]["optional"] is True
    for one in objects.values():
        assert one["metadata"]["annotations"]["helm.sh/hook"] == "post-delete"


def test_metrics_have_the_rights_that_the_proxy_needs_and_only_with_it() -> None:
    objects = _objects(*METRICS)
    rules = objects["ClusterRole", "podfabric-metrics"]["rules"]
    assert [(rule["resources"], rule["verbs"]) for rule in rules] == [
        (["tokenreviews"], ["create"]),
        (["subjectaccessreviews"], ["create"]),
    ]
    service = objects["Service", "podfabric-metrics"]
    monitor = objects["ServiceMonitor", "podfabric"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    pod = objects["DaemonSet", "podfabric-metrics"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (arguments,) = (container["args"] for container in pod["spec"]["containers"])
    assert "--upstream=http://127.0.0.1:9810/" in arguments
    assert service["spec"]["selector"] != _objects()["DaemonSet", "podfabric"]["spec"]["selector"]


def test_service_monitor_without_the_proxy_says_what_is_missing() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        _objects("--set", "metrics.serviceMonitor.enabled=true")
    assert "needs metrics.proxy.enabled" in refused.value.stderr


def test_pods_with_a_device_keep_their_labels_and_each_metric_has_the_node() -> None:
    (endpoint,) = _objects(*METRICS)["ServiceMonitor", "podfabric"]["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True
    assert [each["targetLabel"] for each in endpoint["relabelings"]] == ["node"]


def test_boards_come_as_config_maps_and_only_if_they_are_enabled() -> None:
    files = {path.name: path.read_text() for path in CHART.glob("boards/*.json")}
    boards = ("--set", "boards.enabled=true,boards.labels.team=fabric")
    plain, objects = _objects(), _objects(*boards)
    assert objects.keys() - plain.keys() == {
        ("ConfigMap", f"podfabric-board-{name.removesuffix('.json')}") for name in files
    }
    added = [objects[name] for name in objects.keys() - plain.keys()]
    for one in added:
        labels = one["metadata"]["labels"]
        assert (labels["grafana_dashboard"], labels["team"]) == ("1", "fabric")
    # Grafana's sidecar writes all ConfigMaps into one directory.
    assert {name: text for one in added for name, text in one["data"].items()} == {
        f"podfabric-{name}": text for name, text in files.items()
    }
    other = _objects(*boards, "--set-string", "boards.labels.grafana_dashboard=2")
    labels = other["ConfigMap", "podfabric-board-pod"]["metadata"]["labels"]
    assert labels["grafana_dashboard"] == "2"


def _rules(*arguments: str) -> Manifest:
    spec: Manifest = _objects(*ALERTS, *arguments)["PrometheusRule", "podfabric"]["spec"]
    return spec


def test_each_alert_links_to_its_section_if_there_is_a_place_of_the_page() -> None:
    page = "https://docs.example/alerts/"
    spec = _rules("--set", f"alerts.runbooks={page}")
    rules = [rule for group in spec["groups"] for rule in group["rules"]]
    for rule in rules:
        annotations = rule["annotations"]
        assert annotations.pop("runbook_url") == f"{page}#{rule['alert'].lower()}"
        assert annotations.keys() == {"summary", "description"}
    assert spec == _rules()


def _promtool(*arguments: str) -> None:
    command = [str(CHECKOUT / "tools/go_tool.sh"), "promtool", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.long  # builds promtool once
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    spec = _rules()
    for rule in (rule for group in spec["groups"] for rule in group["rules"]):
        del rule["annotations"]["description"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    (tmp_path / "alerts.yaml").write_text((CHECKOUT / "tests/cluster/alerts_test.yaml").read_text())
    _promtool("check", "rules", "--lint-fatal", str(tmp_path / "rules.yaml"))
    _promtool("test", "rules", str(tmp_path / "alerts.yaml"))


def _expressions() -> dict[str, str]:
    """The expressions of all boards, with values for Grafana's variables."""
    found = {}
    for path in CHART.glob("boards/*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                text = target["expr"].replace("$__rate_interval", "5m")
                for name, value in (("instance", "10.0.0.1"), ("namespace", "a"), ("pod", "p")):
                    text = text.replace(f'"${name}', f'"{value}')
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = text
    return found


@pytest.mark.long  # builds promtool once
def test_expressions_of_boards_join_ports_and_pods(tmp_path: Path) -> None:
    """node_exporter and the agent have different ports, and may see HCAs of one name on nodes."""
    expressions = _expressions()
    rules = [
        {"record": f"board:{number}", "expr": text}
        for number, text in enumerate(expressions.values())
    ]
    groups = {"groups": [{"name": "boards", "rules": rules}]}
    (tmp_path / "boards.yaml").write_text(yaml.safe_dump(groups))
    _promtool("check", "rules", "--lint=none", str(tmp_path / "boards.yaml"))

    counters = {
        f'node_infiniband_port_data_received_bytes_total{{instance="{host}:9100", '
        f'device="mlx5_{device}", port="1"}}': f"0+{60 * rate}x10"
        for host, device, rate in (("10.0.0.1", 0, 7), ("10.0.0.1", 1, 8), ("10.0.0.2", 0, 9))
    }
    holders = {
        f'podfabric_pod_device{{instance="10.0.0.1:9811", namespace="a", pod="{pod}", '
        f'device="mlx5_{device}", port="1"}}': "1x10"
        for pod, device in (("p", 0), ("q", 0), ("q", 1))
    }
    series = counters | holders
    port = '{device="mlx5_0", port="1"'
    of_pod = f'{port}, host="10.0.0.1", instance="10.0.0.1:9811", namespace="a", pod="p"}}'
    of_ports = [
        (f'{{device="mlx5_{n}", port="1", instance="10.0.0.1:9100"}}', 7 + n) for n in (0, 1)
    ]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expressions[board],
                "eval_time": "10m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
            }
            for board, samples in (
                ("pod: Received A", [(of_pod, 7)]),
                ("node: Traffic of ports A", of_ports),
            )
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [test]}))
    _promtool("test", "rules", str(tmp_path / "test.yaml"))


@pytest.mark.parametrize("values", [(), PARTS_OF_GPUS], ids=["hcas", "gpus"])
def test_openshift_allows_what_the_agents_pod_has(values: tuple[str, ...]) -> None:
    objects = _objects(*OPENSHIFT, *values)
    scc = objects["SecurityContextConstraints", "podfabric"]
    pod = _pod(objects)
    assert scc["users"] == ["system:serviceaccount:podfabric:podfabric"]
    assert scc["allowHostNetwork"] is pod["hostNetwork"] is True
    assert scc["allowHostPID"] is pod.get("hostPID", False)
    assert scc["allowHostIPC"] is pod.get("hostIPC", False)
    assert scc["allowPrivilegedContainer"] is False
    kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
    assert set(scc["volumes"]) == kinds | {"projected"}  # `projected` is the token
    context = pod["containers"][0]["securityContext"]
    assert scc["allowedCapabilities"] == context["capabilities"]["add"]
    per_node = _objects(*OPENSHIFT, *PER_NODE)["SecurityContextConstraints", "podfabric"]
    assert set(per_node["volumes"]) == kinds
    host = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    assert host["cni-bin"] == "/var/lib/cni/bin"


@pytest.mark.parametrize(
    ("value", "place", "said"),
    [
        ("imagee={}", "''", "'imagee' not allowed"),
        ('image.pullPolicy="Sometimes"', "/image/pullPolicy", "'Always', 'IfNotPresent', 'Never'"),
        ('image.repository=""', "image.repository is empty", "make image PUSH=registry.example"),
        ('image.repository="a/b@sha256:1"', "image.repository", "as image.digest"),
        ('image.digest="latest"', "/image/digest", "does not match"),
        ("config.agent.workers=0", "/config/agent/workers", "minimum: got 0, want 1"),
        ("config.agent.lisen=1", "/config/agent", "'lisen' not allowed"),
        ('config.agent.listen="0.0.0.0:9810"', "config.agent.listen", "such as 127.0.0.1:9810"),
        ('config.agent.listen="unix:/run/x"', "config.agent.listen", "such as 127.0.0.1:9810"),
        ('config.agent.log_level="loud"', "/config/agent/log_level", "'debug'"),
        ('config.policy.cluster="yes"', "/config/policy/cluster", "want boolean"),
        ('config.pools=[{"mode":"all"}]', "/config/pools/0", "missing property 'name'"),
        ('config.pools=[{"name":"hca"}]', "config.pools[0].name", 'such as "rdma/hca"'),
        ('config.gpus=[{"name":"gpu"}]', "config.gpus[0].name", 'such as "rdma/hca"'),
        (
            'config.pools=[{"name":"a/b","selectors":[{"vendor":["1"]}]}]',
            "/config/pools/0/selectors/0",
            "'vendor' not allowed",
        ),
        (
            'config.pools=[{"name":"a/b","selectors":{"vendor":["1"]}}]',
            "/config/pools/0/selectors",
            "'vendor' not allowed",
        ),
        ('config.pools=[{"name":"a/b","slots":0}]', "/config/pools/0/slots", "minimum"),
        ('config.pools=[{"name":"a/b","slot":1}]', "/config/pools/0", "'slot' not allowed"),
        ('config.pool=[{"name":"a/b"}]', "/config", "'pool' not allowed"),
        ('host.cniBinDir="opt/cni/bin"', "host.cniBinDir", "write an absolute path, such as"),
        ("host.extraDirectories=[{}]", "/host/extraDirectories/0", "missing property 'path'"),
        ('ipam.scope="cloud"', "/ipam/scope", "'cluster', 'node'"),
        ('ipam.range="10.0.0.0/8"', "/ipam", "'range' not allowed"),
        ('config.ipam={"scope":"node"}', "/config", "'ipam' not allowed"),
        ('install.plugins=["ipoip"]', "/install/plugins/0", "'ipoib'"),
        ('resources.limits.memory="lots"', "resources.limits.memory is lots", "such as 512Mi"),
        ("resources.limits.memory=512", "resources.limits.memory is 512", "such as 512Mi"),
        ('controller.resources.requests.cpu="1 core"', "controller.resources", "such as 50m"),
        ('updateStrategy.type="Recreate"', "/updateStrategy/type", "'OnDelete'"),
        ("tolerations={}", "/tolerations", "want array"),
        ('gpu.runtimeClassName="Nvidia!"', "/gpu/runtimeClassName", "does not match"),
        ('config.gpuLimits.driverRoot="usr"', "/config/gpuLimits/driverRoot", "does not match"),
        ('podLabels={"a":1}', "/podLabels/a", "want string"),
        ("metrics.proxy.port=70000", "/metrics/proxy/port", "maximum"),
        ('metrics.serviceMonitor.interval="often"', "/metrics/serviceMonitor/interval", "pattern"),
        ('uninstall.custodian="maybe"', "/uninstall/custodian", "want boolean"),
    ],
)
def test_wrong_value_is_refused_with_its_path(value: str, place: str, said: str) -> None:
    text = _refused(value)
    assert place in text and said in text, text


def test_an_image_is_named_by_its_digest_where_there_is_one() -> None:
    digest = f"sha256:{'a' * 64}"
    values = ("--set", f"image.repository=registry.example/podfabric,image.digest={digest}")
    for pod in _pods(_objects(*values)):
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            assert container["image"] == f"registry.example/podfabric@{digest}"


def test_customary_chart_values_work_as_usual() -> None:
    values = {
        "imagePullSecrets": [{"name": "ours"}],
        "global": {"imagePullSecrets": [{"name": "everybodys"}]},
        "commonLabels": {"team": "fabric"},
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
    }
    sets = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    objects = _objects(*METRICS, *(word for each in sets for word in ("--set-json", each)))
    for pod in _pods(objects):
        assert pod["imagePullSecrets"] == [{"name": "ours"}, {"name": "everybodys"}]
    for name, one in objects.items():
        assert one["metadata"]["labels"]["team"] == "fabric", name
        template = one.get("spec", {}).get("template")
        assert template is None or template["metadata"]["labels"]["team"] == "fabric", name
    daemons = objects["DaemonSet", "podfabric"]["spec"]
    assert daemons["updateStrategy"] == {"type": "OnDelete"}
    assert "team" not in daemons["selector"]["matchLabels"]
    (agent,) = _pod(objects)["containers"]
    assert {"name": "A", "value": "b"} in agent["env"]
    assert {"name": "more", "mountPath": "/more"} in agent["volumeMounts"]
    assert {"name": "more", "emptyDir": {}} in _pod(objects)["volumes"]


def test_generated_manifests_match_the_chart() -> None:
    for path, text in manifests.generated().items():
        assert path.read_text() == text, f"{path} is not the chart's: run `make manifests`"


def test_openshift_overlay_matches_the_chart() -> None:
    charts = _objects(*OPENSHIFT)
    ours = _kustomize(KUSTOMIZE / "openshift")
    assert {volume["name"]: volume for volume in _pod(ours)["volumes"]} == {
        volume["name"]: volume for volume in _pod(charts)["volumes"]
    }
    assert ours.keys() == charts.keys() | {("Namespace", "podfabric")}


def test_custodian_overlay_matches_the_chart() -> None:
    charts = _objects(*CUSTODIAN)["DaemonSet", "podfabric"]["spec"]
    assert _kustomize(KUSTOMIZE / "custodian")["DaemonSet", "podfabric"]["spec"] == charts


@pytest.mark.parametrize("folder", ["base", "openshift"])
def test_the_component_for_gpus_adds_what_the_chart_adds(folder: str, tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    added = (KUSTOMIZE / "gpus/kustomization.yaml").read_text()
    (tmp_path / "gpus/kustomization.yaml").write_text(added)
    objects = _kustomize(KUSTOMIZE / folder)
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(objects.values()))
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": ["objects.yaml"], "components": ["gpus"]})
    )
    ours = _kustomize(tmp_path)
    charts = _objects(*(OPENSHIFT if folder == "openshift" else ()), *PARTS_OF_GPUS)
    for pod in (_pod(ours), _pod(charts)):
        pod["volumes"].sort(key=lambda volume: volume["name"])
    assert _pod(ours) == _pod(charts)
    if folder == "openshift":
        name = ("SecurityContextConstraints", "podfabric")
        for key in ("allowHostPID", "allowedCapabilities"):
            assert ours[name][key] == charts[name][key]


def test_thick_multus_sees_the_agents_socket(tmp_path: Path) -> None:
    daemon = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "kube-multus-ds", "namespace": "kube-system"},
        "spec": {
            "selector": {"matchLabels": {"name": "multus"}},
            "template": {
                "metadata": {"labels": {"name": "multus"}},
                "spec": {
                    "containers": [
                        {
                            "name": "kube-multus",
                            "image": "multus",
                            "resources": {"limits": {"cpu": "100m", "memory": "50Mi"}},
                            "volumeMounts": [{"name": "cnibin", "mountPath": "/opt/cni/bin"}],
                        }
                    ],
                    "volumes": [{"name": "cnibin", "hostPath": {"path": "/opt/cni/bin"}}],
                },
            },
        },
    }
    (tmp_path / "multus.yaml").write_text(yaml.safe_dump(daemon))
    (tmp_path / "component").mkdir()
    patch = (KUSTOMIZE / "multus-thick/kustomization.yaml").read_text()
    (tmp_path / "component/kustomization.yaml").write_text(patch)
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": ["multus.yaml"], "components": ["component"]})
    )
    pod = _kustomize(tmp_path)["DaemonSet", "kube-multus-ds"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "100m", "memory": "256Mi"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
        *("/opt/cni/bin", "/run/podfabric")
    }
    assert {
        "name": "podfabric",
        "hostPath": {"path": "/run/podfabric", "type": "DirectoryOrCreate"},
    } in (pod["volumes"])
