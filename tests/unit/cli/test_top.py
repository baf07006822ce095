"""`podfabric top` on a made-up server: rates of ports, and who holds them."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from base.paths import Paths
from base.types import DeviceId
from cli.show import top
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedHCA, Allocation
from host.sysfs import port_counters
from node.state import ThisNode
from tests.unit.cli.commands import Shell
from tests.unit.host import servers

FIRST = servers.DGX_HCAS[0]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return servers.dgx(tmp_path)


@pytest.fixture
def shell(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    return Shell(paths, monkeypatch, capsys)


def count(paths: Paths, device: str, **counters: int) -> None:
    """Set counters of the port; those of hw_counters begin with `hw_`."""
    port = paths.sys / "class/infiniband" / device / "ports/1"
    for name, value in counters.items():
        folder = "hw_counters" if name.startswith("hw_") else "counters"
        (port / folder).mkdir(exist_ok=True)
        (port / folder / name.removeprefix("hw_")).write_text(f"{value}\n")


def during(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Call `change` in each interval of the command."""
    sleep = time.sleep

    def changed(seconds: float) -> None:
        change()
        sleep(seconds)

    monkeypatch.setattr("cli.show.top.time.sleep", changed)


def measured(paths: Paths, change: Callable[[], None], seconds: float) -> dict[str, top.PortRates]:
    """The rates by RDMA device, as if `change` had taken these seconds."""
    node = ThisNode(paths)
    before = top.counters(node)
    change()
    found = top.rates(node, before, top.counters(node), seconds)
    return {port.rdma: port for port in found}


def test_bytes_are_four_times_the_words_that_the_port_counts(paths: Paths) -> None:
    count(paths, "mlx5_0", port_rcv_data=10, port_xmit_data=20, port_rcv_packets=1)

    first = measured(
        paths,
        lambda: count(paths, "mlx5_0", port_rcv_data=1010, port_xmit_data=20, port_rcv_packets=5),
        2.0,
    )["mlx5_0"]

    assert (first.received_bytes, first.sent_bytes) == (2000.0, 0.0)
    assert (first.received_packets, first.sent_packets) == (2.0, None)


def test_only_counters_that_grow_are_errors_or_congestion(paths: Paths) -> None:
    count(
        paths, "mlx5_0", symbol_error=7, port_xmit_discards=1, port_xmit_wait=100, hw_np_cnp_sent=3
    )

    first = measured(
        paths,
        lambda: count(paths, "mlx5_0", port_xmit_discards=3, port_xmit_wait=200, hw_np_cnp_sent=3),
        2.0,
    )["mlx5_0"]

    assert first.errors == {"port_xmit_discards": 1.0}
    assert first.congestion == {"port_xmit_wait": 50.0}


def test_a_counter_that_was_reset_has_no_rate(paths: Paths) -> None:
    count(paths, "mlx5_0", port_rcv_data=1000, symbol_error=9)

    first = measured(paths, lambda: count(paths, "mlx5_0", port_rcv_data=1, symbol_error=1), 1.0)[
        "mlx5_0"
    ]

    assert first.received_bytes is None
    assert first.errors == {}


def test_a_driver_without_counters_of_bytes_shows_its_packets(paths: Paths) -> None:
    count(paths, "mlx5_1", hw_sent_pkts=5, hw_rcvd_pkts=5)

    second = measured(paths, lambda: count(paths, "mlx5_1", hw_sent_pkts=9), 1.0)["mlx5_1"]

    assert (second.sent_bytes, second.sent_packets, second.received_packets) == (None, 4.0, 0.0)


def test_an_unreadable_counter_is_left_out(paths: Paths) -> None:
    count(paths, "mlx5_0", port_rcv_data=1)
    port = paths.sys / "class/infiniband/mlx5_0/ports/1/counters"
    (port / "port_xmit_data").mkdir()  # reading it fails, as a driver's refusal does
    (port / "symbol_error").write_text("N/A\n")

    found = port_counters.read(paths, "mlx5_0", 1)

    assert found is not None
    assert (found.received_bytes, found.sent_bytes, found.errors) == (4, None, {})


def test_a_port_without_counters_is_listed_with_its_state(shell: Shell) -> None:
    printed = shell("top", "--interval", "0.1")

    assert printed.code == 0
    assert len(printed.out.splitlines()) == 1 + len(servers.DGX_HCAS)
    assert f"mlx5_0/1  {FIRST}" in printed.out


def test_the_command_measures_one_interval(
    shell: Shell, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    count(paths, "mlx5_0", port_rcv_data=0)
    during(monkeypatch, lambda: count(paths, "mlx5_0", port_rcv_data=10**9))

    first, *rest = shell("top", "--interval", "0.1", "-o", "json").document()

    assert first["received_bytes"] > 10**9
    assert all(port["received_bytes"] is None for port in rest)


def test_a_port_shows_the_pods_that_hold_its_hca(shell: Shell, paths: Paths) -> None:
    held = checkpoint.encode(
        Allocation(
            resource="rdma/hca",
            id=DeviceId(f"{FIRST}-0"),
            devices=(AllocatedHCA(id=FIRST, address=FIRST, netdevs=(), rdma=()),),
            time="2026-11-21T19:12:56Z",
            boot_id="b",
        )
    )
    checkpoint.write(paths, [held])
    entry = {"PodUID": "uid-1", "ContainerName": "main", "ResourceName": "rdma/hca"}
    entries = [{**entry, "DeviceIDs": {"-1": [f"{FIRST}-0"]}}]
    paths.device_plugins.mkdir(parents=True)
    content = json.dumps({"Data": {"PodDeviceEntries": entries}})
    (paths.device_plugins / "kubelet_internal_checkpoint").write_text(content)

    first, second, *_ = shell("top", "--interval", "0.1", "-o", "json").document()

    assert (first["pods"], second["pods"]) == (["uid-1"], [])


@pytest.mark.parametrize("word", ["0", "x", "nan", "3601"])
def test_an_interval_that_is_no_time_is_refused(shell: Shell, word: str) -> None:
    printed = shell("top", "--interval", word)

    assert printed.code == 2
    assert f"'{word}': expected seconds, 0.1 to 3600" in printed.err
