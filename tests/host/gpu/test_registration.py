"""Processes register at their group's socket; the kernel identifies them and reports their end."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpu.limits import group_socket, layout
from gpu.limits.group_socket import GroupSocket, Registrant
from gpu.limits.limits_file import GroupError, Limit
from gpu.limits.process_registration import CLIENTS, TICK
from tests.host.gpu.pods import GPU, GroupsNode, MadeContainer, RegisteringProcess
from tests.waiting import PATIENCE, until

LONG = "podfabric.io-gpu-10g-25." + "x" * 150  # its socket's path is longer than an address may be


@pytest.mark.parametrize("version", [1, 2])
def test_a_process_of_the_groups_container_is_registered_in_its_slot(
    node: GroupsNode, version: int
) -> None:
    container = node.container("a", version)
    with container.client(node.socket("a")) as client:
        assert client.register(7) == [layout.STATUS_OK, client.pid, 1]
        known = node.groups.read("a").processes
        assert list(known) == [7]
        assert (known[7].host_pid, known[7].alive) == (client.pid, True)
        assert known[7].overhead_bytes is None
        stat = Path(f"/proc/{client.pid}/stat").read_text().rpartition(")")[2].split()
        assert known[7].start_time == int(stat[19])


def test_any_user_can_connect_also_at_a_socket_whose_path_is_long(node: GroupsNode) -> None:
    container = node.container(LONG)
    directory = os.open(node.socket(LONG).parent, os.O_PATH)
    try:  # as a mount of the directory gives it to the container
        reached = Path(f"/proc/{os.getpid()}/fd/{directory}/agent.sock")
        with container.client(reached) as client:
            assert client.register(0)[0] == layout.STATUS_OK
    finally:
        os.close(directory)
    assert node.socket(LONG).stat().st_mode & 0o777 == 0o666


def test_a_process_of_another_groups_container_is_refused_whatever_it_asks_for(
    node: GroupsNode,
) -> None:
    ours, theirs = node.container("a"), node.container("b")
    with ours.client(node.socket("a")) as own, theirs.client(node.socket("a")) as stranger:
        assert own.register(3)[0] == layout.STATUS_OK
        for slot in (0, 3):
            assert stranger.register(slot) == [layout.STATUS_STRANGER, 0, 0]
        assert node.alive("a") == {3: own.pid}
        assert node.alive("b") == {}


def test_a_process_of_the_host_is_refused(node: GroupsNode) -> None:
    node.container("a")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(PATIENCE)
        client.connect(str(node.socket("a")))
        client.send(struct.pack("<II", layout.VERSION, 0))
        assert client.recv(64) == struct.pack("<IIQ", layout.STATUS_STRANGER, 0, 0)


def test_region_distinguishes_containers_of_one_pod(node: GroupsNode, tmp_path: Path) -> None:
    first = node.container("a")
    second = node.container("b", pod_uid=first.container.pod_uid)
    script = """
        mkdir -p /run/podfabric/gpu && mount -t tmpfs none /run/podfabric/gpu &&
        touch /run/podfabric/gpu/region && mount --bind "$0" /run/podfabric/gpu/region &&
        exec "$@"
    """
    tried = []
    for container, region in ((first, "a"), (second, "b")):
        for group in ("a", "b"):
            command = [
                *("unshare", "-m", "sh", "-ec", script, str(node.groups.root / region / "region")),
                *(sys.executable, "-c", ONCE, str(node.socket(group))),
            ]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as process:
                container.take(process.pid)
                printed, _ = process.communicate("go\n")
            tried.append((region, group, printed.strip()))
    ok, stranger = str(layout.STATUS_OK), str(layout.STATUS_STRANGER)
    assert tried == [
        ("a", "a", ok), ("a", "b", stranger), ("b", "a", stranger), ("b", "b", ok)
    ]  # fmt: skip


@pytest.mark.parametrize("seen", ["before", "its parent", "never"])
def test_a_process_that_changes_its_root_stays_in_its_containers_group(
    node: GroupsNode, tmp_path: Path, seen: str
) -> None:
    first = node.container("a")
    container = node.container("b", pod_uid=first.container.pod_uid)
    script = """
        read go
        mkdir -p /run/podfabric/gpu && mount -t tmpfs none /run/podfabric/gpu &&
        touch /run/podfabric/gpu/region && mount --bind "$0" /run/podfabric/gpu/region
        root=$1; shift
        [ "$root" = / ] || { mount --rbind / "$root" && umount -R "$root/run/podfabric/gpu"; }
        $EXEC chroot "$root" "$@"
    """

    def asked(root: Path, how: str) -> str:
        command = [
            *("unshare", "-m", "sh", "-ec", script.replace("$EXEC", how)),
            *(str(node.groups.root / "b/region"), str(root)),
            *(sys.executable, "-c", ONCE, str(node.socket("b"))),
        ]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            container.take(process.pid)
            printed, _ = process.communicate("go\ngo\n")
        return printed.strip()

    changed = tmp_path / "root"
    changed.mkdir()
    if seen == "before":
        assert asked(Path("/"), "exec") == str(layout.STATUS_OK)
    answer = asked(changed, "" if seen == "its parent" else "exec")
    assert answer == str(layout.STATUS_STRANGER if seen == "never" else layout.STATUS_OK)


def test_processes_that_lose_their_slots_hold_no_descriptor_of_the_agent(node: GroupsNode) -> None:
    def pidfds() -> int:
        links = Path("/proc/self/fd").iterdir()
        return sum("pidfd" in str(link.readlink()) for link in links if link.is_symlink())

    before = pidfds()
    container = node.container("a")
    with ExitStack() as stack:
        for _ in range(6):  # each takes the slot that the previous one has not entered
            client = stack.enter_context(container.client(node.socket("a")))
            assert client.register(5)[0] == layout.STATUS_OK
        assert node.alive("a") == {5: client.pid}
        until(lambda: pidfds() == before + 1)
        assert client.register(5)[0] == layout.STATUS_OK  # again, and for another slot
        assert client.register(6)[0] == layout.STATUS_OK
        until(lambda: pidfds() == before + 1)
        node.groups.remove("a")
        until(lambda: pidfds() == before)


ONCE = """
import socket, struct, sys
input()
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
    client.connect(sys.argv[1])
    client.send(struct.pack("<II", 1, 0))
    print(struct.unpack("<IIQ", client.recv(64))[0])
