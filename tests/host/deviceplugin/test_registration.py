"""A pool's registration, with a kubelet that starts, stops, refuses, and forgets."""

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from base.paths import Paths
from deviceplugin.kubelet import plugin_sockets, registration
from deviceplugin.kubelet.registration import PluginServer
from tests.host.deviceplugin.conftest import Serve, plugin_threads
from tests.host.deviceplugin.pool import NAME, Pool
from tests.kubelet import Kubelet, PodRejected
from tests.kubelet.endpoint import Endpoint
from tests.waiting import PATIENCE, until

ONE = [{"name": "main", "limits": {NAME: 1}}]


def all_healthy(kubelet: Kubelet, count: int = 4) -> None:
    kubelet.wait(lambda: kubelet.allocatable(NAME) == count)


def own_sockets(root: Path) -> list[Path]:
    directory = root / "device-plugins"
    return sorted(directory.glob("*podfabric-*")) + sorted(directory.glob(".podfabric-*"))


@pytest.fixture
def processes(root: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """A function that starts a plugin of four devices in a separate process."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.host.deviceplugin.pool", str(root)],
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_pool_is_registered_by_its_file_name_and_asked_for_options_then_the_list(
    kubelet: Kubelet, serve: Serve, root: Path
) -> None:
    kubelet.start()
    server = serve(Pool())
    all_healthy(kubelet)
    assert [call.method for call in kubelet.calls] == [
        "Register",
        "GetDevicePluginOptions",
        "ListAndWatch",
    ]
    (path,) = own_sockets(root)
    assert kubelet.calls[0].ids == (path.name,)
    assert path.stat().st_mode & 0o777 == 0o600
    endpoint = kubelet.endpoint(NAME)
    assert endpoint is not None
    assert not endpoint.options.pre_start_required
    assert endpoint.options.get_preferred_allocation_available
    kubelet.wait(lambda: server.state().registered)
    assert server.state().socket == str(path)
    assert server.state().devices == server.state().healthy == 4


@pytest.mark.parametrize("made", ["nothing", "the root", "the directory"])
def test_a_kubelet_that_is_not_there_is_waited_for(
    kubelet: Kubelet, serve: Serve, root: Path, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    if made == "the root":
        root.mkdir()
    if made == "the directory":
        (root / "device-plugins").mkdir(parents=True)
    server = serve(Pool())
    kubelet.wait(lambda: "waiting for the kubelet" in server.state().problem)
    assert not server.state().registered
    server.changed()
    kubelet.start()
    all_healthy(kubelet)
    kubelet.wait(lambda: server.state().problem == "")
    assert caplog.text.count("kubelet.sock: does not exist: waiting for the kubelet") <= 1


def test_a_pool_is_back_at_once_after_a_kubelets_restart_and_holders_keep_their_devices(
    kubelet: Kubelet, serve: Serve, root: Path, patient: None
) -> None:
    kubelet.start()
    serve(Pool())
    all_healthy(kubelet)
    pods = [kubelet.admit(f"pod-{number}", ONE) for number in range(3)]
    (before,) = own_sockets(root)
    kubelet.restart()
    kubelet.wait(lambda: kubelet.allocatable(NAME) == 4)
    (after,) = own_sockets(root)
    assert after != before
    held = {device for each in kubelet.held() for device in each.devices}
    assert held == {device for pod in pods for device in pod.containers["main"].ids[NAME]}
    allocated = kubelet.count("Allocate", NAME)
    for pod in pods:
        kubelet.readmit(pod)
    assert kubelet.count("Allocate", NAME) == allocated
    last = kubelet.admit("last", ONE)
    assert not held & set(last.containers["main"].ids[NAME])
    with pytest.raises(PodRejected, match="Requested: 1, Available: 0"):
        kubelet.admit("one too many", ONE)


def test_many_restarts_in_a_row_end_registered(kubelet: Kubelet, serve: Serve, root: Path) -> None:
    kubelet.start()
    serve(Pool())
    for _ in range(5):
        kubelet.restart()
    all_healthy(kubelet)
    assert len(own_sockets(root)) == 1


def test_a_kubelet_that_was_away_finds_the_list_as_it_is_then(
    kubelet: Kubelet, serve: Serve
) -> None:
    pool = Pool()
    kubelet.start()
    server = serve(pool)
    all_healthy(kubelet)
    kubelet.stop()
    pool.set("2", False)
    server.changed()
    kubelet.start()
    kubelet.wait(lambda: kubelet.capacity(NAME) == 4)
    assert kubelet.allocatable(NAME) == 3


def test_a_socket_that_vanished_is_made_again_under_another_name(
    kubelet: Kubelet, serve: Serve, root: Path
) -> None:
    kubelet.start()
    serve(Pool())
    all_healthy(kubelet)
    (before,) = own_sockets(root)
    before.unlink()
    kubelet.wait(lambda: kubelet.count("ListAndWatch", NAME) == 2)
    kubelet.wait(lambda: kubelet.allocatable(NAME) == 4 and own_sockets(root))
    assert own_sockets(root) != [before]
    assert kubelet.admit("pod", ONE).containers["main"].ids


def test_another_programs_socket_under_its_name_is_left_alone(
    kubelet: Kubelet, serve: Serve, root: Path
) -> None:
    kubelet.start()
    server = serve(Pool())
    all_healthy(kubelet)
    (path,) = own_sockets(root)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path.with_name("other")))
        other.listen()
        path.with_name("other").replace(path)
        number = path.stat().st_ino
        kubelet.wait(lambda: len(own_sockets(root)) == 2)
        all_healthy(kubelet)
        server.close()
        assert own_sockets(root) == [path]
        assert path.stat().st_ino == number


def removed(directory: Path) -> bool:
    """Remove a directory; returns False if the plugin made a socket in it meanwhile."""
    try:
        shutil.rmtree(directory)
    except OSError:
        return False
    return True


def test_a_directory_that_is_replaced_is_followed(
    kubelet: Kubelet, serve: Serve, root: Path
) -> None:
    kubelet.start()
    serve(Pool())
    all_healthy(kubelet)
    kubelet.stop()
    (root / "device-plugins").rename(root / "before")
    kubelet.start()
    all_healthy(kubelet)
    kubelet.stop()
    until(lambda: removed(root / "device-plugins"))
    kubelet.start()
    all_healthy(kubelet)
    assert len(own_sockets(root)) == 1


def test_a_pool_registers_again_when_the_kubelet_stops_reading_its_list(
    kubelet: Kubelet, serve: Serve
) -> None:
    kubelet.start()
    serve(Pool())
    all_healthy(kubelet)
    endpoint = kubelet.endpoint(NAME)
    assert endpoint is not None
    endpoint.close()
    kubelet.wait(lambda: kubelet.endpoint(NAME) is not endpoint)
    all_healthy(kubelet)


def test_a_registration_after_which_the_list_is_not_asked_for_is_repeated(
    kubelet: Kubelet, serve: Serve, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def third(endpoint: Endpoint) -> bool:
        if kubelet.count("Register", NAME) < 3:
            return False
        monkeypatch.setattr(registration, "WATCHDOG", 10 * PATIENCE)  # the list may arrive late
        return True

    kubelet.before_watch = third
    kubelet.start()
    server = serve(Pool())
    all_healthy(kubelet)
    assert kubelet.count("Register", NAME) == 3
    kubelet.wait(lambda: server.state().problem == "")


def test_a_refusal_is_logged_once_and_tried_again(
    kubelet: Kubelet, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet.refuse[NAME] = "the node is full"
    kubelet.start()
    server = serve(Pool())
    kubelet.wait(lambda: kubelet.count("Register", NAME) >= 3)
    assert "the kubelet refuses the resource: the node is full" in server.state().problem
    kubelet.refuse.clear()
    all_healthy(kubelet)
    assert caplog.text.count("the node is full") == 1


def test_a_kubelet_that_listens_no_more_is_tried_until_it_is_replaced(
    kubelet: Kubelet, serve: Serve, root: Path
) -> None:
    (root / "device-plugins").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(root / "device-plugins/kubelet.sock"))
    server = serve(Pool())
    kubelet.wait(lambda: "no process listens" in server.state().problem)
    kubelet.start()
    kubelet.wait(lambda: kubelet.allocatable(NAME) == 4)


def test_a_pool_that_is_refused_keeps_no_other_from_the_kubelet(
    kubelet: Kubelet, serve: Serve
) -> None:
    kubelet.start()
    refused = serve(Pool(name="kubernetes.io/hca"))
    serve(Pool())
    serve(Pool(2, name="rdma/other"))
    all_healthy(kubelet)
    kubelet.wait(lambda: kubelet.allocatable("rdma/other") == 2)
    kubelet.wait(lambda: "is invalid" in refused.state().problem)


def test_path_that_is_too_long_for_a_socket_is_logged(tmp_path: Path) -> None:
    root = tmp_path / ("long" * 20)
    (root / "device-plugins").mkdir(parents=True)
    server = PluginServer(Paths(kubelet=root), Pool())
    server.start()
    try:
        Kubelet(root).wait(lambda: "at most 107 bytes" in server.state().problem)
    finally:
        server.close()


def test_close_leaves_nothing_and_may_be_called_again(
    kubelet: Kubelet, serve: Serve, root: Path
) -> None:
    kubelet.start()
    server = serve(Pool())
    all_healthy(kubelet)
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    second = serve(Pool(name="rdma/second"))
    kubelet.wait(lambda: kubelet.allocatable("rdma/second") == 4)
    second.close()
    server.close()
    server.close()
    assert own_sockets(root) == []
    kubelet.wait(lambda: kubelet.allocatable(NAME) == 0)
    assert kubelet.capacity(NAME) == 4
    kubelet.wait(lambda: not plugin_threads())
    kubelet.wait(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)  # noqa: PTH208


def test_close_does_not_wait_for_a_kubelet_that_hangs_in_register(
    kubelet: Kubelet, serve: Serve, root: Path, patient: None
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hang(endpoint: Endpoint) -> bool:
        inside.set()
        return go_on.wait(10 * PATIENCE) and False

    kubelet.before_watch = hang
    kubelet.start()
    server = serve(Pool())
    assert inside.wait(PATIENCE)
    closing = threading.Thread(target=server.close)
    closing.start()
    closing.join(PATIENCE)
    hung = closing.is_alive()
    go_on.set()
    closing.join()
    assert not hung
    assert own_sockets(root) == []


def test_a_server_that_never_started_can_be_closed(root: Path) -> None:
    PluginServer(Paths(kubelet=root), Pool()).close()


def test_a_plugin_killed_between_register_and_the_list_is_succeeded(
    kubelet: Kubelet, root: Path, processes: Callable[[], subprocess.Popen[bytes]]
) -> None:
    first: list[subprocess.Popen[bytes]] = []
    started = threading.Event()

    def kill(endpoint: Endpoint) -> bool:
        if started.wait(PATIENCE) and kubelet.count("Register", NAME) == 1:
            first[0].kill()
            first[0].wait()
        return True

    kubelet.before_watch = kill
    kubelet.start()
    first.append(processes())
    started.set()
    kubelet.wait(lambda: kubelet.count("ListAndWatch", NAME) == 1)
    first[0].wait()
    assert len(own_sockets(root)) == 1
    second = processes()
    all_healthy(kubelet)
    assert len(own_sockets(root)) == 1
    assert f"-{second.pid}-" in own_sockets(root)[0].name


def test_leftovers_are_removed_and_nothing_else(root: Path) -> None:
    root.mkdir()
    dead, other = root / "podfabric-rdma_hca-1-00000000.sock", root / "nvidia-gpu.sock"
    half_made = root / ".podfabric-rdma_hca-1-00000001.sock"
    for path in (dead, other, half_made):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    (root / "podfabric-file.sock").write_text("")
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(root / "podfabric-rdma_hca-2-00000000.sock"))
        alive.listen()
        assert plugin_sockets.remove_leftovers(root) == [dead]
        os.utime(half_made, (0, 0))
        assert plugin_sockets.remove_leftovers(root) == [half_made]
    assert len(list(root.iterdir())) == 3


def test_problem_is_logged_with_its_pool(
    kubelet: Kubelet, serve: Serve, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = f"{NAME}: {root}/device-plugins: the directory does not exist"
    with caplog.at_level(logging.INFO):
        server = serve(Pool())
        kubelet.wait(lambda: told in caplog.text)
    assert server.state().problem
