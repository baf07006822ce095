"""The server of the launchers' socket.

One thread accepts clients and reads requests. Workers run the calls. A worker gets only complete
requests, and the thread sends the rest of a long answer. So a slow client does not occupy a worker.
A call ends at a `checkpoint` (`base.interrupts`) after its client hangs up or its deadline passes.
"""

import gc
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from functools import partial

from agent.observe import logs
from agent.observe.logs import fields
from agent.serve import framing
from agent.serve.connections import ConfigTooLarge, ConnectionState, LauncherConnection, Lost, Room
from agent.serve.framing import ANSWERED, LEAVING, REFUSED, BadFrame
from agent.serve.workers import Job, Workers
from agent.settings import Settings
from base.interrupts import Call
from cni.spec.dispatch import CLEANING_UP, error_document
from cni.spec.errors import CNIError, Code

RECEIVE_TIME = 10.0  # seconds for a whole request; the launcher has all of it before it connects
READ_TIME = 10.0  # seconds for the client to read its answer and close
OVERTIME = 5.0  # seconds that a call has to end after its deadline
TICK = 0.25  # seconds between two checks of the deadlines
BACKLOG = 1024
STOPPING = "stopping", "the agent is stopping"  # for the metrics, and for the client
ROOM = 48 << 20  # bytes for all large requests, until their calls have ended

_log = logging.getLogger(__name__)


