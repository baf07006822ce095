"""`podfabric ipam`: what an operator sees."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from base.paths import Paths
from cli.commands import run
from ipam.recovery import DATABASE, LOG
from tests.unit.ipam.calls import NEXT_BOOT, Calls

POOL = {"range": "10.0.0.0/24"}
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def node(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A node that the command line sees too."""
    monkeypatch.setenv("PODFABRIC_STATE", str(memory_path))
    return Calls(memory_path / "ipam", Paths().boot_id())


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs a command: exit code, standard output, standard error."""

    def command(*words: str) -> tuple[int, str, str]:
        code = run(["ipam", *words])
        output = capsys.readouterr()
        return code, output.out, output.err

    return command


def test_list_and_show_name_the_holder(node: Calls, say: Say) -> None:
    node.add(POOL, "c1", pod="p1", uid="u1")
    node.boot = NEXT_BOOT
    node.add(POOL, "c2")
    _, table, _ = say("list")
    header, first, second = table.splitlines()
    assert header.split() == [
        "ADDRESS", "RANGE", "POD", "NETWORK", "INTERFACE", "CONTAINER", "SINCE", "BOOT",
    ]  # fmt: skip
    assert first.split()[:6] == ["10.0.0.1", "10.0.0.0/24", "ns/p1", "n1", "eth0", "c1"]
    assert (first.split()[-1], second.split()[-1]) == ("this", "earlier")
    _, document, _ = say("show", "10.0.0.1", "-o", "json")
    (shown,) = json.loads(document)
    assert (shown["uid"], shown["container_id"]) == ("u1", "c1")
    assert say("show", "10.0.0.9")[0] == 1
    assert say("show", "nonsense")[0] == 1


def test_name_that_a_tenant_chose_cannot_command_the_terminal(node: Calls, say: Say) -> None:
    node.add(POOL, "c1", ifname="\x1b[31mnet")
    for words in (("list",), ("show", "10.0.0.1"), ("release", "10.0.0.1", "--force")):
        _, told, _ = say(*words)
        assert ("\x1b" in told, "\\x1b[31mnet" in told) == (False, True)


def test_release_minds_who_may_be_running(node: Calls, say: Say) -> None:
    node.add(POOL, "c1", pod="p1")
    code, _, refusal = say("release", "10.0.0.1")
    assert code == 1
    assert "--force" in refusal
    assert node.held() == {"10.0.0.1": "c1"}
    assert say("release", "10.0.0.1", "--force")[0] == 0
    assert node.held() == {}
    assert say("release", "10.0.0.1")[0] == 1


def test_release_of_an_earlier_boots_address_needs_no_force(node: Calls, say: Say) -> None:
    node.boot = NEXT_BOOT
    node.add(POOL, "c1")
    assert say("release", "10.0.0.1")[0] == 0


def test_release_asks_which_of_several_domains(node: Calls, say: Say) -> None:
    node.boot = NEXT_BOOT
    node.add({**POOL, "network_name": "blue"}, "c1")
    node.add(POOL, "c2")
    code, _, refusal = say("release", "10.0.0.1")
    assert (code, "--network-name" in refusal) == (1, True)
    assert say("release", "10.0.0.1", "--network-name", "blue")[0] == 0
    assert node.held() == {"10.0.0.1": "c2"}


def test_fsck_of_a_sound_store_changes_nothing(node: Calls, say: Say) -> None:
    node.add(POOL)
    files = {path.name: path.read_bytes() for path in node.directory.iterdir()}
    assert say("fsck", "--dry-run")[0] == 0
    code, verdict, _ = say("fsck")
    assert (code, "is sound" in verdict) == (0, True)
    assert {path.name: path.read_bytes() for path in node.directory.iterdir()} == files


@pytest.mark.parametrize("name", [DATABASE, LOG])
def test_fsck_repairs_a_store_that_lost_one_file(node: Calls, say: Say, name: str) -> None:
    node.add(POOL, "c1")
    node.add(POOL, "c2")
    node.delete(POOL, "c1")
    (node.directory / name).write_bytes(b"\0" * 5000)
    code, found, _ = say("fsck", "--dry-run")
    assert (code, "NOT sound" in found) == (1, True)
    assert (node.directory / name).read_bytes() == b"\0" * 5000
    assert say("fsck")[0] == 0
    assert node.held() == {"10.0.0.2": "c2"}


def test_fsck_keeps_the_damaged_files_aside(node: Calls, say: Say) -> None:
    node.add(POOL)
    (node.directory / DATABASE).write_bytes(b"damaged")
    _, told, _ = say("fsck")
    (aside,) = node.directory.glob(f"{DATABASE}.damaged-*")
    assert aside.read_bytes() == b"damaged"
    assert str(aside) in told


def test_fsck_refuses_to_lose_reservations_unless_told(node: Calls, say: Say) -> None:
    for number in range(5):
        node.add(POOL, f"c{number}")
    (node.directory / DATABASE).write_bytes(b"\0" * 5000)
    lines = (node.directory / LOG).read_bytes().splitlines(keepends=True)
    lines[3] = b"x" + lines[3][1:]
    (node.directory / LOG).write_bytes(b"".join(lines))
    code, told, _ = say("fsck")
    assert code == 1
    assert "1 records of the log cannot be read" in told
    assert "--accept-loss" in told
    assert say("list")[0] == 1
    assert say("fsck", "--rebuild", "--accept-loss")[0] == 0
    assert sorted(node.held().values()) == ["c0", "c1", "c3", "c4"]


def test_an_unfinished_call_is_no_damage(node: Calls, say: Say) -> None:
    node.add(POOL)
    with (node.directory / LOG).open("ab") as log:
        log.write(b"12345678 {")
    assert say("fsck")[0] == 0
    assert not list(node.directory.glob("*.damaged-*"))


def test_import_takes_over_a_host_local_network(node: Calls, say: Say, tmp_path: Path) -> None:
    source = tmp_path / "n1"
    source.mkdir()
    (source / "10.0.0.1").write_bytes(b"theirs\r\neth0")
    code, told, _ = say("import", str(source), "--range", "10.0.0.0/24")
    assert (code, told) == (0, "imported 1 of 1 reservations, the rest was there\n")
    assert node.addresses(POOL, "new") == ["10.0.0.2/24"]
    node.delete(POOL, "theirs")
    assert node.held() == {"10.0.0.2": "new"}


def test_import_asks_for_what_it_cannot_know(node: Calls, say: Say, tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("kind: IPPool\nmetadata: {name: x}\nspec: {range: 10.0.0.0/24}\n")
    assert "--network" in say("import", str(file))[2]
    assert say("import", str(file), "--network", "n1")[0] == 0
    assert say("import", str(tmp_path / "missing"), "--network", "n1")[0] == 1
    assert say("import", str(file), "--network", "n1", "--range", "x")[0] == 1
    assert node.held() == {}
