"""A node with two RoCE HCAs that are made up, and the plugins `macvlan` and `ipvlan`."""

from pathlib import Path
from typing import Any, ClassVar

from base.paths import Paths
from base.pod import Pod
from cni.macvlan.plugin import Ipvlan, Macvlan
from cni.spec.plugin import Plugin
from policy import document
from policy.rules import Policy
from tests.kernel.pods import Node
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host.sysfs import Tree

HCAS = ("0000:17:00.0", "0000:3b:00.0")
POD = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME=worker-0;K8S_POD_UID=uid-0"


class MacvlanNode(Node):
    """A node with a RoCE HCA below each of roce0 and roce1."""

    kinds: ClassVar = {"macvlan": Macvlan, "ipvlan": Ipvlan}
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, root: Path, kind: str = "macvlan") -> None:
        super().__init__(root)
        self.type = kind  # type: ignore[misc]
        self.tree = Tree(root / "sys")
        self.paths = Paths(
            **{name: root / name for name in ("sys", "run", "state", "kubelet", "etc", "cni_bin")}
        )
        for number, hca in enumerate(HCAS):
            rdma, netdev = f"mlx5_{number}", f"roce{number}"
            self.tree.pf(hca)
            self.tree.netdev(hca, netdev)
            self.tree.rdma(hca, rdma)
            self.tree.port(rdma, link_layer="Ethernet", netdev=netdev)
            dev = f"231:{192 + number}"
            self.tree.character("infiniband_verbs", f"uverbs{number}", rdma, dev)
        self.holding = Holding(self.paths)

    def plugin(self) -> Plugin:
        return self.kinds[self.type](self.paths, policy=lambda: self.policy)

    def give(self, *hcas: str) -> None:
        self.holding.give(Pod("ml", "worker-0", "uid-0"), {f"{hca}-0": [hca] for hca in hcas})

    def allow(self, **rule: Any) -> None:  # noqa: ANN401
        written = [{"name": "r", "subjects": [{"namespaces": ["*"]}], **rule}]
        self.policy = Policy(rules=document.rules_of(written, "rules"))

    def gid(self, number: int, index: int, gid: str) -> None:
        """A row of the GID table of mlx5_<number>."""
        port = f"class/infiniband/mlx5_{number}/ports/1"
        self.tree.write(f"{port}/gids/{index}", gid)
        self.tree.write(f"{port}/gid_attrs/ndevs/{index}", f"roce{number}")
        self.tree.write(f"{port}/gid_attrs/types/{index}", "RoCE v2")
