"""The socket and its clients: well-behaved clients are served while other clients misbehave."""

import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from agent.serve import framing
from agent.serve import launcher_server as server_module
from agent.serve.framing import ANSWERED, HEADER, LEAVING, REFUSED, REQUEST_MAGIC, LauncherRequest
from agent.serve.launcher_server import BACKLOG
from base import interrupts
from base.unix_socket import listen
from tests.frames import write_request
from tests.host.agent.serving import Limits, Reply, descriptors, read, send, server
from tests.waiting import PATIENCE, until


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the agent wait as long as a test for data that a busy machine sends or reads late."""
    for name in ("RECEIVE_TIME", "READ_TIME"):
        monkeypatch.setattr(server_module, name, PATIENCE)


def waiting(request: LauncherRequest, netns: int | None) -> bytes:
    """A call that takes long, keeps its worker, and may be ended."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        interrupts.checkpoint()
        time.sleep(0.01)
    return b"came to its end"


def code_of(reply: Reply) -> int:
    document = msgspec.json.decode(reply.stdout)
    assert document["cniVersion"]
    return int(document["code"])


def test_socket_is_for_root_only(tmp_path: Path) -> None:
    with server(tmp_path) as serving:
        assert serving.path.stat().st_mode & 0o777 == 0o600


def test_descriptor_arrives_and_is_closed_after_the_call(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(request: LauncherRequest, netns: int | None) -> bytes:
        assert netns is not None
        seen.append(os.fstat(netns).st_ino)
        return b""

    with server(tmp_path, look) as serving, Path("/proc/self/ns/net").open("rb") as namespace:
        before = descriptors()
        for count in (1, 1, 3):  # a launcher sends one; nobody owns the rest
            with serving.start("c", fds=[namespace.fileno()] * count) as client:
                read(client)
        until(lambda: descriptors() <= before)
        inode = os.fstat(namespace.fileno()).st_ino
    assert seen == [inode] * 3


def test_descriptor_of_a_request_that_never_becomes_whole_is_closed(tmp_path: Path) -> None:
    with server(tmp_path) as serving, Path("/proc/self/ns/net").open("rb") as namespace:
        before, of_it = descriptors(), descriptors(namespace)
        client = serving.connect()
        socket.send_fds(client, [HEADER.pack(REQUEST_MAGIC, 1, 1, 1, 0)], [namespace.fileno()])
        until(lambda: descriptors(namespace) == of_it + 1)
        client.close()
        until(lambda: descriptors(namespace) == of_it and descriptors() <= before)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"p",
        HEADER.pack(REQUEST_MAGIC, 5, 10, 2, 0),
        HEADER.pack(REQUEST_MAGIC, 5, 10, 2, 0) + b"ipoib",
    ],
)
def test_client_that_dies_mid_request_costs_nothing(tmp_path: Path, sent: bytes) -> None:
    with server(tmp_path) as serving:
        before = descriptors()
        for _ in range(50):
            with serving.connect() as client:
                client.sendall(sent)
        assert serving.ask().status == ANSWERED
        until(lambda: serving.server.connections == 0)
        until(lambda: descriptors() <= before)
        assert serving.caller.begun == ["c"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n",
        b"\0" * 100,
        HEADER.pack(b"pfa1", 0, 0, 0, 0),
        HEADER.pack(REQUEST_MAGIC, 256, 0, 0, 0),
        HEADER.pack(REQUEST_MAGIC, 0, framing.MAX_ENVIRON + 1, 0, 0),
        HEADER.pack(REQUEST_MAGIC, 0, 0, framing.MAX_CONFIG + 1, 0),
        HEADER.pack(REQUEST_MAGIC, 0, 0, 0xFFFFFFFF, 0),
        HEADER.pack(REQUEST_MAGIC, 1, 0, 0, 0) + b"xtoo much",
    ],
)
def test_broken_framing_is_answered_by_an_error(tmp_path: Path, sent: bytes) -> None:
    with server(tmp_path) as serving:
        with serving.connect() as client:
            client.sendall(sent)
            reply = read(client)
        assert (reply.exit_code, code_of(reply)) == (1, 6)
        assert serving.caller.begun == []
        assert serving.ask().status == ANSWERED


def test_ten_megabytes_of_garbage_or_configuration_delay_no_other_call(
    tmp_path: Path, patient: None
) -> None:
    with server(tmp_path) as serving:
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                try:
                    with serving.connect() as client:
                        client.sendall(b"x" * (10 << 20))
                except OSError:
                    continue

        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            with ThreadPoolExecutor(8) as pool:
                replies = list(pool.map(lambda n: serving.ask(f"c{n}"), range(200)))
            big = serving.ask("big", "DEL", b" " * (10 << 20))
        finally:
            stop.set()
            flooding.join()
    assert {reply.status for reply in replies} == {ANSWERED}
    assert len(big.stdout) == 10 << 20


