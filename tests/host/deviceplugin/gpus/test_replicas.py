"""Pools of mode replicas on a real socket: ids offered and given to a kubelet (Deepomatic's)."""

from collections.abc import Iterator, Mapping

import pytest

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.plugin import DevicePlugin
from deviceplugin.pools.flags import SHARED_GPU, parse_command_line
from deviceplugin.pools.pool_config import DevicePluginConfig
from gpu.gpu_pool import GpuPoolConfig
from gpu.pools.limit_backend import GpuParts
from tests.host.deviceplugin.node import Node
from tests.host.deviceplugin.processes import running
from tests.kubelet.kubelet import Kubelet
from tests.unit.gpu.driver import Driver
from tests.unit.host.servers import gpu_uuid
from tests.waiting import PATIENCE, until

RESOURCE = "example.com/shared-gpu"


def pool(**changed: object) -> DevicePluginConfig:
    fields = {"mode": "replicas", "resource": RESOURCE, "replicas": 4, "placement": "spread"}
    return DevicePluginConfig(pools=(), gpus=(GpuPoolConfig(**{**fields, **changed}),))  # type: ignore[arg-type]


def container(count: int = 1, resource: str = RESOURCE) -> Mapping[str, object]:
    return {"name": "main", "limits": {resource: count}}


@pytest.fixture
def gpus() -> int:
    return 0


@pytest.fixture
def driver(paths: Paths) -> Driver:
    return Driver(paths)


@pytest.fixture
def node(paths: Paths, driver: Driver, kubelet: Kubelet) -> Iterator[Node]:
    driver.load(2)
    new_node = Node(paths, pool())
    kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == 8)
    yield new_node
    new_node.plugin.close()


@pytest.mark.parametrize("tools", [True, False])
def test_deepomatics_command_line_gives_its_ids_nodes_and_mount(
    paths: Paths, driver: Driver, kubelet: Kubelet, tools: bool
) -> None:
    driver.load(2, tools=tools)
    flags = ["-host-path", "/opt/nvidia", "--container-path=/usr/local/nvidia"]
    command, rest = parse_command_line(
        [*flags, "-gpu-duplication-factor=100", "-plugin-directory", str(kubelet.directory)]
    )
    assert rest == []
    assert command.plugin_directory == paths.device_plugins
    node = Node(paths, command.load(paths.config))
    try:
        kubelet.wait(lambda: kubelet.allocatable(SHARED_GPU) == 200)
        assert set(kubelet.devices(SHARED_GPU)) == {
            f"nvidia{gpu}-_-{k}" for gpu in (0, 1) for k in range(1, 101)
        }
        given = kubelet.admit("trainer", [container(1, SHARED_GPU)]).containers["main"]
        names = ["nvidia0", "nvidiactl", "nvidia-uvm", *(["nvidia-uvm-tools"] if tools else [])]
        assert given.devices == {f"/dev/{name}": (str(paths.dev / name), "rw") for name in names}
        assert given.mounts == {"/usr/local/nvidia": ("/opt/nvidia", True)}
        assert given.env == {}
        assert given.annotations == {}
        assert given.cdi == []
        assert not kubelet.count("PreStartContainer", SHARED_GPU)
    finally:
        node.plugin.close()


def test_two_units_of_a_gpu_are_its_nodes_once(node: Node, kubelet: Kubelet) -> None:
    given = kubelet.admit("trainer", [container(2)]).containers["main"]
    assert given.ids[RESOURCE] == ["nvidia0-_-1", "nvidia0-_-2"]
    assert [path for path in given.devices if path[-1].isdigit()] == ["/dev/nvidia0"]
    kept = checkpoint.read(node.paths).allocations
    assert [(entry.id, entry.gpu and entry.gpu.uuid) for entry in kept] == [
        ("nvidia0-_-1", gpu_uuid(0)),
        ("nvidia0-_-2", gpu_uuid(0)),
    ]


def test_containers_are_spread_over_the_gpus(node: Node, kubelet: Kubelet) -> None:
    for number in range(4):
        kubelet.admit(f"trainer-{number}", [container()])
    minors = [entry.gpu.minor for entry in checkpoint.read(node.paths).allocations if entry.gpu]
    assert sorted(minors) == [0, 0, 1, 1]


def test_unknown_id_is_refused_by_name_and_gives_nothing(node: Node, kubelet: Kubelet) -> None:
    endpoint = kubelet.endpoint(RESOURCE)
    assert endpoint is not None
    with pytest.raises(Exception, match=r"cannot allocate nvidia7-_-1 of .* has no such id"):
        endpoint.allocate(["nvidia0-_-1", "nvidia7-_-1"])
    assert checkpoint.read(node.paths).allocations == ()


def test_id_of_a_gpu_without_its_node_is_unhealthy_and_refused_by_name(
    node: Node, kubelet: Kubelet
) -> None:
    (node.paths.dev / "nvidia1").unlink()
    kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == 4)
    assert kubelet.capacity(RESOURCE) == 8
    endpoint = kubelet.endpoint(RESOURCE)
    assert endpoint is not None
    with pytest.raises(Exception, match=r"cannot allocate nvidia1-_-3 of .*/nvidia1: No such file"):
        endpoint.allocate(["nvidia1-_-3"])
    assert checkpoint.read(node.paths).allocations == ()
    Driver(node.paths).nodes(range(2))
    kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == 8)


