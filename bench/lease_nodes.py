"""The nodes of `bench.leases`: address plugin, store and lessee of many agents, each with its
own directory, Node object and token. A process runs some of them, and takes orders from its
pipe."""

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from base import decoding
from base.loop import boottime
from bench.processes import in_threads
from cni.spec.errors import CNIError
from ipam.leases.lessee import Lessee
from ipam.plugin import AddressPlugin
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Stores
from kube.client import ClusterApi
from kube.requests import Lines, Query, Response, RestRequest
from kube.resources import Unavailable
from kube.transport import KubernetesApi
from tests.unit.ipam.calls import request

Ipam = Mapping[str, object]
BOOT = "boot-1"
TRIES = 40  # of one ADD, as its runtime repeats it


class Place(NamedTuple):
    """A node's directory, and its access to the API server. `leases`: its own thread leases."""

    name: str
    kubeconfig: Path
    directory: Path
    leases: bool = True


class State(NamedTuple):
    """The contents of a node's store, and the requests of its client."""

    name: str
    instance: str
    held: Sequence[tuple[str, str]]  # domain and address
    rows: Mapping[str, tuple[str, str]]  # uid and state by name
    calls: Mapping[str, int]  # by verb
    claims: int
    conflicts: int
    confirmed: float | None  # seconds ago


class Did(NamedTuple):
    """Results of ADDs: their durations, the end of the last one, errors by code, final failures."""

    seconds: Sequence[float]
    ended: float
    errors: Counter[int]
    failed: Sequence[str]


class Answer(NamedTuple):
    """The result of one ADD: the address, or the error's code and text; seconds."""

    address: str
    code: int
    text: str
    seconds: float


class Placed(NamedTuple):
    """A pod and its address ("" without one); seconds since its first ADD, and earlier error
    codes."""

    address: str
    seconds: float
    refused: Sequence[int]


class FaultyTransport:
    """Fails some requests. Half of the failed ones take effect, and their answer is lost."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - a Transport
        self._inner = inner
        self._random = random.Random(14)
        self.rate = 0.0
        self.calls: Counter[str] = Counter()

    def send(self, request: RestRequest, patience: float, most: int = 0) -> Response:
        self.calls[request.method] += 1
        fault = self._random.random()
        if fault < self.rate / 2:
            raise Unavailable("not sent")
        answer: Response = self._inner.send(request, patience, most)
        if fault < self.rate:
            raise Unavailable("cut off after the effect")
        return answer

    def follow(self, where: str, query: Query) -> Lines:
        self.calls["WATCH"] += 1
        lines: Lines = self._inner.follow(where, query)
        return lines


class Node:
    """One node. Its clock can be advanced."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.offset = 0.0
        self._client = KubernetesApi(place.kubeconfig)
        self.transport = FaultyTransport(self._client._client)
        self.files = StoreFiles(place.directory)
        self.lessee = Lessee(
            ClusterApi(self.transport, node=place.name),
            self.files,
            place.name,
            BOOT,
            clock=self.clock,
        )
        self._store = SqliteStore(self.files, BOOT)
        stores = Stores(self.files, lambda: "cluster", self.lessee, clock=self.clock)
        self.plugin = AddressPlugin(stores, lambda: BOOT)
        if place.leases:
            self.lessee.start()

    def clock(self) -> float:
        return boottime() + self.offset

    def add(self, pod: str, ipam: Ipam, ifname: str, did: list[float], errors: Counter[int]) -> str:
        """Add one interface of a pod, repeating as a runtime does; returns "" or an error."""
        began = time.monotonic()
        for _ in range(TRIES):
            answer = self.add_once(pod, f"{pod}-1", ipam, ifname)
            if answer.address:
                did.append(time.monotonic() - began)
                return ""
            errors[answer.code] += 1
            time.sleep(0.2)
        return f"{self.place.name} {pod}: {answer.text}"

    def add_once(self, pod: str, container: str, ipam: Ipam, ifname: str = "net0") -> Answer:
        """One ADD."""
        began = time.monotonic()
        try:
            result = self.plugin.reserve(request("ADD", ipam, container, pod=pod, ifname=ifname))[0]
        except CNIError as error:
            return Answer("", int(error.code), error.message, time.monotonic() - began)
        address = result.ips[0].address.partition("/")[0]
        return Answer(address, 0, "", time.monotonic() - began)

    def delete(self, pod: str, ifname: str) -> None:
        self.plugin.delete(request("DEL", None, f"{pod}-1", pod=pod, ifname=ifname))

    def state(self) -> State:
        with self.files.transaction() as tables:
            known = tables.instance()
            rows = {row.name: (row.uid, row.state) for row in tables.blocks()}
        held = [(each.domain, each.address) for each in self._store.reservations()]
        counted = self.lessee.counted()
        return State(
            self.place.name,
            known.id if known else "",
            held,
            rows,
            dict(self.transport.calls),
            counted.claims,
            counted.conflicts,
            counted.confirmed,
        )


