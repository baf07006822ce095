"""Which IPAM plugin an interface plugin gets, and that an ADD can be taken back."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cni.spec.errors import Code
from cni.spec.request import Request
from ipam.delegation import Ipam, choose
from tests.unit.ipam.calls import BOOT, NEXT_BOOT, Calls, error_of, request

POOL = {"range": "10.0.0.0/24"}


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    return directory


def executable(path: Path, answer: str = "", code: int = 0) -> None:
    """A plugin that notes its command and answers the same whatever it is asked."""
    path.write_text(
        f"#!/bin/sh\necho $CNI_COMMAND >> {path}.calls\ncat > /dev/null\n"
        f"printf '%s' '{answer}'\nexit {code}\n"
    )
    path.chmod(0o755)


def calls_of(path: Path) -> list[str]:
    log = path.with_name(f"{path.name}.calls")
    return log.read_text().split() if log.exists() else []


def asked(command: str, ipam_type: str, path: Path, container_id: str = "c1") -> Request:
    given = request(command, {**POOL, "type": ipam_type}, container_id, path=[str(path)])
    return msgspec.structs.replace(given, environ={**os.environ, "CNI_COMMAND": command})


def chosen(command: str, ipam_type: str, path: Path, node: Calls) -> Ipam:
    return choose(ipam_type, asked(command, ipam_type, path), node.plugin)


RESULT = json.dumps({"cniVersion": "1.0.0", "ips": [{"address": "10.7.0.1/24"}]})


@pytest.mark.parametrize("ipam_type", ["podfabric-ipam", "whereabouts"])
def test_our_types_are_served_in_process(node: Calls, bin_dir: Path, ipam_type: str) -> None:
    ipam = chosen("ADD", ipam_type, bin_dir, node)
    assert [ip.address for ip in ipam.add().ips] == ["10.0.0.1/24"]
    assert node.held() == {"10.0.0.1": "c1"}
    chosen("STATUS", ipam_type, bin_dir, node).status()
    chosen("DEL", ipam_type, bin_dir, node).delete()
    assert node.held() == {}


def test_a_whereabouts_that_is_not_ours_wins(node: Calls, bin_dir: Path) -> None:
    executable(bin_dir / "whereabouts", RESULT)
    ipam = chosen("ADD", "whereabouts", bin_dir, node)
    assert [ip.address for ip in ipam.add().ips] == ["10.7.0.1/24"]
    assert node.held() == {}
    ipam.undo()
    ipam.undo()
    assert calls_of(bin_dir / "whereabouts") == ["ADD", "DEL"]


def test_a_whereabouts_that_links_to_ours_is_ours(node: Calls, bin_dir: Path) -> None:
    (bin_dir / "podfabric-ipam").write_text("#!/bin/sh\nexit 1\n")
    (bin_dir / "whereabouts").symlink_to("podfabric-ipam")
    chosen("ADD", "whereabouts", bin_dir, node).add()
    assert node.held() == {"10.0.0.1": "c1"}


def test_a_script_of_ours_named_whereabouts_is_ours(node: Calls, bin_dir: Path) -> None:
    (bin_dir / "whereabouts").write_text("#!/bin/sh\n# podfabric: whereabouts\n")
    chosen("ADD", "whereabouts", bin_dir, node).add()
    assert node.held() == {"10.0.0.1": "c1"}


def test_any_other_type_is_an_executable(node: Calls, bin_dir: Path) -> None:
    executable(bin_dir / "elsewhere", RESULT)
    for command in ("ADD", "CHECK", "GC", "STATUS", "DEL"):
        ipam = chosen(command, "elsewhere", bin_dir, node)
        verbs: dict[str, Callable[[], object]] = {
            "ADD": ipam.add,
            "CHECK": ipam.check,
            "GC": ipam.gc,
            "STATUS": ipam.status,
            "DEL": ipam.delete,
        }
        verbs[command]()
    assert calls_of(bin_dir / "elsewhere") == ["ADD", "CHECK", "GC", "STATUS", "DEL"]


def test_a_result_without_addresses_is_an_error_and_undone(node: Calls, bin_dir: Path) -> None:
    executable(bin_dir / "empty", json.dumps({"cniVersion": "1.0.0"}))
    error = error_of(chosen("ADD", "empty", bin_dir, node).add)
    assert "IPAM plugin returned missing IP config" in error.message
    assert calls_of(bin_dir / "empty") == ["ADD", "DEL"]


def test_status_of_a_missing_executable_is_50(node: Calls, bin_dir: Path) -> None:
    error = error_of(chosen("STATUS", "nowhere", bin_dir, node).status)
    assert error.code == Code.UNAVAILABLE
    assert "failed to find plugin" in error.message


@pytest.mark.parametrize("code", [50, 51, 11])
def test_the_executables_code_is_passed_on(node: Calls, bin_dir: Path, code: int) -> None:
    executable(bin_dir / "failing", json.dumps({"code": code, "msg": "because"}), 1)
    error = error_of(chosen("STATUS", "failing", bin_dir, node).status)
    assert (error.code, error.message) == (code, "because")


def test_undo_takes_back_what_this_add_reserved_and_gives_back_what_it_took(
    node: Calls, bin_dir: Path
) -> None:
    node.boot = NEXT_BOOT
    node.add(POOL, "old", pod="p")
    node.boot = BOOT
    node.add(POOL, "other")
    before = node.store.reservations()
    given = request("ADD", POOL, "new", pod="p")
    ipam = choose("podfabric-ipam", given, node.plugin)
    ipam.undo()
    assert node.store.reservations() == before
    ipam.add()
    assert node.held() == {"10.0.0.1": "new", "10.0.0.2": "other"}
    ipam.undo()
    assert node.store.reservations() == before
