"""Reports refused processes: processes that get no GPU although their container has a share.

The shim writes the reason to the standard error of the process. This module writes it to the
agent's log and passes it to `report`. Refusals while no agent runs are not reported.
"""

import logging
from collections.abc import Callable

import msgspec

from base.problems import Seldom
from gpu.limits.tenants import Tenant

QUIET = 10.0  # seconds between two reports of the same refusal of a group

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
    """A refused process: its tenant, and one of the texts above."""

    tenant: Tenant
    text: str


class Refusals:
    """Logs refusals and passes them to `report`, with a limited rate. Any thread may use it."""

    def __init__(self, report: Callable[[Refusal], object] = lambda refusal: None) -> None:
        self._report = report
        self._seldom = Seldom()

    def report(self, tenant: Tenant, text: str, detail: str = "") -> None:
        """Report a refusal. `detail` is for the log only. Tenants can cause any number of them."""
        if not self._seldom.may_say((tenant.group, text), QUIET):
            return
        pod = f"pod {tenant.pod}, container {tenant.container}"
        _log.warning("GPUs: %s: %s%s", pod, text, f" ({detail})" if detail else "")
        self._report(Refusal(tenant=tenant, text=text))
