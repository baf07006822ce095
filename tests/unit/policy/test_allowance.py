"""The decisions of rules (one rule for all of `use`, any rule for an option), and a plain model."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.pod import Pod
from cni.spec.errors import CNIError, Code
from policy import allowance, rules
from policy.allowance import Allowance, Device, NotAllowed
from policy.document import rules_of
from policy.rules import Policy
from tests.unit.deviceplugin.cards import card, rdma, vf
from tests.unit.policy import model
from tests.unit.policy.model import Asker, Wish

EVERYBODY = [{"namespaces": ["*"]}]


def policy(*rules: dict[str, Any]) -> Policy:
    return Policy(rules=rules_of(list(rules), "rules"))


class Known:
    """Of all namespaces the same labels, and what was asked."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self.asked: list[str] = []

    def labels(self, namespace: str) -> dict[str, str]:
        self.asked.append(namespace)
        return self._labels

    def of(self, rules: Policy) -> Policy:
        """The rules, with these labels for every namespace."""
        return msgspec.structs.replace(rules, labels=self.labels)


def of(rules: Policy, namespace: str = "a", **labels: str) -> Allowance:
    return allowance.of_pod(Known(labels).of(rules), Pod(namespace, "pod"))


def pkey(allowed: Allowance, value: int) -> Allowance:
    return allowed.using("pkeys", value, "pkey", f"{value:#06x}")


def test_without_a_rule_for_the_pod_the_rule_of_the_node_counts() -> None:
    mine = of(policy({"name": "b", "subjects": [{"namespaces": ["b"]}]}))
    assert pkey(mine, 0x8001).titles() == ("config.yaml",)
    mine.require_option("trust", True, "trust", "on")
    with pytest.raises(NotAllowed) as refused:
        mine.require_option("pfOnly", True, "pfOnly", "true")
    assert refused.value.rules == ("config.yaml",)
    assert '(config.yaml) lists it in "set.pfOnly"' in refused.value.message


def test_what_no_rule_lists_is_refused_with_key_value_and_rules() -> None:
    mine = of(
        policy(
            {"name": "r", "subjects": EVERYBODY, "use": {"pkeys": ["0x8001"]}},
            {"name": "s", "subjects": EVERYBODY, "use": {"pkeys": ["0x8002"]}},
        )
    )
    with pytest.raises(NotAllowed) as refused:
        pkey(mine, 0x8003)
    assert refused.value.code == Code.NOT_ALLOWED
    assert (refused.value.key, refused.value.value) == ("pkey", "0x8003")
    assert refused.value.rules == ("r", "s")
    assert '"pkey": 0x8003 is not allowed for this namespace' in refused.value.message
    assert '(r, s) lists it in "use.pkeys"' in refused.value.message


def test_rules_for_a_pod_replace_the_rule_of_the_node() -> None:
    rule = {
        "name": "r",
        "subjects": [{"namespaces": ["a"]}],
        "set": {"match_device": [False], "hostPaths": ["/var/log/x"]},
    }
    node = rules.of(
        {"set": {"pfOnly": [True], "hostPaths": ["/y"]}, "rules": [rule]}, "config.yaml"
    )
    mine, other = of(node), of(node, "b")
    assert mine.may("match_device", False) and not mine.may("pfOnly", True)
    assert mine.host_paths == ("/var/log/x",)
    assert other.may("pfOnly", True) and not other.may("match_device", False)
    assert other.host_paths == ("/y",)


def test_devices_are_those_of_the_selectors_or_of_the_pools() -> None:
    pf = card("0000:3b:00.0", rdma("mlx5_0"), netdevs=("ens1f0",))
    own, others = vf(pf, 1, rdma("mlx5_1")), vf(pf, 5, rdma("mlx5_5"))
    mine = of(
        policy(
            {
                "name": "r",
                "subjects": EVERYBODY,
                "use": {"devices": [{"pfNames": ["ens1f0#0-3"]}], "pools": ["rdma/a*"]},
            }
        )
    )

    def device(asked: Device) -> Allowance:
        return mine.using("devices", asked, "deviceID", asked.hca.id)

    device(Device(own))
    device(Device(others, frozenset({"rdma/ab"})))
    with pytest.raises(NotAllowed):
        device(Device(others))
    with pytest.raises(NotAllowed):
        device(Device(pf, frozenset({"rdma/b"})))


