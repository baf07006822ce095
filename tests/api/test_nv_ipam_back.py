"""There and back: nv-ipam's own daemon, mode own, and that daemon again, with all pods running."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse, text
from ipam.cluster.controller.rounds import Rounds, read_world
from ipam.cluster.nv_ipam.hand_back import NotPossible, hand_back, revoke
from ipam.cluster.nv_ipam.shares import JOINED
from ipam.cluster.objects import AddressBlock, AddressShare
from ipam.confirmed import boottime
from ipam.importing import import_all
from ipam.nv_ipam import importing
from ipam.nv_ipam.exporting import export, forget_freed, reopen
from tests.api import nv_ipam
from tests.api.nv_ipam import NAMESPACE, NodeDaemon, put_pool
from tests.api.server import ApiServer, name
from tests.api.test_nv_ipam_own import OwnApiNode
from tests.api.test_nv_ipam_own import kinds as kinds  # a fixture
from tests.cluster import programs
from tests.unit.cli.commands import short_path
from tests.unit.ipam.cluster.nv_ipam.nodes import duplicates
from tests.waiting import until

SIZE = 16  # addresses of an entry
OLD = 5  # pods of the daemon


class Return:
    """Two nodes of one IPPool, the first of which nv-ipam's daemon serves before and after."""

    def __init__(self, server: ApiServer, built: Path, root: Path, stack: ExitStack) -> None:
        self.server = server
        self.pool = name("back")
        self.ipam: dict[str, object] = {"poolName": self.pool}
        self.nodes = [self._node(root, stack, each) for each in ("a", "b")]
        self.a, self.b = self.nodes
        self.newcomer = name("newcomer")
        self.state = self.a.directory / "nv-ipam"
        self.daemon = NodeDaemon(server, built, self.state, self.a.name)
        self.rounds = Rounds(server.admin, nv_ipam=NAMESPACE)
        names = [self.a.name, self.b.name, self.newcomer]
        selected = [{"key": "metadata.name", "operator": "In", "values": [each]} for each in names]
        selector = {"nodeSelectorTerms": [{"matchFields": [each]} for each in selected]}
        spec = {"subnet": "10.31.0.0/24", "perNodeBlockSize": SIZE, "nodeSelector": selector}
        put_pool(server, "ippools", self.pool, spec)
        self.routed = {"poolName": name("prefixes"), "poolType": "cidrpool"}
        self.routed_spec = {"cidr": "10.32.0.0/26", "perNodeNetworkPrefix": 28} | {
            "nodeSelector": selector
        }

    def _node(self, root: Path, stack: ExitStack, letter: str) -> OwnApiNode:
        node = OwnApiNode(self.server, root, name(letter))
        node.directory = root / node.name
        stack.callback(self.server.kubectl, "delete", "node", node.name, "--ignore-not-found")
        stack.callback(node.service.close)
        return node

    def entries(self) -> dict[str, set[str]]:
        """The addresses of the entry of each node."""
        where = f"/apis/{nv_ipam.API}/namespaces/{NAMESPACE}/ippools/{self.pool}"
        _, found = self.server.send("GET", where)
        return {
            each["nodeName"]: {
                text(address) for address in range(parse(each["startIP"]), parse(each["endIP"]) + 1)
            }
            for each in found.get("status", {}).get("allocations") or ()
        }

    def shares(self) -> list[AddressShare]:
        return list(self.server.admin.list(AddressShare, {"spec.node": self.a.name}).items)

    def settle(self) -> None:
        """A round of podfabric's controller."""
        self.rounds.round(read_world(self.server.admin, time.monotonic, NAMESPACE))
        assert not self.rounds.steps.taken_errors()

    def has_joined(self) -> bool:
        self.settle()
        is_said = any(JOINED in share.metadata.annotations for share in self.shares())
        return is_said and not self.entries()

    def add(self, node: OwnApiNode, pod: str, ipam: dict[str, Any] | None = None) -> None:
        """ADD by podfabric, which the runtime repeats."""

        def added() -> bool:
            try:
                node.add(pod, ipam or self.ipam)
            except CNIError as error:
                assert error.code == Code.TRY_AGAIN, error
                self.settle()
                node.leases.lessee.step()
                return False
            return True

        until(added, what=f"address for {pod}", pause=0.2)

    def theirs(
        self, container: str, ipam: dict[str, Any] | None = None, command: str = "ADD"
    ) -> tuple[int, dict[str, Any]]:
        """ADD by nv-ipam's executable and daemon."""
        return self.daemon.call(command, self.daemon.config(ipam or self.ipam), container)

    def gives(self, container: str, ipam: dict[str, Any] | None = None) -> str:
        """The same, as soon as the daemon has seen the pool."""
        found: list[str] = []
        answer: dict[str, Any] = {}

        def given() -> bool:
            nonlocal answer
            code, answer = self.theirs(container, ipam)
            if code == 0:
                found.append(answer["ips"][0]["address"].partition("/")[0])
            return code == 0

        try:
            until(given, what=f"their address for {container}", pause=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}: {answer}") from None
        return found[0]

    def ours(self) -> set[str]:
        """What podfabric's pods hold, on both nodes."""
        assert not duplicates(self.nodes)
        return {address for node in self.nodes for address in node.held()}


@pytest.fixture
def there(kinds: ApiServer) -> Iterator[Return]:
    (built,) = programs.build([nv_ipam.PROGRAM])
    with short_path() as directory, ExitStack() as stack:
        yield Return(kinds, built, directory, stack)