def test_client_that_sends_nothing_is_dropped_and_delays_no_other_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginning = write_request(LauncherRequest("ipoib", {}, b"{}"))[:5]
    with server(tmp_path, workers=2) as serving:
        monkeypatch.setattr(server_module, "RECEIVE_TIME", 10 * PATIENCE)
        silent = [serving.connect() for _ in range(20)]
        for byte in beginning:
            silent[0].sendall(bytes([byte]))
            assert serving.ask().status == ANSWERED
        monkeypatch.setattr(server_module, "RECEIVE_TIME", 1.0)
        for client in silent:
            client.close()
        silent = [serving.connect() for _ in range(20)]
        silent[0].sendall(beginning)
        for client in silent:
            assert client.recv(1) == b""
            client.close()
        until(lambda: serving.server.connections == 0)


@pytest.mark.parametrize("events", [select.EPOLLHUP | select.EPOLLRDHUP, select.EPOLLOUT])
def test_event_of_an_earlier_connection_of_that_number_does_no_harm(
    tmp_path: Path, events: int
) -> None:
    with server(tmp_path) as serving:
        client = serving.connect()
        until(lambda: serving.server.connections == 1)
        (connection,) = serving.server._connections.values()
        serving.server._attend(connection, events)
        send(client, "c", "ADD", b"{}")
        assert read(client).status == ANSWERED
        client.close()


def test_client_that_goes_away_ends_its_add(tmp_path: Path) -> None:
    with server(tmp_path, waiting) as serving:
        client = serving.start("gone")
        until(lambda: serving.caller.begun == ["gone"])
        client.close()
        until(lambda: serving.caller.ended == ["gone"])
        until(lambda: serving.server.connections == 0)


@pytest.mark.parametrize("command", ["DEL", "GC"])
def test_removal_comes_to_its_end_without_its_client(tmp_path: Path, command: str) -> None:
    gone, done = threading.Event(), threading.Event()

    def remove(request: LauncherRequest, netns: int | None) -> bytes:
        gone.wait(PATIENCE)
        interrupts.checkpoint()
        done.set()
        return b""

    with server(tmp_path, remove) as serving:
        client = serving.start("c", command)
        until(lambda: serving.caller.begun == ["c"])
        client.close()
        until(lambda: serving.server.connections == 0)
        gone.set()
        assert done.wait(PATIENCE)
    assert serving.caller.ended == []


def test_deadline_answers_try_again_and_ends_the_call(tmp_path: Path) -> None:
    with server(tmp_path, waiting, limits=Limits(deadline=2.0)) as serving:
        reply = serving.ask("slow")
        assert (reply.status, reply.exit_code, code_of(reply)) == (ANSWERED, 1, 11)
        until(lambda: serving.caller.ended == ["slow"])


