"""Registers the processes of groups, and tells their shims when one of them has died.

Each group has a socket of its own, in the directory that its containers see. Who connects, the
kernel says (SO_PEERCRED and a pidfd): its container must hold the group, whatever the request has.
One group's clients cannot keep another's waiting: each group has a backlog, a number of clients and
a rate of its own.

The protocol is at the end of shim/layout.h.
"""

import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from base.loop import StepThread
from base.problems import Seldom
from gpu.limits import group_socket, layout, processes, refusals
from gpu.limits.group_socket import BURST, GroupSocket, Registrant
from gpu.limits.groups import Groups
from gpu.limits.layout import (
    STATUS_BUSY,
    STATUS_OK,
    STATUS_SLOT,
    STATUS_STRANGER,
    STATUS_VERSION,
    PfAnswer,
    PfRequest,
)
from gpu.limits.limits_file import GroupError, LimitsInvalid
from gpu.limits.living_processes import LivingProcesses
from gpu.limits.refusals import Refusals
from gpu.limits.region import RegionInvalid
from gpu.limits.tenants import Tenant, Tenants

CLIENTS = 32  # of a group, whose request has not come
ROUND = 32  # clients of a group that are accepted before another group's turn
TICK = 0.25  # seconds
QUIET = 10.0  # seconds between two lines of the log about a group's clients
RATE = 200.0  # clients of a group, per second

_REQUEST = 8  # bytes

_log = logging.getLogger(__name__)


_REFUSED = {
    STATUS_VERSION: refusals.VERSION,
    STATUS_STRANGER: refusals.STRANGER,
    STATUS_SLOT: refusals.SLOT,
    STATUS_BUSY: refusals.BUSY,
}


