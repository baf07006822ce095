"""`podfabric ipam`: what an operator sees."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from base.paths import Paths
from cli.commands import run
from ipam.store.database import DATABASE
from tests.unit.ipam.calls import NEXT_BOOT, Calls
from tests.unit.ipam.conftest import memory_path
from tools.use_it import shown, without_chance

__all__ = ["memory_path"]

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


def _give_as_shown(node: Calls) -> None:
    for pod, container in (("worker-0", "8f2c51e0a7b14d52"), ("worker-1", "1c77e9b04d2f4a10")):
        arguments = f"K8S_POD_NAMESPACE=default;K8S_POD_NAME={pod}"
        ipam = {"range": "10.56.0.0/24"}
        node.add(ipam, container, network="fabric", ifname="net1", args=arguments)


def test_list_prints_the_output_of_the_page(node: Calls, say: Say) -> None:
    _give_as_shown(node)
    assert without_chance(say("list")[1]) == without_chance(shown()["podfabric ipam list"])


def test_release_and_fsck_name_the_holder_and_the_files(
    node: Calls, say: Say, memory_path: Path
) -> None:
    _give_as_shown(node)
    holder = "pod default/worker-1, fabric/1c77e9b04d2f4a10/net1"
    _, _, refusal = say("release", "10.56.0.2")
    assert refusal == (
        f"podfabric ipam: 10.56.0.2 may be in use: {holder} got this address after the last "
        "boot: make sure that the pod is gone, then add --force\n"
    )
    assert say("release", "10.56.0.2", "--force")[1] == f"released 10.56.0.2, held by {holder}\n"
    _, rebuilt, _ = say("fsck", "--rebuild")
    directory = f"{memory_path}/ipam"
    assert re.sub(r"damaged-\w+", "damaged-TIME", rebuilt).splitlines() == [
        f"address store: kept reservations.db as {directory}/reservations.db.damaged-TIME",
        "address store: built again",
        f"the address store in {directory} is sound",
    ]


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
    code, verdict, _ = say("fsck")
    assert (code, "is sound" in verdict) == (0, True)
    assert {path.name: path.read_bytes() for path in node.directory.iterdir()} == files


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("show", "10.0.0.1"),
        ("release", "10.0.0.1"),
        ("fsck",),
        ("fsck", "--rebuild"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("made", [True, False], ids=["empty", "not there"])
def test_without_a_store_a_command_says_so_and_makes_none(
    node: Calls, say: Say, words: tuple[str, ...], made: bool
) -> None:
    if made:
        node.directory.mkdir()
    before = list(node.directory.parent.rglob("*"))
    code, told, error = say(*words)
    assert (code, told) == (1, "")
    assert f"{node.directory} has no address store: " in error
    assert list(node.directory.parent.rglob("*")) == before


def test_where_an_agent_has_given_no_address_yet_the_list_is_empty(node: Calls, say: Say) -> None:
    (node.directory.parent / "agent.lock").touch()
    assert say("list", "-o", "json")[:2] == (0, "[]\n")
    assert say("fsck")[0] == 0


def test_fsck_builds_a_damaged_store_again_only_if_told(node: Calls, say: Say) -> None:
    node.add(POOL, "c1")
    node.add(POOL, "c2")
    node.delete(POOL, "c1")
    content = (node.directory / DATABASE).read_bytes().replace(b"n1c2eth0", b"n1c2xth0", 1)
    (node.directory / DATABASE).write_bytes(content)
    code, told, _ = say("fsck")
    assert (code, "NOT sound" in told) == (1, True)
    assert (node.directory / DATABASE).read_bytes() == content
    code, told, _ = say("fsck", "--rebuild")
    assert (code, "is sound" in told) == (0, True)
    assert node.held() == {}  # no journal and no interface has an address
    (aside,) = node.directory.glob(f"{DATABASE}.damaged-*")
    assert aside.read_bytes() == content
    assert str(aside) in told
