"""Which IPAM plugin an interface plugin gets, and that an ADD can be taken back."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from cni.spec.errors import CNIError, Code
from cni.spec.notes import collected
from cni.spec.request import Request
from ipam.delegation import Delegation, IpamCall
from policy import rules
from policy.rules import Policy
from tests.unit.ipam.calls import BOOT, NEXT_BOOT, Calls, error_of, request

pytestmark = pytest.mark.root

POOL = {"range": "10.0.0.0/24"}


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    return directory


def executable(path: Path, answer: str = "", code: int = 0) -> None:
    """A plugin that notes its command and always gives the same answer."""
    path.write_text(
        f"#!/bin/sh\necho $CNI_COMMAND >> {path}.calls\ncat > /dev/null\n"
        f"printf '%s' '{answer}'\nexit {code}\n"
    )
    path.chmod(0o755)


def calls_of(path: Path) -> list[str]:
    log = path.with_name(f"{path.name}.calls")
    return log.read_text().split() if log.exists() else []


def asked(command: str, ipam_type: str, container_id: str = "c1") -> Request:
    given = request(command, {**POOL, "type": ipam_type}, container_id)
    return msgspec.structs.replace(given, environ={**os.environ, "CNI_COMMAND": command})


def delegation(node: Calls, bin_dir: Path, *allowed: str) -> Delegation:
    policy = rules.of({"use": {"ipamTypes": [*allowed]}}, "config.yaml")
    return Delegation(node.plugin, bin_dir, lambda: policy)


def chosen(command: str, ipam_type: str, bin_dir: Path, node: Calls) -> IpamCall:
    """The call of the IPAM plugin, on a node that allows the type."""
    ipam = delegation(node, bin_dir, ipam_type).of(asked(command, ipam_type))
    assert ipam is not None
    return ipam


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


def test_nv_ipam_is_served_here_unless_nvidias_executable_is_installed(
    node: Calls, bin_dir: Path
) -> None:
    error = error_of(chosen("ADD", "nv-ipam", bin_dir, node).add)
    assert "has not read nv-ipam's pools" in error.message
    executable(bin_dir / "nv-ipam", RESULT)
    error = error_of(lambda: delegation(node, bin_dir).of(asked("ADD", "nv-ipam")))
    assert (error.code, "ipamTypes" in error.message) == (Code.NOT_ALLOWED, True)
    delegation(node, bin_dir, "nv-ipam").of(asked("ADD", "nv-ipam")).add()  # type: ignore[union-attr]
    assert calls_of(bin_dir / "nv-ipam") == ["ADD"]


@pytest.mark.parametrize("link", [True, False])
def test_a_whereabouts_that_is_ours_is_served_in_process(
    node: Calls, bin_dir: Path, link: bool
) -> None:
    (bin_dir / "podfabric-ipam").write_text("#!/bin/sh\nexit 1\n")
    if link:
        (bin_dir / "whereabouts").symlink_to("podfabric-ipam")
    else:
        (bin_dir / "whereabouts").write_text("#!/bin/sh\n# podfabric: whereabouts\n")
    chosen("ADD", "whereabouts", bin_dir, node).add()
    assert node.held() == {"10.0.0.1": "c1"}


def test_undo_takes_back_what_this_add_reserved_and_gives_back_what_it_took(
    node: Calls, bin_dir: Path
) -> None:
    node.boot = NEXT_BOOT
    node.add(POOL, "old", pod="p")
    node.boot = BOOT
    node.add(POOL, "other")
    before = node.store.reservations()
    ipam = delegation(node, bin_dir).of(request("ADD", POOL, "new", pod="p"))
    assert ipam is not None
    ipam.undo()
    assert node.store.reservations() == before
    ipam.add()
    assert node.held() == {"10.0.0.1": "new", "10.0.0.2": "other"}
    ipam.undo()
    assert node.store.reservations() == before


def test_a_whereabouts_that_only_the_runtime_has_is_not_replaced_in_silence(
    node: Calls, bin_dir: Path, tmp_path: Path
) -> None:
    """Its addresses are the cluster's; the store of this node would give them out again."""
    (tmp_path / "runtimes").mkdir()
    executable(tmp_path / "runtimes/whereabouts", RESULT)
    for command in ("ADD", "DEL"):
        call = asked(command, "whereabouts")
        call = msgspec.structs.replace(call, path=(str(tmp_path / "runtimes"),))
        error = error_of(lambda call=call: delegation(node, bin_dir).of(call))  # type: ignore[misc]
        assert (error.code, "PODFABRIC_CNI_BIN" in error.message) == (Code.DELEGATE, True)


def test_removal_of_what_only_the_runtime_has_fails_only_if_an_add_may_have_run_it(
    node: Calls, bin_dir: Path, tmp_path: Path
) -> None:
    """The ADD failed because the executable is missing here: nothing is left to release."""
    (tmp_path / "runtimes").mkdir()
    executable(tmp_path / "runtimes/whereabouts", RESULT)
    here = delegation(node, bin_dir, "whereabouts")
    call = msgspec.structs.replace(asked("DEL", "whereabouts"), path=(str(tmp_path / "runtimes"),))
    with collected() as notes:
        assert here.of_removal(call, False) is None
    assert "PODFABRIC_CNI_BIN" in notes.text
    for added in (True, None):
        error = error_of(lambda added=added: here.of_removal(call, added))  # type: ignore[misc]
        assert error.code == Code.DELEGATE
    assert calls_of(tmp_path / "runtimes/whereabouts") == []


def test_check_of_what_was_allowed_once_goes_on(node: Calls, bin_dir: Path) -> None:
    executable(bin_dir / "elsewhere")
    call = asked("CHECK", "elsewhere")
    ipam = delegation(node, bin_dir).of(call, added=call.config.ipam)
    assert ipam is not None
    ipam.check()
    assert calls_of(bin_dir / "elsewhere") == ["CHECK"]


def _unreadable() -> Policy:
    raise CNIError(Code.IO_FAILURE, "config.yaml: cannot be read")


@pytest.mark.parametrize("command", ["DEL", "GC"])
@pytest.mark.parametrize("rules_can_be_read", [True, False])
def test_removal_runs_what_an_add_ran_and_nothing_else_that_is_not_allowed(
    node: Calls, bin_dir: Path, command: str, rules_can_be_read: bool
) -> None:
    executable(bin_dir / "once")
    policy = Policy if rules_can_be_read else _unreadable
    here = Delegation(node.plugin, bin_dir, policy)
    call = asked(command, "once")
    ipam = here.of_removal(call, True)
    assert ipam is not None
    ipam.delete() if command == "DEL" else ipam.gc()
    with collected() as notes:
        assert here.of_removal(call, False) is None
    assert notes.text.startswith('IPAM plugin "once" was not called, because no ADD called it: ')
    error = error_of(lambda: here.of_removal(call, None))  # the journal is damaged
    assert error.code == (Code.NOT_ALLOWED if rules_can_be_read else Code.IO_FAILURE)
    assert calls_of(bin_dir / "once") == [command]