def test_ranges_lie_within_one_network_and_counts_below_the_limit() -> None:
    use: dict[str, Any] = {
        "ranges": ["10.1.0.0/16"],
        "addressesPerAttachment": 2,
        "addressesPerNamespace": 5,
    }
    use["addressesPerPod"] = 3
    rules = policy(
        {"name": "r", "subjects": EVERYBODY, "use": use},
        {"name": "s", "subjects": EVERYBODY, "use": use | {"addressesPerNamespace": 9}},
    )
    base = (0xFFFF << 32) | 0x0A010000
    mine = of(rules).within([(base, base + 0xFFFF)], "ipam.range", str)
    with pytest.raises(NotAllowed):
        mine.within([(base, base + 5), (base, base + 0x10000)], "ipam.range", str)
    with pytest.raises(NotAllowed):
        mine.using("addressesPerAttachment", 3, "ipam", 3)
    left = mine.using("addressesPerAttachment", 2, "ipam", 2)
    assert left.most("addressesPerNamespace") == 9
    assert left.most("addressesPerPod") == 3
    unlimited = policy(
        {"name": "t", "subjects": EVERYBODY}, {"name": "r", "subjects": EVERYBODY, "use": use}
    )
    assert of(unlimited).most("addressesPerNamespace") is None


def test_a_rule_fixes_what_a_definition_leaves_out_and_allows_what_it_fixes() -> None:
    rules = policy(
        {"name": "r", "subjects": EVERYBODY, "use": {"networkNames": ["r"]}},
        {"name": "s", "subjects": EVERYBODY, "fixed": {"pkey": "0x0001", "mtu": 2044}},
        {"name": "t", "subjects": EVERYBODY, "fixed": {"pkey": "0x8002"}},
    )
    mine = of(rules)
    assert mine.fixed("pkey") == 1 and mine.fixed("vlan") is None
    narrowed = pkey(mine, 0x8001)  # as `ipoib` makes a child of it
    assert narrowed.fixed("pkey") == 1
    assert pkey(mine, 0x8002).fixed("pkey") == 0x8002
    mine.require_option("mtu", 2044, "mtu", 2044)


def test_rules_of_objects_come_in_the_order_of_their_names() -> None:
    rule = {"name": "r", "subjects": EVERYBODY, "fixed": {"vlan": 1}}
    late = rules_of([rule], "spec.rules", "b")
    early = rules_of([rule | {"fixed": {"vlan": 2}}], "spec.rules", "a")
    assert of(Policy(rules=(*late, *early))).fixed("vlan") == 2


def test_labels_are_asked_for_only_where_rules_look_at_them() -> None:
    known = Known({"tier": "gold"})
    rules = policy(
        {"name": "r", "subjects": [{"namespaces": ["a"]}]},
        {
            "name": "s",
            "subjects": [
                {"namespaceSelector": {"matchLabels": {"tier": "gold"}}, "namespaces": ["b"]}
            ],
        },
    )
    found = [allowance.of_pod(known.of(rules), Pod(name, "p")) for name in "abc"]
    assert [each.titles() for each in found] == [("r",), ("s",), ("config.yaml",)]
    assert known.asked == ["b"]


def test_labels_that_cannot_be_known_now_end_the_call() -> None:
    subject = {"namespaceSelector": {"matchLabels": {"a": "b"}}}
    rules = policy({"name": "r", "subjects": [subject]})
    with pytest.raises(CNIError) as refused:
        allowance.of_pod(rules, Pod("a", "p"))
    assert refused.value.code == Code.TRY_AGAIN


