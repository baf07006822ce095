"""The choice of device ids: the tables of other plugins where they apply, and what must hold."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deviceplugin.allocate.preferred import assign, preferred
from deviceplugin.pools.pool import Pool
from host.sysfs.topology import PciLocation, Topology
from tests.unit.deviceplugin.made import hca, pool
from tests.unit.host import servers

UNKNOWN = Topology(())


def _ids(of: Pool) -> list[str]:
    return [slot.id for slot in of.slots]


def _per_hca(of: Pool, ids: Sequence[str]) -> list[int]:
    slots = [slot for device_id in ids if (slot := of.slot(device_id)) is not None]
    return sorted((Counter(slot.hcas[0] for slot in slots)).values(), reverse=True)


# --- Slots over HCAs: internal/rm/allocate_test.go of the NVIDIA plugin, replicas for slots.


@pytest.mark.parametrize(
    ("placement", "hcas", "slots", "size", "counts"),
    [
        pytest.param("spread", 2, 4, 2, [1, 1], id="distributed 2x4, 2"),
        pytest.param("spread", 2, 4, 4, [2, 2], id="distributed 2x4, 4"),
        pytest.param("spread", 3, 2, 3, [1, 1, 1], id="distributed 3x2, 3"),
        pytest.param("pack", 2, 4, 2, [2], id="packed 2x4, 2"),
        pytest.param("pack", 2, 4, 4, [4], id="packed 2x4, 4"),
        pytest.param("pack", 2, 4, 5, [4, 1], id="packed 2x4, 5"),
        pytest.param("spread", 2, 4, 9, [4, 4], id="more than there are: an error there"),
        pytest.param("pack", 2, 4, 9, [4, 4], id="packed, more than there are"),
    ],
)
def test_slots_are_spread_or_packed_over_hcas(
    placement: str, hcas: int, slots: int, size: int, counts: list[int]
) -> None:
    cards = [hca(f"0000:0{n}:00.0") for n in range(hcas)]
    of = pool(cards, mode="shared", slots=slots, placement=placement)
    chosen = preferred(of, _ids(of), [], size, {}, [], UNKNOWN)
    assert _per_hca(of, chosen) == counts
    repeated = [preferred(of, _ids(of)[::-1], [], size, {}, [], UNKNOWN) for _ in range(10)]
    assert repeated == [chosen] * 10  # in any order of the request


def test_spread_counts_the_slots_that_containers_hold() -> None:
    of = pool([hca("0000:00:00.0"), hca("0000:01:00.0")], mode="shared", slots=2)
    available = ["0000:00:00.0-0", "0000:00:00.0-1", "0000:01:00.0-1"]
    held = {"0000:01:00.0": 1}
    assert _per_hca(of, preferred(of, available, [], 2, held, [], UNKNOWN)) == [1, 1]
    assert preferred(of, available, [], 1, held, [], UNKNOWN) == ["0000:00:00.0-0"]


def test_two_slots_of_one_hca_are_no_second_hca() -> None:
    of = pool([hca("0000:00:00.0"), hca("0000:01:00.0")], mode="shared", slots=64)
    held = {"0000:01:00.0": 40}
    assert _per_hca(of, preferred(of, _ids(of), [], 2, held, [], UNKNOWN)) == [1, 1]


@pytest.mark.parametrize(
    ("held", "must", "size", "chosen"),
    [
        pytest.param({"0000:01:00.0": 2}, [], 2, ["0000:01:00.0-2", "0000:01:00.0-3"], id="loaded"),
        pytest.param({"0000:01:00.0": 3}, [], 2, ["0000:00:00.0-0", "0000:00:00.0-1"], id="fewest"),
        pytest.param(
            {"0000:01:00.0": 1}, ["0000:00:00.0-3"], 2, ["0000:00:00.0-3", "0000:00:00.0-0"], id="m"
        ),
    ],
)
def test_pack_takes_the_fewest_hcas_and_of_these_the_most_loaded(
    held: dict[str, int], must: list[str], size: int, chosen: list[str]
) -> None:
    of = pool(
        [hca("0000:00:00.0"), hca("0000:01:00.0")],
        mode="shared",
        slots=4,
        placement="pack",
    )
    taken = {f"{name}-{n}" for name, count in held.items() for n in range(count)}
    available = [device_id for device_id in _ids(of) if device_id not in taken]
    assert preferred(of, available, must, size, held, [], UNKNOWN) == chosen


def test_slots_are_taken_by_number() -> None:
    of = pool([hca("0000:00:00.0")], mode="shared", slots=12)
    available = [f"0000:00:00.0-{n}" for n in (11, 10, 9)]
    assert preferred(of, available, [], 2, {}, [], UNKNOWN) == available[:0:-1]


def test_tokens_are_taken_by_number() -> None:
    of = pool([hca("0000:00:00.0")], mode="all", amount=20)
    assert preferred(of, ["10", "9", "11"], ["11"], 2, {}, [], UNKNOWN) == ["11", "9"]


# --- What the kubelet must include: besteffort_test.go of go-gpuallocator, where it applies.


@pytest.mark.parametrize(
    ("available", "must", "size", "expected"),
    [
        pytest.param("4", "4", 1, "4", id="must {4}, 1"),
        pytest.param("0124567", "4", 1, "4", id="must {4} of many, 1"),
        pytest.param("", "", 1, "", id="none left"),
        pytest.param("012", "4", 1, "0", id="must not available: [] there, a guess here"),
        pytest.param("0124", "420", 2, "42", id="more than the size: [] there, the first here"),
        pytest.param("012", "11", 2, "10", id="must twice"),
        pytest.param("012", "", 0, "", id="size 0"),
        pytest.param("012", "1", -3, "", id="size below 0"),
        pytest.param("0", "", 10**9, "0", id="size without bound"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_with_a_guess(
    available: str, must: str, size: int, expected: str
) -> None:
    of = pool([hca(f"0000:0{n}:00.0") for n in range(8)])
    chosen = preferred(of, _named(available), _named(must), size, {}, [], UNKNOWN)
    assert chosen == _named(expected)


def _named(numbers: str) -> list[str]:
    return [f"0000:0{number}:00.0" for number in numbers]


def test_ids_that_the_pool_does_not_know_come_last() -> None:
    of = pool([hca("0000:01:00.0")])
    available = ["0000:00:00.0", "what", "0000:01:00.0"]
    assert preferred(of, available, [], 2, {}, [], UNKNOWN) == ["0000:01:00.0", "0000:00:00.0"]


# --- Eight GPUs and eight HCAs on four switches: HCAs 0 and 1 on the first, and so on.


class Server:
    """The made-up server, with its HCAs and GPUs by number."""

    def __init__(self, root: Path) -> None:
        paths = servers.dgx(root)
        self.hcas = list(servers.DGX_HCAS)
        self.gpus = list(servers.DGX_GPUS)
        self.topology = Topology.read(paths, [*self.hcas, *self.gpus])
        self.pool = pool([hca(address) for address in self.hcas])

    def moved(self, addresses: Mapping[str, str]) -> Topology:
        """A topology of the GPUs and of devices with these addresses, one for each HCA."""
        at = {known: self._location(known) for known in self.gpus}
        at |= {name: replace(self._location(hca), address=name) for name, hca in addresses.items()}
        return Topology(at.values())

    def _location(self, address: str) -> PciLocation:
        location = self.topology.location(address)
        assert location is not None
        return location

    def choose(self, free: str, size: int, gpus: str = "", must: str = "") -> str:
        """Digits for HCAs and GPUs."""
        chosen = preferred(
            self.pool,
            [self.hcas[int(n)] for n in free],
            [self.hcas[int(n)] for n in must],
            size,
            {},
            [self.gpus[int(n)] for n in gpus],
            self.topology,
        )
        return "".join(str(self.hcas.index(device_id)) for device_id in chosen)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(tmp_path_factory.mktemp("dgx"))


@pytest.mark.parametrize(
    ("free", "size", "gpus", "chosen"),
    [
        pytest.param("01234567", 1, "5", "4", id="one GPU"),
        pytest.param("01234567", 2, "01", "01", id="two GPUs of a switch, an HCA for each"),
        pytest.param("01234567", 2, "06", "06", id="two GPUs of two switches"),
        pytest.param("01234567", 8, "01234567", "01234567", id="all"),
        pytest.param("12457", 4, "0246", "1247", id="on each switch the one that is left"),
        pytest.param("134567", 2, "01", "13", id="the second goes as near as there is"),
        pytest.param("4567", 1, "0", "4", id="only the other socket's"),
        pytest.param("01234567", 2, "0123", "02", id="fewer than GPUs: each switch"),
        pytest.param("01234567", 3, "0123", "012", id="three for four GPUs"),
        pytest.param("01234567", 2, "01234567", "02", id="two for eight"),
        pytest.param("1234567", 1, "0167", "1", id="one for four"),
        pytest.param("0167", 2, "014", "01", id="not for another switch at any cost"),
        pytest.param("01234567", 3, "06", "061", id="more than GPUs: their switches in turn"),
        pytest.param("01234567", 4, "06", "0617", id="four for two"),
        pytest.param("01234567", 5, "06", "06172", id="their switches are used up"),
        pytest.param("234567", 3, "0", "234", id="none at the GPU"),
    ],
)
def test_hcas_are_near_the_gpus(
    server: Server, free: str, size: int, gpus: str, chosen: str
) -> None:
    assert server.choose(free, size, gpus) == chosen
    assert server.choose(free[::-1], size, gpus[::-1]) == chosen


@pytest.mark.parametrize(
    ("must", "gpus", "chosen"),
    [
        pytest.param("1", "06", "16", id="it serves the one GPU"),
        pytest.param("4", "06", "40", id="it serves the nearest, the other GPU gets its own"),
        pytest.param("17", "06", "17", id="all chosen already"),
    ],
)
def test_what_must_be_included_serves_its_nearest_gpu(
    server: Server, must: str, gpus: str, chosen: str
) -> None:
    assert server.choose("01234567", 2, gpus, must) == chosen


@pytest.mark.parametrize(
    ("free", "size", "chosen"),
    [
        pytest.param("01234567", 1, "0", id="one"),
        pytest.param("01234567", 2, "02", id="two switches, of one socket"),
        pytest.param("01234567", 4, "0246", id="each switch once"),
        pytest.param("01234567", 8, "02461357", id="all"),
        pytest.param("1234567", 2, "24", id="from where most are left"),
        pytest.param("1357", 2, "13", id="near each other where it is all the same"),
        pytest.param("0146", 1, "0", id="the switch with two"),
        pytest.param("17", 2, "17", id="what is left"),
    ],
)
def test_without_gpus_the_switches_keep_equally_many(
    server: Server, free: str, size: int, chosen: str
) -> None:
    assert server.choose(free, size) == chosen


def test_successive_pairs_use_every_hca_once(server: Server) -> None:
    free = "01234567"
    left_on_switches = []
    for _ in range(4):
        for taken in server.choose(free, 2):
            free = free.replace(taken, "")
        left_on_switches.append(sorted(Counter(int(n) // 2 for n in free).values()))
    assert left_on_switches == [[1, 1, 2, 2], [1, 1, 1, 1], [1, 1], []]
    assert server.choose(free, 1) == ""


def test_load_decides_between_hcas_of_one_switch_and_does_not_send_traffic_over_the_bridge(
    server: Server,
) -> None:
    of = pool(server.pool.hcas, mode="shared", slots=1000)
    first, second = server.hcas[:2]

    def preferred_of(held: dict[str, int]) -> str:
        chosen = preferred(of, _ids(of), [], 1, held, [server.gpus[0]], server.topology)
        return chosen[0].rpartition("-")[0]

    assert preferred_of({first: 1}) == second
    assert (
        preferred_of({first: 900, second: 800}) == second
    )  # the remaining GPUs have an HCA only at NODE or SYS


@pytest.mark.parametrize("placement", ["spread", "pack"])
def test_where_a_gpu_is_chosen_later_hcas_are_near_one_that_is_open(
    server: Server, placement: str
) -> None:
    of = pool(server.pool.hcas, mode="shared", slots=1000, placement=placement)
    held = dict.fromkeys(server.hcas, 70)

    def number_of(opened: str, known: str = "") -> int:
        open_gpus, gpus = ([server.gpus[int(n)] for n in each] for each in (opened, known))
        (chosen,) = preferred(of, _ids(of), [], 1, held, gpus, server.topology, open_gpus)
        return server.hcas.index(chosen.rpartition("-")[0]) // 2

    assert [number_of(n) for n in "0246"] == [0, 1, 2, 3]  # one switch for two of each
    assert number_of("46", known="0") == 0
    held[server.hcas[4]] = held[server.hcas[5]] = 0 if placement == "pack" else 71
    assert number_of("46") == 3  # of several, one whose HCAs suit the pool


def test_more_hcas_than_gpus_are_of_the_gpus_switches_in_turn(server: Server) -> None:
    first, last = server.hcas[0], server.hcas[6]
    hcas = {f"0000:00:{n:02x}.0": first if n < 4 else last for n in range(6)}
    of = pool([hca(address) for address in hcas])
    near = [server.gpus[0], server.gpus[6]]
    chosen = preferred(of, list(hcas), [], 4, {}, near, server.moved(hcas))
    assert sorted(Counter(hcas[device_id] for device_id in chosen).items()) == [
        (first, 2),
        (last, 2),
    ]


def _machine(root: Path, kind: str) -> tuple[Topology, tuple[str, ...], tuple[str, ...]]:
    """A made-up server: its topology, the HCAs, the GPUs."""
    hcas: tuple[str, ...] = servers.FLAT_HCAS
    gpus: tuple[str, ...] = servers.FLAT_GPUS
    if kind == "domains":
        paths, hcas, gpus = servers.domains(root), servers.DOMAINS_HCAS, servers.DOMAINS_GPUS
    else:
        paths = servers.flat_vm(root)
    return Topology.read(paths, [*hcas, *gpus]), hcas, gpus


@pytest.mark.parametrize(
    ("kind", "size", "gpus", "chosen"),
    [
        pytest.param("domains", 1, "1", "1", id="domains, the GPU's own"),
        pytest.param("domains", 2, "10", "01", id="domains, both"),
        pytest.param("domains", 3, "01", "012", id="domains, one behind a VMD as well"),
        pytest.param("domains", 3, "", "023", id="domains, those of a socket"),
        pytest.param("flat", 2, "23", "01", id="flat, all alike"),
        pytest.param("flat", 2, "", "01", id="flat, without GPUs"),
    ],
)
def test_domains_and_virtual_machines(
    tmp_path: Path, kind: str, size: int, gpus: str, chosen: str
) -> None:
    topology, hcas, all_gpus = _machine(tmp_path, kind)
    of = pool([hca(address) for address in hcas])
    near = [all_gpus[int(n)] for n in gpus]
    found = preferred(of, _ids(of), [], size, {}, near, topology)
    assert "".join(str(hcas.index(device_id)) for device_id in found) == chosen


def test_vfs_of_one_pf_are_one_hca(server: Server) -> None:
    vfs = [hca(f"{pf[:-3]}{n:02x}.0", pf=pf, index=n) for pf in server.hcas[:2] for n in (1, 2)]
    of = pool(vfs)
    # As a node has it where the pool has VFs only: the topology does not know the PFs.
    known = server.moved({vf.id: vf.pf for vf in vfs})
    for gpus in ([], server.gpus[:2]):
        chosen = preferred(of, _ids(of), [], 2, {}, gpus, known)
        assert chosen == [vfs[0].id, vfs[2].id]
    assert preferred(of, _ids(of)[1:], [], 1, {vfs[0].id: 1}, [], known) == [vfs[2].id]


def test_vfs_are_near_a_gpu_also_where_the_pf_is_not_known(server: Server) -> None:
    pfs = {f"0000:00:{n:02x}.0": server.hcas[n] for n in range(8)}
    of = pool([hca(vf, pf=pf) for vf, pf in pfs.items()])
    chosen = preferred(of, list(pfs), [], 1, {}, [server.gpus[6]], server.moved(pfs))
    assert chosen == ["0000:00:06.0"]


def test_vfs_that_share_slots_of_a_pf_take_turns() -> None:
    pf = "0000:3b:00.0"
    of = pool([hca(f"0000:3b:00.{n}", pf=pf) for n in (1, 2)], mode="shared", slots=4)
    chosen = preferred(of, _ids(of), [], 3, {"0000:3b:00.1": 1}, [], UNKNOWN)
    assert chosen == ["0000:3b:00.2-0", "0000:3b:00.1-0", "0000:3b:00.2-1"]


# --- What holds for any request.

_NAMES = [f"0000:0{n}:00.0" for n in range(5)]
_HCAS = [hca(name, pf="0000:01:00.0" if n == 2 else "") for n, name in enumerate(_NAMES)]
_POOLS = [
    pool(_HCAS),
    pool(_HCAS, mode="shared", slots=3),
    pool(_HCAS, mode="shared", slots=3, placement="pack"),
    pool(_HCAS, mode="all", amount=12),
    pool([]),
]
_KNOWN_IDS = sorted({slot.id for known_pool in _POOLS for slot in known_pool.slots})
_some_ids = st.lists(st.sampled_from(_KNOWN_IDS) | st.text(max_size=5), max_size=30)


@given(
    of=st.sampled_from(_POOLS),
    available=_some_ids,
    must=_some_ids,
    size=st.integers(-5, 40) | st.integers(),
    held=st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=3), st.integers()),
    gpus=st.lists(st.sampled_from(servers.DGX_GPUS) | st.text(max_size=5), max_size=20),
)
@settings(max_examples=300, deadline=None)
def test_any_request_gets_as_many_ids_as_there_are_each_once(
    of: Pool,
    available: list[str],
    must: list[str],
    size: int,
    held: dict[str, int],
    gpus: list[str],
) -> None:
    chosen = preferred(of, available, must, size, held, gpus, UNKNOWN)
    there = set(available)
    assert len(chosen) == min(max(size, 0), len(there))
    assert len(set(chosen)) == len(chosen)
    assert there.issuperset(chosen)
    possible = there.intersection(must)
    assert possible.issubset(chosen) or possible.issuperset(chosen)
    assert preferred(of, available[::-1], must, size, held, gpus[::-1], UNKNOWN) == chosen


@given(
    st.integers(1, 5).flatmap(
        lambda columns: st.lists(
            st.lists(st.integers(0, 9), min_size=columns, max_size=columns), min_size=1, max_size=5
        )
    ),
    st.integers(0, 6),
)
@example(costs=[[0, 0], [0, 0]], size=1)
@settings(deadline=None)
def test_no_other_assignment_costs_less(costs: list[list[int]], size: int) -> None:
    rows, columns = len(costs), len(costs[0])
    count = min(rows, columns, size)
    pairs = assign(costs, size)
    assert len(pairs) == count == len(set(pairs.values()))
    least = min(
        sum(costs[row][column] for row, column in zip(some, order, strict=True))
        for some in itertools.combinations(range(rows), count)
        for order in itertools.permutations(range(columns), count)
    )
    assert sum(costs[row][column] for row, column in pairs.items()) == least
