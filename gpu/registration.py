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
from contextlib import suppress

from gpu import group_socket, layout, processes
from gpu.groups import GroupError, Groups
from gpu.layout import (
    STATUS_BUSY,
    STATUS_OK,
    STATUS_SLOT,
    STATUS_STRANGER,
    STATUS_VERSION,
    PfAnswer,
    PfRequest,
)
from gpu.region import RegionInvalid
from gpu.tenants import Tenants

CLIENTS = 32  # of a group, whose request has not come
ROUND = 16  # clients of a group that are accepted before another group's turn
PATIENCE = 0.5  # seconds for a request; the shim waits as long for its answer
TICK = 0.25  # seconds
QUIET = 10.0  # seconds between two lines of the log about a group's clients
RATE, BURST = 200.0, 1024.0  # clients of a group: per second, and after a quiet time

_REQUEST = 8  # bytes

_log = logging.getLogger(__name__)


class _GroupSocket:
    """The socket of a group."""

    def __init__(self, group: str, opened: socket.socket) -> None:
        self.group = group
        self.socket = opened
        self.accepting = False
        self.clients = 0
        self.budget = BURST


class _Registrant:
    """A connection whose request has not come yet."""

    def __init__(self, listener: _GroupSocket, peer: socket.socket) -> None:
        self.listener = listener
        self.socket = peer
        self.deadline = time.monotonic() + PATIENCE


class LivingProcess:
    """A process that is registered, until it ends."""

    def __init__(self, pidfd: int, pid: int, start_time: int) -> None:
        self.pidfd = pidfd
        self.pid = pid
        self.start_time = start_time
        self.image = processes.image_of(pid)  # another one after it executed a program
        self.slots: dict[tuple[str, int], int] = {}  # registrations by group and slot


