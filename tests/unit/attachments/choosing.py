"""How attachments of `ipoib` and `sriov` choose an HCA, on servers made of files."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP

from base.paths import Paths
from base.pod import Pod
from cni.attachments.matching import Match, matched
from cni.ipoib import options as ipoib_options
from cni.ipoib import parents
from cni.spec.config import decode
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.sriov import candidates
from cni.sriov import options as sriov_options
from cni.sriov import vf_policy as sriov_permitted
from host.netlink import links
from host.netlink.links import ARPHRD_INFINIBAND, Link
from host.netlink.sockets import Rtnetlink
from host.sysfs import pci
from policy.allowance import Allowance, of_pod
from policy.rules import Policy
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

ROUTE = cast(Rtnetlink, "host")
POD = Pod("ml", "worker-0", "uid-0")
OTHER = Pod("ml", "worker-1", "uid-1")
SAFE = Policy()
CNI_ARGS = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME=worker-0;K8S_POD_UID=uid-0"


def show(paths: Paths, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let the kernel list the interfaces of a server, all up."""
    shown = {
        path.name: Link(
            index=int((path / "ifindex").read_text()),
            name=path.name,
            kind=kind,
            link_type=ARPHRD_INFINIBAND,
            mac=(path / "address").read_text().strip(),
            broadcast="",
            mtu=2044,
            flags=IFF_UP,
            pkey=0xFFFF,
            mode="datagram",
        )
        for path in sorted((paths.sys / "class/net").iterdir())
    }
    monkeypatch.setattr(links, "find", lambda route, name: shown.get(name))
    monkeypatch.setattr(links, "every", lambda route, kind="": list(shown.values()))


def request(ifname: str = "net1", cni_args: str = CNI_ARGS, **config: Any) -> Request:  # noqa: ANN401
    """An ADD of an attachment to the network `fabric`."""
    return Request(
        command="ADD",
        container_id="c1",
        ifname=ifname,
        args=cni_args,
        network="fabric",
        config=decode(json.dumps({"name": "fabric", **config}).encode()),
    )


@contextmanager
def match_of(
    paths: Paths, call: Request, allowance: Allowance, *, needed: bool, wanted: bool
) -> Iterator[Match]:
    """The match of a call, with the lock that an ADD holds while it chooses."""
    match = matched(
        paths, call, call.arguments.pod, needed=needed, match_device=wanted, allowance=allowance
    )
    with match.choosing():
        yield match


def ipoib(
    node: Holding,
    ifname: str = "net1",
    cni_args: str = CNI_ARGS,
    policy: Policy = SAFE,
    **config: Any,  # noqa: ANN401
) -> str:
    """The parent that an ADD of `ipoib` takes."""
    call = request(ifname, cni_args, **{"type": "ipoib", "master": "auto"} | config)
    wanted = ipoib_options.read(call)
    allowance = ipoib_options.allowed(wanted, of_pod(policy, call.arguments.pod))
    ask = {"needed": not wanted.masters, "wanted": wanted.match_device}
    with match_of(node.paths, call, allowance, **ask) as match:
        plan = parents.choose(ROUTE, node.paths, wanted, call, match)
        match.take(plan.hca)
    return plan.parent.name


def sriov(
    node: Holding,
    ifname: str = "net1",
    cni_args: str = CNI_ARGS,
    policy: Policy = SAFE,
    **config: Any,  # noqa: ANN401
) -> str:
    """The device that an ADD of `sriov` takes, if the first that fits is free."""
    call = request(ifname, cni_args, **{"type": "sriov"} | config)
    wanted = sriov_options.read(call)
    allowance = sriov_permitted.by_options(wanted, of_pod(policy, call.arguments.pod))
    ask = {"needed": not wanted.device and not wanted.masters, "wanted": wanted.match_device}
    with match_of(node.paths, call, allowance, **ask) as match:
        refusals: list[CNIError] = []
        for address in candidates.candidates(node.paths, wanted, match):
            function = pci.find(node.paths, address)
            assert function is not None
            try:
                candidates.require_entitled(node.paths, address, wanted, match)
                key = wanted.device_key or "master"
                match.using(address, key, address)
                candidates.require_match(node.paths, function, wanted, match)
            except CNIError as refusal:
                refusals.append(refusal)
                continue
            match.take(address)
            return address
    raise refusals[0]


def refusal(call: Any, *given: Any, **config: Any) -> CNIError:  # noqa: ANN401
    """The error of a call."""
    with pytest.raises(CNIError) as caught:
        call(*given, **config)
    return caught.value


def swap(paths: Paths, first: int, second: int) -> None:
    """Exchange the uverbs devices of the RDMA devices mlx5_N with these numbers."""
    tree = Tree(paths.sys, paths)
    for number in (first, second):
        link = tree.root / f"class/infiniband_verbs/uverbs{number}"
        shutil.rmtree(link.resolve())
        link.unlink()
    for number, other in ((first, second), (second, first)):
        dev = f"{servers.MAJOR}:{servers.UVERBS + other}"
        tree.character("infiniband_verbs", f"uverbs{other}", f"mlx5_{number}", dev)