"""


@pytest.mark.parametrize(
    ("version", "slot", "status"),
    [
        (2, 0, layout.STATUS_VERSION),
        (0, 0, layout.STATUS_VERSION),
        (1, 256, layout.STATUS_SLOT),
        (1, 2**32 - 1, layout.STATUS_SLOT),
    ],
)
def test_a_request_of_another_version_or_slot_is_refused(
    node: GroupsNode, version: int, slot: int, status: int
) -> None:
    with node.container("a").client(node.socket("a")) as client:
        assert client.register(slot, version) == [status, 0, 0]
        assert client.register(255)[0] == layout.STATUS_OK


def test_a_slot_of_a_living_process_is_not_given_to_another(node: GroupsNode) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as first, container.client(node.socket("a")) as second:
        assert first.register(5) == [layout.STATUS_OK, first.pid, 1]
        node.claim("a", 5)
        assert second.register(5) == [layout.STATUS_SLOT, 0, 0]
        assert first.register(5) == [layout.STATUS_OK, first.pid, 2]  # it executed a program
        first.kill()
        until(lambda: node.alive("a") == {}, what="end of the first")
        assert second.register(5) == [layout.STATUS_OK, second.pid, 3]


def test_a_slot_is_free_whose_process_did_not_wait_for_its_registration(
    node: GroupsNode,
) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as first, container.client(node.socket("a")) as second:
        first.register(5)  # and it does not enter it: to its shim the answer came too late
        assert second.register(5) == [layout.STATUS_OK, second.pid, 2]
        first.kill()
        second.register(6)
        assert node.alive("a") == {5: second.pid, 6: second.pid}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_slots_of_a_process_that_dies_in_any_way_are_freed(
    node: GroupsNode, number: int
) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as dying, container.client(node.socket("a")) as other:
        assert [dying.register(1)[2], dying.register(2)[2], other.register(3)[2]] == [1, 1, 1]
        assert node.alive("a") == {1: dying.pid, 2: dying.pid, 3: other.pid}
        dying.kill(number)
        until(lambda: node.alive("a") == {3: other.pid}, what="end of the slots")
        assert {each.registration for each in node.groups.read("a").processes.values()} == {1}
        assert list(node.registrar.living._by_pid) == [other.pid]


def test_the_end_of_a_process_that_cannot_be_written_at_once_is_written_later(
    node: GroupsNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left, for example."""
    container, failed = node.container("a"), threading.Event()

    def unwritten(group: str, slots: object) -> None:
        failed.set()
        raise GroupError(group)

    with container.client(node.socket("a")) as client:
        assert client.register(3)[0] == layout.STATUS_OK
        with monkeypatch.context() as patch:
            patch.setattr(node.groups, "mark_dead", unwritten)
            client.kill()
            assert failed.wait(PATIENCE)
        until(lambda: node.alive("a") == {}, what="end of the process in the limits")
    node.groups.remove("a")
    until(lambda: not node.registrar._unmarked, what="end of what was not written")


