"""Pods that hold several HCAs, for `"rails": "all"`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from base.paths import Paths
from base.pod import Pod
from tests.kernel import cards, igb
from tests.kernel.pods import IP, Node, SriovNode, link_names, run
from tests.unit.deviceplugin.holding import Holding

RAILS = 4


class RailPods(NamedTuple):
    """Four HCAs of one kind. `state` is all host state that an ADD may change."""

    node: type[Node]
    hcas: Sequence[str]
    config: Mapping[str, Any]
    state: Callable[[], object]
    broken: Callable[[], Any]  # a block in which HCA 2 cannot be attached

    def on(self, root: Path) -> Node:
        """A node on which the pod "four" holds all HCAs, and the pod "one" the first HCA."""
        node = self.node(root)
        node.paths = Paths(run=root / "run", state=root / "state", kubelet=root / "kubelet")
        holding = Holding(node.paths)
        for name, hcas in (("four", self.hcas), ("one", self.hcas[:1])):
            holding.give(Pod("ml", name, f"uid-{name}"), {f"{hca}-{name}": [hca] for hca in hcas})
        return node

    def of(self, pod: str) -> dict[str, Any]:
        """The configuration and CNI_ARGS of a pod's calls."""
        of_pod = f"K8S_POD_NAMESPACE=ml;K8S_POD_NAME={pod};K8S_POD_UID=uid-{pod}"
        ranges = [{"range": f"10.8.{number}.0/24"} for number in range(RAILS)]
        addresses = {"type": "podfabric-ipam", "rails": ranges}
        rails = {"rails": "all", "ipam": addresses, "args": f"IgnoreUnknown=1;{of_pod}"}
        return {**self.config, **rails}


@contextmanager
def ipoib_rails() -> Iterator[RailPods]:
    """Four HCAs with IPoIB parents, for the block."""
    with igb.with_many_hcas(RAILS):
        hcas = [f"ibloop{number}" for number in range(RAILS)]
        yield RailPods(Node, hcas, {"master": "auto"}, link_names, _parent_down)


@contextmanager
def vf_rails() -> Iterator[RailPods]:
    """Four VFs, for the block."""
    with igb.with_addressed_vfs(cards.cards()[0], RAILS) as card:
        settings = {"vlan": 100, "trust": "on"}
        broken = partial(_without_driver, card.vfs[2])
        yield RailPods(SriovNode, card.vfs, settings, cards.snapshot, broken)


@contextmanager
def _parent_down() -> Iterator[None]:
    run(IP, "link", "set", "ib2", "down")
    try:
        yield
    finally:
        run(IP, "link", "set", "ib2", "up")
        igb.await_carrier("ib2")


@contextmanager
def _without_driver(vf: str) -> Iterator[None]:
    igb.unbind(vf)
    try:
        yield
    finally:
        igb.bind(vf, "igbvf")
        cards.await_netdev(vf)
