"""Registers the processes of groups, and marks ended processes dead in `limits`.

The kernel identifies the process that connects to a group's socket (SO_PEERCRED and a pidfd). The
process must run in the group's container. Each group has its own backlog, clients and rate, so no
group can delay another group. gpu/shim/layout.h describes the protocol.
"""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from base.loop import StepThread
from base.problems import Seldom
from gpu.limits import group_socket, layout, processes
from gpu.limits.group_socket import BURST, GroupSocket, Registrant
from gpu.limits.groups import Groups
from gpu.limits.layout import PfAnswer, PfRequest
from gpu.limits.limits_file import GroupError, LimitsInvalid
from gpu.limits.living_processes import LivingProcesses
from gpu.limits.region import RegionInvalid
from gpu.limits.tenants import Tenant, Tenants

CLIENTS = 32  # most clients of a group that have sent no request yet
ROUND = 32  # clients of a group that are accepted before another group's turn
TICK = 0.25  # seconds
QUIET = 10.0  # seconds between two log lines about a group, or two reports of one refusal
RATE = 200.0  # clients of a group per second

_REQUEST = 8  # bytes

_log = logging.getLogger(__name__)
VERSION = (
    "got no GPU for a process: podfabric's library in the container and the node's agent have "
    "different versions: delete the pod"
)
STRANGER = (
    "got no GPU for a process: the agent does not find the process in this container: start the "
    "process in the container; if it was started there, delete the pod"
)
SLOT = (
    "got no GPU for a process: another process has its slot in /run/podfabric/gpu/region: start "
    "the process again; if it gets no GPU then, delete the pod"
)
BUSY = (
    "got no GPU for a process: the agent could not register the process; the agent's log has the "
    "reason: start the process again"
)
_REFUSED = {
    layout.STATUS_VERSION: VERSION,
    layout.STATUS_STRANGER: STRANGER,
    layout.STATUS_SLOT: SLOT,
    layout.STATUS_BUSY: BUSY,
}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refused process. `text` is `VERSION`, `STRANGER`, `SLOT` or `BUSY`."""

    tenant: Tenant
    text: str


class Refusals:
    """Logs and reports refusals at a limited rate. Any thread may use it."""

    def __init__(self, report: Callable[[Refusal], object] = lambda refusal: None) -> None:
        self._report = report
        self._seldom = Seldom()

    def report(self, tenant: Tenant, text: str, detail: str = "") -> None:
        """Drops a refusal that was reported in the last `QUIET` seconds."""
        if not self._seldom.may_say((tenant.group, text), QUIET):
            return
        pod = f"pod {tenant.pod}, container {tenant.container}"
        _log.warning("GPUs: %s: %s%s", pod, text, f" ({detail})" if detail else "")
        self._report(Refusal(tenant=tenant, text=text))


class Registrar(StepThread):
    """Serves the sockets of all groups in a thread, from `start` to `close`."""

    def __init__(self, groups: Groups, tenants: Tenants, refused: Refusals | None = None) -> None:
        super().__init__("gpu-registrar", join=None)
        self._groups = groups
        self._tenants = tenants
        self._refusals = refused or Refusals()
        self._lock = threading.RLock()  # guards the fields below
        self._listeners: dict[int, GroupSocket] = {}  # by descriptor
        self._clients: dict[int, Registrant] = {}
        self._seldom = Seldom()
        # Ended processes that are not marked dead yet: registrations by group and slot.
        self._unmarked: dict[str, dict[int, int]] = {}
        self._epoll = select.epoll()
        self.living = LivingProcesses(self._epoll)
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._ticked = 0.0

    def start(self) -> None:
        self._epoll.register(self._end, select.EPOLLIN)
        self._groups.made, self._groups.removed = self._listen, self._forget
        for group in self._groups.names():
            try:
                self._adopt(group)
                self._listen(group)
            except (GroupError, OSError) as error:
                _log.warning("GPUs: cannot serve group %s: %s", group, error)
        super().start()

    def close(self) -> None:
        """The files of the sockets stay until the next agent replaces them."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        super().close()
        with self._lock:
            for listener in self._listeners.values():
                listener.socket.close()
            for client in self._clients.values():
                client.socket.close()
            self._listeners, self._clients = {}, {}
        self.living.close()
        self._epoll.close()
        os.close(self._end)

    def _listen(self, group: str) -> None:
        with self._lock:
            if self._ended.is_set() or self._serves(group):
                return
            listener = GroupSocket(group, group_socket.listen(self._groups.root / group / "agent"))
            self._listeners[listener.socket.fileno()] = listener
            self._accept_if_possible(listener)

    def _forget(self, group: str) -> None:
        with self._lock:
            for descriptor, listener in list(self._listeners.items()):
                if listener.group == group:
                    del self._listeners[descriptor]
                    # Unregister: a child that was just forked may still have the descriptor.
                    if listener.accepting:
                        self._epoll.unregister(descriptor)
                    listener.socket.close()
            self._unmarked.pop(group, None)  # registrations of a new group begin at 1
        self.living.forget(group)

    def _serves(self, group: str) -> bool:
        return any(listener.group == group for listener in self._listeners.values())

    def _adopt(self, group: str) -> None:
        """Watch living processes that an earlier agent registered. Mark ended processes dead."""
        self._groups.settle(group)
        dead: dict[int, int] = {}
        for slot, known in self._groups.read(group).processes.items():
            if not known.alive:
                continue
            pidfd = processes.pidfd_of(known.host_pid)
            if pidfd is None or processes.start_time(known.host_pid) != known.start_time:
                dead[slot] = known.registration
                if pidfd is not None:
                    os.close(pidfd)
            else:
                self.living.watch(
                    pidfd, known.host_pid, known.start_time, group, slot, known.registration
                )
        if dead:
            self._groups.mark_dead(group, dead)

    def wake(self) -> None:
        os.eventfd_write(self._end, 1)

    def step(self) -> float:
        """Wait up to `TICK` seconds for clients, and serve them."""
        ready = [descriptor for descriptor, _ in self._epoll.poll(TICK)]
        with self._lock:
            ended = [fd for fd in ready if fd not in {*self._listeners, *self._clients}]
        self._mark_dead(self.living.take_ended(ended))  # first: a request may need the slots
        for descriptor in ready:
            with self._lock:
                listener = self._listeners.get(descriptor)
                client = self._clients.get(descriptor)
            if listener is not None:
                self._accept(listener)
            elif client is not None:
                self._take(client)
        now = time.monotonic()
        if now - self._ticked >= TICK:
            self._tick(now)
        return 0.0

    def _tick(self, now: float) -> None:
        with self._lock:
            unmarked, self._unmarked = self._unmarked, {}
        self._mark_dead(unmarked)
        with self._lock:
            passed, self._ticked = min(now - self._ticked, 5.0), now
            for client in list(self._clients.values()):
                if now >= client.deadline:
                    self._close(client)
            for listener in self._listeners.values():
                listener.budget = min(BURST, listener.budget + passed * RATE)
                self._accept_if_possible(listener)

    def _accept_if_possible(self, listener: GroupSocket) -> None:
        """Accept clients unless too many clients of the group wait or the group exceeds its rate.

        Other clients wait in the backlog.
        """
        possible = listener.clients < CLIENTS and listener.budget >= 1
        if possible and not listener.accepting:
            self._epoll.register(listener.socket, select.EPOLLIN)
        elif not possible and listener.accepting:
            self._epoll.unregister(listener.socket)
        listener.accepting = possible

    def _accept(self, listener: GroupSocket) -> None:
        for _ in range(ROUND):
            with self._lock:
                if listener.socket.fileno() < 0 or not listener.accepting:  # removed by now
                    return
                try:
                    peer, _ = listener.socket.accept()
                except BlockingIOError:
                    return
                except OSError as error:  # no descriptors or memory: the next tick tries again
                    _log.warning("GPUs: cannot accept a connection: %s", error.strerror)
                    self._epoll.unregister(listener.socket)
                    listener.accepting = False
                    return
                client = Registrant(listener, peer)
                listener.clients += 1
                listener.budget -= 1
                self._clients[peer.fileno()] = client
                self._accept_if_possible(listener)
            if not self._take(client):
                self._epoll.register(peer, select.EPOLLIN)
                client.awaited = True

    def _take(self, client: Registrant) -> bool:
        """Answer a request and close the client. Returns False if no request has arrived."""
        try:
            content = client.socket.recv(_REQUEST + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            content = b""
        if len(content) == _REQUEST:
            self._answer(client, PfRequest.from_buffer_copy(content))
        self._close(client)
        return True

    def _answer(self, client: Registrant, request: PfRequest) -> None:
        """Register the process if it may have the slot. An ended process gets no answer."""
        peer = group_socket.peer(client.socket)
        answer = self._registered(client.listener.group, request, *peer) if peer else None
        if answer is not None:
            with suppress(OSError):  # the client has closed its socket
                client.socket.send(bytes(answer), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _registered(self, group: str, request: PfRequest, pid: int, pidfd: int) -> PfAnswer | None:
        """The caller must not close `pidfd`. Returns `None` if the process has ended."""
        status, detail = layout.STATUS_BUSY, ""
        tenant: Tenant | None = None
        try:
            tenant = self._tenants.of(pid)
            began = processes.start_time(pid)
            if began is None or processes.has_ended(pidfd):
                return None
            if request.version != layout.VERSION:
                status = layout.STATUS_VERSION
            elif tenant is None or tenant.group != group:
                status = layout.STATUS_STRANGER
            elif request.slot >= layout.SLOTS or self._is_taken(group, request.slot, pid, began):
                status = layout.STATUS_SLOT
            else:
                made = self._groups.register(group, request.slot, pid, began)
                registration = made.registration
                self.living.watch(pidfd, pid, began, group, request.slot, registration)
                pidfd = -1
                return PfAnswer(layout.STATUS_OK, pid, registration)
        except (GroupError, LimitsInvalid, OSError) as error:
            detail = f": {error}"
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        if tenant is None:
            tenant = next((t for t in self._tenants.listed() if t.group == group), None)
        if tenant is None:
            self._warn(group, f"no container holds it: refused process {pid}{detail}")
        else:
            self._refusals.report(tenant, _REFUSED[status], f"process {pid}{detail}")
        return PfAnswer(status)

    def _is_taken(self, group: str, slot: int, pid: int, start_time: int) -> bool:
        """Whether another living process is registered in the slot and has not released it."""
        registration = self.living.other_holder(group, slot, pid, start_time)
        if registration is None:
            return False
        try:
            with self._groups.region(group, self._groups.read(group)) as region:
                use = region.slots([slot]).get(slot)
        except RegionInvalid:
            return True
        return use is not None and use.registration == registration

    def _mark_dead(self, dead: Mapping[str, Mapping[int, int]]) -> None:
        """After an error, the next tick tries again."""
        for group, slots in dead.items():
            try:
                self._groups.mark_dead(group, slots)
            except (GroupError, LimitsInvalid, OSError) as error:
                self._warn(group, f"cannot mark ended processes dead: {error}")
                with self._lock:
                    if self._serves(group):
                        self._unmarked.setdefault(group, {}).update(slots)

    def _warn(self, group: str, text: str) -> None:
        """Log at a limited rate, because a tenant can cause the warning."""
        if self._seldom.may_say(group, QUIET):
            _log.warning("GPUs: group %s: %s", group, text)

    def _close(self, client: Registrant) -> None:
        with self._lock:
            if self._clients.pop(client.socket.fileno(), None) is None:
                return
            if client.awaited:
                self._epoll.unregister(client.socket)
            client.socket.close()
            client.listener.clients -= 1
            if client.listener.socket.fileno() >= 0:
                self._accept_if_possible(client.listener)
