"""Events on pods, from a process' action to the API server, with all parts of the agent."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from agent.observe.node_events import KILLED, OVER, REFUSED, AgentEvents
from gpu import limit_service
from gpu.driver.nvml import Nvml
from gpu.limits import process_registration
from gpu.limits.limits_file import Limit
from gpu.limits.process_registration import Refusal
from gpu.watch import compute_shares
from gpu.watch.enforcement import LOOKS, OverUse
from gpu.watch.usage_watch import NodeSample, Watch
from kube.client import ClusterApi
from tests.fake_api import FakeApi
from tests.host.gpu.pods import RegisteringProcess
from tests.host.gpu.served_node import FIRST, ServedNode
from tests.standin.gpus import GIB
from tests.waiting import until


class Rounds:
    """The watch's actions in order: a "tick", a "look", a look that saw "over"-use, and "told"."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        tick, look = Watch.tick, Watch.look

        def ticking(watch: Watch, nvml: Nvml) -> object:
            self.done.append("tick")
            return tick(watch, nvml)

        def looking(watch: Watch, nvml: Nvml | None, problem: str = "") -> NodeSample:
            at = len(self.done)
            self.done.append("look")
            sample = look(watch, nvml, problem)
            if any(of.overuse_bytes for of in sample.tenants):
                self.done[at] = "over"
            return sample

        patch.setattr(Watch, "tick", ticking)
        patch.setattr(Watch, "look", looking)


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def node(tmp_path: Path, api: FakeApi) -> Iterator[ServedNode]:
    """A node whose agent has an API server."""
    events = AgentEvents(
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, lambda environ: cast(ClusterApi, api)
    )
    with ExitStack() as stack:
        stack.callback(events.close)
        node = ServedNode(tmp_path, stack)
        node.report = events.of_gpu
        node.install_driver()
        yield node


def told(api: FakeApi) -> list[tuple[str, str, str]]:
    """The reason, message and pod of each event."""
    return [(event.reason, event.message, event.regarding["name"]) for event in api.events]


def test_over_use_is_an_event_of_the_pod_two_seconds_after_it_at_most(
    node: ServedNode, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in looks, since a busy machine delays each look. At the latest, the second look
    after the over-use counts. Looks are a second apart, which is some ticks of the loop."""
    rounds, events = Rounds(monkeypatch), node.report

    def report(overuse: OverUse | Refusal) -> None:
        rounds.done.append("told")
        events(overuse)

    node.report = report
    node.start()
    container = node.container("a", Limit(FIRST, GIB, 1.0))
    process = node.process(container, GIB // 4)
    until(lambda: rounds.done.count("look") >= 2, what="looks at a container within its limit")
    assert told(api) == []
    node.allocate(process, 2 * GIB)
    before = len(rounds.done)
    until(lambda: api.events, what="event")
    (event,) = api.events
    uid = container.container.pod_uid
    assert event.regarding == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "default",
        "name": "pod-of-a",
        "uid": uid,
    }
    assert event.reason == OVER
    assert event.message.startswith("container main uses 2604 MiB of GPU-00000000-57a0")
    done = rounds.done[: rounds.done.index("told")]
    looks = [each for each in done if each != "tick"]
    assert (looks[-LOOKS:], looks.count("over")) == (["over"] * LOOKS, LOOKS)
    assert len([each for each in done[before:] if each != "tick"]) <= LOOKS
    ticks = "".join("." if each == "tick" else "|" for each in done).split("|")[1:-1]
    most = round(limit_service.LOOK / compute_shares.TICK)
    assert max(map(len, ticks)) <= most
    assert LOOKS * most * compute_shares.TICK <= 2.0
    assert process.process.poll() is None


def test_kill_of_a_pods_processes_is_an_event_of_the_pod(node: ServedNode, api: FakeApi) -> None:
    node.start(on_overuse="kill")
    process = node.process(node.container("a", Limit(FIRST, GIB, 1.0)), 2 * GIB)
    until(lambda: api.events, what="event")
    ((reason, message, pod),) = told(api)
    assert (reason, pod) == (KILLED, "pod-of-a")
    assert message.endswith(f": killed {process.pid}")


def test_a_process_that_the_agent_refuses_is_an_event_of_its_pod(
    node: ServedNode, api: FakeApi
) -> None:
    started = node.start()
    container = node.container("a", Limit(FIRST, GIB, 1.0))
    socket = started.groups.root / "a/agent/agent.sock"
    with RegisteringProcess(container, socket) as client:
        client.register(0, version=2)
    until(lambda: api.events, what="event")
    assert told(api) == [(REFUSED, f"container main {process_registration.VERSION}", "pod-of-a")]