class Registrar(StepThread):
    """Serves the sockets of all groups in a thread, from `start` to `close`."""

    def __init__(self, groups: Groups, tenants: Tenants, told: Refusals | None = None) -> None:
        super().__init__("gpu-registrar", join=None)
        self._groups = groups
        self._tenants = tenants
        self._refusals = told or Refusals()
        self.answered: Counter[int] = Counter()  # by status
        self._lock = threading.RLock()  # of the following
        self._listeners: dict[int, GroupSocket] = {}  # by descriptor
        self._clients: dict[int, Registrant] = {}
        self._seldom = Seldom()
        # What could not be written yet: registrations of processes that ended, by group and slot.
        self._unburied: dict[str, dict[int, int]] = {}
        self._epoll = select.epoll()
        self.living = LivingProcesses(self._epoll)
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._ticked = 0.0

    def start(self) -> None:
        """Adopt what an earlier agent registered, listen at every group's socket, and serve."""
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
        """Stop. The sockets' files stay: the next agent replaces them."""
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
        """Open the socket of a group, unless it is open. Raises OSError."""
        with self._lock:
            if self._ended.is_set() or any(
                each.group == group for each in self._listeners.values()
            ):
                return
            listener = GroupSocket(group, group_socket.listen(self._groups.root / group / "agent"))
            self._listeners[listener.socket.fileno()] = listener
            self._accept_if_possible(listener)

    def _forget(self, group: str) -> None:
        """Close the socket of a group that was removed."""
        with self._lock:
            for descriptor, listener in list(self._listeners.items()):
                if listener.group == group:
                    del self._listeners[descriptor]
                    # Closing is not enough: a child that was just forked still has the descriptor.
                    if listener.accepting:
                        self._epoll.unregister(descriptor)
                    listener.socket.close()
            self._unburied.pop(group, None)  # another of this name counts registrations from one
        self.living.forget(group)

    def _adopt(self, group: str) -> None:
        """Watch the processes that an earlier agent registered; bury those that ended since."""
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
            self._groups.bury(group, dead)

    def wake(self) -> None:
        """End the present step."""
        os.eventfd_write(self._end, 1)

    def step(self) -> float:
        """Serve the processes that ask, or wait for one."""
        ready = [descriptor for descriptor, _ in self._epoll.poll(TICK)]
        with self._lock:
            ended = [each for each in ready if each not in {*self._listeners, *self._clients}]
        self._bury(self.living.take_ended(ended))  # first: those who ask may need what they had
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
            unburied, self._unburied = self._unburied, {}
        self._bury(unburied)
        with self._lock:
            passed, self._ticked = min(now - self._ticked, 5.0), now
            for client in list(self._clients.values()):
                if now >= client.deadline:
                    self._close(client)
            for listener in self._listeners.values():
                listener.budget = min(BURST, listener.budget + passed * RATE)
                self._accept_if_possible(listener)

    def _accept_if_possible(self, listener: GroupSocket) -> None:
        """Accept up to the bounds of the group; more clients wait in the backlog."""
        possible = listener.clients < CLIENTS and listener.budget >= 1
        if possible and not listener.accepting:
            self._epoll.register(listener.socket, select.EPOLLIN)
        elif not possible and listener.accepting:
            self._epoll.unregister(listener.socket)
        listener.accepting = possible

    def _accept(self, listener: GroupSocket) -> None:
        for _ in range(ROUND):
            with self._lock:
                if listener.socket.fileno() < 0 or not listener.accepting:  # removed meanwhile
                    return
                try:
                    peer, _ = listener.socket.accept()
                except BlockingIOError:
                    return
                except OSError as error:  # no descriptor or memory is left: again after a tick
                    _log.warning("GPUs: accepting a connection: %s", error.strerror)
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
        """Answer a client's request, and close; False if it has not come yet."""
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
        """Register the process that asks, if it may have the slot; nothing if it has ended."""
        peer = group_socket.peer(client.socket)
        answer = self._registered(client.listener.group, request, *peer) if peer else None
        if answer is not None:
            self.answered[answer.status] += 1
            with suppress(OSError):  # it has gone
                client.socket.send(bytes(answer), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _registered(self, group: str, request: PfRequest, pid: int, pidfd: int) -> PfAnswer | None:
        """Enter a process in its slot, and watch it. Takes the pidfd."""
        status, detail = STATUS_BUSY, ""
        tenant: Tenant | None = None
        try:
            tenant = self._tenants.of(pid)
            began = processes.start_time(pid)
            if began is None or processes.has_ended(pidfd):
                return None
            if request.version != layout.VERSION:
                status = STATUS_VERSION
            elif tenant is None or tenant.group != group:
                status = STATUS_STRANGER
            elif request.slot >= layout.SLOTS or self._is_taken(group, request.slot, pid, began):
                status = STATUS_SLOT
            else:
                made = self._groups.register(group, request.slot, pid, began)
                registration = made.registration
                self.living.watch(pidfd, pid, began, group, request.slot, registration)
                pidfd = -1
                return PfAnswer(STATUS_OK, pid, registration)
        except (GroupError, LimitsInvalid, OSError) as error:
            detail = f": {error}"
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        holders = (of for of in self._tenants.listed() if of.group == group)
        tenant = tenant or next(holders, None)
        if tenant is None:
            self._complain(group, f"nobody holds it: process {pid} was refused{detail}")
        else:
            self._refusals.tell(tenant, _REFUSED[status], f"process {pid}{detail}")
        return PfAnswer(status)

    def _is_taken(self, group: str, slot: int, pid: int, start_time: int) -> bool:
        """Whether another process, which lives, is registered in the slot and uses it.

        One whose answer came too late has given the slot back, so that it does not say so itself.
        """
        registration = self.living.other_holder(group, slot, pid, start_time)
        if registration is None:
            return False
        try:
            with self._groups.region(group, self._groups.read(group)) as region:
                said = region.slots([slot]).get(slot)
        except RegionInvalid:
            return True
        return said is not None and said.registration == registration

    def _bury(self, dead: Mapping[str, Mapping[int, int]]) -> None:
        """Write that processes are dead; again later where that fails, unless the group is gone."""
        for group, slots in dead.items():
            try:
                self._groups.bury(group, slots)
            except (GroupError, LimitsInvalid, OSError) as error:
                self._complain(group, f"processes have ended: {error}")
                with self._lock:
                    if any(each.group == group for each in self._listeners.values()):
                        self._unburied.setdefault(group, {}).update(slots)

    def _complain(self, group: str, text: str) -> None:
        """Log what a tenant can bring about, not as often as it likes."""
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
