"""Answers GetPreferredAllocation: chooses the best of the free device ids for a container.

If the container's GPUs are known, each GPU gets one HCA at the least total distance. Otherwise, the
least loaded HCA comes first, and the PCIe switches take turns. So each switch keeps HCAs for its
free GPUs. If the GPU is chosen later, the HCAs are near an open GPU. An open GPU has room for the
container. A pool that packs takes as few HCAs as possible.

VFs and SFs share the link of their PF, so "HCA" here means a PF with all its functions. No function
raises an error, because the kubelet would reject the pod.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from deviceplugin.pools.pool import Pool
from host.sysfs.topology import Distance, Topology

# By default, NCCL uses GPUDirect RDMA up to PXB. So no other cost may outweigh PHB.
COSTS = {
    Distance.SAME: 0,
    Distance.PIX: 0,
    Distance.PXB: 1,
    Distance.PHB: 10,
    Distance.NODE: 20,
    Distance.SYS: 40,
}
UNCOVERED = 4  # for a second GPU of a switch: between PXB and PHB
_LOADS_PER_COST = 8  # this many holders of an HCA count as much as PXB
_MOST_LOAD = 71  # below PHB: a load never makes an HCA behind the host bridge better
_EXACT = 16  # the assignment is exact for this many GPUs


def preferred(
    pool: Pool,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    held: Mapping[str, int],
    gpu_addresses: Sequence[str],
    topology: Topology,
    open_gpus: Sequence[str] = (),
) -> list[str]:
    """Choose `size` different ids of `available`, or all ids if `available` has fewer.

    The ids of `must_include` come first. `held` has the number of allocated ids of each HCA.
    `open_gpus` count only if `gpu_addresses` is empty. Between equal choices, the lower address
    wins.
    """
    free = set(available)
    chosen = [device_id for device_id in dict.fromkeys(must_include) if device_id in free][
        : max(size, 0)
    ]
    if len(chosen) < size:
        open_gpus = () if gpu_addresses else open_gpus
        request = _PreferenceSearch(pool, free, chosen, held, gpu_addresses, topology, open_gpus)
        chosen += request.more(size - len(chosen))
    return chosen


class _PreferenceSearch:
    """The search for one request. A place is the address of a PF."""

    def __init__(
        self,
        pool: Pool,
        free: set[str],
        chosen: Sequence[str],
        held: Mapping[str, int],
        gpus: Sequence[str],
        topology: Topology,
        open_gpus: Sequence[str],
    ) -> None:
        mode = pool.config.mode
        self._exclusive = mode == "exclusive"
        self._packs = mode == "shared" and pool.config.placement == "pack"
        self._topology = topology
        self._gpus = sorted(set(gpus), key=_order)
        self._open = open_gpus
        self._switches: dict[str, str] = {}
        self._distances: dict[tuple[str, str], Distance] = {}
        places = {hca.id: hca.pf or hca.address or hca.id for hca in pool.hcas}
        # The address of each place's first HCA, because the topology may lack a VF's PF.
        self._addresses = {places[hca.id]: hca.address for hca in reversed(pool.hcas)}
        hca_of: dict[str, str] = {}
        if mode != "all":  # an id of mode "all" stands for several HCAs
            slots = [slot for device_id in free if (slot := pool.slot(device_id)) is not None]
            hca_of = {slot.id: slot.hcas[0] for slot in slots if slot.hcas}
        self._loads: Counter[str] = Counter()
        for name, count in held.items():
            if name in places:
                self._loads[places[name]] += max(count, 0)
        self._taken: Counter[str] = Counter()
        for device_id in chosen:
            if hca_of.get(device_id) in places:
                self._taken[places[hca_of[device_id]]] += 1
        self._free: dict[str, list[str]] = {}  # by place; the last of a list is taken first
        self._others: list[str] = []
        for device_id, hca_id in self._sorted(free.difference(chosen), hca_of, held):
            known = hca_id in places
            ids = self._free.setdefault(places[hca_id], []) if known else self._others
            ids.append(device_id)
        self._rank = {place: n for n, place in enumerate(sorted(self._free, key=_order))}

    def more(self, size: int) -> list[str]:
        chosen: list[str] = []
        for way in (self._packed,) if self._packs else (self._near, self._balanced):
            if len(chosen) < size:
                chosen += [self._take(place) for place in way(size - len(chosen))]
        while len(chosen) < size and self._others:
            chosen.append(self._others.pop())
        return chosen

    def _sorted(
        self, free: set[str], hca_of: Mapping[str, str], held: Mapping[str, int]
    ) -> list[tuple[str, str]]:
        """The ids, best last, each with its HCA. An unknown HCA is ""."""
        ranked = []
        nth: Counter[str] = Counter()
        for order, device_id in sorted((_order(device_id), device_id) for device_id in free):
            hca_id = hca_of.get(device_id, "")
            load = held.get(hca_id, 0)
            rank = -load if self._packs else load + nth[hca_id]
            ranked.append((rank, order, device_id, hca_id))
            nth[hca_id] += hca_id != ""
        return [(device_id, hca_id) for _, _, device_id, hca_id in sorted(ranked, reverse=True)]

    def _take(self, place: str) -> str:
        taken = self._free[place].pop()
        if not self._free[place]:
            del self._free[place]
        self._taken[place] += 1
        return taken

    def _packed(self, size: int) -> Iterator[str]:
        """Choose from as few HCAs as possible."""

        def order(place: str) -> tuple[int, ...]:
            return (
                -(self._taken[place] > 0),
                -min(len(self._free[place]), size),
                sum(self._cost(place, gpu) for gpu in self._gpus),
                self._to_open(place),
                -self._loads[place],
                self._rank[place],
            )

        while size > 0 and self._free:
            place = min(self._free, key=order)
            number = min(size, len(self._free[place]))
            size -= number
            yield from [place] * number

    def _near(self, size: int) -> Iterator[str]:
        """Choose one HCA for each GPU at the least total cost."""
        gpus = self._unserved()[:_EXACT]
        places = sorted(
            (place for place in self._free if not self._taken[place]), key=self._rank.__getitem__
        )
        if not gpus or not places:
            return
        served: Counter[str] = Counter()
        costs = []
        for gpu in gpus:
            switch = self._switch(gpu)
            again = UNCOVERED * served[switch]
            served[switch] += 1
            costs.append([self._price(place, gpu, again) for place in places])
        pairs = assign(costs, size)
        yield from (places[pairs[row]] for row in sorted(pairs))

    def _price(self, place: str, gpu: str, again: int) -> int:
        """Distance plus load. Between equal sums, the lower load wins, then the lower address."""
        load = self._loads[place]
        cost = (self._cost(place, gpu) + again) * _LOADS_PER_COST + min(load, _MOST_LOAD)
        return (cost * 4096 + min(load, 4095)) * 65536 + self._rank[place]

    def _unserved(self) -> list[str]:
        """The GPUs without an HCA. Each HCA of `must_include` serves its nearest GPU."""
        gpus = list(self._gpus)
        for place in sorted(self._taken, key=_order):
            if gpus:
                gpus.remove(min(gpus, key=lambda gpu: self._cost(place, gpu)))
        return gpus

    def _balanced(self, size: int) -> Iterator[str]:
        """Choose one id at a time.

        Prefers, in this order: an HCA that the container lacks, an HCA near the GPUs, the next
        switch.
        """
        nearest = {
            place: min((self._cost(place, gpu) for gpu in self._gpus), default=0)
            for place in self._free
        }
        to_open = {place: self._to_open(place) * _LOADS_PER_COST for place in self._free}
        apart = {
            place: sum(int(self._distance(place, other)) for other in self._taken)
            for place in nearest
        }
        taken: Counter[str] = Counter()
        for place, count in self._taken.items():
            taken[self._switch(place)] += count
        free: Counter[str] = Counter()
        for place, ids in self._free.items():
            free[self._switch(place)] += len(ids)
        loads = Counter(self._loads)
        for place, count in self._loads.items():
            loads[f"switch {self._switch(place)}"] += count

        def order(place: str) -> tuple[int, ...]:
            switch = self._switch(place)
            load, on_switch = loads[place], loads[f"switch {switch}"] + taken[switch]
            return (
                self._taken[place],
                nearest[place],
                to_open[place] + min(load, _MOST_LOAD) if self._open else 0,
                taken[switch] if self._gpus else 0,
                *((-free[switch], load) if self._exclusive else (load, on_switch)),
                taken[switch],
                apart[place],
                self._rank[place],
            )

        while size > 0 and self._free:
            size -= 1
            place = min(self._free, key=order)
            taken[self._switch(place)] += 1
            free[self._switch(place)] -= 1
            loads[place] += 1
            for other in apart:
                apart[other] += self._distance(other, place)
            yield place

    def _to_open(self, place: str) -> int:
        return min((self._cost(place, gpu) for gpu in self._open), default=0)

    def _cost(self, place: str, gpu: str) -> int:
        return COSTS[self._distance(place, gpu)]

    def _distance(self, place: str, other: str) -> Distance:
        distance = self._distances.get((place, other))
        if distance is None:
            addresses = self._address(place), self._address(other)
            distance = self._distances[place, other] = self._topology.distance(*addresses)
        return distance

    def _switch(self, place: str) -> str:
        """The switch of a place or GPU; `place` itself if the switch is unknown."""
        switch = self._switches.get(place)
        if switch is None:
            switch = self._switches[place] = self._topology.switch(self._address(place)) or place
        return switch

    def _address(self, place: str) -> str:
        return self._addresses.get(place, place)


def _order(device_id: str) -> tuple[str, int]:
    """The sort key, by address, then slot: "0000:3b:00.0-9" comes before "0000:3b:00.0-10"."""
    hca_id, _, slot = device_id.rpartition("-")
    if slot.isascii() and slot.isdecimal() and len(slot) < 10:
        return hca_id, int(slot)
    return device_id, -1


def assign(costs: Sequence[Sequence[int]], size: int | None = None) -> dict[int, int]:
    """Assign columns to `size` rows (default: all) at the least total cost. Returns column by row.

    If there are more rows than columns, some rows get no column. Costs must not be negative.
    """
    rows = len(costs)
    columns = len(costs[0]) if rows else 0
    count = min(rows, columns, rows if size is None else max(size, 0))
    if count == 0:
        return {}
    # Spare columns of cost 0 stand for no column. The most expensive rows get these.
    table = [[*(cost + 1 for cost in row), *[0] * (rows - count)] for row in costs]
    return {row: column for row, column in _hungarian(table).items() if column < columns}


def _hungarian(table: Sequence[Sequence[int]]) -> dict[int, int]:
    """Assign a column to each row at the least total cost (algorithm of Jonker and Volgenant).

    The table has at least as many columns as rows. Each step adds one row by a shortest augmenting
    path, so earlier rows may move to other columns. In the internal lists, rows and columns count
    from 1, and 0 means none.
    """
    rows, columns = len(table), len(table[0])
    of_row = [0] * (rows + 1)
    of_column = [0] * (columns + 1)
    row_at = [0] * (columns + 1)  # the row that has the column
    for row in range(1, rows + 1):
        row_at[0] = row
        column = 0
        least: list[int | None] = [None] * (columns + 1)
        came_from = [0] * (columns + 1)
        seen = [False] * (columns + 1)
        while row_at[column]:
            seen[column] = True
            at = row_at[column]
            prices = table[at - 1]
            base = of_row[at]
            step, following = None, 0
            for other in range(1, columns + 1):
                if seen[other]:
                    continue
                reduced = prices[other - 1] - base - of_column[other]
                cost = least[other]
                if cost is None or reduced < cost:
                    least[other] = cost = reduced
                    came_from[other] = column
                if step is None or cost < step:
                    step, following = cost, other
            assert step is not None  # there are as many columns as rows
            for other in range(columns + 1):
                if seen[other]:
                    of_row[row_at[other]] += step
                    of_column[other] -= step
                elif (cost := least[other]) is not None:
                    least[other] = cost - step
            column = following
        while column:
            before = came_from[column]
            row_at[column] = row_at[before]
            column = before
    return {at - 1: column - 1 for column, at in enumerate(row_at) if column and at}
