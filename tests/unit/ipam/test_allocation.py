"""whereabouts' pkg/allocate table, through the plugin: which address is next."""

import pytest

from cni.spec.errors import Code
from tests.unit.ipam.calls import Calls, Json, error_of, reservation

EXHAUSTED = "no free address in "
SPLIT = ["192.168.0.0/30", "192.168.0.6/31", "192.168.0.8/31", "192.168.0.4/30"]
SPLIT_TWO = [*SPLIT[:1], "192.168.0.14/31", "192.168.0.4/30", *SPLIT[1:3]]


@pytest.mark.parametrize(
    ("ipam", "taken", "expected"),
    [
        ({"range": "192.168.1.1/24"}, [], "192.168.1.1"),
        ({"range": "caa5::0/112"}, [], "caa5::1"),
        ({"range": "::1/126"}, [], "::1"),
        ({"range": "fd::1/116"}, [], "fd::1"),
        ({"range": "100::2:1/126"}, [], "100::2:1"),
        ({"range": "192.168.0.0/29", "exclude": ["192.168.0.0/30"]}, [], "192.168.0.4"),
        ({"range": "192.168.0.0/29", "exclude": ["192.168.0.1"]}, [], "192.168.0.2"),
        ({"range": "100::2:1/125", "exclude": ["100::2:1/126"]}, [], "100::2:4"),
        ({"range": "100::2:1/125", "exclude": ["100::2:1"]}, [], "100::2:2"),
        ({"range": "2001:db8::/30", "exclude": ["2001:db8::0/32"]}, [], "2001:db9::"),
        ({"range": "192.168.0.0/28", "exclude": SPLIT}, [], "192.168.0.10"),
        ({"range": "192.168.0.0/28", "exclude": SPLIT_TWO}, [], "192.168.0.10"),
        ({"range": "192.168.0.0/29", "exclude": ["192.168.0.0/30"]}, [4, 5, 6], EXHAUSTED),
        ({"range": "192.168.0.0/29", "exclude": ["192.168.0.4/30"]}, [1, 2, 3], EXHAUSTED),
        ({"range": "192.168.0.0/29", "range_start": "192.168.0.0"}, [], "192.168.0.1"),
        (
            {
                "range": "192.168.0.0/28",
                "range_start": "192.168.0.1",
                "range_end": "192.168.0.6",
                "exclude": ["192.168.0.4/30"],
            },
            [1, 2, 3],
            EXHAUSTED,
        ),
        ({"range": "192.168.0.0/28", "range_end": "192.168.0.6"}, [], "192.168.0.1"),
        ({"range": "192.168.0.0/28", "range_end": "192.168.0.6"}, [1, 2, 3], "192.168.0.4"),
        ({"range": "192.168.0.0/28", "range_end": "192.168.0.6"}, [1, 2, 5], "192.168.0.3"),
        ({"range": "10.0.0.0/29", "exclude": ["10.0.0.0/8"]}, [], EXHAUSTED),
        ({"range": "100::2:1/125", "exclude": ["100::2:0/125"]}, [], EXHAUSTED),
        ({"range": "10.0.0.0/29", "exclude": ["10.0.0.1-10.0.0.3"]}, [], "10.0.0.4"),
        # host-local's, from allocator_test.go: its own spelling brings its default gateway
        ({"subnet": "10.0.0.0/29"}, [], "10.0.0.2"),
        ({"subnet": "2001:db8:1::0/64"}, [], "2001:db8:1::2"),
        ({"subnet": "10.0.0.0/30"}, [], "10.0.0.2"),
    ],
)  # fmt: skip
def test_the_lowest_free_address_is_next(
    node: Calls, ipam: Json, taken: list[int], expected: str
) -> None:
    held = [reservation(f"192.168.0.{last}", f"holder{last}") for last in taken]
    node.store.load(held)
    if expected == EXHAUSTED:
        error = error_of(lambda: node.add(ipam))
        assert error.code == Code.NO_FREE_ADDRESS
        assert error.message.startswith(EXHAUSTED)
    else:
        assert node.addresses(ipam)[0].partition("/")[0] == expected


