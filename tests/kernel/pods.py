"""The node under test: namespaces are pods, and calls are made as a runtime makes them.

Calls go through `cni.spec.dispatch.answer` in this process, because an interpreter's start takes
seconds on an emulated CPU. The demonstration and the conformance suite start the executables
themselves.
"""

import fcntl
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from base.paths import Paths
from cni.ipoib import child
from cni.ipoib.plugin import IPoIB
from cni.rdma.plugin import Rdma
from cni.spec.attachment import Attachment
from cni.spec.dispatch import answer
from cni.spec.errors import Code
from cni.spec.plugin import Plugin
from cni.sriov.plugin import Sriov
from host import netdev_move
from host.errors import NamespaceGone
from host.namespaces import NetworkNamespace
from host.netlink import links
from host.netlink.links import Link
from host.netlink.sockets import netlink
from ipam.store.sqlite_store import SqliteStore
from policy.rules import Policy
from tests.waiting import until

IP = "/usr/sbin/ip"
INFINIBAND = Path("/sys/class/infiniband")
# Many processes use one store alternately. On a busy machine some of them time out repeatedly until
# the other processes are done.
AT_ONCE = 400.0  # seconds
NETWORK = "fabric"


class Reply(NamedTuple):
    """An answer of the plugin."""

    exit_code: int
    document: dict[str, Any]

    @property
    def text(self) -> str:
        """The message of an error."""
        return str(self.document["msg"])

    @property
    def addresses(self) -> list[str]:
        """The addresses of a result, without prefix length."""
        return [ip["address"].partition("/")[0] for ip in self.document["ips"]]

    @property
    def interface(self) -> dict[str, Any]:
        """The interface of a result."""
        (interface,) = self.document["interfaces"]
        assert isinstance(interface, dict)
        return interface


class Node:
    """The plugin `ipoib` on this machine; its files are below `root`."""

    type: ClassVar = "ipoib"
    defaults: ClassVar[dict[str, Any]] = {"master": "ib0"}

    def plugin(self) -> Plugin:
        """The plugin as an agent would make it."""
        return IPoIB(self.paths, policy=lambda: self.policy)

    unanswered_since: int | None = None  # set by a launcher that repeats a call

    def __init__(self, root: Path) -> None:
        self.paths = Paths(run=root / "run", state=root / "state")
        self.policy = Policy()

    def call(
        self,
        command: str,
        container_id: str,
        netns: str,
        *,
        previous: Reply | None = None,
        ifname: str = "net1",
        args: str = "",
        **config: Any,  # noqa: ANN401 - keys of a network configuration
    ) -> Reply:
        """Call one verb. `config` changes the plugin's default configuration; `None` removes a
        key."""
        environ = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container_id,
            "CNI_NETNS": netns if not netns or "/" in netns else f"/var/run/netns/{netns}",
            "CNI_IFNAME": ifname,
            "CNI_ARGS": args,
            "CNI_PATH": "/opt/cni/bin",
        }
        least = {"cniVersion": "1.1.0", "name": NETWORK, "type": self.type}
        every = {**least, **self.defaults, **config}
        document = {key: value for key, value in every.items() if value is not None}
        if previous is not None:
            document["prevResult"] = previous.document
        stdin = json.dumps(document).encode()
        if self.unanswered_since is not None:
            environ["PODFABRIC_UNANSWERED_SINCE"] = str(self.unanswered_since)
        reply = answer(self.plugin, environ, lambda: stdin)
        return Reply(reply.exit_code, json.loads(reply.document or b"{}"))

    def add(self, container_id: str, netns: str, **config: Any) -> Reply:  # noqa: ANN401
        """An ADD that must succeed."""
        reply = self.call("ADD", container_id, netns, **config)
        assert reply.exit_code == 0, reply.document
        return reply

    def delete(self, container_id: str, netns: str, **config: Any) -> None:  # noqa: ANN401
        """Call a DEL that must succeed and print nothing.

        A runtime repeats the call if an interface has not returned from a dead namespace in time.
        """

        def last() -> Reply | None:
            reply = self.call("DEL", container_id, netns, **config)
            late = reply.exit_code != 0 and "is not back on the host yet" in reply.text
            return None if late else reply

        assert until(last) == Reply(0, {})

    def attach(self, name: str, **config: Any) -> None:  # noqa: ANN401
        """Repeat DEL and ADD, as a runtime does, if the machine was too busy for the first ADD.

        The container's id is the name of its namespace.
        """

        def is_attached() -> bool:
            reply = self.call("ADD", name, name, **config)
            if reply.exit_code:
                assert reply.document["code"] == Code.TRY_AGAIN, reply
                self.detach(name, **config)
            return reply.exit_code == 0

        until(is_attached, AT_ONCE)

    def detach(self, name: str, **config: Any) -> None:  # noqa: ANN401
        """Repeat DEL until it succeeds: on a busy machine a call may time out waiting for the
        store."""

        def is_detached() -> bool:
            reply = self.call("DEL", name, name, **config)
            if reply.exit_code:
                again = (Code.TRY_AGAIN, Code.CLEANUP_INCOMPLETE)
                assert reply.document["code"] in again, reply
                assert "try again" in reply.document["msg"], reply
            return reply.exit_code == 0

        until(is_detached, AT_ONCE)

    def refused(self, container_id: str, netns: str, **config: Any) -> Reply:  # noqa: ANN401
        """Call an ADD that must fail and leave nothing; the runtime's DEL after it succeeds."""
        before = link_names()
        reply = self.call("ADD", container_id, netns, **config)
        assert reply.exit_code == 1, reply.document
        assert link_names() == before
        assert self.leftovers() == []
        self.delete(container_id, netns, **config)
        return reply

    def leftovers(self) -> list[str]:
        """Journal files, reservations, held locks and marked interfaces: [] after every DEL."""
        with netlink() as host:
            marked = [
                f"interface {link.name}"
                for link in links.every(host)
                if link.alias.startswith(child.ALIAS_PREFIX)
                or (link.parent and netdev_move.is_unfinished(link))
            ]
        attachments = self.paths.attachments
        journal = [
            f"journal {path.relative_to(attachments)}"
            for path in sorted(attachments.rglob("*"))
            if not path.is_dir()
        ]
        # The lock file of a device or PF may stay if no process holds the lock.
        locks = [
            f"lock {path.name}"
            for path in _listing(self.paths.locks)
            if path.name.startswith("attachment-") or _is_held(path)
        ]
        return marked + journal + locks + [f"address {held}" for held in self.reservations()]

    def reservations(self) -> list[str]:
        """Every reserved address."""
        if not self.paths.ipam.exists():
            return []
        store = SqliteStore(self.paths.ipam, self.paths.boot_id())
        return [reservation.address for reservation in store.reservations()]

    def journal_file(self, container_id: str, ifname: str = "net1") -> Path:
        """The journal file of an attachment."""
        key = Attachment(NETWORK, container_id, ifname).key
        (path,) = self.paths.attachments.glob(f"*-{key}.json")
        return path


