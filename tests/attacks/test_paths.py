"""The agent, which is root, opens no file that a definition names unless the policy allows it.

Each file that must not be touched is real: a pipe, an endless device.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from cni.spec.errors import CNIError, Code
from cni.spec.result import DNS
from policy import rules
from policy.rules import Policy
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
    """A directory that the node allows for resolv.conf."""
    directory = tmp_path / "allowed"
    directory.mkdir()
    node.policy = rules.of({"set": {"hostPaths": [str(directory)]}}, "config.yaml")
    return directory


# --- the default: no path that a definition names is opened -----------------------------------


@pytest.mark.parametrize("key", ["log_file", "resolvConf"])
@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_a_pipe_does_not_make_a_call_hang(node: Calls, tmp_path: Path, key: str, verb: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ipam = {**POOL, key: str(pipe)}
    if verb == "ADD":
        assert ended(lambda: node.addresses(ipam)) == ["10.0.0.1/24"]
    else:
        ended(lambda: node.delete(ipam))


@pytest.mark.parametrize("path", ["/etc/hostname", "/etc/absent", "/dev/zero", "/etc/\0", "x"])
def test_resolv_conf_reveals_nothing_about_the_host(
    node: Calls, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The answer is the same whether the file exists or not: no DNS, and one warning."""
    result = ended(lambda: node.add({**POOL, "resolvConf": path}))
    assert result.dns == DNS()
    warning = capfd.readouterr().err.replace(path, "")
    assert warning.count("\n") == 1
    assert "ipam.resolvConf" in warning


def test_ignored_keys_are_named_in_one_warning(
    node: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ("log_file", "resolvConf", "dataDir", "configuration_path")
    ipam = {**POOL, **dict.fromkeys(keys, "/etc/passwd")}
    node.add(ipam)
    warning = capfd.readouterr().err
    assert warning.count("\n") == 1
    assert all(f"ipam.{key}" in warning for key in keys)
    assert "set.hostPaths" in warning
    node.delete(ipam)
    assert capfd.readouterr().err == ""


def test_addresses_are_released_although_the_policy_cannot_be_read(node: Calls) -> None:
    node.add(POOL)

    def unreadable() -> Policy:
        raise CNIError(Code.IO_FAILURE, "config.yaml: not a mapping")

    node.policy_source = unreadable
    node.delete(POOL)
    assert node.held() == {}
    assert error_of(lambda: node.add(POOL)).code == Code.IO_FAILURE


# --- a directory that the administrator allows -------------------------------------------------


def test_resolv_conf_in_an_allowed_directory_is_read(node: Calls, allowed: Path) -> None:
    (allowed / "resolv.conf").write_text("nameserver 10.0.0.53\nsearch a b\n")
    result = node.add({**POOL, "resolvConf": str(allowed / "resolv.conf")})
    assert result.dns == DNS(nameservers=("10.0.0.53",), search=("a", "b"))


def test_a_large_resolv_conf_is_an_error_that_reserves_nothing(node: Calls, allowed: Path) -> None:
    (allowed / "resolv.conf").write_text("search a\n" * 20_000)
    path = str(allowed / "resolv.conf")
    error = error_of(lambda: node.add({**POOL, "resolvConf": path}))
    assert (error.code, "65536 bytes" in error.message) == (Code.INVALID_CONFIG, True)
    assert node.held() == {}
