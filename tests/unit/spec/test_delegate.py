"""Running another executable: found in CNI_PATH, given what we got, never waited for forever."""

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest

from cni.spec import delegate
from cni.spec.errors import CNIError, Code
from cni.spec.interrupts import Call, Terminated, serving
from cni.spec.request import Request


def executable(directory: Path, script: str, name: str = "d") -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def request(*path: Path, deadline: float = 20.0) -> Request:
    environ = {"CNI_COMMAND": "ADD", "PATH": os.environ["PATH"], "KEPT": "yes"}
    return Request(
        command="ADD",
        path=tuple(str(directory) for directory in path),
        config=b'{"cniVersion":"1.0.0", "name":"n1"}',
        cni_version="1.0.0",
        environ=environ,
        delegate_deadline=deadline,
    )


def fails(plugin_type: str, call: Request, command: str = "CHECK") -> CNIError:
    with pytest.raises(CNIError) as caught:
        delegate.run(plugin_type, command, call)
    return caught.value


def test_first_directory_wins(tmp_path: Path) -> None:
    first = executable(tmp_path / "a", "")
    executable(tmp_path / "b", "")
    assert delegate.find("d", [str(tmp_path / "a"), str(tmp_path / "b")]) == first


def test_directories_and_dangling_links_of_the_name_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a" / "d").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "d").symlink_to("nowhere")
    last = executable(tmp_path / "c", "")
    assert delegate.find("d", [str(tmp_path / one) for one in "abc"]) == last


@pytest.mark.parametrize("name", ["a/b", "/bin/sh", "..", ".", ""])
def test_type_that_is_a_path_is_refused(name: str) -> None:
    with pytest.raises(CNIError, match=f"invalid plugin name: {name}"):
        delegate.find(name, ["/bin"])


def test_missing_executable_is_named_with_the_path_that_was_searched() -> None:
    with pytest.raises(CNIError) as caught:
        delegate.find("d", ["/a", "/b"])
    assert caught.value.message == 'failed to find plugin "d" in path [/a /b]'


def test_delegate_gets_our_environment_and_our_bytes(tmp_path: Path) -> None:
    executable(tmp_path, f"cat /proc/$$/environ > {tmp_path}/environ; cat > {tmp_path}/stdin")
    delegate.run("d", "CHECK", request(tmp_path))
    given = request(tmp_path)
    environ = dict(
        pair.split("=", 1) for pair in (tmp_path / "environ").read_text().split("\0") if pair
    )
    assert environ == {**given.environ, "CNI_COMMAND": "CHECK"}
    assert (tmp_path / "stdin").read_bytes() == given.config


def test_delegate_that_reads_nothing_is_no_error(tmp_path: Path) -> None:
    executable(tmp_path, "exit 0")
    large = b'{"name":"n1","x":"' + b"x" * 1_000_000 + b'"}'
    delegate.run("d", "CHECK", msgspec.structs.replace(request(tmp_path), config=large))


def test_error_document_is_passed_on(tmp_path: Path) -> None:
    executable(tmp_path, """echo '{"code":11,"msg":"later","details":"why"}'; exit 1""")
    error = fails("d", request(tmp_path))
    assert (error.code, error.message, error.details) == (11, "later", "why")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo boom >&2; exit 1", "netplugin failed: boom"),
        ("exit 1", "netplugin failed with no error message"),
        ("echo boom; exit 1", "error parsing its diagnostic message"),
        ("kill -9 $$", "netplugin failed with no error message: signal: Killed"),
    ],
)
def test_failure_without_a_document_is_explained(tmp_path: Path, script: str, message: str) -> None:
    executable(tmp_path, script)
    assert message in fails("d", request(tmp_path)).message


def test_file_that_is_no_program_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = executable(tmp_path, "")
    path.chmod(0o644)
    error = fails("d", request(tmp_path))
    assert error.code == Code.DELEGATE
    assert str(path) in error.message


