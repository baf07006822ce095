"""Every key of every plugin, with hostile values: paths, endless lists and texts, wrong types.

Each call is answered by one JSON document that reveals nothing about the node. No file is touched,
and the agent has all of its workers afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inotify_simple import INotify, flags

from tests.attacks.bounds_node import Answer, Node, network, node
from tests.attacks.hostile_keys import (
    ARGS,
    BASES,
    PATHS,
    Bait,
    Key,
    keys_of,
    values,
    with_value,
)
from tests.netns import namespace

VERBS = ("ADD", "DEL", "CHECK", "STATUS")
EVERY = [
    pytest.param(plugin, key, id=f"{plugin}-{'.'.join(map(str, key))}")
    for plugin in BASES
    for key in keys_of(plugin)
]
ROWS = [row for row in EVERY if row.values[1] not in PATHS]
PATH_ROWS = [row for row in EVERY if row.values[1] in PATHS]
TURNS = {(row.values[0], row.values[1]): number for number, row in enumerate(EVERY)}
TOUCHED = (
    flags.ACCESS | flags.ATTRIB | flags.CREATE | flags.DELETE | flags.MODIFY | flags.MOVED_FROM
    | flags.MOVED_TO | flags.OPEN
)  # fmt: skip


class Attacked:
    """A node with bait files, and an inotify watch that notices when one is opened."""

    def __init__(self, attacked: Node, bait: Bait) -> None:
        self.node = attacked
        self.bait = bait
        self._inotify = INotify()
        self._inotify.add_watch(bait.directory, TOUCHED)
        self._inotify.add_watch(bait.directory / "inside", TOUCHED)

    def require_unharmed(self, answer: Answer, verb: str) -> None:
        """Check for one document without an internal error or a secret, and no touched bait
        file."""
        if answer.exit_code:
            assert answer.code != 999, answer
            assert answer.document["msg"].isprintable(), answer
        elif verb == "ADD":
            assert answer.document["cniVersion"], answer
        else:
            assert answer.stdout == b"", answer
        assert Bait.SECRET.encode() not in answer.stdout + answer.stderr
        touched = self._inotify.read(timeout=0)
        assert not touched, f"{verb} touched {touched}"

    def close(self) -> None:
        self._inotify.close()


@contextmanager
def attacked_node(root: Path) -> Iterator[Attacked]:
    """A node that must still work at the end."""
    with namespace() as netns, node(root / "n", netns=str(netns)) as made:
        attacked = Attacked(made, Bait.laid(root / "bait"))
        try:
            yield attacked
            made.require_all_workers()
            log = made.service.log.read_text()
            assert Bait.SECRET not in log
            assert "Traceback" not in log
            assert "a worker is lost" not in log
        finally:
            attacked.close()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attacked_node(tmp_path_factory.mktemp("h")) as made:
        yield made


def feed(attacked: Attacked, plugin: str, key: Key, *, every_verb: bool = False) -> None:
    """Try every hostile value at that key, with an ADD and with one other verb, or with all
    verbs."""
    turn = TURNS[plugin, key]  # so that each value meets each verb at some key
    for number, (name, value) in enumerate(values(attacked.bait).items()):
        raw = with_value(plugin, key, value)
        others = VERBS[1:] if every_verb else (VERBS[1 + (turn + number) % 3],)
        for verb in (VERBS[0], *others):
            container = f"c{number}"
            try:
                answer = attacked.node.call(plugin, verb, container, raw)
                attacked.require_unharmed(answer, verb)
            except Exception as error:
                error.add_note(f"{verb} with {name}: {raw[:500]!r}")
                raise


@pytest.mark.parametrize(("plugin", "key"), ROWS)
def test_hostile_value_of_a_key_does_no_harm(attacked: Attacked, plugin: str, key: Key) -> None:
    feed(attacked, plugin, key)


@pytest.mark.parametrize("key", ARGS)
@pytest.mark.parametrize("plugin", BASES)
def test_hostile_value_of_an_argument_does_no_harm(
    attacked: Attacked, plugin: str, key: str
) -> None:
    config = network("hostile", plugin, **BASES[plugin])
    texts = [
        *attacked.bait.paths.values(),
        *("\x1b[31mred", "a\nb", "\u202eevil", "\udcff", "%s%n{x}", "9" * 5000, ",", "/", "-1"),
        "10.9.0.1," * 1000,
        "x" * 100_000,
    ]
    for number, text in enumerate(texts):
        args = f"IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p;{key}={text}"
        for verb in VERBS:
            answer = attacked.node.call(plugin, verb, f"a{number}", config, CNI_ARGS=args)
            attacked.require_unharmed(answer, verb)


@pytest.mark.parametrize("variable", ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS", "CNI_PATH"])
def test_hostile_variable_does_no_harm(attacked: Attacked, variable: str) -> None:
    for text in ("\x1b[31m", "a\nb", "\u202e", "\udcff", "../..", "x" * 100_000, ";id>pwned;#"):
        for plugin, base in BASES.items():
            config = network("hostile", plugin, **base)
            for verb in VERBS:
                answer = attacked.node.call(plugin, verb, "e1", config, **{variable: text})
                assert answer.code != 999, answer
                assert Bait.SECRET.encode() not in answer.stdout + answer.stderr


@pytest.mark.parametrize(("plugin", "key"), ROWS[::9])
def test_hostile_value_through_a_launcher_is_answered_by_one_document(
    attacked: Attacked, plugin: str, key: Key
) -> None:
    hostile = values(attacked.bait)
    for name in list(hostile)[::4]:
        raw = with_value(plugin, key, hostile[name])
        for verb in VERBS:
            answer = attacked.node.call_by_launcher(plugin, verb, "l1", raw)
            attacked.require_unharmed(answer, verb)


@pytest.mark.parametrize(("plugin", "key"), PATH_ROWS)
def test_path_in_a_definition_leads_to_no_file(tmp_path: Path, plugin: str, key: Key) -> None:
    """Each runs on a separate node, and last: an opened FIFO would block its worker forever."""
    with attacked_node(tmp_path) as attacked:
        feed(attacked, plugin, key, every_verb=True)