@pytest.mark.parametrize(
    ("ipam", "sequence"),
    [
        (
            {"range": "192.168.2.225/28", "exclude": ["192.168.2.229/30", "192.168.2.236/32"]},
            [f"192.168.2.{last}" for last in (225, 226, 227, 232, 233, 234, 235, 237, 238)],
        ),
        ({"range": "10.10.0.0/30"}, ["10.10.0.1", "10.10.0.2"]),
        ({"range": "192.168.1.5-192.168.1.12/24"}, [f"192.168.1.{n}" for n in range(5, 13)]),
        ({"range": "10.0.0.0/31", "use_all_addresses": True}, ["10.0.0.0", "10.0.0.1"]),
        ({"range": "10.0.0.7/32", "use_all_addresses": True}, ["10.0.0.7"]),
        ({"range": "fd00::6/127", "use_all_addresses": True}, ["fd00::6", "fd00::7"]),
        ({"range": "fd00::6/128", "use_all_addresses": True}, ["fd00::6"]),
        ({"range": "10.0.0.0/30", "use_all_addresses": True}, [f"10.0.0.{n}" for n in range(4)]),
        (
            {"ranges": [[{"subnet": "10.0.0.0/30"}, {"subnet": "10.0.1.0/30"}]]},
            ["10.0.0.2", "10.0.1.2"],
        ),
        ({"subnet": "192.168.1.0/29"}, [f"192.168.1.{n}" for n in range(2, 7)]),
        ({"range": "192.168.1.0/29", "gateway": "192.168.1.3"},
         [f"192.168.1.{n}" for n in (1, 2, 4, 5, 6)]),
        # Every next hop that the definition names, wherever it names it.
        ({"range": "10.56.217.0/29", "gateway": "10.56.217.1",
          "routes": [{"dst": "192.168.0.0/16"}, {"dst": "10.10.0.0/16", "gw": "10.56.217.5"}]},
         [f"10.56.217.{n}" for n in (2, 3, 4, 6)]),
        ({"range": "fd00::/125", "routes": [{"dst": "::/0", "gw": "fd00:0::1"}]},
         [f"fd00::{n}" for n in range(2, 7)]),
        ({"ranges": [[{"range": "10.0.0.1-10.0.0.2/24", "gateway": "10.0.1.1"},
                      {"range": "10.0.1.1-10.0.1.2/24", "gateway": "10.0.0.1"}]]},
         ["10.0.0.2", "10.0.1.2"]),
    ],
)  # fmt: skip
def test_a_range_yields_this_sequence_and_is_exhausted(
    node: Calls, ipam: Json, sequence: list[str]
) -> None:
    given = [node.addresses(ipam, f"c{n}")[0].partition("/")[0] for n in range(len(sequence))]
    assert given == sequence
    assert error_of(lambda: node.add(ipam, "late")).message.startswith(EXHAUSTED)


def test_a_slash_23_yields_510_addresses_across_the_octet(node: Calls) -> None:
    ipam = {"range": "10.0.0.0/23"}
    node.store.load([reservation(f"10.0.0.{n}", f"h{n}") for n in range(1, 255)])
    assert node.addresses(ipam, "a") == ["10.0.0.255/23"]
    assert node.addresses(ipam, "b") == ["10.0.1.0/23"]
    node.store.load([reservation(f"10.0.1.{n}", f"k{n}") for n in range(1, 255)])
    assert error_of(lambda: node.add(ipam, "c")).code == Code.NO_FREE_ADDRESS


def test_the_error_of_a_full_range_says_range_exclusions_and_how_many_are_held(node: Calls) -> None:
    ipam = {"range": "192.168.2.0/30", "exclude": ["192.168.2.2"]}
    node.add(ipam)
    assert error_of(lambda: node.add(ipam, "c2")).message == (
        'no free address in "ipam.range": 192.168.2.0/30 (192.168.2.1-192.168.2.2) without '
        "192.168.2.2, of which 1 are held: delete pods that need no address any more, or widen "
        "the range"
    )