def test_a_call_for_no_pod_fails_only_if_no_pod_might_do_it() -> None:
    rule = {"name": "r", "subjects": [{"namespaces": ["b"]}], "set": {"pfOnly": [True]}}
    own = rules.of({"set": {"pfOnly": [True]}}, "config.yaml")
    for allowing in (policy(rule), own):
        assert allowance.of_anyone(allowing).may("pfOnly", True)
    for refusing in (Policy(), policy(rule | {"set": {}})):
        assert not allowance.of_anyone(refusing).may("pfOnly", True)


NAMES = st.sampled_from(["a", "b", "team-a", "team-b"])
PATTERNS = st.lists(st.sampled_from(["a", "b", "team-*", "?", "*", "*-b"]), min_size=1, max_size=3)
NUMBERS = st.integers(1, 9)
SPANS = st.lists(
    st.one_of(
        NUMBERS,
        st.tuples(NUMBERS, NUMBERS).map(lambda ends: f"{min(ends)}-{max(ends)}"),
        st.just("*"),
    ),
    max_size=3,
)
LABELS = st.dictionaries(st.sampled_from("kl"), st.sampled_from("12"))
EXPRESSIONS = st.one_of(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from("kl"),
            "operator": st.sampled_from(["In", "NotIn"]),
            "values": st.lists(st.sampled_from("12"), min_size=1, max_size=2),
        }
    ),
    st.fixed_dictionaries(
        {"key": st.sampled_from("kl"), "operator": st.sampled_from(["Exists", "DoesNotExist"])}
    ),
)
SUBJECTS = st.lists(
    st.fixed_dictionaries(
        {"namespaces": PATTERNS},
        optional={
            "namespaceSelector": st.fixed_dictionaries(
                {"matchLabels": LABELS},
                optional={"matchExpressions": st.lists(EXPRESSIONS, max_size=2)},
            ),
        },
    ),
    min_size=1,
    max_size=2,
)
RULES = st.lists(
    st.fixed_dictionaries(
        {"subjects": SUBJECTS},
        optional={
            "use": st.fixed_dictionaries(
                {}, optional={"pkeys": SPANS, "vlans": SPANS, "networkNames": PATTERNS}
            ),
            "set": st.fixed_dictionaries(
                {},
                optional={
                    "mtu": SPANS,
                    "trust": st.lists(st.one_of(st.booleans(), st.just("*")), max_size=2),
                    "link_state": PATTERNS,
                },
            ),
        },
    ),
    max_size=6,
)
OPTIONS = st.dictionaries(st.sampled_from(["mtu", "trust", "link_state"]), st.none()).flatmap(
    lambda keys: st.fixed_dictionaries(
        {key: {"mtu": NUMBERS, "trust": st.booleans(), "link_state": NAMES}[key] for key in keys}
    )
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    RULES,
    st.builds(Asker, NAMES, LABELS),
    st.lists(
        st.builds(
            Wish,
            st.none() | NUMBERS,
            st.none() | NUMBERS,
            st.none() | NAMES,
            OPTIONS.map(lambda options: tuple(options.items())),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_random_rules_decide_as_the_plain_model(
    document: model.Document, asker: Asker, wishes: list[Wish]
) -> None:
    named = [rule | {"name": f"r{index}"} for index, rule in enumerate(document)]
    rules = policy(*named)
    for wish in wishes:
        mine = of(rules, asker.namespace, **asker.labels)
        expected = model.allowed(named, asker, wish)
        assert (mine.titles() == ("config.yaml",)) is (expected is None)
        if expected is not None:
            assert _granted(mine, wish) is expected


def _granted(mine: Allowance, wish: Wish) -> bool:
    try:
        for key, value in wish.options:
            mine.require_option(key, value, key, value)
        for key, asked in (
            ("pkeys", wish.pkey),
            ("vlans", wish.vlan),
            ("networkNames", wish.network_name),
        ):
            if asked is not None:
                mine = mine.using(key, asked, key, asked)
    except NotAllowed:
        return False
    return True
