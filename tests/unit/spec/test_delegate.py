"""Running another executable: one that root put there, given what we got, in limited time."""

import os
import threading
from pathlib import Path

import msgspec
import pytest

from base.interrupts import Call, Terminated, serving
from cni.spec import delegate
from cni.spec.config import NetworkConfig, decode
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request

pytestmark = pytest.mark.root


def executable(directory: Path, script: str, name: str = "d") -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def request(deadline: float = 20.0) -> Request:
    environ = {"CNI_COMMAND": "ADD", "PATH": os.environ["PATH"], "KEPT": "yes"}
    return Request(
        command="ADD",
        config=decode(b'{"cniVersion":"1.0.0", "name":"n1"}'),
        cni_version="1.0.0",
        environ=environ,
        delegate_deadline=deadline,
    )


def fails(directory: Path, deadline: float = 20.0) -> CNIError:
    with pytest.raises(CNIError) as caught:
        delegate.run("d", directory, "CHECK", request(deadline))
    return caught.value


def test_executable_is_found_also_by_a_link(tmp_path: Path) -> None:
    program = executable(tmp_path / "elsewhere", "")
    assert delegate.find("d", program.parent) == program
    link = tmp_path / "link"
    link.symlink_to(program)
    assert delegate.find("link", tmp_path) == link


def test_delegate_that_reads_nothing_is_no_error(tmp_path: Path) -> None:
    executable(tmp_path, "exit 0")
    large = NetworkConfig(b'{"name":"n1","x":"' + b"x" * 1_000_000 + b'"}')
    delegate.run("d", tmp_path, "CHECK", msgspec.structs.replace(request(), config=large))


def test_file_that_is_no_program_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = executable(tmp_path, "")
    path.chmod(0o644)
    error = fails(tmp_path)
    assert error.code == Code.DELEGATE
    assert str(path) in error.message


def test_failure_of_the_undoing_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executable(tmp_path, """echo "{\\"code\\":100,\\"msg\\":\\"no $CNI_COMMAND\\"}"; exit 1""")
    with pytest.raises(CNIError, match="no ADD"):
        delegate.add("d", tmp_path, request())
    assert "no DEL" in capsys.readouterr().err


def test_delegate_that_writes_without_end_is_killed_and_costs_no_memory(tmp_path: Path) -> None:
    executable(tmp_path, "exec cat /dev/zero")
    error = fails(tmp_path)
    assert error.code == Code.DELEGATE
    assert "answered more than 16777216 bytes" in error.message


def test_of_an_endless_standard_error_the_beginning_is_kept(tmp_path: Path) -> None:
    executable(tmp_path, "head -c 3000000 /dev/zero | tr '\\0' x >&2; exit 3")
    error = fails(tmp_path)
    assert len(error.message) < delegate.MAX_STDERR + 100


def test_child_that_left_the_delegate_s_group_does_not_hold_up_a_call_that_ends(
    tmp_path: Path,
) -> None:
    executable(tmp_path, f"setsid sleep 60 & echo > {tmp_path}/started")
    call = Call(endable=True)
    with serving(call):
        ending = threading.Timer(0.5, call.end)
        ending.start()
        with pytest.raises(Terminated):
            delegate.run("d", tmp_path, "CHECK", request())


def test_error_document_with_code_0_is_an_error_all_the_same(tmp_path: Path) -> None:
    executable(tmp_path, "echo '{}'; exit 1")
    assert fails(tmp_path).code == Code.INTERNAL


def test_delegate_has_the_limits_that_we_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delegate, "DESCRIPTOR_LIMITS", (99, delegate.DESCRIPTOR_LIMITS[1]))
    executable(tmp_path, f"ulimit -Sn > {tmp_path}/limit")
    delegate.run("d", tmp_path, "CHECK", request())
    assert (tmp_path / "limit").read_text() == "99\n"