def test_restarted_agent_knows_which_processes_live(node: GroupsNode) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as dying, container.client(node.socket("a")) as living:
        for slot, client in enumerate((dying, living), start=1):
            assert client.register(slot)[0] == layout.STATUS_OK
        node.registrar.close()
        dying.kill()
        node.restart()
        assert node.alive("a") == {2: living.pid}
        assert living.register(9)[0] == layout.STATUS_OK
        living.kill()
        until(lambda: node.alive("a") == {}, what="end of a process that was adopted")


def test_a_pid_that_is_used_again_is_not_the_process_that_was_registered(node: GroupsNode) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as client:
        # As if an earlier process with this pid had been registered.
        node.groups.register("a", 4, client.pid, start_time=1)
        node.restart()
        assert node.alive("a") == {}


def test_next_agent_finishes_the_change_of_a_killed_agent(node: GroupsNode) -> None:
    node.container("a")
    limits = node.groups.root / "a/limits"
    with limits.open("r+b") as file:
        file.seek(16)
        file.write(struct.pack("<Q", 9))
    node.restart()
    assert struct.unpack_from("<Q", limits.read_bytes(), 16)[0] % 2 == 0


def test_groups_that_are_removed_are_not_served_and_can_be_made_again(node: GroupsNode) -> None:
    container = node.container("a")
    with container.client(node.socket("a")) as client:
        assert client.register(0)[0] == layout.STATUS_OK
        node.groups.remove("a")
        assert not node.socket("a").exists()
        node.groups.make("a", Limit(GPU, 1 << 30, 1.0))
        assert client.register(0) == [layout.STATUS_OK, client.pid, 1]