class NodeProcess:
    """Some nodes in a separate process. Separate `ask` and `answer` let all processes work at
    once."""

    def __init__(self, places: Sequence[Place]) -> None:
        context = multiprocessing.get_context("spawn")
        self.places = places
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, places), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process' id."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, order: str, *arguments: object) -> None:
        self._pipe.send((order, arguments))

    def answer(self) -> list[Any]:
        """The answer of each node."""
        answers: list[Any] = self._pipe.recv()
        return answers

    def kill(self) -> None:
        """Kill the agents by SIGKILL."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, places: Sequence[Place]) -> None:
    with (places[0].directory.parent / f"{places[0].name}.log").open("w") as log:
        os.dup2(log.fileno(), 2)  # one line for each repeated ADD
    decoding.build_decoders()
    nodes = [Node(place) for place in places]
    while True:
        try:
            order, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(in_threads(lambda node: ORDERS[order](node, *arguments), nodes))  # noqa: B023


def _pods(node: Node, names: Sequence[str], ipams: Sequence[Ipam]) -> Did:
    """Add a pod of each name with an interface for each `ipam`, one after the other."""
    took: list[float] = []
    errors: Counter[int] = Counter()
    failed = [
        text
        for pod in names
        for number, ipam in enumerate(ipams)
        if (text := node.add(f"{node.place.name}-{pod}", ipam, f"net{number}", took, errors))
    ]
    return Did(took, time.monotonic(), errors, failed)


def _churn(node: Node, for_: float, pause: float, ipams: Sequence[Ipam]) -> Did:
    """Repeat ADD and DEL of a pod."""
    took: list[float] = []
    errors: Counter[int] = Counter()
    failed: list[str] = []
    end = time.monotonic() + for_
    number = 0
    while time.monotonic() < end:
        number += 1
        pod = f"{node.place.name}-churn-{number}"
        for index, ipam in enumerate(ipams):
            if text := node.add(pod, ipam, f"net{index}", took, errors):
                failed.append(text)
        for index in range(len(ipams)):
            node.delete(pod, f"net{index}")
        if pause:
            time.sleep(pause * random.uniform(0.5, 1.5))
    return Did(took, time.monotonic(), errors, failed)


def _placed(
    node: Node, pods: Mapping[str, Sequence[str]], ipam: Ipam, for_: float
) -> Sequence[Placed]:
    """Add all pods of this node at once. Each ADD is repeated, as by a runtime, for `for_` s."""

    def place(pod: str) -> Placed:
        began, refused = time.monotonic(), []
        while time.monotonic() - began < for_:
            answer = node.add_once(pod, f"{pod}-1", ipam)
            if answer.address:
                break
            refused.append(answer.code)
            time.sleep(0.2)
        return Placed(answer.address, time.monotonic() - began, refused)

    return in_threads(place, pods.get(node.place.name, ()))


def _removed(node: Node, pods: Mapping[str, Sequence[str]]) -> None:
    for pod in pods.get(node.place.name, ()):
        node.delete(pod, "net0")


def _tried(node: Node, pod: str, container: str, ipam: Ipam) -> Answer:
    return node.add_once(f"{node.place.name}-{pod}", container, ipam)


def _deletions(node: Node, names: Sequence[str], interfaces: int) -> Sequence[float]:
    """Seconds of each DEL."""
    took = []
    for pod in names:
        for number in range(interfaces):
            began = time.monotonic()
            node.delete(f"{node.place.name}-{pod}", f"net{number}")
            took.append(time.monotonic() - began)
    return took


def _forward(node: Node, seconds: float) -> None:
    """Advance the clock; the lessee's thread notices within a second."""
    node.offset += seconds


def _idle(node: Node, seconds: int) -> None:
    """Let time pass without a pod, second by second, for a lessee without a thread."""
    for _ in range(seconds):
        node.offset += 1.0
        node.lessee.step()


def _faults(node: Node, rate: float) -> None:
    node.transport.rate = rate


ORDERS: Mapping[str, Callable[..., Any]] = {
    "pods": _pods,
    "churn": _churn,
    "placed": _placed,
    "removed": _removed,
    "tried": _tried,
    "deletions": _deletions,
    "forward": _forward,
    "idle": _idle,
    "faults": _faults,
    "state": Node.state,
}