class SriovNode(Node):
    """A node with the plugin `sriov`; each call names its device."""

    type: ClassVar = "sriov"
    defaults: ClassVar[dict[str, Any]] = {}

    def plugin(self) -> Plugin:
        return Sriov(self.paths, policy=lambda: self.policy)


class RdmaNode(SriovNode):
    """A node with the plugin `rdma`, which follows `sriov` in a chain."""

    type: ClassVar = "rdma"

    def plugin(self) -> Plugin:
        return Rdma(self.paths)


def _is_held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _listing(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


@contextmanager
def pod(name: str) -> Iterator[str]:
    """A pod's network namespace."""
    run(IP, "netns", "add", name)
    try:
        yield name
    finally:
        subprocess.run([IP, "netns", "delete", name], check=False, capture_output=True)


def delete_children(netns: str) -> None:
    """Delete the children in a pod. Otherwise the kernel moves them to the host some time later."""
    with suppress(NamespaceGone):
        for name in link_names(netns, "ipoib"):
            run(IP, "-n", netns, "link", "delete", name)


def link_in(netns: str, name: str = "net1") -> Link | None:
    """An interface of a pod."""
    with NetworkNamespace.open(f"/var/run/netns/{netns}") as space, netlink(space) as route:
        return links.find(route, name)


def link_names(netns: str = "", kind: str = "") -> set[str]:
    """The names of a pod's or the host's interfaces, of one kind or all."""
    if not netns:
        with netlink() as route:
            return {link.name for link in links.every(route, kind)}
    with NetworkNamespace.open(f"/var/run/netns/{netns}") as space, netlink(space) as route:
        return {link.name for link in links.every(route, kind)}


def pings(netns: str, address: str, tries: int = 5) -> bool:
    """Whether an echo returns; address resolution may use up the first tries."""
    command = [IP, "netns", "exec", netns, "ping", "-n", "-c", "1", "-W", "1", address]
    return any(
        subprocess.run(command, check=False, capture_output=True).returncode == 0
        for _ in range(tries)
    )


def run(*command: str) -> str:
    """A command's standard output. Raises an error if the command fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def knob(hca: int, name: str) -> Path:
    """A switch of the software HCA (tests/kernel/ibloop/README.md)."""
    return INFINIBAND / f"ibloop{hca}" / "ibloop" / name


def ipam(cidr: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """The `ipam` object for a range."""
    return {"type": "podfabric-ipam", "range": cidr, **more}