class Server:
    """Serves the listening unix socket `listener` until `stop`.

    `call` runs a request and returns the answer's frame. `refused` gets the reason of each refusal.
    The server calls `leave` after its last accept(2). The next agent may then listen, while this
    agent finishes the running calls. The caller may replace `limits` at any time.
    """

    def __init__(
        self,
        listener: socket.socket,
        call: Callable[[framing.LauncherRequest, int | None, Call], bytes],
        workers: Workers,
        limits: Settings,
        *,
        leave: Callable[[], object] = lambda: None,
        refused: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self.limits = limits
        self._listener = listener
        self._call = call
        self._workers = workers
        self._leave = leave
        self._refused = refused
        self._connections: dict[int, LauncherConnection] = {}
        self._room = Room(ROOM)
        self._numbers = 0
        self._stopping = False
        self._accepting = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._last_tick = time.monotonic()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def lively(self, within: float = 5.0) -> bool:
        """Whether the serving thread has worked in the last `within` seconds."""
        return time.monotonic() - self._last_tick < within

    def stop(self) -> None:
        """Finish the running calls, leave the waiting calls to the next agent, and end `serve`.

        Safe in a signal handler.
        """
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def serve(self) -> None:
        self._listener.setblocking(False)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._accept_if_room()
        while not self._stopping:
            self._round()
        self._drain()
        self._epoll.close()

    def _drain(self) -> None:
        self._accept_if_room()
        self._leave()
        for connection in list(self._connections.values()):
            # A worker skips a refused call.
            if not connection.begun and connection.state is not ConnectionState.ANSWERED:
                self._refuse(connection, *STOPPING)
        end = time.monotonic() + self.limits.grace
        while self._workers.busy and time.monotonic() < end:
            self._round()
        for connection in list(self._connections.values()):
            if connection.call is not None:
                connection.call.end()
        end = time.monotonic() + OVERTIME
        while time.monotonic() < end and (
            self._workers.busy or any(peer.unsent for peer in self._connections.values())
        ):
            self._round()
        for connection in list(self._connections.values()):
            if connection.begun:  # a launcher that gets no answer assumes that no call runs
                text = "the agent stopped before the call was done: call DEL, or repeat the call"
                self._fail(connection, Code.TRY_AGAIN, text)
            self._close(connection)

    def _round(self) -> None:
        for descriptor, events in self._epoll.poll(TICK):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor == self._listener.fileno():
                self._accept()
            elif (connection := self._connections.get(descriptor)) is not None:
                self._attend(connection, events)
        for connection in self._room.admitted():
            connection.make_buffer(time.monotonic() + RECEIVE_TIME)
            self._epoll.modify(connection, select.EPOLLIN | select.EPOLLRDHUP)
        now = time.monotonic()
        if now - self._last_tick >= TICK:
            self._last_tick = now
            self._workers.tend()
            self._accept_if_room()
            if self._room.was_left():
                gc.collect()
                trim()
            for connection in list(self._connections.values()):
                if now >= connection.deadline:
                    self._expire(connection)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client is gone already
            return
        except OSError as error:  # no descriptor or memory is left: accept again after a tick
            _log.warning("cannot accept a connection: %s", error.strerror)
            self._epoll.unregister(self._listener)
            self._accepting = False
            return
        self._numbers += 1
        connection = LauncherConnection(peer, self._numbers, time.monotonic() + RECEIVE_TIME)
        self._connections[connection.fileno()] = connection
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        uid = connection.peer_uid
        if uid != 0:
            self._refused("not_root")
            _log.warning("refused a connection of uid %d: the agent serves root only", uid)
            self._fail(
                connection,
                Code.INVALID_ENVIRONMENT,
                f"the agent serves only root, not the uid {uid}",
            )
        else:
            self._receive(connection)
        self._accept_if_room()

    def _accept_if_room(self) -> None:
        """Accept clients up to the limit. Other clients wait in the backlog."""
        room = len(self._connections) < self.limits.connections and not self._stopping
        if room and not self._accepting:
            self._epoll.register(self._listener, select.EPOLLIN)
        elif not room and self._accepting:
            self._epoll.unregister(self._listener)
        self._accepting = room

    def _attend(self, connection: LauncherConnection, events: int) -> None:
        if connection.state is ConnectionState.READING and events & select.EPOLLIN:
            self._receive(connection)
            return
        if events & select.EPOLLOUT and connection.unsent and connection.flush():
            self._epoll.modify(connection, select.EPOLLRDHUP)
        # The event may be about an earlier connection with the same descriptor, so ask the kernel.
        gone = events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)
        if gone and connection.gone():
            self._hang_up(connection)

    def _receive(self, connection: LauncherConnection) -> None:
        try:
            request = connection.receive(self.limits.max_config_bytes)
        except EOFError:
            self._close(connection)
            return
        except BadFrame as bad:
            self._refused("bad_frame")
            _log.warning("refused a request that no launcher sends: %s", bad)
            self._fail(
                connection, Code.DECODING_FAILURE, f"the agent cannot read the request: {bad}"
            )
            return
        except ConfigTooLarge as large:
            self._refused("too_large")
            self._fail(connection, Code.INVALID_CONFIG, str(large))
            return
        except Lost as lost:
            self._refuse(connection, "no_room", str(lost))
            return
        if request is None:
            if connection.lacking:
                self._find_room(connection)
            return
        if self._stopping:
            self._refuse(connection, *STOPPING)
            return
        deadline = connection.arrived + self.limits.deadline
        endable = request.environ.get("CNI_COMMAND") not in CLEANING_UP
        connection.called(request, Call(endable, connection.gone), deadline)
        self._epoll.modify(connection, select.EPOLLRDHUP)
        self._workers.submit(
            Job(
                lambda job: self._work(connection, job),
                deadline + OVERTIME,
                # A stuck call may never end, and other requests need its memory.
                stuck=lambda: self._give_back(connection),
            )
        )

    def _find_room(self, connection: LauncherConnection) -> None:
        if self._room.take(connection, _cost(connection.lacking)):
            connection.make_buffer(time.monotonic() + RECEIVE_TIME)
        else:
            connection.wait(connection.arrived + self.limits.deadline)
            self._epoll.modify(connection, select.EPOLLRDHUP)

    def _give_back(self, connection: LauncherConnection) -> None:
        """Free the memory of a request. Any thread may call this."""
        if self._room.give_back(connection):
            os.eventfd_write(self._wake, 1)

    def _work(self, connection: LauncherConnection, job: Job) -> None:
        begun = connection.begin()
        if begun is None:
            return
        request, call, netns = begun
        call.aside = partial(self._workers.aside, job)
        job.about = logs.of_call(request, connection.number)
        with fields(**job.about):
            try:
                frame = self._call(request, netns, call)
            except Exception as error:  # noqa: BLE001 - a client must get an answer
                _log.exception("a call ended without an answer")
                text = f"internal error of the agent: {type(error).__name__} (see its log)"
                failure = CNIError(Code.INTERNAL, text)
                frame = framing.write_answer(ANSWERED, 1, b"", error_document(failure))
            finally:
                if netns is not None:
                    os.close(netns)
                self._give_back(connection)
        self._answer(connection, frame)

    def _hang_up(self, connection: LauncherConnection) -> None:
        """End the call of a client that has gone, if the call can still be ended."""
        if connection.state is ConnectionState.CALLED and connection.call is not None:
            connection.call.end()
        self._close(connection)

    def _expire(self, connection: LauncherConnection) -> None:
        if connection.state is ConnectionState.WAITING:
            text = "the agent had no room for a request of this size within the deadline"
            self._refuse(connection, "no_room", text)
        elif connection.state is not ConnectionState.CALLED or connection.call is None:
            self._close(connection)  # a request that does not come, or an answer that is not read
        elif not connection.begun:
            self._refuse(connection, "no_worker", "no worker was free within the deadline")
        elif connection.call.end():
            self._fail(connection, Code.TRY_AGAIN, f"{self._late()}; the agent undoes its work")
        elif connection.overtime:
            self._fail(connection, Code.TRY_AGAIN, f"{self._late()}; it still runs")
        else:
            connection.overtime = True
            connection.deadline = time.monotonic() + OVERTIME

    def _late(self) -> str:
        limit = f"{self.limits.deadline:g} s"
        return f"the call was not done within {limit}: call DEL, or repeat the call"

    def _refuse(self, connection: LauncherConnection, reason: str, why: str) -> None:
        self._refused(reason)
        error = CNIError(Code.TRY_AGAIN, f"{why}: nothing was done, try again")
        status = LEAVING if self._stopping else REFUSED
        frame = framing.write_answer(status, 1, b"", error_document(error))
        self._answer(connection, frame, unless_begun=True)

    def _fail(self, connection: LauncherConnection, code: int, text: str) -> None:
        document = error_document(CNIError(code, text))
        self._answer(connection, framing.write_answer(ANSWERED, 1, b"", document))

    def _answer(
        self, connection: LauncherConnection, frame: bytes, *, unless_begun: bool = False
    ) -> None:
        """Send the answer. Any thread may call this, because epoll sets are thread-safe."""
        if connection.state in (ConnectionState.READING, ConnectionState.WAITING):
            connection.stop_reading()  # the request is not complete
            self._give_back(connection)
            self._epoll.modify(connection, select.EPOLLRDHUP)

        def wait_for_room() -> None:
            self._epoll.modify(connection, select.EPOLLRDHUP | select.EPOLLOUT)

        connection.answer(frame, READ_TIME, wait_for_room, unless_begun=unless_begun)

    def _close(self, connection: LauncherConnection) -> None:
        self._connections.pop(connection.fileno(), None)
        connection.close(self._epoll.unregister)
        if not connection.begun:
            self._give_back(connection)
        self._accept_if_room()


def _cost(size: int) -> int:
    """The bytes of memory that a request of `size` bytes may need until its call has ended.

    The factor was measured with the configurations that need most memory.
    """
    return min(3 * size + (2 << 20), ROOM)


def trim() -> None:
    """Return all free pages of the heaps to the kernel.

    This works with glibc and PYTHONMALLOC=malloc, as in the image and in the unit file. Python's
    own arenas of 1 MiB would stay while one object is in them.
    """
    import ctypes  # not needed before the first large request has ended

    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
