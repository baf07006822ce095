"""Very long lists: the error names the key and its limit, and no other pod has to wait.

Each list is tested at the largest length that the limits of a whole configuration allow, so that
its own limit decides, and at the largest length that fits into 1 MiB.
"""

import threading
from collections.abc import Iterator

import pytest

from cni.spec import limits
from tests.attacks.bounds_node import Answer, Node, network, node
from tests.attacks.lists import IPAM, LISTS, RANGE, List, ipam, ranged, v4, v6

BOUND = 2.0  # CPU seconds; without limits another pod's DEL waited for 15 to 75
VICTIM = network(
    "victim", "podfabric-ipam", ipam={"type": "podfabric-ipam", "range": "10.8.0.0/24"}
)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("a")) as made:
        yield made


class Victim(threading.Thread):
    """Another pod, for which DEL is called repeatedly."""

    def __init__(self, attacked: Node) -> None:
        super().__init__()
        self._node = attacked
        self._over = threading.Event()
        self.answers: list[Answer] = []

    def run(self) -> None:
        while not self._over.is_set() or not self.answers:
            self.answers.append(self._node.call(IPAM, "DEL", "victim", VICTIM))

    def __enter__(self) -> "Victim":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()

    def require_quick(self) -> None:
        assert max(answer.cpu for answer in self.answers) < BOUND
        assert {answer.code for answer in self.answers} == {0}


@pytest.mark.parametrize("listed", LISTS, ids=str)
def test_list_beyond_its_limit_is_refused_by_its_key_and_no_other_pod_waits(
    attacked: Node, listed: List
) -> None:
    with Victim(attacked) as victim:
        for verb in listed.verbs:
            for entries in (listed.limit + 1, listed.widest):
                answer = attacked.call(listed.plugin, verb, "attacker", listed.of(entries))
                assert answer.code in (listed.code, 50 if verb == "STATUS" else listed.code)
                assert answer.document["code"] != 999
                assert f"{listed.key}" in answer.document["msg"], answer
                assert str(listed.limit) in answer.document["msg"], answer
                assert answer.cpu < BOUND
    victim.require_quick()


@pytest.mark.parametrize("listed", LISTS, ids=str)
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "STATUS", "DEL", "GC"])
def test_list_of_a_mebibyte_does_not_delay_other_pods(
    attacked: Node, listed: List, verb: str
) -> None:
    raw = listed.of(listed.largest)
    assert 1 << 19 < len(raw) <= limits.MAX_BYTES
    with Victim(attacked) as victim:
        answer = attacked.call(listed.plugin, verb, "attacker", raw)
    if verb in ("DEL", "GC"):
        assert answer.code == 0
    else:
        assert answer.code == 7
        assert str(limits.MAX_VALUES) in answer.document["msg"]
    assert answer.cpu < BOUND
    victim.require_quick()


def test_list_at_its_limit_is_accepted(attacked: Node) -> None:
    excluded = [v4(number) for number in range(0, 2048, 2)]
    routes = [{"dst": f"{v6(number << 16)}/112"} for number in range(256)]
    raw = network("attack", IPAM, **ranged(exclude=excluded, routes=routes))
    with Victim(attacked) as victim:
        answer = attacked.call(IPAM, "ADD", "attacker", raw)
        assert answer.code == 0
        assert answer.document["ips"] == [{"address": "10.9.0.1/16"}]
        assert len(answer.document["routes"]) == 256
        assert attacked.call(IPAM, "DEL", "attacker", raw).code == 0
    assert answer.cpu < BOUND
    victim.require_quick()


def test_64_sets_over_1024_exclusions_hold_the_store_for_no_longer_than_they_must(
    attacked: Node,
) -> None:
    """Everything that is allowed, at once, for a returning pod and with requested addresses."""
    sets = [
        {
            "range": RANGE,
            "range_start": v4(256 * number + 1),
            "range_end": v4(256 * number + 250),
            "exclude": [v4(256 * number + 2 * hole) for hole in range(16)],
        }
        for number in range(64)
    ]
    asked = [v4(256 * number + 101) for number in range(64)]
    raw = network("attack", IPAM, **ipam(ipRanges=sets))
    by_name = network("attack", IPAM, **ipam(ipRanges=sets), runtimeConfig={"ips": asked})
    with Victim(attacked) as victim:
        for container, config in (("a1", raw), ("a1-again", raw), ("b1", by_name)):
            args = "K8S_POD_NAMESPACE=ns;K8S_POD_NAME=attacker"
            answer = attacked.call(IPAM, "ADD", container, config, CNI_ARGS=args)
            assert answer.code == 0, answer
            assert len(answer.document["ips"]) == 64
            assert answer.cpu < BOUND
        for container in ("a1", "a1-again", "b1"):
            assert attacked.call(IPAM, "DEL", container, raw).code == 0
    victim.require_quick()


@pytest.mark.parametrize("plugin", ["ipoib", "sriov"])
def test_many_unknown_keys_are_refused_by_their_number(attacked: Node, plugin: str) -> None:
    keys = {f"xmaster{number}x": 1 for number in range(9000)}
    with Victim(attacked) as victim:
        answer = attacked.call(plugin, "ADD", "attacker", network("attack", plugin, **keys))
    assert answer.code == 7
    assert "at most 64" in answer.document["msg"]
    assert answer.cpu < BOUND
    victim.require_quick()


@pytest.mark.parametrize("pair", ["IP=10.9.0.9", "IP=" + "10.9.0.9," * 3000, "X=" + "y" * 20_000])
@pytest.mark.parametrize("plugin", ["podfabric-ipam", "ipoib", "sriov"])
def test_arguments_without_end_are_refused(attacked: Node, plugin: str, pair: str) -> None:
    args = ";".join([pair] * (200_000 // len(pair)))
    keys = {"podfabric-ipam": ranged()}.get(plugin, {"master": "none0"})
    with Victim(attacked) as victim:
        raw = network("attack", plugin, **keys)
        answer = attacked.call(plugin, "ADD", "attacker", raw, CNI_ARGS=args)
    assert answer.code == 4
    assert str(limits.MAX_ARGS) in answer.document["msg"]
    assert answer.cpu < BOUND
    victim.require_quick()


@pytest.mark.parametrize("verb", ["ADD", "CHECK", "STATUS", "DEL", "GC"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("plugin", ["podfabric-ipam", "ipoib", "sriov", "rdma"])
def test_deep_nesting_is_refused_and_the_agent_lives(
    attacked: Node, plugin: str, opening: str, verb: str
) -> None:
    """Python 3.13 does not limit recursion in C code. Without our limit the agent crashed."""
    process = attacked.service.process
    for depth in (40, 600, 5000, 200_000):
        raw = network("attack", plugin)[:-1] + b',"x":' + opening.encode() * depth
        answer = attacked.call(plugin, verb, "attacker", raw)
        assert answer.code in (6, 7)
    assert process.poll() is None
