"""Events on pods and on the node: each once, and nothing without an API server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from agent.observe import node_events as module
from agent.observe.node_events import KILLED, OVER, REFUSED, AgentEvents
from base.pod import Pod
from gpu.limits.process_registration import SLOT, VERSION, Refusal
from gpu.limits.tenants import Tenant
from gpu.watch.enforcement import OverUse
from kube.client import ClusterApi
from tests.waiting import until

IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


class Reported:
    """The API server, as far as events go."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def report(self, reason: str, message: str, regarding: Mapping[str, Any]) -> None:
        self.events.append((reason, message, regarding["name"]))


def tenant(pod: str, container: str = "main") -> Tenant:
    return Tenant(group=pod, pod=Pod("ml", pod, f"uid-{pod}"), container=container)


def overuse(pod: str, *killed: int) -> OverUse:
    return OverUse(
        tenant=tenant(pod),
        uuid="GPU-1",
        device_bytes=3 << 30,
        limit_bytes=2 << 30,
        action="kill" if killed else "report",
        killed=killed,
    )


def test_a_pod_is_told_once_and_again_when_it_is_killed() -> None:
    api = Reported()
    events = AgentEvents(IN_CLUSTER, lambda environ: cast(ClusterApi, api))
    for told in (overuse("a"), overuse("a"), overuse("b"), overuse("a", 7), overuse("a", 8)):
        events.of_gpu(told)
    until(lambda: len(api.events) == 3, what="three events")
    events.close()
    assert [(reason, pod) for reason, _, pod in api.events] == [
        (OVER, "a"),
        (OVER, "b"),
        (KILLED, "a"),
    ]
    assert api.events[0][1] == (
        "container main uses 3072 MiB of GPU-1, but may use only 2048 MiB: no process is killed "
        "(onOveruse: report)"
    )


def test_a_pod_is_told_once_of_each_reason_for_which_its_processes_get_no_gpu() -> None:
    api = Reported()
    events = AgentEvents(IN_CLUSTER, lambda environ: cast(ClusterApi, api))
    told = [(tenant("a"), VERSION), (tenant("a"), VERSION), (tenant("a"), SLOT)]
    for of, text in (*told, (tenant("b", container=""), VERSION)):
        events.of_gpu(Refusal(tenant=of, text=text))
    events.of_gpu(overuse("a"))
    until(lambda: len(api.events) == 4, what="four events")
    events.close()
    assert api.events[:3] == [
        (REFUSED, f"container main {VERSION}", "a"),
        (REFUSED, f"container main {SLOT}", "a"),
        (REFUSED, VERSION, "b"),  # the limits of a whole pod
    ]
    assert api.events[3][0] == OVER


def test_without_an_api_server_nothing_is_asked() -> None:
    asked: list[object] = []
    events = AgentEvents({}, lambda environ: asked.append(environ))
    events.of_gpu(overuse("a"))
    events.close()
    assert asked == []


def test_an_api_server_that_cannot_be_used_stops_nothing() -> None:
    events = AgentEvents(IN_CLUSTER, lambda environ: None)
    for _ in range(1000):
        events.of_gpu(overuse("a"))
    events.close()


def test_the_node_is_told_of_each_mistake_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Reported()
    monkeypatch.setattr(module, "TOKEN", tmp_path / "token")
    events = AgentEvents({**IN_CLUSTER, "NODE_NAME": "n1"}, lambda environ: cast(ClusterApi, api))
    events.of_node("ConfigurationError", "before there is a token")
    (tmp_path / "token").touch()
    for text in ("pools: wrong", "pools: wrong", "policy: wrong"):
        events.of_node("ConfigurationError", text)
    until(lambda: len(api.events) == 2, what="two events")
    events.close()
    assert api.events == [
        ("ConfigurationError", "pools: wrong", "n1"),
        ("ConfigurationError", "policy: wrong", "n1"),
    ]
