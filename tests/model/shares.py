"""Shares of one address of one of nv-ipam's pools (docs/cluster-protocol.md), on two machines.

The entry of the address may move at any time: so each machine may begin to want it, or lose it, at
any step. All that goes wrong goes wrong on the first machine: its agent dies, it boots, a request
gets no answer and may arrive late, its Node object is gone and comes back, and the controller
fences and deletes its share. The second machine is well, and another leaves the share to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

MOST_FAULTS = 2  # kills, boots, and requests without an answer; what a controller does is not one


@dataclass(frozen=True)
class Rules:
    """What the protocol demands. Each can be left out."""

    share_before_look: bool = True
    look_after_share: bool = True
    file_loses_before_share: bool = True
    store_is_read_after_the_file: bool = True
    share_is_written_after_a_restart: bool = True
    confirmation_compares_the_uid: bool = True
    time_before_request: bool = True
    fenced_is_not_confirmed: bool = True
    fence_then_wait: bool = True
    proof_after_fence: bool = True
    reclaim_names_version: bool = True


class Share(NamedTuple):
    """An AddressShare. `ours` is whether the file has its uid."""

    x: bool
    fenced: bool = False
    ours: bool = False


class First(NamedTuple):
    """The first machine. Ages: 0 is none, 1 a time after the last fence, 2 one before it.

    `phase` is what its agent is about to do, `age` the time that belongs to it; `last` is the time
    of the agent's last confirmation, `confirmed` that in the file. `late` is a write that may still
    arrive: with the address ("x"), or without ("-").
    """

    share: Share | None = None
    file_x: bool = False
    confirmed: int = 0
    pod: bool = False
    phase: str = ""
    age: int = 0
    last: int = 0
    answered: bool = False
    late: str = ""
    node: bool = True
    controller: str = ""
    faults: int = 0


class Second(NamedTuple):
    """The other machine, on which nothing fails."""

    share: bool = False
    file_x: bool = False
    pod: bool = False
    phase: str = ""


class World(NamedTuple):
    a: First = First()
    b: Second = Second()


def one_owner(world: World) -> bool:
    """Whether no two pods have the address."""
    return not (world.a.pod and world.b.pod)


class SharesModel:
    """The steps of both machines and of the controller, by the rules."""

    def __init__(self, rules: Rules = Rules()) -> None:
        self._rules = rules

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Each step that is possible: its name, and the state after it."""
        a, b = world
        for name, after in self._first(a, b.share):
            yield f"a: {name}", World(after, b)
        sees = a.share is not None and a.share.x
        for name, other in self._second(b, sees=sees):
            yield f"b: {name}", World(a, other)

    def _first(self, a: First, other: bool) -> Iterator[tuple[str, First]]:
        yield from self._pods(a)
        if not a.phase and a.node:
            yield "notes the time, sees its Node", a._replace(phase="noted", age=1)
        if a.phase == "noted":
            yield "lists its shares", self._listed(a)
        if a.phase in ("whole", "lacking"):
            yield "writes the confirmation", self._confirmed(a)
        yield from self._widens(a, other)
        yield from self._narrows(a)
        yield from self._faults(a)
        yield from self._controller(a)

    def _pods(self, a: First) -> Iterator[tuple[str, First]]:
        if a.file_x and a.confirmed and not a.pod:
            yield "ADD", a._replace(pod=True)
        if a.pod:
            yield "DEL", a._replace(pod=False)

    # --- confirmation --------------------------------------------------------------------------

    def _listed(self, a: First) -> First:
        share, rules = a.share, self._rules
        is_whole = (
            share is not None
            and (share.ours or not rules.confirmation_compares_the_uid)
            and not (share.fenced and rules.fenced_is_not_confirmed)
            and (share.x or not a.file_x)
        )
        return a._replace(phase="whole" if is_whole else "lacking")

    def _confirmed(self, a: First) -> First:
        age = a.age if self._rules.time_before_request else 1
        share = a.share
        if a.phase == "lacking":
            # The file forgets the uid: all of it is looked for again before it is handed out.
            share = share and share._replace(ours=False)
            return a._replace(phase="", age=0, last=age, confirmed=0, share=share)
        return a._replace(phase="", age=0, last=age, confirmed=age)

    # --- widen ---------------------------------------------------------------------------------

    def _widens(self, a: First, other: bool) -> Iterator[tuple[str, First]]:
        rules, share = self._rules, a.share
        if not a.phase and a.last and not rules.look_after_share:
            yield "looks before its share", a._replace(phase="" if other else "looked")
        begins = "looked" if not rules.look_after_share else ""
        if a.phase == begins and a.last and a.node:
            is_there = share is not None and share.x and not share.fenced
            needless = a.answered or not rules.share_is_written_after_a_restart
            if is_there and needless:
                yield "its share has the address", a._replace(phase="shared")
            elif rules.share_before_look:
                yield "writes its share", _written(a, x=True)._replace(phase="shared")
                if a.faults < MOST_FAULTS:
                    lost = a._replace(late="x", answered=False, phase="", faults=a.faults + 1)
                    yield "writes its share, no answer", lost
            else:
                yield "has no share yet", a._replace(phase="shared")
        if a.phase == "shared":
            is_free = not other or not rules.look_after_share
            yield "lists the others", a._replace(phase="free" if is_free else "")
        if a.phase == "free":
            usable = a._replace(phase="", file_x=True)
            if a.share is None or a.share.fenced:
                usable = usable._replace(confirmed=0)
            else:
                usable = usable._replace(share=a.share._replace(ours=True), confirmed=a.last)
            yield "writes the file", usable
            if not rules.share_before_look:
                late = _written(usable, x=True)
                share = late.share and late.share._replace(ours=True)
                yield "writes file and share", late._replace(share=share, confirmed=a.last)

    # --- narrow --------------------------------------------------------------------------------

    def _narrows(self, a: First) -> Iterator[tuple[str, First]]:
        rules = self._rules
        if not a.phase and a.last and (a.file_x or (a.share is not None and a.share.x)):
            if rules.store_is_read_after_the_file:
                yield "its file loses the address", a._replace(phase="lost", file_x=False)
            else:
                held = "held" if a.pod else "unheld"
                yield "reads the store, then its file loses it", a._replace(phase=f"{held}, file")
        if a.phase == "lost":
            yield "reads the store", a._replace(phase="held" if a.pod else "unheld")
        if a.phase in ("held, file", "unheld, file"):
            phase = a.phase.partition(",")[0]
            yield "its file loses the address", a._replace(phase=phase, file_x=False)
        if a.phase == "held":
            yield "keeps its share", a._replace(phase="")
        if a.phase == "unheld":
            yield "narrows its share", _written(a, x=False)._replace(phase="")
            if a.faults < MOST_FAULTS:
                lost = a._replace(late="-", answered=False, phase="", faults=a.faults + 1)
                yield "narrows its share, no answer", lost
        if not rules.file_loses_before_share and not a.phase and a.file_x and not a.pod:
            yield "narrows its share first", _written(a, x=False)._replace(phase="lost")

    # --- what goes wrong -----------------------------------------------------------------------

    def _faults(self, a: First) -> Iterator[tuple[str, First]]:
        if a.late:
            late = _written(a, x=a.late == "x")
            yield "a late write arrives", late._replace(answered=a.answered, late="")
            yield "a late write never arrives", a._replace(late="")
        if a.node:
            yield "its Node object is deleted", a._replace(node=False)
        else:
            yield "its Node object is back", a._replace(node=True)
        if a.faults >= MOST_FAULTS:
            return
        dead = a._replace(phase="", age=0, last=0, answered=False, faults=a.faults + 1)
        yield "its agent dies", dead
        yield "boots", dead._replace(pod=False, confirmed=0)

    # --- the controller ------------------------------------------------------------------------

    def _controller(self, a: First) -> Iterator[tuple[str, First]]:
        rules, share = self._rules, a.share
        if share is None:
            return
        if not a.controller and not a.node:
            fenced = a._replace(
                share=share._replace(fenced=True),
                controller="fenced" if rules.fence_then_wait else "waited",
                late="",  # the version is another one
                confirmed=a.confirmed and 2,
                age=a.age and 2,
                last=a.last and 2,
            )
            yield "the controller fences its share", fenced
        if a.controller == "fenced":
            yield "the controller has waited", self._expired(a)._replace(controller="waited")
        # A Node object that is gone for so long is the administrator's word that no pod runs there.
        is_proved = not a.node and not a.pod
        if a.controller == "waited" and (is_proved or (a.node and not rules.proof_after_fence)):
            yield "the controller sends its DELETE", a._replace(controller="sent")
        is_as_fenced = share.fenced or not rules.reclaim_names_version
        if a.controller == "sent" and is_as_fenced:
            yield "its share is deleted", a._replace(share=None, controller="", late="")
        if a.controller and (a.node or not share.fenced):
            yield "the controller gives up", a._replace(controller="")

    def _expired(self, a: First) -> First:
        """The machine when maxOffline has passed since the fence: older times are worth nothing."""
        is_late = a.age == 2 and self._rules.time_before_request
        return a._replace(
            confirmed=a.confirmed if a.confirmed == 1 else 0,
            last=a.last if a.last == 1 else 0,
            age=0 if is_late else a.age,
            phase="" if is_late else a.phase,
        )

    # --- the other machine ---------------------------------------------------------------------

    def _second(self, b: Second, *, sees: bool) -> Iterator[tuple[str, Second]]:
        if b.file_x and not b.pod:
            yield "ADD", b._replace(pod=True)
        if b.pod:
            yield "DEL", b._replace(pod=False)
        if not b.phase and not b.file_x:
            yield "writes its share", b._replace(share=True, phase="shared")
        if b.phase == "shared":
            yield "lists the others", b._replace(phase="" if sees else "free")
        if b.phase == "free":
            yield "writes the file", b._replace(file_x=True, phase="")
        if not b.phase and b.share:
            yield "its file loses the address", b._replace(file_x=False, phase="lost")
        if b.phase == "lost":
            yield "writes its share again", b._replace(share=b.pod, phase="")


def _written(a: First, *, x: bool) -> First:
    """The share as a write leaves it: a share without the address is deleted. A write of this
    machine ends what waits for an earlier version, also a fence."""
    if not x:
        return a._replace(share=None, answered=True, late="", controller="")
    share = a.share or Share(x=True)
    is_same = a.share is not None
    new = Share(x=True, fenced=share.fenced and not a.node, ours=share.ours and is_same)
    return a._replace(share=new, answered=True, late="")
