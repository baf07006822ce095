"""One call of the plugin without a process, and stores to make it on."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec

from base.pod import Pod
from cni.spec.attachment import Attachment
from cni.spec.config import decode, decode_for_removal
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.spec.result import Result
from ipam.addresses import parse, parse_interface
from ipam.plugin import AddressPlugin
from ipam.ranges import Range, RangeSet, of_network
from ipam.store.reservations import Owner, Reservation
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Stores
from policy import rules
from policy.rules import Policy

BOOT = "11111111-1111-1111-1111-111111111111"
NEXT_BOOT = "22222222-2222-2222-2222-222222222222"

Json = Mapping[str, object]


class How(TypedDict, total=False):
    """The values of a call that differ from the default. `config` is added to the configuration."""

    network: str
    ifname: str
    version: str
    pod: str
    uid: str
    args: str
    path: Sequence[str]
    config: Json


class Calls:
    """A node with a store of its own: the verbs, with everything that matters as an argument."""

    def __init__(self, files: Path | StoreFiles, boot: str = BOOT) -> None:
        self.files = files
        self.boot = boot
        self.policy = Policy()
        self.policy_source: rules.Source = lambda: self.policy

    @property
    def directory(self) -> Path:
        """Where the store is."""
        return self.files if isinstance(self.files, Path) else self.files.directory

    @property
    def plugin(self) -> AddressPlugin:
        """A new one for each call, as for each process."""
        return AddressPlugin(Stores(self.files), lambda: self.boot, self.policy_source)

    @property
    def store(self) -> SqliteStore:
        """The same store from the other side."""
        return SqliteStore(self.files, self.boot)

    def add(self, ipam: Json, container_id: str = "c1", **how: Unpack[How]) -> Result:
        """ADD; the result."""
        return self.plugin.reserve(request("ADD", ipam, container_id, **how))[0]

    def addresses(self, ipam: Json, container_id: str = "c1", **how: Unpack[How]) -> list[str]:
        """ADD; the addresses of the result with their prefixes."""
        return [ip.address for ip in self.add(ipam, container_id, **how).ips]

    def delete(self, ipam: Json | None, container_id: str = "c1", **how: Unpack[How]) -> None:
        """DEL."""
        self.plugin.delete(request("DEL", ipam, container_id, **how))

    def check(self, ipam: Json, container_id: str = "c1", **how: Unpack[How]) -> None:
        """CHECK."""
        self.plugin.check(request("CHECK", ipam, container_id, **how))

    def gc(self, ipam: Json | None = None, **how: Unpack[How]) -> None:
        """GC."""
        self.plugin.gc(request("GC", ipam, "", **how))

    def status(self, ipam: Json, **how: Unpack[How]) -> None:
        """STATUS."""
        self.plugin.status(request("STATUS", ipam, "", **how))

    def held(self) -> dict[str, str]:
        """Address to container id, for everything."""
        return {
            reservation.address: reservation.container_id
            for reservation in self.store.reservations()
        }


def request(command: str, ipam: Json | None, container_id: str, **how: Unpack[How]) -> Request:
    """A request as `cni.spec` would have read it. `ipam` None leaves the key out."""
    pairs = ["IgnoreUnknown=1"]
    if how.get("pod"):
        pairs += ["K8S_POD_NAMESPACE=ns", f"K8S_POD_NAME={how['pod']}"]
    if how.get("uid"):
        pairs.append(f"K8S_POD_UID={how['uid']}")
    if how.get("args"):
        pairs.append(how["args"])
    network, version = how.get("network", "n1"), how.get("version", "1.0.0")
    document = {"cniVersion": version, "name": network, "type": "macvlan", **how.get("config", {})}
    if ipam is not None:
        document["ipam"] = {"type": "podfabric-ipam", **ipam}
    decoder = decode_for_removal if command in ("DEL", "GC") else decode
    return Request(
        command=command,
        container_id=container_id,
        netns="/var/run/netns/nobody-made-this",
        ifname=how.get("ifname", "eth0"),
        args=";".join(pairs),
        path=tuple(how.get("path", ())),
        config=decoder(json.dumps(document).encode()),
        network=network,
        cni_version=version,
        environ={},
    )


def error_of(call: Callable[[], object]) -> CNIError:
    """The CNIError that the call raises."""
    try:
        answer = call()
    except CNIError as error:
        return error
    raise AssertionError(f"no error, but {answer!r}")


def range_of(
    cidr: str, start: str = "", end: str = "", *, use_all: bool = False, domain: str = ""
) -> Range:
    """A range without exclusions."""
    network = parse_interface(cidr)[1]
    first, last = of_network(
        network,
        start=parse(start) if start else None,
        end=parse(end) if end else None,
        use_all=use_all,
    )
    return Range(network=network, first=first, last=last, domain=domain)


def sets_of(*ranges: Range) -> tuple[RangeSet, ...]:
    """Each range as a set of its own."""
    return tuple(RangeSet((range_,)) for range_ in ranges)


def owner(container_id: str, *, network: str = "n1", ifname: str = "eth0", pod: str = "") -> Owner:
    """An owner, of the pod ns/<pod> if that is given."""
    return Owner(
        Attachment(network, container_id, ifname), Pod(namespace="ns", name=pod) if pod else Pod()
    )


def reservation(address: str, container_id: str, **how: str | int) -> Reservation:
    """A reservation of this boot in network n1, with the changes in `how`."""
    usual = Reservation(
        domain="",
        address=address,
        range="10.0.0.0/8",
        network="n1",
        container_id=container_id,
        ifname="eth0",
        boot=BOOT,
        since=1_700_000_000,
        segment="",
    )
    return msgspec.structs.replace(usual, **how)
