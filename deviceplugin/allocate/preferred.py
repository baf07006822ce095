"""Which of the free device ids a container best gets: the answer to GetPreferredAllocation.

Without GPUs: every HCA once before any twice, the least loaded first, over the switches in turn,
so that each switch keeps HCAs for the GPUs that are free there. With the addresses of the
container's GPUs: one HCA for each GPU, such that the sum of the distances is least. A pool that
packs takes as few HCAs as it can, and of these the most loaded.

VFs and SFs share their PF's wires, so what is said of an HCA here goes for a PF with all of them.

The kubelet only takes it for a hint, but rejects the pod for an error: this makes the best of any
request, and raises nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from deviceplugin.allocate.assignment import assign
from deviceplugin.pools.pool import Pool
from host.topology import Distance, Topology

# What a class of distance costs. GPUDirect RDMA goes as far as PXB, by NCCL's default: nothing
# makes up for PHB.
COSTS = {
    Distance.SAME: 0,
    Distance.PIX: 0,
    Distance.PXB: 1,
    Distance.PHB: 10,
    Distance.NODE: 20,
    Distance.SYS: 40,
}
UNCOVERED = 4  # a GPU of a switch that has one served: dearer than PXB, cheaper than PHB
_LOADS_PER_COST = 8  # so many holders of an HCA weigh as much as PXB does
_MOST_LOAD = 71  # below PHB: no load makes an HCA behind the host bridge the better one
_EXACT = 16  # GPUs that are assigned all at once


def preferred(
    pool: Pool,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    held: Mapping[str, int],
    gpu_addresses: Sequence[str],
    topology: Topology,
) -> list[str]:
    """`size` ids out of `available`, fewer only if there are fewer; each once.

    Those of `must_include` that are available come first. `held` says how many ids of an HCA
    containers have. Ids that the pool does not know are taken last. Between equals the lower
    address decides, then the lower slot.
    """
    free = set(available)
    chosen = [id_ for id_ in dict.fromkeys(must_include) if id_ in free][: max(size, 0)]
    if len(chosen) < size:
        request = _PreferenceSearch(pool, free, chosen, held, gpu_addresses, topology)
        chosen += request.more(size - len(chosen))
    return chosen


class _PreferenceSearch:
    """One request: the free ids by HCA ("place": the PF's address), and what was chosen so far."""

    def __init__(
        self,
        pool: Pool,
        free: set[str],
        chosen: Sequence[str],
        held: Mapping[str, int],
        gpus: Sequence[str],
        topology: Topology,
    ) -> None:
        mode = pool.config.mode
        self._exclusive = mode == "exclusive"
        self._packs = mode == "shared" and pool.config.placement == "pack"
        self._topology = topology
        self._gpus = sorted(set(gpus), key=_order)
        self._switches: dict[str, str] = {}
        self._distances: dict[tuple[str, str], Distance] = {}
        places = {one.id: one.pf or one.address or one.id for one in pool.hcas}
        # What the topology knows are the HCAs themselves, a VF perhaps without its PF.
        self._addresses = {places[one.id]: one.address for one in reversed(pool.hcas)}
        of_id: dict[str, str] = {}
        if mode != "all":  # whose ids are of no one HCA
            known = [slot for id_ in free if (slot := pool.slot(id_)) is not None]
            of_id = {slot.id: slot.hcas[0] for slot in known if slot.hcas}
        self._loads: Counter[str] = Counter()
        for name, count in held.items():
            if name in places:
                self._loads[places[name]] += max(count, 0)
        self._taken: Counter[str] = Counter()
        for id_ in chosen:
            if of_id.get(id_) in places:
                self._taken[places[of_id[id_]]] += 1
        self._free: dict[str, list[str]] = {}  # by place, the first to take last
        self._others: list[str] = []
        for id_, hca in self._sorted(free.difference(chosen), of_id, held):
            ids = self._free.setdefault(places[hca], []) if hca in places else self._others
            ids.append(id_)
        self._rank = {place: n for n, place in enumerate(sorted(self._free, key=_order))}

    def more(self, size: int) -> list[str]:
        """`size` more ids, or all that are left."""
        chosen: list[str] = []
        for way in (self._packed,) if self._packs else (self._near, self._balanced):
            if len(chosen) < size:
                chosen += [self._take(place) for place in way(size - len(chosen))]
        while len(chosen) < size and self._others:
            chosen.append(self._others.pop())
        return chosen

    def _sorted(
        self, free: set[str], of_id: Mapping[str, str], held: Mapping[str, int]
    ) -> list[tuple[str, str]]:
        """Ids with their HCAs ("" if not known), the first to take last.

        Of HCAs at one place, a pool that packs takes the most loaded one, else the least.
        """
        found = []
        nth: Counter[str] = Counter()
        for order, id_ in sorted((_order(one), one) for one in free):
            hca = of_id.get(id_, "")
            load = held.get(hca, 0)
            found.append((-load if self._packs else load + nth[hca], order, id_, hca))
            nth[hca] += hca != ""
        return [(id_, hca) for _, _, id_, hca in sorted(found, reverse=True)]

    def _take(self, place: str) -> str:
        ids = self._free[place]
        taken = ids.pop()
        if not ids:
            del self._free[place]
        self._taken[place] += 1
        return taken

    def _packed(self, size: int) -> Iterator[str]:
        """Fewest HCAs: one that has enough, if there is one, else the one that has most."""

        def order(place: str) -> tuple[int, ...]:
            return (
                -(self._taken[place] > 0),
                -min(len(self._free[place]), size),
                sum(self._cost(place, gpu) for gpu in self._gpus),
                -self._loads[place],
                self._rank[place],
            )

        while size > 0 and self._free:
            place = min(self._free, key=order)
            number = min(size, len(self._free[place]))
            size -= number
            yield from [place] * number

    def _near(self, size: int) -> Iterator[str]:
        """One HCA for each GPU, at the least sum of costs; with fewer, each for another switch."""
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
        """Distance and load; what is equal by these is told by the load alone, then the address."""
        load = self._loads[place]
        cost = (self._cost(place, gpu) + again) * _LOADS_PER_COST + min(load, _MOST_LOAD)
        return (cost * 4096 + min(load, 4095)) * 65536 + self._rank[place]

    def _unserved(self) -> list[str]:
        """The GPUs but those that the HCAs of `must_include` are for: the nearest of each."""
        gpus = list(self._gpus)
        for place in sorted(self._taken, key=_order):
            if gpus:
                gpus.remove(min(gpus, key=lambda gpu: self._cost(place, gpu)))
        return gpus

    def _balanced(self, size: int) -> Iterator[str]:
        """One by one: every HCA once, near to the GPUs if there are any, the switches in turn."""
        nearest = {
            place: min((self._cost(place, gpu) for gpu in self._gpus), default=0)
            for place in self._free
        }
        apart = {place: sum(self._apart(place, one) for one in self._taken) for place in nearest}
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
                apart[other] += self._apart(other, place)
            yield place

    def _cost(self, place: str, gpu: str) -> int:
        return COSTS[self._distance(place, gpu)]

    def _apart(self, place: str, other: str) -> int:
        return int(self._distance(place, other))

    def _distance(self, place: str, other: str) -> Distance:
        distance = self._distances.get((place, other))
        if distance is None:
            here, there = self._address(place), self._address(other)
            distance = self._distances[place, other] = self._topology.distance(here, there)
        return distance

    def _switch(self, place: str) -> str:
        """The switch that something is on; what is on none that is known is on one of its own."""
        switch = self._switches.get(place)
        if switch is None:
            switch = self._switches[place] = self._topology.switch(self._address(place)) or place
        return switch

    def _address(self, place: str) -> str:
        """By which the topology knows a place, or a GPU."""
        return self._addresses.get(place, place)


def _order(id_: str) -> tuple[str, int]:
    """By address, then slot: "0000:3b:00.0-9" before "0000:3b:00.0-10", "9" before "10"."""
    hca, _, slot = id_.rpartition("-")
    if slot.isascii() and slot.isdecimal() and len(slot) < 10:
        return hca, int(slot)
    return id_, -1