def test_id_of_a_sick_gpu_is_unhealthy_until_a_reset_and_refused_with_the_reason(
    node: Node, kubelet: Kubelet
) -> None:
    sick = {gpu_uuid(1): "critical error Xid 79: reset the GPU"}
    node.plugin.reconfigure(pool(), GpuParts(faults=lambda: sick))
    kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == 4)
    assert kubelet.capacity(RESOURCE) == 8
    endpoint = kubelet.endpoint(RESOURCE)
    assert endpoint is not None
    with pytest.raises(Exception, match=r"cannot allocate nvidia1-_-3 of .* Xid 79: reset the GPU"):
        endpoint.allocate(["nvidia1-_-3"])
    sick.clear()
    kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == 8)


def test_node_that_goes_between_list_and_allocate_is_refused(node: Node, kubelet: Kubelet) -> None:
    """A regular file in place of a device node must never be given."""
    path = node.paths.dev / "nvidia-uvm"
    endpoint = kubelet.endpoint(RESOURCE)
    assert endpoint is not None
    path.unlink()
    path.write_text("")
    with pytest.raises(Exception, match=r"nvidia-uvm: is not a character device|unhealthy"):
        endpoint.allocate(["nvidia0-_-1"])


def test_driver_that_appears_later_is_offered_within_ten_seconds_without_a_restart(
    paths: Paths, driver: Driver, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in rounds of the plugin's loop, because a busy machine delays them. The round in
    which the driver appears may have looked already; the next one lists it. A round waits for
    `waited` seconds.
    """
    rounds: list[tuple[float, int]] = []  # how long it waits, and the ids that are listed then
    watch = DevicePlugin._watch

    def watched(plugin: DevicePlugin) -> float:
        seconds = watch(plugin)
        rounds.append((seconds, len(plugin._gpus.services[RESOURCE].listing())))
        return seconds

    monkeypatch.setattr(DevicePlugin, "_watch", watched)
    node = Node(paths, pool())
    try:
        kubelet.wait(lambda: kubelet.count("ListAndWatch", RESOURCE))
        assert kubelet.capacity(RESOURCE) == 0
        driver.load(2)
        begun = len(rounds)
        kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == 8)
        assert kubelet.count("Register", RESOURCE) == 1
        until(lambda: len(rounds) > begun + 1, what="rounds")
        assert rounds[begun + 1][1] == 8
        assert sum(seconds for seconds, _ in rounds[begun - 1 : begun + 1]) <= 10
    finally:
        node.plugin.close()


def test_holder_stays_listed_when_its_gpu_goes(node: Node, kubelet: Kubelet) -> None:
    pod = kubelet.admit("trainer", [container()])
    (held,) = pod.containers["main"].ids[RESOURCE]
    Driver(node.paths).unload()
    kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == 0)
    kubelet.wait(lambda: kubelet.capacity(RESOURCE) == 4)
    assert kubelet.devices(RESOURCE)[held][0] is False


def test_pods_of_a_node_that_boots_are_admitted_before_the_driver_is_there(
    node: Node, kubelet: Kubelet
) -> None:
    pod = kubelet.admit("trainer", [container()])
    (held,) = pod.containers["main"].ids[RESOURCE]
    node.plugin.close()
    kubelet.stop()
    Driver(node.paths).unload()
    node.start()
    kubelet.start()
    kubelet.wait(lambda: kubelet.devices(RESOURCE).get(held) == (True, ()))
    kubelet.readmit(pod)
    endpoint = kubelet.endpoint(RESOURCE)
    assert endpoint is not None
    with pytest.raises(Exception, match="unhealthy"):  # but nothing is given
        endpoint.allocate([held])


def test_lost_checkpoint_is_filled_from_the_kubelet(node: Node, kubelet: Kubelet) -> None:
    kubelet.admit("trainer", [container(2)])
    node.plugin.close()
    node.paths.checkpoint.unlink()
    node.start()
    kept = checkpoint.read(node.paths).allocations
    assert [(entry.id, entry.adopted) for entry in kept] == [
        ("nvidia0-_-1", True),
        ("nvidia0-_-2", True),
    ]
    assert {entry.gpu.bdf for entry in kept if entry.gpu} == {"0000:10:00.0"}


def test_command_serves_the_flags_pool(paths: Paths, driver: Driver, kubelet: Kubelet) -> None:
    driver.load(1)
    flags = ("-plugin-directory", str(kubelet.directory), "--gpu-duplication-factor", "3")
    with running(paths, flags=flags):
        kubelet.wait(lambda: kubelet.allocatable(SHARED_GPU) == 3)


def test_wrong_flag_of_the_command_is_named(paths: Paths) -> None:
    with running(paths, flags=("-gpu-duplication-factor=0",)) as process:
        assert process.process.wait(PATIENCE) == 2
        assert "-gpu-duplication-factor: '0': expected a number from 1 to 10000" in process.log
