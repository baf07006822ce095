"""Writes the condition `FabricDegraded` of each Node from the faults in the Node's FabricNode.

The controller's leader does this. A condition is written when it changes, not repeatedly. The agent
reports a fault and its end with hysteresis (deviceplugin.health), so a condition does not flap.
"""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from base.loop import Backoff, StepThread
from base.problems import Problems
from base.text import printable
from kube.client import ClusterApi
from kube.informer import Mirror, all_nodes
from kube.resources import ApiError, Conflict, Node, NodeCondition, NotFound, Refused
from node.fabric_node import FabricNode

TYPE = "FabricDegraded"
AGAIN = 60.0  # seconds between two looks, without a change of a FabricNode
STANDBY = 1.0  # seconds between two looks whether this process leads
_MOST_FAULTS = 3  # in the message
_LONGEST = 1000  # characters of a message

_log = logging.getLogger(__name__)


class NodeFaults(NamedTuple):
    name: str
    faults: int
    text: str


class NodeConditions(StepThread):
    """Follows the FabricNodes, and writes the conditions, while `api.may_write()` is true."""

    def __init__(self, api: ClusterApi) -> None:
        super().__init__("node-conditions", join=0.0)
        self._api = api
        self._mirror: Mirror[NodeFaults] | None = None
        self._nodes: dict[str, Node] | None = None  # with the conditions that were last written
        self._backoff = Backoff(1.0, AGAIN)
        self._problems = Problems(_log)

    def close(self) -> None:
        super().close()
        self._stand_by()

    def step(self) -> float:
        if not self._api.may_write():
            self._stand_by()
            return STANDBY
        if self._mirror is None:
            self._mirror = Mirror(self._api, FabricNode, _faults, self.wake, may_lack=True)
        found = self._mirror.items()
        if found is None:
            return STANDBY
        try:
            self._write({each.name: each for each in found})
        except ApiError as error:
            self._nodes = None  # read again, because an answer may be lost
            self._problems.tell(TYPE, error)
            return self._backoff.pause()
        self._problems.tell(TYPE, None)
        self._backoff.reset()
        return AGAIN

    def _stand_by(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
        self._mirror = self._nodes = None

    def _write(self, found: Mapping[str, NodeFaults]) -> None:
        if self._nodes is None or not found.keys() <= self._nodes.keys():
            self._nodes = {node.name: node for node in all_nodes(self._api)}
        failure: ApiError | None = None
        for name, node in self._nodes.items():
            last = node.condition(TYPE)
            wanted = _condition(found.get(name), last)
            if wanted is None:
                continue
            try:
                self._api.set_condition(node, wanted)
            except NotFound:
                continue
            except (Conflict, Refused) as error:  # the other Nodes still get their conditions
                failure = error
                continue
            others = (each for each in node.status.conditions if each.type != TYPE)
            self._nodes[name] = node.with_conditions((*others, wanted))
        if failure is not None:
            raise failure


def _faults(node: FabricNode) -> NodeFaults:
    faults = node.status.faults
    text = "; ".join(f"{fault.about}: {fault.text}" for fault in faults[:_MOST_FAULTS])
    return NodeFaults(node.metadata.name, len(faults), printable(text)[:_LONGEST])


def _condition(of: NodeFaults | None, last: NodeCondition | None) -> NodeCondition | None:
    """The condition to write. Returns `None` if the `last` condition still holds."""
    if of is None:
        status, reason, message = "Unknown", "NoFabricNode", "no agent of podfabric reports"
    elif of.faults:
        status, reason, message = "True", "Faults", of.text
    else:
        status, reason, message = "False", "NoFaults", "the node has no fault of its fabric"
    if last is None and of is None:
        return None
    if last is not None and (last.status, last.message) == (status, message):
        return None
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    since = last.last_transition_time if last is not None and last.status == status else now
    return NodeCondition(TYPE, status, reason, message, since, now)