def imported(node: OwnApiNode, store: Path) -> None:
    """As `podfabric ipam import` does."""
    import_all(node.store, importing.reservations(store, node.boot))
    ids: list[str] = []
    node.store.look(lambda tables: ids.append(tables.meta.store))
    importing.mark(node.directory, ids[0], store.read_bytes())


@pytest.mark.long
def test_their_daemon_with_its_old_store_gives_nothing_that_podfabric_gave(
    there: Return, tmp_path: Path
) -> None:
    built = there.daemon.executable.parent
    log = tmp_path / "controller.log"
    with nv_ipam.controller(there.server, built / "ipam-controller", log), there.daemon.running():
        old = {there.gives(f"old-{number}") for number in range(OLD)}
        until(lambda: there.b.name in there.entries(), what="entry of the other node")
    store = (there.state / "store").read_bytes()
    assert len(old) == OLD

    # Over to podfabric: both nodes join, and pods come.
    imported(there.a, there.state / "store")
    until(there.has_joined, what="no entries", pause=0.5)
    for number in range(20):
        there.add(there.nodes[number % 2], f"pod-{number}")
    assert old < there.ours()

    # Back, with all pods running.
    blocks = there.server.admin.list(AddressBlock).items
    (line,) = hand_back(there.server.admin, NAMESPACE, there.a.name)
    assert there.server.admin.list(AddressBlock).items == blocks
    assert (there.state / "store").read_bytes() == store
    entry = there.entries()[there.a.name]
    assert len(entry) == SIZE, line
    assert not entry & there.ours()
    there.settle()
    with there.daemon.running():
        given = {there.gives(f"new-{number}") for number in range(SIZE)}
        assert given == entry
        code, answer = there.theirs("too-many")
        assert (code != 0, "no free addresses" in str(answer)) == (True, True), answer
        # Pods of both times end there.
        for container in ("old-0", f"{there.a.name}-pod-0"):
            assert there.daemon.call("DEL", there.daemon.config(there.ipam), container)[0] == 0
        # The other node goes on with most of what is left.
        there.b.leases.clock.now += 500.0
        for number in range(180):
            there.add(there.b, f"more-{number}")
        assert len(there.ours()) > 200
        assert not given & there.ours()

        # Their controller keeps the entry, and cuts one for a new node.
        with nv_ipam.controller(there.server, built / "ipam-controller", log):
            there.server.machine(there.newcomer)
            until(lambda: there.newcomer in there.entries(), what="entry of the new node")
            assert there.entries()[there.a.name] == entry
    there.server.kubectl("delete", "node", there.newcomer)


@pytest.mark.long
def test_their_daemon_is_given_what_pods_of_prefixes_hold_and_goes_on_from_there(
    there: Return,
) -> None:
    a, store = there.a, there.state / "store"
    put_pool(there.server, "cidrpools", str(there.routed["poolName"]), there.routed_spec)
    # Shares are confirmed by the clock of this machine: ADDs are later, by the node's own.
    a.leases.clock.now = boottime() + 600.0
    for number in range(5):
        there.add(a, f"r{number}", there.routed)
        there.add(a, f"p{number}")
    ours = {*a.held()}
    with pytest.raises(NotPossible, match="podfabric ipam export"):
        list(hand_back(there.server.admin, NAMESPACE, a.name))

    # While the daemon runs nothing is written: it would not see it.
    with there.daemon.running():
        until(lambda: (there.state / "daemon.sock").exists(), what="socket of the daemon")
        with pytest.raises(CNIError, match="daemon answers"):
            until(lambda: bool(export(a.store, store)) and False, what="refusal", pause=0.1)
    assert len(export(a.store, store)) == 10
    with pytest.raises(CNIError, match="given back"):
        a.add("more", there.routed)

    def is_handed_back() -> bool:
        there.settle()
        try:
            return len(list(hand_back(there.server.admin, NAMESPACE, a.name))) == 2
        except NotPossible:
            a.service.follower.wake()
            return False

    until(is_handed_back, what="word of the node's agent", pause=0.2)

    with there.daemon.running():
        first = there.gives("first", there.routed)  # its store was read: the checksum is right
        given = {first} | {there.gives(f"new-{number}", there.routed) for number in range(8)}
        assert len(given) == 9  # of 14 addresses podfabric's pods have five
        assert not given & ours
        code, answer = there.theirs("too-many", there.routed)
        assert (code != 0, "no free addresses" in str(answer)) == (True, True), answer
        entry = there.entries()[a.name]
        by_pool = {there.gives(f"in-pool-{number}") for number in range(SIZE)}
        assert by_pool == entry
        assert not by_pool & ours
        # A pod of podfabric's ends there, and its address is free.
        (gone,) = [each for each in a.store.reservations() if each.container_id == "r0-1"]
        config = there.daemon.config(there.routed)
        assert there.daemon.call("DEL", config, gone.container_id, ifname=gone.ifname)[0] == 0
        assert there.gives("after", there.routed) == gone.address
        assert there.daemon.call("DEL", config, "after")[0] == 0
        assert there.daemon.call("DEL", config, "first")[0] == 0

    # And once more to podfabric.
    assert forget_freed(a.store, store, store.read_bytes()) == 1
    imported(a, store)
    reopen(a.directory)
    assert list(revoke(there.server.admin, NAMESPACE, a.name))
    there.add(a, "again", there.routed)
    held = [each.address for each in a.store.reservations()]
    assert len(held) == len(set(held)) == 4 + 8 + 1 + 5 + SIZE  # ours, theirs; in each pool