class Registrar:
    """Serves the sockets of all groups in a thread, from `start` to `close`."""

    def __init__(self, groups: Groups, tenants: Tenants) -> None:
        self._groups = groups
        self._tenants = tenants
        self.answered: Counter[int] = Counter()  # by status
        self._lock = threading.RLock()  # of the following six
        self._listeners: dict[int, _GroupSocket] = {}  # by descriptor
        self._clients: dict[int, _Registrant] = {}
        self._living: dict[int, LivingProcess] = {}  # by pidfd
        self._by_pid: dict[int, LivingProcess] = {}  # the same
        self._holders: dict[tuple[str, int], LivingProcess] = {}  # by group and slot
        self._complained: dict[str, float] = {}  # when, by group
        self._closed = False
        self._epoll = select.epoll()
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._ticked = 0.0
        self._thread = threading.Thread(target=self._run, name="gpu-registrar", daemon=True)

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
        self._thread.start()

    def close(self) -> None:
        """Stop. The sockets' files stay: the next agent replaces them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._end, 1)
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            for listener in self._listeners.values():
                listener.socket.close()
            for client in self._clients.values():
                client.socket.close()
            for pidfd in self._living:
                os.close(pidfd)
            self._listeners, self._clients, self._living = {}, {}, {}
            self._by_pid, self._holders = {}, {}
        self._epoll.close()
        os.close(self._end)

    def living(self) -> dict[int, LivingProcess]:
        """The registered processes that have not ended, by pid."""
        with self._lock:
            return dict(self._by_pid)

    def _listen(self, group: str) -> None:
        """Open the socket of a group, unless it is open. Raises OSError."""
        with self._lock:
            if self._closed or any(each.group == group for each in self._listeners.values()):
                return
            listener = _GroupSocket(group, group_socket.listen(self._groups.root / group / "agent"))
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
            for key in [key for key in self._holders if key[0] == group]:
                del self._holders.pop(key).slots[key]
            self._complained.pop(group, None)

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
                self._watch(
                    pidfd, known.host_pid, known.start_time, group, slot, known.registration
                )
        if dead:
            self._groups.bury(group, dead)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._round()
            except Exception:  # noqa: BLE001 - without this thread no process gets a GPU
                _log.exception("GPUs: an internal error while serving processes")
                time.sleep(TICK)

    def _round(self) -> None:
        for descriptor, _ in self._epoll.poll(TICK):
            with self._lock:
                listener = self._listeners.get(descriptor)
                client = self._clients.get(descriptor)
            if listener is not None:
                self._accept(listener)
            elif client is not None:
                self._serve(client)
            elif descriptor != self._end:
                self._ended(descriptor)
        now = time.monotonic()
        if now - self._ticked >= TICK:
            self._tick(now)

    def _tick(self, now: float) -> None:
        with self._lock:
            passed, self._ticked = min(now - self._ticked, 5.0), now
            for client in list(self._clients.values()):
                if now >= client.deadline:
                    self._close(client)
            for listener in self._listeners.values():
                listener.budget = min(BURST, listener.budget + passed * RATE)
                self._accept_if_possible(listener)

    def _accept_if_possible(self, listener: _GroupSocket) -> None:
        """Accept up to the bounds of the group; more clients wait in the backlog."""
        possible = listener.clients < CLIENTS and listener.budget >= 1
        if possible and not listener.accepting:
            self._epoll.register(listener.socket, select.EPOLLIN)
        elif not possible and listener.accepting:
            self._epoll.unregister(listener.socket)
        listener.accepting = possible

    def _accept(self, listener: _GroupSocket) -> None:
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
                peer.setblocking(False)
                client = _Registrant(listener, peer)
                listener.clients += 1
                listener.budget -= 1
                self._clients[peer.fileno()] = client
                self._accept_if_possible(listener)
            if not self._serve(client):
                self._epoll.register(peer, select.EPOLLIN)

    def _serve(self, client: _Registrant) -> bool:
        """Answer a request and close; False if it has not come yet."""
        try:
            content = client.socket.recv(_REQUEST + 1)
        except BlockingIOError:
            return False
        except OSError:
            content = b""
        if len(content) == _REQUEST:
            answer = self._answered(client, PfRequest.from_buffer_copy(content))
            if answer is not None:
                self.answered[answer.status] += 1
                with suppress(OSError):  # it has gone
                    client.socket.send(bytes(answer), socket.MSG_NOSIGNAL)
        self._close(client)
        return True

    def _answered(self, client: _Registrant, request: PfRequest) -> PfAnswer | None:
        """The answer; None if the process has ended."""
        if request.version != layout.VERSION:
            return PfAnswer(STATUS_VERSION)
        if request.slot >= layout.SLOTS:
            return PfAnswer(STATUS_SLOT)
        group = client.listener.group
        peer = group_socket.peer(client.socket)
        if peer is None:
            return None
        pid, pidfd = peer
        try:
            tenant, start_time = self._tenants.of(pid), processes.start_time(pid)
            if start_time is None or processes.has_ended(pidfd):
                return None
            if tenant is None or tenant.group != group:
                self._complain(group, f"process {pid} is in no container of it")
                return PfAnswer(STATUS_STRANGER)
            if self._is_taken(group, request.slot, pid, start_time):
                return PfAnswer(STATUS_SLOT)
            registered = self._groups.register(group, request.slot, pid, start_time)
            registration = registered.registration
            self._watch(pidfd, pid, start_time, group, request.slot, registration)
            pidfd = -1
            return PfAnswer(STATUS_OK, pid, registration)
        except (GroupError, OSError) as error:
            self._complain(group, f"cannot register process {pid}: {error}")
            return PfAnswer(STATUS_BUSY)
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def _is_taken(self, group: str, slot: int, pid: int, start_time: int) -> bool:
        """Whether another process, which lives, is registered in the slot and uses it.

        One whose answer came too late has given the slot back, so that it does not say so itself.
        """
        with self._lock:
            holder = self._holders.get((group, slot))
            if (
                holder is None
                or (holder.pid, holder.start_time) == (pid, start_time)
                or processes.has_ended(holder.pidfd)
            ):
                return False
            registration = holder.slots[group, slot]
        try:
            with self._groups.region(group, self._groups.read(group)) as region:
                said = region.slots([slot]).get(slot)
        except RegionInvalid:
            return True
        return said is not None and said.registration == registration

    def _watch(
        self, pidfd: int, pid: int, start_time: int, group: str, slot: int, registration: int
    ) -> None:
        """Notice the end of a process. Takes the pidfd."""
        with self._lock:
            former = self._holders.pop((group, slot), None)
            if former is not None:
                del former.slots[group, slot]
            process = self._by_pid.get(pid)
            if process is not None and process.start_time == start_time:
                os.close(pidfd)
                process.image = processes.image_of(pid)
            else:
                process = LivingProcess(pidfd, pid, start_time)
                self._living[pidfd] = self._by_pid[pid] = process
                self._epoll.register(pidfd, select.EPOLLIN)
            process.slots[group, slot] = registration
            self._holders[group, slot] = process

    def _ended(self, pidfd: int) -> None:
        """A process has ended: say so in the limits of its groups."""
        with self._lock:
            process = self._living.get(pidfd)
            # Ask: the event may be about an earlier descriptor of this number.
            if process is None or not processes.has_ended(pidfd):
                return
            del self._living[pidfd]
            if self._by_pid.get(process.pid) is process:
                del self._by_pid[process.pid]
            for key in process.slots:
                del self._holders[key]
            self._epoll.unregister(pidfd)
            os.close(pidfd)
        for group in {group for group, _ in process.slots}:
            slots = {slot: of for (name, slot), of in process.slots.items() if name == group}
            try:
                self._groups.bury(group, slots)
            except (GroupError, OSError) as error:
                _log.warning("GPUs: group %s: process %d has ended: %s", group, process.pid, error)

    def _complain(self, group: str, text: str) -> None:
        """Log what a tenant can bring about, not as often as it likes."""
        now = time.monotonic()
        if now - self._complained.get(group, float("-inf")) >= QUIET:
            self._complained[group] = now
            _log.warning("GPUs: group %s: %s", group, text)

    def _close(self, client: _Registrant) -> None:
        with self._lock:
            if self._clients.pop(client.socket.fileno(), None) is None:
                return
            with suppress(FileNotFoundError):  # its request was there when it was accepted
                self._epoll.unregister(client.socket)
            client.socket.close()
            client.listener.clients -= 1
            if client.listener.socket.fileno() >= 0:
                self._accept_if_possible(client.listener)
