"""The agent, which is root, opens no file that a definition names unless the policy allows it.

Each file that must not be touched is real: a script of root, a pipe, an endless device, the
store's own log.
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from cni.policy import rules
from cni.policy.rules import Policy
from cni.spec.errors import CNIError, Code
from cni.spec.result import DNS
from tests.unit.ipam.calls import Calls, error_of
from tests.unit.ipam.conftest import memory_path, node
from tests.waiting import PATIENCE

__all__ = ["memory_path", "node"]

T = TypeVar("T")
POOL = {"range": "10.0.0.0/24"}


def ended(call: Callable[[], T]) -> T:
    """The answer of the call. A call that hangs fails the test, and later tests still run."""
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(call())
        except (CNIError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the call hangs"
    if errors:
        raise errors[0]
    return answers[0]


@pytest.fixture
def allowed(node: Calls, tmp_path: Path) -> Path:
    """A directory that the node allows for log files and for resolv.conf."""
    directory = tmp_path / "allowed"
    directory.mkdir()
    node.policy = rules.of({"set": {"hostPaths": [str(directory)]}}, "config.yaml")
    return directory


# --- the default: no path that a definition names is opened -----------------------------------


@pytest.mark.parametrize("verb", ["ADD", "DEL", "GC"])
def test_a_log_file_appends_nothing_to_a_script_of_root(
    node: Calls, tmp_path: Path, verb: str
) -> None:
    script = tmp_path / "cron.sh"
    script.write_text("#!/bin/sh\n")
    ipam = {**POOL, "log_file": str(script), "log_level": "debug"}
    if verb == "ADD":
        assert node.addresses(ipam, ifname=";id>pwned;#") == ["10.0.0.1/24"]
    elif verb == "DEL":
        node.delete(ipam, ifname=";id>pwned;#")
    else:
        node.gc(ipam, config={"cni.dev/valid-attachments": []})
    assert script.read_text() == "#!/bin/sh\n"


def test_a_log_file_cannot_be_the_stores_own_log(node: Calls) -> None:
    node.add(POOL, "c1")
    log = node.directory / "reservations.log"
    ipam = {**POOL, "log_file": str(log), "log_level": "debug"}
    node.delete(ipam, "none")
    assert node.addresses(ipam, "c2") == ["10.0.0.2/24"]
    assert node.held() == {"10.0.0.1": "c1", "10.0.0.2": "c2"}


@pytest.mark.parametrize("key", ["log_file", "resolvConf"])
@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_a_pipe_does_not_make_a_call_hang(node: Calls, tmp_path: Path, key: str, verb: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ipam = {**POOL, key: str(pipe), "log_level": "debug"}
    if verb == "ADD":
        assert ended(lambda: node.addresses(ipam)) == ["10.0.0.1/24"]
    else:
        ended(lambda: node.delete(ipam))


@pytest.mark.parametrize("path", ["/etc/hostname", "/etc/absent", "/dev/zero", "/etc/\0", "x"])
def test_resolv_conf_reveals_nothing_about_the_host(
    node: Calls, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The answer is the same whether it exists or not: no DNS, and one warning."""
    result = ended(lambda: node.add({**POOL, "resolvConf": path}))
    assert result.dns == DNS()
    warning = capfd.readouterr().err.replace(path, "")
    assert warning.count("\n") == 1
    assert "ipam.resolvConf" in warning


def test_ignored_keys_are_named_in_one_warning(
    node: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ("log_file", "resolvConf", "dataDir", "configuration_path")
    ipam = {**POOL, **dict.fromkeys(keys, "/etc/passwd"), "log_level": "panic"}
    node.add(ipam)
    warning = capfd.readouterr().err
    assert warning.count("\n") == 1
    assert all(f"ipam.{key}" in warning for key in keys)
    assert "set.hostPaths" in warning
    node.delete(ipam)
    warning = capfd.readouterr().err
    assert (warning.count("\n"), "ipam.log_file" in warning) == (1, True)


def test_addresses_are_released_although_the_policy_cannot_be_read(
    node: Calls, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node.add(POOL)

    def unreadable() -> Policy:
        raise CNIError(Code.IO_FAILURE, "config.yaml: not a mapping")

    node.policy_source = unreadable
    log = tmp_path / "ipam.log"
    ipam = {**POOL, "log_file": str(log)}
    node.delete(ipam)
    assert node.held() == {}
    assert "config.yaml: not a mapping" in capfd.readouterr().err
    assert error_of(lambda: node.add(ipam)).code == Code.IO_FAILURE
    assert not log.exists()


# --- a directory that the administrator allows -------------------------------------------------


def test_a_log_file_in_an_allowed_directory_is_written(node: Calls, allowed: Path) -> None:
    (allowed / "deeper").mkdir()
    log = allowed / "deeper/ipam.log"
    ipam = {**POOL, "log_file": str(log), "log_level": "info"}
    node.add(ipam)
    node.delete(ipam)
    lines = log.read_text().splitlines()
    assert "[info] ADD n1/c1/eth0: 10.0.0.1/24" in lines[0]
    assert "[info] DEL n1/c1/eth0: 10.0.0.1" in lines[1]
    assert log.stat().st_mode & 0o777 == 0o600


def test_resolv_conf_in_an_allowed_directory_is_read(node: Calls, allowed: Path) -> None:
    (allowed / "resolv.conf").write_text("nameserver 10.0.0.53\nsearch a b\n")
    result = node.add({**POOL, "resolvConf": str(allowed / "resolv.conf")})
    assert result.dns == DNS(nameservers=("10.0.0.53",), search=("a", "b"))


def test_text_of_a_tenant_is_escaped_in_the_log_file(
    node: Calls, allowed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = allowed / "ipam.log"
    ifname = "a\x1b[2J\u202eb"
    node.delete({**POOL, "log_file": str(log), "log_level": "info"}, ifname=ifname)
    for text in (log.read_text(), capfd.readouterr().err):
        assert text.count("\n") == 1
        assert "a\\x1b[2J\\u202eb" in text


def test_a_log_file_does_not_grow_without_end(
    node: Calls, allowed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = allowed / "ipam.log"
    with log.open("wb") as file:
        file.truncate(16 << 20)
    node.delete({**POOL, "log_file": str(log), "log_level": "info"})
    assert log.stat().st_size == 16 << 20
    assert "nothing is added" in capfd.readouterr().err


def test_a_large_resolv_conf_is_an_error_that_reserves_nothing(node: Calls, allowed: Path) -> None:
    (allowed / "resolv.conf").write_text("search a\n" * 20_000)
    path = str(allowed / "resolv.conf")
    error = error_of(lambda: node.add({**POOL, "resolvConf": path}))
    assert (error.code, "65536 bytes" in error.message) == (Code.INVALID_CONFIG, True)
    assert node.held() == {}


@pytest.mark.parametrize("value", [5, None, ["/etc/passwd"], {"a": 1}])
def test_del_works_although_the_log_file_is_not_text(node: Calls, value: object) -> None:
    node.add(POOL)
    node.delete(json.loads(json.dumps({**POOL, "log_file": value})))
    assert node.held() == {}