def test_call_that_cannot_end_is_answered_past_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call hangs in the kernel. Its worker is lost while it hangs; its client gets an
    answer."""
    monkeypatch.setattr(server_module, "OVERTIME", 0.5)
    let_go = threading.Event()

    def hang(request: LauncherRequest, netns: int | None) -> bytes:
        let_go.wait(PATIENCE)
        return b""

    with server(tmp_path, hang, limits=Limits(deadline=0.5)) as serving:
        for command in ("ADD", "DEL"):
            assert code_of(serving.ask("c", command)) == 11
        let_go.set()


def test_no_call_begins_without_a_free_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "OVERTIME", PATIENCE)  # no other worker replaces it
    go_on = threading.Event()

    def occupy(request: LauncherRequest, netns: int | None) -> bytes:
        go_on.wait(PATIENCE)
        return waiting(request, netns)

    with server(tmp_path, occupy, workers=1, limits=Limits(deadline=3.0)) as serving:
        first = serving.start("first")
        until(lambda: serving.caller.begun == ["first"])
        second = serving.ask("second")
        assert (second.status, code_of(second)) == (REFUSED, 11)
        assert code_of(read(first)) == 11
        go_on.set()
        first.close()
        until(lambda: serving.caller.ended == ["first"])
        assert serving.caller.begun == ["first"]


def test_stop_finishes_what_runs_and_leaves_the_rest_to_the_next_agent(tmp_path: Path) -> None:
    go_on = threading.Event()

    def wait(request: LauncherRequest, netns: int | None) -> bytes:
        go_on.wait(PATIENCE)
        return b"done"

    with server(tmp_path, wait, workers=1) as serving:
        running = serving.start("running")
        until(lambda: serving.caller.begun == ["running"])
        queued = serving.start("queued")
        unsent = serving.connect()
        until(lambda: serving.server.connections == 3)
        serving.server.stop()
        assert read(queued).status == LEAVING
        send(unsent, "late", "ADD", b"{}")
        assert read(unsent).status == LEAVING
        with serving.start("later") as later:  # the next listener accepts it
            later.settimeout(0.3)
            with pytest.raises(TimeoutError):
                later.recv(1)
        go_on.set()
        assert read(running).stdout == b"done"
        for client in (running, queued, unsent):
            client.close()
    assert serving.caller.begun == ["running"]


def test_stop_ends_what_takes_longer_than_its_grace(tmp_path: Path) -> None:
    with server(tmp_path, waiting, limits=Limits(grace=0.3)) as serving:
        client = serving.start("long")
        until(lambda: serving.caller.begun == ["long"])
        serving.server.stop()
        serving.thread.join(PATIENCE)
        assert not serving.thread.is_alive()
        client.close()
    assert serving.caller.ended == ["long"]


def test_unread_answer_delays_no_other_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "READ_TIME", PATIENCE)
    with server(tmp_path, workers=1) as serving:
        slow = serving.start("slow", "DEL", b"s" * (4 << 20))
        until(lambda: serving.caller.begun == ["slow"])
        for number in range(20):
            assert serving.ask(f"c{number}").status == ANSWERED
        assert read(slow).stdout == b"s" * (4 << 20)
        slow.close()
        until(lambda: serving.server.connections == 0)


def test_clients_past_the_limit_wait_for_room(tmp_path: Path) -> None:
    with server(tmp_path, limits=Limits(connections=4)) as serving:
        idle = [serving.connect() for _ in range(4)]
        until(lambda: serving.server.connections == 4)
        fifth = serving.start("fifth")
        fifth.settimeout(0.3)
        with pytest.raises(TimeoutError):
            fifth.recv(1)
        idle.pop().close()
        fifth.settimeout(PATIENCE)
        assert read(fifth).status == ANSWERED
        for client in [fifth, *idle]:
            client.close()


def large(size: int) -> bytes:
    """The first bytes of a DEL with a configuration of that size."""
    environ = b"CNI_COMMAND=DEL\0"
    return HEADER.pack(REQUEST_MAGIC, 0, len(environ), size, 0) + environ


def test_large_requests_wait_for_room_and_small_ones_do_not(tmp_path: Path) -> None:
    """Two requests of 7 MiB fill the room. They hold it until their calls have ended."""
    go_on = threading.Event()

    def wait(request: LauncherRequest, netns: int | None) -> bytes:
        if len(request.config) > 1 << 20:
            go_on.wait(PATIENCE)
        return b"%d" % len(request.config)

    with server(tmp_path, wait) as serving, ThreadPoolExecutor(4) as pool:
        size = 7 << 20
        first = [pool.submit(serving.ask, f"c{n}", "DEL", b" " * size) for n in range(2)]
        until(lambda: len(serving.caller.begun) == 2)
        second = [pool.submit(serving.ask, f"d{n}", "DEL", b" " * (2 << 20)) for n in range(2)]
        until(lambda: serving.server.connections == 4)
        assert serving.ask("small").stdout == b"2"
        assert sorted(serving.caller.begun) == ["c0", "c1", "small"]
        go_on.set()
        for reply, expected in zip([*first, *second], (size, size, 2 << 20, 2 << 20), strict=True):
            assert reply.result().stdout == b"%d" % expected
    assert serving.refused == []


def test_large_request_without_room_is_refused_at_its_deadline(tmp_path: Path) -> None:
    with server(tmp_path, limits=Limits(deadline=3.0)) as serving:
        half = [serving.connect() for _ in range(2)]
        for client in half:  # they have room, and do not send the rest
            client.sendall(large(7 << 20))
        until(lambda: serving.server.connections == 2)
        reply = serving.ask("c", "DEL", b" " * (2 << 20))
        assert (reply.status, code_of(reply)) == (REFUSED, 11)
        assert serving.refused == ["no_room"]
        for client in half:
            client.close()
        until(lambda: serving.server.connections == 0)
        assert serving.ask("c", "DEL", b" " * (2 << 20)).status == ANSWERED


def test_room_of_a_client_that_goes_away_is_free_again(tmp_path: Path) -> None:
    with server(tmp_path) as serving:
        for _ in range(3):
            half = [serving.connect() for _ in range(3)]  # two have room, the third waits for it
            for client in half:
                client.sendall(large(framing.MAX_CONFIG - 1000))
            until(lambda: serving.server.connections == 3)
            for client in half:
                client.close()
            until(lambda: serving.server.connections == 0)
        assert serving.ask("c", "DEL", b" " * (15 << 20)).status == ANSWERED


def test_stop_leaves_what_waits_for_room_to_the_next_agent(tmp_path: Path) -> None:
    with server(tmp_path) as serving:
        half = [serving.connect() for _ in range(3)]
        for client in half:
            client.sendall(large(framing.MAX_CONFIG - 1000))
        until(lambda: serving.server.connections == 3)
        serving.server.stop()
        assert read(half[2]).status == LEAVING
        for client in half:
            client.close()


@pytest.mark.parametrize("command", ["ADD", "CHECK", "STATUS", ""])
def test_configuration_above_the_limit_is_refused_by_its_first_bytes(
    tmp_path: Path, command: str
) -> None:
    environ = f"CNI_COMMAND={command}\0".encode()
    head = HEADER.pack(REQUEST_MAGIC, 0, len(environ), (1 << 20) + 1, 0) + environ
    with server(tmp_path) as serving:
        with serving.connect() as client:
            client.sendall(head)
            reply = read(client)
        assert (reply.status, code_of(reply)) == (ANSWERED, 7)
        for part in ("1048577 bytes", "at most 1048576", '"agent.max_config_bytes"'):
            assert part in reply.stdout.decode().replace('\\"', '"')
        assert serving.caller.begun == []
        assert serving.ask("c", command, b" " * (1 << 20)).stdout == b" " * (1 << 20)
        assert serving.refused == ["too_large"]


def test_environment_that_is_read_in_parts_decides_as_well(tmp_path: Path) -> None:
    environ = b"A=" + b"x" * (100 << 10) + b"\0CNI_COMMAND=ADD\0"
    with server(tmp_path) as serving:
        with serving.connect() as client:
            client.sendall(HEADER.pack(REQUEST_MAGIC, 0, len(environ), 2 << 20, 0) + environ)
            assert code_of(read(client)) == 7
        assert serving.refused == ["too_large"]


@pytest.mark.parametrize("command", ["DEL", "GC"])
def test_removals_may_be_as_large_as_the_protocol_allows(
    tmp_path: Path, patient: None, command: str
) -> None:
    with server(tmp_path, lambda request, netns: b"%d" % len(request.config)) as serving:
        config = b" " * framing.MAX_CONFIG
        assert serving.ask("c", command, config).stdout == b"%d" % len(config)


def test_other_users_are_refused(tmp_path: Path) -> None:
    with server(tmp_path) as serving:
        tmp_path.chmod(0o755)
        serving.path.chmod(0o666)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.chdir(tmp_path)
                os.setuid(65534)
                client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                client.settimeout(PATIENCE)
                client.connect("agent.sock")
                reply = read(client)
                os.write(writing, reply.stdout)
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        answer = os.read(reading, 4096)
        os.close(reading)
    assert os.waitstatus_to_exitcode(status) == 0
    assert msgspec.json.decode(answer)["code"] == 4
    assert serving.caller.begun == []


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with server(tmp_path):
        pass
    assert (tmp_path / "agent.sock").exists()
    with server(tmp_path) as serving:
        assert serving.ask().status == ANSWERED


def test_calls_whose_clients_have_gone_keep_nothing_while_they_wait(tmp_path: Path) -> None:
    with (
        server(tmp_path, waiting, workers=1) as serving,
        Path("/proc/self/ns/net").open("rb") as namespace,
    ):
        first = serving.start("first")
        until(lambda: serving.caller.begun == ["first"])
        before = descriptors()
        clients = [serving.start(f"c{n}", fds=[namespace.fileno()]) for n in range(20)]
        until(lambda: serving.workers.waiting == 20)
        for client in clients:
            client.close()
        until(lambda: serving.server.connections == 1)
        until(lambda: descriptors() <= before)
        first.close()
        until(lambda: serving.caller.ended == ["first"])
        until(lambda: serving.workers.waiting == 0)
    assert serving.caller.begun == ["first"]


def test_socket_with_a_listener_is_not_replaced(tmp_path: Path) -> None:
    with server(tmp_path) as serving:
        with pytest.raises(OSError, match="in use"):
            listen(serving.path, BACKLOG)
        assert serving.ask().status == ANSWERED


def test_begun_call_is_answered_before_the_agent_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an end of file the launcher would conclude that no call is running any more."""
    monkeypatch.setattr(server_module, "OVERTIME", 0.3)
    let_go = threading.Event()

    def hang(request: LauncherRequest, netns: int | None) -> bytes:
        let_go.wait(PATIENCE)
        return b""

    with server(tmp_path, hang, limits=Limits(grace=0.3)) as serving:
        client = serving.start("c", "DEL")
        until(lambda: serving.caller.begun == ["c"])
        serving.server.stop()
        reply = read(client)
        assert (reply.status, code_of(reply)) == (ANSWERED, 11)
        client.close()
        let_go.set()
