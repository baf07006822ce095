"""The socket and its clients: good ones are served, whatever the others do."""

import contextlib
import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from agent import framing
from agent import server as server_module
from agent.framing import ANSWERED, HEADER, REFUSED, REQUEST_MAGIC, Request
from cni.spec import interrupts
from tests.host.agent.serving import Limits, Reply, descriptors, read, send, server, until


def waiting(request: Request, netns: int | None) -> bytes:
    """A call that takes long, and may be ended."""
    for _ in range(1000):
        interrupts.checkpoint()
        time.sleep(0.01)
    return b"came to its end"


def code_of(reply: Reply) -> int:
    document = msgspec.json.decode(reply.stdout)
    assert document["cniVersion"]
    return int(document["code"])


def test_a_request_is_answered_with_what_was_noted(tmp_path: Path) -> None:
    with server(tmp_path) as serving:
        reply = serving.ask(config=b'{"x":1}')
    assert reply == Reply(ANSWERED, 0, b"a note\n", b'{"x":1}')


def test_socket_is_for_root_only(tmp_path: Path) -> None:
    with server(tmp_path) as serving:
        assert serving.path.stat().st_mode & 0o777 == 0o600


def test_descriptor_arrives_and_is_closed_after_the_call(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(request: Request, netns: int | None) -> bytes:
        assert netns is not None
        seen.append(os.fstat(netns).st_ino)
        return b""

    with server(tmp_path, look) as serving, Path("/proc/self/ns/net").open("rb") as namespace:
        before = descriptors()
        for count in (1, 1, 3):  # a launcher sends one; the others are nobody's
            with serving.start("c", fds=[namespace.fileno()] * count) as client:
                read(client)
        until(lambda: descriptors() == before)
        inode = os.fstat(namespace.fileno()).st_ino
    assert seen == [inode] * 3


def test_descriptor_of_a_request_that_never_becomes_whole_is_closed(tmp_path: Path) -> None:
    with server(tmp_path) as serving, Path("/proc/self/ns/net").open("rb") as namespace:
        before = descriptors()
        client = serving.connect()
        socket.send_fds(client, [HEADER.pack(REQUEST_MAGIC, 1, 1, 1, 0)], [namespace.fileno()])
        until(lambda: descriptors() >= before + 3)
        client.close()
        until(lambda: descriptors() == before)


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
        until(lambda: descriptors() == before)
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


def test_ten_megabytes_of_garbage_and_of_configuration_delay_nobody(tmp_path: Path) -> None:
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
            big = serving.ask("big", config=b" " * (10 << 20))
        finally:
            stop.set()
            flooding.join()
    assert {reply.status for reply in replies} == {ANSWERED}
    assert len(big.stdout) == 10 << 20


def test_client_that_sends_nothing_is_let_go_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "RECEIVE_TIME", 1.0)
    with server(tmp_path, workers=2) as serving:
        silent = [serving.connect() for _ in range(20)]
        dripping = serving.connect()
        started = time.monotonic()
        for byte in framing.write_request(Request("ipoib", {}, b"{}"))[:5]:
            dripping.sendall(bytes([byte]))
            assert serving.ask().status == ANSWERED
        assert time.monotonic() - started < 1.0
        for client in [*silent, dripping]:
            assert client.recv(1) == b""
            client.close()
        assert serving.server.connections <= 1


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
    done = threading.Event()

    def remove(request: Request, netns: int | None) -> bytes:
        time.sleep(0.3)
        interrupts.checkpoint()
        done.set()
        return b""

    with server(tmp_path, remove) as serving:
        client = serving.start("c", command)
        until(lambda: serving.caller.begun == ["c"])
        client.close()
        assert done.wait(5)
    assert serving.caller.ended == []


def test_deadline_answers_try_again_and_ends_the_call(tmp_path: Path) -> None:
    with server(tmp_path, waiting, limits=Limits(deadline=0.5)) as serving:
        reply = serving.ask("slow")
        assert (reply.status, reply.exit_code, code_of(reply)) == (ANSWERED, 1, 11)
        until(lambda: serving.caller.ended == ["slow"])


