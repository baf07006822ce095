"""Command lines that cannot be meant: exit code 2, and a text that says what was expected."""

import argparse
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from agent.observe import logs
from agent.settings import Settings
from base.paths import Paths
from cli import arguments, device_plugin
from deviceplugin import service
from tests.unit.cli.commands import Shell
from tests.unit.host import servers


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    return Shell(servers.dgx(tmp_path), monkeypatch, capsys)


@pytest.mark.parametrize(
    ("of", "text", "value"),
    [
        (arguments.file, "a/b", Path("a/b")),
        (arguments.file, " ", Path(" ")),
        (arguments.namespace, "ml", "ml"),
        (arguments.pod, "worker-0", "worker-0"),
        (arguments.pod, "ml/worker-0", "ml/worker-0"),
    ],
)
def test_what_can_be_meant_is_taken(of: Callable[[str], object], text: str, value: object) -> None:
    assert of(text) == value


@pytest.mark.parametrize(
    ("of", "texts", "expected"),
    [
        (arguments.file, ("",), "the path is empty: write a path, or remove the option"),
        (arguments.namespace, ("", "a/b", "/"), "the name of a namespace"),
        (arguments.pod, ("", "/", "a/", "/a", "a//b", "a/b/c"), "a pod's name, or namespace/name"),
    ],
)
def test_what_cannot_be_meant_says_what_was_expected(
    of: Callable[[str], object], texts: tuple[str, ...], expected: str
) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError) as raised:
            of(text)
        assert str(raised.value).endswith(expected)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["devices", "--config", ""], "argument --config: the path is empty: write a path"),
        (["explain", ""], "argument POD: '': expected a pod's name, or namespace/name"),
        (["explain", "a/b/c"], "argument POD: 'a/b/c': expected a pod's name, or namespace/name"),
        (["explain", "a/"], "argument POD: 'a/': expected a pod's name, or namespace/name"),
        (["explain", "x", "-n", ""], "argument -n/--namespace: '': expected the name of"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(
    shell: Shell, given: list[str], text: str
) -> None:
    printed = shell(*given)
    assert (printed.code, printed.out) == (2, "")
    assert text in printed.err


@pytest.mark.parametrize(
    ("given", "usage", "text"),
    [
        ("install --bogus", "podfabric install ", "unrecognized arguments: --bogus\n"),
        ("install --plugin-s", "podfabric install ", 'did you mean "--plugins"?'),
        ("explain a b", "podfabric explain ", "unrecognized arguments: b\n"),
        ("ipam show x --clustr", "podfabric ipam show ", 'did you mean "--cluster"?'),
        ("ipam --cluster list", "podfabric ipam ", "unrecognized arguments: --cluster"),
        ("ipam lst", "podfabric ipam ", 'did you mean "list"?'),
        ("topo --json", "podfabric topo ", 'did you mean "-o json"?'),
        ("topo -o jsn", "podfabric topo ", 'did you mean "json"?'),
        ("doktor", "podfabric ", 'did you mean "doctor"?'),
        ("help", "podfabric ", "invalid choice: 'help' (choose from 'ipam', "),
        ("device-plugin -confg=a", "podfabric device-plugin ", 'did you mean "-config"?'),
    ],
)
def test_a_wrong_word_has_the_usage_of_its_command_and_the_nearest_right_one(
    shell: Shell, given: str, usage: str, text: str
) -> None:
    printed = shell(*given.split())
    assert (printed.code, printed.out) == (2, "")
    assert f"usage: {usage}" in printed.err
    assert text in printed.err


def test_version_is_that_of_the_installed_package(shell: Shell) -> None:
    assert shell("--version")[:2] == (0, f"podfabric {version('podfabric')}\n")


FLAGS: dict[str, list[str]] = {
    "the usual file": [],
    "another file": ["-config", "{other}"],
    "another plugin's": ["-config-file={theirs}"],
    "no file": ["-resource-amount", "8"],
}


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("the usual file", "error"),
        ("another file", "debug"),
        ("another plugin's", "info"),
        ("no file", "error"),
    ],
)
def test_a_file_that_is_named_says_how_to_log_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, level: str
) -> None:
    paths = Paths(**{name: tmp_path / name for name in Paths.__struct_fields__})
    for name in Paths.__struct_fields__:
        monkeypatch.setenv(f"PODFABRIC_{name.upper()}", str(getattr(paths, name)))
    paths.etc.mkdir()
    paths.config.write_text("agent: {log_level: error}\npools: []\n")
    other, theirs = tmp_path / "other.yaml", tmp_path / "theirs.json"
    other.write_text("agent: {log_level: debug}\npools: []\n")
    theirs.write_text('{"resourceList": [{"resourceName": "nic", "selectors": {"isRdma": true}}]}')
    used: list[Settings] = []
    handlers: dict[int, Callable[..., Any]] = {}
    monkeypatch.setattr(logs, "configure", used.append)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)

    class Ended:
        """A service that gets SIGTERM as soon as it begins."""

        def __init__(self, *given: object) -> None:
            pass

        def start(self) -> None:
            handlers[signal.SIGTERM](signal.SIGTERM, None)

        def close(self) -> None:
            pass

    monkeypatch.setattr(service, "Service", Ended)
    given = [flag.format(other=other, theirs=theirs) for flag in FLAGS[flags]]
    assert device_plugin.run(given) == 0
    assert [option.log_level for option in used] == [level]
