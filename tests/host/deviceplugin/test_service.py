"""The device plugin as a process: its start, its service, and its successor."""

import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.pools import formats
from deviceplugin.service import Service
from tests.host.deviceplugin.processes import configure, made_server, running
from tests.kubelet import Kubelet, PodRejected
from tests.waiting import PATIENCE, until

HCA = "rdma/hca"
POOL = {"name": HCA, "slots": 4}
IDS = 32
KILLS = int(os.environ.get("PODFABRIC_PLUGIN_KILLS", "20"))


@pytest.fixture
def server() -> Iterator[Paths]:
    with tempfile.TemporaryDirectory(prefix="pf-") as root:
        paths = made_server(Path(root))
        configure(paths, POOL)
        yield paths


@pytest.fixture
def kubelet(server: Paths) -> Iterator[Kubelet]:
    with Kubelet(server.kubelet) as own_kubelet:
        yield own_kubelet


@pytest.fixture
def service(server: Paths) -> Iterator[Service]:
    """The service, not started."""
    running_service = Service(server, lambda: formats.load(server.config), server.config)
    yield running_service
    running_service.close()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.ERROR]


def sockets(paths: Paths) -> list[str]:
    return sorted(path.name for path in paths.device_plugins.glob("*podfabric*"))


def test_kubelet_that_comes_later_is_waited_for(service: Service, server: Paths) -> None:
    service.start()
    assert service.plugin is None
    with Kubelet(server.kubelet) as kubelet:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == IDS)
        (state,) = until(lambda: service.plugin.states() if service.plugin else [])
        assert (state.resource, state.devices, state.healthy) == (HCA, IDS, IDS)


def test_service_that_never_began_ends(service: Service, server: Paths) -> None:
    service.start()
    service.close()
    assert not server.checkpoint.exists()


def test_wrong_file_offers_nothing_until_it_is_corrected(
    service: Service, server: Paths, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    configure(server, {"name": "no-domain"})
    service.start()
    until(lambda: errors(caplog))
    assert str(server.config) in errors(caplog)[0]
    assert "nothing is offered" in errors(caplog)[0]
    assert kubelet.resources() == []
    configure(server, POOL)
    kubelet.wait(lambda: kubelet.allocatable(HCA) == IDS)


def test_mistake_in_the_file_is_logged_and_the_last_configuration_stays(
    service: Service, server: Paths, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    service.start()
    kubelet.wait(lambda: kubelet.allocatable(HCA) == IDS)
    configure(server, {"name": HCA, "slots": 0})
    until(lambda: errors(caplog))
    (told,) = errors(caplog)
    assert "slots" in told and "keeping the previous one" in told
    kubelet.admit("worker-0", [{"name": "main", "limits": {HCA: 1}}])
    configure(server, {"name": HCA, "slots": 2})
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 16)
    assert kubelet.count("Register", HCA) == 1


def test_changed_file_is_applied_at_run_time(
    service: Service, server: Paths, kubelet: Kubelet
) -> None:
    service.start()
    kubelet.wait(lambda: kubelet.allocatable(HCA) == IDS)
    configure(server, POOL, {"name": "rdma/all", "mode": "all", "amount": 3, "overlap": True})
    kubelet.wait(lambda: kubelet.allocatable("rdma/all") == 3)
    server.config.unlink()  # the default pool applies
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 8 * 64)
    kubelet.wait(lambda: kubelet.allocatable("rdma/all") == 0)


def test_second_instance_waits_and_takes_over(server: Paths, kubelet: Kubelet) -> None:
    with running(server) as first:
        kubelet.wait(lambda: kubelet.allocatable(HCA) == IDS)
        kubelet.admit("worker-0", [{"name": "main", "limits": {HCA: 1}}])
        before = checkpoint.read(server)
        with running(server) as second:
            until(lambda: "another device plugin runs" in second.log)
            assert kubelet.count("Register", HCA) == 1
            first.kill()
            kubelet.wait(lambda: kubelet.count("Register", HCA) == 2)
            kubelet.wait(lambda: kubelet.allocatable(HCA) == IDS)
            assert checkpoint.read(server) == before
            assert second.end() == 0
    assert sockets(server) == []


def test_mistake_of_the_command_line_is_reported_at_once(server: Paths) -> None:
    configure(server, {"nam": HCA})
    with running(server) as service:
        assert service.process.wait(PATIENCE) == 2
        assert 'did you mean "name"' in service.log or "nam" in service.log


@pytest.mark.early
def test_killed_plugin_forgets_nothing_that_the_kubelet_knows(
    server: Paths, kubelet: Kubelet
) -> None:
    """Kill -9 at any moment, while pods come and go."""
    ended = threading.Event()
    admitted: list[str] = []
    wrong: list[str] = []

    def pods() -> None:
        kubelet.wait(lambda: kubelet.allocatable(HCA))
        choice = random.Random(1)
        living = []
        number = 0
        while not ended.is_set():
            number += 1
            with suppress(PodRejected):  # the plugin is dead
                request = {"name": "main", "limits": {HCA: choice.randint(1, 3)}}
                pod = kubelet.admit(f"worker-{number}", [request])
                admitted.append(pod.name)
                living.append(pod)
                known = {allocation.id for allocation in checkpoint.read(server).allocations}
                given = set(pod.containers["main"].ids[HCA])
                wrong.extend(given - known)
            if len(living) > 5:
                kubelet.remove(living.pop(choice.randrange(len(living))))
            ended.wait(0.01)

    def registered_since(count: int) -> bool:
        return kubelet.count("Register", HCA) > count

    client = threading.Thread(target=pods)
    client.start()
    moments = random.Random(2)
    try:
        kills = 0
        while kills < KILLS or len(admitted) <= KILLS:  # a busy machine admits few between two
            kills += 1
            registered = kubelet.count("Register", HCA)
            with running(server) as service:
                if moments.random() < 0.8:  # otherwise the kill hits its start
                    kubelet.wait(partial(registered_since, registered))
                time.sleep(moments.uniform(0.0, 0.4))
                service.kill()
        with running(server) as last:
            kubelet.wait(lambda: kubelet.allocatable(HCA) == IDS)
            before = len(admitted)
            kubelet.wait(lambda: len(admitted) > before)
            ended.set()
            client.join(PATIENCE)
            known = {allocation.key for allocation in checkpoint.read(server).allocations}
            held = {(entry.resource, id_) for entry in kubelet.held() for id_ in entry.devices}
            assert held
            assert held <= known
            assert len(sockets(server)) == 1, "the sockets of the killed ones"
            assert last.end() == 0
    finally:
        ended.set()
        client.join(PATIENCE)
    assert wrong == []
    assert sockets(server) == []
    assert len(admitted) > KILLS
    assert not server.checkpoint.with_suffix(".damaged").exists()
