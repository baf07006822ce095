"""Tells people when a process gets no GPU although its container holds a part of one.

The shim says it on the process' standard error. This says it in the agent's log, and to `report`.
An agent that is away says nothing, and does not learn of it later.
"""

import logging
from collections.abc import Callable

import msgspec

from base.problems import Seldom
from gpu.limits.tenants import Tenant

QUIET = 10.0  # seconds between two words about the same of a group

_log = logging.getLogger(__name__)

VERSION = (
    "got no GPU for a process: its library of podfabric is of another version than the node's "
    "agent: delete the pod"
)
STRANGER = (
    "got no GPU for a process: the agent does not find the process in this container: start it in "
    "the container itself; if it is there, delete the pod"
)
SLOT = (
    "got no GPU for a process: another process has its place in /run/podfabric/gpu/region: start "
    "it again; if that does not help, delete the pod"
)
BUSY = (
    "got no GPU for a process: the agent could not register it, and its log says why: start it "
    "again"
)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, with what to do: one of the texts above."""

    tenant: Tenant
    text: str


class Refusals:
    """Logs them, and hands them to `report`, each not too often. Any thread may use it."""

    def __init__(self, report: Callable[[Refusal], object] = lambda refusal: None) -> None:
        self._report = report
        self._seldom = Seldom()

    def tell(self, tenant: Tenant, text: str, detail: str = "") -> None:
        """A process was refused; `detail` is for the log. Tenants bring this about as they like."""
        if not self._seldom.may_say((tenant.group, text), QUIET):
            return
        of = f"pod {tenant.pod}, container {tenant.container}"
        _log.warning("GPUs: %s: %s%s", of, text, f" ({detail})" if detail else "")
        self._report(Refusal(tenant=tenant, text=text))