def _silent(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(PATIENCE)
    client.connect(str(path))
    return client


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 9, b"x" * 60_000], ids=len)
def test_invalid_request_ends_the_connection(
    node: GroupsNode, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not content:  # otherwise it ends immediately
        monkeypatch.setattr(group_socket, "PATIENCE", 0.1)
    node.container("a")
    with _silent(node.socket("a")) as client:
        if content:
            client.send(content)
        assert client.recv(64) == b""
    assert node.alive("a") == {}


def test_a_client_that_is_slow_to_ask_is_answered(node: GroupsNode) -> None:
    """Other work of the node may delay the client between its connection and its request."""
    node.container("a")
    with _silent(node.socket("a")) as client:
        client.settimeout(3 * TICK)
        with pytest.raises(TimeoutError):
            client.recv(64)
        client.settimeout(PATIENCE)
        client.send(struct.pack("<II", layout.VERSION, 0))
        # The client is in no container; the test only needs an answer.
        assert client.recv(64) == struct.pack("<IIQ", layout.STATUS_STRANGER, 0, 0)


def test_silent_clients_of_one_group_delay_no_other_group(
    node: GroupsNode,
) -> None:
    node.container("a")
    other = node.container("b")
    with ExitStack() as stack:
        for _ in range(4 * CLIENTS):
            stack.enter_context(_silent(node.socket("a")))
        with other.client(node.socket("b")) as client:
            for slot in range(20):
                assert client.register(slot)[0] == layout.STATUS_OK


def test_a_group_that_connects_without_end_keeps_no_other_group_waiting(node: GroupsNode) -> None:
    node.container("a")
    other = node.container("b")
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.setblocking(False)
                try:
                    client.connect(str(node.socket("a")))
                except OSError:  # the backlog is full
                    over.wait(0.001)

    flooding = [threading.Thread(target=flood) for _ in range(3)]
    for thread in flooding:
        thread.start()
    try:
        with other.client(node.socket("b")) as client:
            for slot in range(100):
                assert client.register(slot)[0] == layout.STATUS_OK
    finally:
        over.set()
        for thread in flooding:
            thread.join()


MANY = """
import os, socket, struct, sys
sys.stdin.readline()
for slot in range(256):
    if os.fork() == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(sys.argv[1])
            client.send(struct.pack("<II", 1, slot))
            client.recv(64)
        break
sys.stdin.read()
"""


def test_256_simultaneous_processes_each_get_their_slot(node: GroupsNode) -> None:
    container = node.container("a")
    with subprocess.Popen(
        [sys.executable, "-c", MANY, node.socket("a")], stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        container.take(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: len(node.alive("a")) == layout.SLOTS, what="registration of all")
        assert len(set(node.alive("a").values())) == layout.SLOTS
    until(lambda: node.alive("a") == {}, what="end of all")


def test_later_of_two_simultaneous_requests_gets_the_slot(node: GroupsNode, tmp_path: Path) -> None:
    """The first has not recorded in its region that it uses the slot; its answer may be too
    late."""
    container = node.container("a")
    with ExitStack() as stack:
        _, clients, requests = _asking(stack, container, tmp_path / "own.sock", [5, 5])
        for each in requests:
            node.registrar._answer(*each)
        assert [client.answer().split()[0] for client in clients] == ["0", "0"]
        assert node.alive("a") == {5: clients[1].pid}


def test_failure_to_write_is_answered_to_all_simultaneous_requests(
    node: GroupsNode, tmp_path: Path
) -> None:
    container = node.container("a")
    with ExitStack() as stack:
        _, clients, requests = _asking(stack, container, tmp_path / "own.sock", [1, 2])
        (node.groups.root / "a/limits").unlink()
        node.groups._forget("a")
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for each in requests:
            node.registrar._answer(*each)
        answers = [client.answer().split()[0] for client in clients]
        assert answers == [str(layout.STATUS_BUSY)] * 2
        assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - no pidfd is left


def _asking(
    stack: ExitStack, container: MadeContainer, path: Path, slots: list[int]
) -> tuple[socket.socket, list[RegisteringProcess], list[tuple[Registrant, layout.PfRequest]]]:
    """Processes that have requested slots at a socket of the test's own, and their requests."""
    own = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    own.bind(str(path))
    own.listen()
    clients, requests = [], []
    for slot in slots:
        client = stack.enter_context(container.client(path))
        client.ask(slot)
        clients.append(client)
        peer = stack.enter_context(own.accept()[0])
        request = layout.PfRequest.from_buffer_copy(peer.recv(8))
        requests.append((Registrant(GroupSocket("a", own), peer), request))
    return own, clients, requests
