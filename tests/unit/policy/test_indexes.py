"""Indexes find what a look at each rule finds: for values, and for devices."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cni.policy import values
from cni.policy.device_index import Device
from cni.policy.document import rules_of
from cni.policy.rule_index import RuleIndex
from cni.policy.value_index import ValueIndex, bits
from cni.policy.values import Values
from host.discovery import HCA
from tests.unit.deviceplugin.cards import card, rdma, vf

PATTERNS = st.text("ab*?", min_size=1, max_size=4)
SPANS = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(
    lambda ends: f"{min(ends)}-{max(ends)}"
)
LISTS = st.lists(
    st.one_of(
        st.lists(PATTERNS, max_size=4).map(lambda items: values.read(items, "name", "names")),
        st.lists(SPANS, max_size=4).map(lambda items: values.read(items, "number", "numbers")),
        st.just(values.EVERYTHING),
    ),
    max_size=8,
)


def numbers(found: Sequence[bool]) -> list[int]:
    return [number for number, each in enumerate(found) if each]


@settings(max_examples=500, deadline=None)
@given(LISTS, st.text("ab", max_size=5), st.integers(-1, 21), st.integers(0, 5))
def test_an_index_of_lists_finds_those_that_allow_a_value(
    lists: list[Values], name: str, first: int, more: int
) -> None:
    index = ValueIndex((each, 1 << number) for number, each in enumerate(lists))
    for value in (name, first, True):
        assert [*bits(index.having(value))] == numbers([each.allows(value) for each in lists])
    found = index.having_all(first, first + more)
    assert [*bits(found)] == numbers([each.allows_all(first, first + more) for each in lists])


@given(LISTS, LISTS)
def test_a_union_allows_what_either_allows(some: list[Values], others: list[Values]) -> None:
    for one, other in zip(some, others, strict=False):
        both = values.union(one, other)
        for value in (*range(-1, 22), "", "a", "ab", "bb"):
            assert both.allows(value) is (one.allows(value) or other.allows(value))


FIRST = card("0000:3b:00.0", rdma("mlx5_0"), netdevs=("ens1f0",))
SECOND = card("0000:86:00.0", rdma("mlx5_8"), netdevs=("ens2f0",))
HCAS = (
    FIRST,
    SECOND,
    vf(FIRST, 0, rdma("mlx5_1")),
    vf(FIRST, 5, rdma("mlx5_6")),
    vf(SECOND, 0, rdma("mlx5_9")),
)
SELECTORS = st.fixed_dictionaries(
    {},
    optional={
        "pciAddresses": st.lists(st.sampled_from([hca.address for hca in HCAS]), min_size=1),
        "rdmaDevices": st.lists(st.sampled_from(["mlx5_0", "mlx5_1", "mlx5_9"]), min_size=1),
        "ifNames": st.lists(st.sampled_from(["ens1f0", "ens2f0"]), min_size=1),
        "pfNames": st.lists(st.sampled_from(["ens1f0", "ens1f0#0-3", "ens2f0#0"]), min_size=1),
        "rootDevices": st.lists(st.sampled_from([FIRST.address, "0000:86:00.0#0"]), min_size=1),
        "isRdma": st.booleans(),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"devices": st.lists(SELECTORS, max_size=2)},
            optional={"pools": st.lists(st.sampled_from(["x/a", "x/*", "y/b"]), max_size=2)},
        ),
        max_size=6,
    ),
    st.sampled_from(HCAS),
    st.frozensets(st.sampled_from(["x/a", "y/b"])),
)
def test_an_index_of_devices_finds_the_rules_that_list_one(
    uses: list[dict[str, Any]], hca: HCA, resources: frozenset[str]
) -> None:
    rules = rules_of(
        [
            {"name": f"r{number}", "subjects": [{"namespaces": ["*"]}], "use": use}
            for number, use in enumerate(uses)
        ],
        "rules",
    )
    index = RuleIndex(rules)
    expected = numbers(
        [rule.use.has_device(hca) or any(map(rule.use.pools.allows, resources)) for rule in rules]
    )
    device = Device(hca, resources)
    assert [*bits(index.using("devices", device))] == expected
    assert [*bits(index.using("devices", device))] == expected  # which was kept