def test_hanging_delegate_is_killed_with_its_children(tmp_path: Path) -> None:
    executable(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait")
    started = time.monotonic()
    error = fails("d", request(tmp_path, deadline=0.5))
    assert time.monotonic() - started < 10
    assert error.code == Code.TRY_AGAIN
    assert "within 0.5 s" in error.message
    assert is_gone(int((tmp_path / "child").read_text()))


def test_failed_add_is_undone(tmp_path: Path) -> None:
    executable(tmp_path, f"echo $CNI_COMMAND >> {tmp_path}/calls; echo garbage")
    with pytest.raises(CNIError) as caught:
        delegate.add("d", request(tmp_path))
    assert caught.value.code == Code.DECODING_FAILURE
    assert (tmp_path / "calls").read_text().split() == ["ADD", "DEL"]


def test_failure_of_the_undoing_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executable(tmp_path, """echo "{\\"code\\":100,\\"msg\\":\\"no $CNI_COMMAND\\"}"; exit 1""")
    with pytest.raises(CNIError, match="no ADD"):
        delegate.add("d", request(tmp_path))
    assert "no DEL" in capsys.readouterr().err


def test_missing_version_of_a_result_is_ours(tmp_path: Path) -> None:
    executable(tmp_path, """echo '{"ips":[{"address":"10.9.0.1/24"}]}'""")
    assert delegate.add("d", request(tmp_path)).ips[0].address == "10.9.0.1/24"


def test_standard_error_of_a_success_is_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executable(tmp_path, "echo note >&2")
    delegate.run("d", "CHECK", request(tmp_path))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "note\n")


def test_executable_that_is_being_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script cannot be busy, the interpreter of a real one can: a copy of a program is used."""
    program = tmp_path / "d"
    program.write_bytes(Path("/bin/true").read_bytes())
    program.chmod(0o755)
    pauses = []
    writer = program.open("r+b")
    sleep = time.sleep  # subprocess waits with it, too

    def pause(seconds: float) -> None:
        if seconds < 1:
            sleep(seconds)
            return
        pauses.append(seconds)
        if len(pauses) == 2:
            writer.close()

    monkeypatch.setattr("cni.spec.delegate.time.sleep", pause)
    delegate.run("d", "CHECK", request(tmp_path))
    assert len(pauses) == 2


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_delegate_that_writes_without_end_is_killed_and_costs_no_memory(tmp_path: Path) -> None:
    executable(tmp_path, "exec cat /dev/zero")
    error = fails("d", request(tmp_path))
    assert error.code == Code.DELEGATE
    assert "answered more than 16777216 bytes" in error.message


def test_of_an_endless_standard_error_the_beginning_is_kept(tmp_path: Path) -> None:
    executable(tmp_path, "head -c 3000000 /dev/zero | tr '\\0' x >&2; exit 3")
    error = fails("d", request(tmp_path))
    assert len(error.message) < delegate.MAX_STDERR + 100


def test_child_that_left_the_delegate_s_group_does_not_hold_up_a_call_that_ends(
    tmp_path: Path,
) -> None:
    executable(tmp_path, f"setsid sleep 5 & echo > {tmp_path}/started")
    call = Call(endable=True)
    with serving(call):
        ending = threading.Timer(0.5, call.end)
        ending.start()
        started = time.monotonic()
        with pytest.raises(Terminated):
            delegate.run("d", "CHECK", request(tmp_path))
    assert time.monotonic() - started < 3


def test_error_document_with_code_0_is_an_error_all_the_same(tmp_path: Path) -> None:
    executable(tmp_path, "echo '{}'; exit 1")
    assert fails("d", request(tmp_path)).code == Code.INTERNAL


def test_delegate_has_the_limits_that_we_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delegate, "_DESCRIPTORS", (99, delegate._DESCRIPTORS[1]))
    executable(tmp_path, f"ulimit -Sn > {tmp_path}/limit")
    delegate.run("d", "CHECK", request(tmp_path))
    assert (tmp_path / "limit").read_text() == "99\n"