def test_call_that_cannot_end_is_answered_past_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in the kernel; its worker is lost for as long as it hangs, no client is."""
    monkeypatch.setattr(server_module, "OVERTIME", 0.5)
    let_go = threading.Event()

    def hang(request: Request, netns: int | None) -> bytes:
        let_go.wait(20)
        return b""

    with server(tmp_path, hang, limits=Limits(deadline=0.5)) as serving:
        started = time.monotonic()
        for command in ("ADD", "DEL"):
            assert code_of(serving.ask("c", command)) == 11
        assert time.monotonic() - started < 5
        let_go.set()


def test_without_a_free_worker_nothing_is_begun(tmp_path: Path) -> None:
    with server(tmp_path, waiting, workers=1, limits=Limits(deadline=1.0)) as serving:
        first = serving.start("first")
        until(lambda: serving.caller.begun == ["first"])
        second = serving.ask("second")
        assert (second.status, code_of(second)) == (REFUSED, 11)
        assert code_of(read(first)) == 11
        first.close()
        until(lambda: serving.caller.ended == ["first"])
        assert serving.caller.begun == ["first"]


def test_stop_finishes_what_runs_and_refuses_the_rest(tmp_path: Path) -> None:
    go_on = threading.Event()

    def wait(request: Request, netns: int | None) -> bytes:
        go_on.wait(10)
        return b"done"

    with server(tmp_path, wait, workers=1) as serving:
        running = serving.start("running")
        until(lambda: serving.caller.begun == ["running"])
        queued = serving.start("queued")
        unsent = serving.connect()
        until(lambda: serving.server.connections == 3)
        serving.server.stop()
        assert read(queued).status == REFUSED
        send(unsent, "late", "ADD", b"{}")
        assert read(unsent).status == REFUSED
        assert serving.ask("later").status == REFUSED
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
        serving.thread.join(8)
        assert not serving.thread.is_alive()
        client.close()
    assert serving.caller.ended == ["long"]


def test_answer_that_is_not_read_holds_up_nobody(tmp_path: Path) -> None:
    with server(tmp_path, workers=1) as serving:
        slow = serving.start("slow", config=b"s" * (4 << 20))
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
        fifth.settimeout(10)
        assert read(fifth).status == ANSWERED
        for client in [fifth, *idle]:
            client.close()


def test_requests_that_are_not_whole_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_BUFFERED", 3 << 20)
    with server(tmp_path) as serving:
        head = HEADER.pack(REQUEST_MAGIC, 0, 0, 8 << 20, 0)
        clients = [serving.connect() for _ in range(4)]
        for client in clients:
            with contextlib.suppress(OSError):  # it was refused before it had sent all
                client.sendall(head + b"x" * (1 << 20))
        until(lambda: "no_room" in serving.refused)
        for client in clients:
            client.close()
        until(lambda: serving.server.connections == 0)
        assert serving.ask().status == ANSWERED


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
                client.settimeout(5)
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


def test_200_clients_at_once_are_all_served(tmp_path: Path) -> None:
    with server(tmp_path, workers=16, limits=Limits(connections=512)) as serving:
        clients = [serving.start(f"c{n}", config=b'{"n":%d}' % n) for n in range(200)]
        for number, client in enumerate(clients):
            assert read(client).stdout == b'{"n":%d}' % number
            client.close()


def test_calls_whose_clients_have_gone_keep_nothing_while_they_wait(tmp_path: Path) -> None:
    with (
        server(tmp_path, waiting, workers=1) as serving,
        Path("/proc/self/ns/net").open("rb") as namespace,
    ):
        first = serving.start("first")
        until(lambda: serving.caller.begun == ["first"])
        before = descriptors()
        for number in range(20):
            serving.start(f"c{number}", fds=[namespace.fileno()]).close()
        until(lambda: serving.server.connections == 1)
        until(lambda: descriptors() == before)
        first.close()
        until(lambda: serving.caller.ended == ["first"])
        until(lambda: serving.workers.waiting == 0)
    assert serving.caller.begun == ["first"]


def test_socket_of_somebody_who_listens_is_not_replaced(tmp_path: Path) -> None:
    with server(tmp_path) as serving:
        with pytest.raises(OSError, match="in use"):
            server_module.listen(serving.path)
        assert serving.ask().status == ANSWERED


def test_begun_call_is_answered_before_the_agent_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end of file would tell the launcher that nobody is at work any more."""
    monkeypatch.setattr(server_module, "OVERTIME", 0.3)
    let_go = threading.Event()

    def hang(request: Request, netns: int | None) -> bytes:
        let_go.wait(20)
        return b""

    with server(tmp_path, hang, limits=Limits(grace=0.3)) as serving:
        client = serving.start("c", "DEL")
        until(lambda: serving.caller.begun == ["c"])
        serving.server.stop()
        reply = read(client)
        assert (reply.status, code_of(reply)) == (ANSWERED, 11)
        client.close()
        let_go.set()
