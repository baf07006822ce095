"""The port and the program of a transfer, with a made-up sysfs and a stand-in for ib_write_bw."""

import threading
from pathlib import Path

import pytest

from base.paths import Paths
from cli.fabric_check import transfer
from cli.fabric_check.transfer import VerbsPort
from host.netlink.links import ARPHRD_INFINIBAND, Link
from tests.waiting import join, until

MAC = "80:00:00:66:fe:80:00:00:00:00:00:00:02:1b:0e:00:00:00:00:01"
GUID = "021b:0e00:0000:0001"
ADDRESS = "10.1.0.5"


def link(pkey: int | None) -> Link:
    return Link(
        index=2,
        name="net1",
        kind="ipoib",
        link_type=ARPHRD_INFINIBAND,
        mac=MAC,
        broadcast="",
        mtu=2044,
        flags=0,
        pkey=pkey,
    )


def hca(paths: Paths, name: str, number: int, **files: str) -> None:
    """An HCA whose device node the pod has."""
    port = f"class/infiniband/{name}/ports/1"
    verbs = f"class/infiniband_verbs/uverbs{number}"
    every = {f"{verbs}/ibdev": name, f"{verbs}/dev": f"231:{192 + number}"}
    every |= {f"{port}/{path.replace('__', '/')}": text for path, text in files.items()}
    for path, text in every.items():
        (paths.sys / path).parent.mkdir(parents=True, exist_ok=True)
        (paths.sys / path).write_text(f"{text}\n")
    (paths.dev / "infiniband").mkdir(parents=True, exist_ok=True)
    (paths.dev / f"infiniband/uverbs{number}").touch()


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(sys=tmp_path / "sys", dev=tmp_path / "dev")


def test_an_ipoib_interface_uses_its_port_with_the_index_of_its_p_key(paths: Paths) -> None:
    pkeys = {"pkeys__0": "0xffff", "pkeys__1": "0x0000", "pkeys__2": "0x0001"}
    hca(
        paths,
        "mlx5_0",
        0,
        link_layer="InfiniBand",
        gids__0="fe80:0000:0000:0000:0000:0000:0000:0009",
    )
    hca(paths, "mlx5_1", 1, link_layer="InfiniBand", gids__0=f"fe80:0000:0000:0000:{GUID}", **pkeys)
    port = transfer.port_of(paths, link(0x8001), ADDRESS, 0)
    assert port == VerbsPort("mlx5_1", pkey=2)
    assert "--pkey_index=2" in port.options(7)
    lacking = transfer.port_of(paths, link(0x8002), ADDRESS, 0)
    assert lacking == VerbsPort("mlx5_1", pkey=-1)


def test_a_roce_interface_uses_the_gid_of_its_address(paths: Paths) -> None:
    address = "0000:0000:0000:0000:0000:ffff:0a01:0005"
    gids = {"gids__0": "fe80:0000:0000:0000:0000:0000:0000:0001", "gids__2": address}
    gids |= {"gids__3": address, "gid_attrs__types__2": "IB/RoCE v1"}
    hca(paths, "mlx5_3", 3, gid_attrs__types__3="RoCE v2", link_layer="Ethernet", **gids)
    port = transfer.port_of(paths, link(None), ADDRESS, 0)
    assert port == VerbsPort("mlx5_3", gid=3)
    assert port.options(7)[-2:] == ["-x", "3"]


def test_an_interface_without_gid_takes_the_hca_of_its_number(paths: Paths) -> None:
    assert transfer.port_of(paths, link(None), ADDRESS, 0) is None
    for number in range(2):
        hca(paths, f"rxe{number}", number, link_layer="Ethernet")
    assert transfer.port_of(paths, link(0x8001), ADDRESS, 1) == VerbsPort("rxe1")


def test_the_server_program_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, starts = tmp_path / transfer.PROGRAM, tmp_path / "starts"
    program.write_text(f"#!/bin/sh\necho $* >> {starts}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(transfer, "_PAUSE", 0.01)
    serving = threading.Thread(target=transfer.serve, args=(VerbsPort("rxe0"), 7))
    serving.start()
    until(lambda: starts.exists() and len(starts.read_text().splitlines()) > 2)
    program.unlink()
    join(serving)


def test_the_reason_of_a_failed_transfer_is_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SECONDS", 0.3)
    monkeypatch.setattr(transfer, "_PAUSE", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    port = VerbsPort("rxe0")
    assert (
        transfer.failure(port, 7, "::1") == "ib_write_bw does not start: No such file or directory"
    )
    program = tmp_path / transfer.PROGRAM
    program.write_text("#!/bin/sh\necho Failed to modify QP to RTR >&2\nexit 1\n")
    program.chmod(0o755)
    why = transfer.failure(port, 7, "::1")
    assert why == "ib_write_bw on rxe0 failed: Failed to modify QP to RTR"
    program.write_text("#!/bin/sh\nexec sleep 9\n")
    assert transfer.failure(port, 7, "::1") == "ib_write_bw on rxe0 did not end within 0.3 s"
    program.write_text("#!/bin/sh\n")
    assert transfer.failure(port, 7, "::1") == ""
