"""Between a request and the journal: which attachment it is about, what an entry would ask for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec

from base.locks import Busy
from base.paths import Paths
from cni.attachments.entry import ADDING, ATTACHED, JournalDamaged, JournalEntry
from cni.attachments.journal import Journal
from cni.spec.arguments import Pod
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from cni.spec.ipam import IpamConfig, ipam_of
from cni.spec.network_config import decode_leniently
from cni.spec.notes import note
from cni.spec.request import Request
from cni.spec.result import Result
from host.addresses import Hop
from host.errors import HostError
from host.namespaces import NetworkNamespace


def attachment_of(request: Request) -> Attachment:
    """The attachment a request is about. CNIError 4 for what the journal could not hold."""
    texts = {"IFNAME": request.ifname, "NETNS": request.netns, "ARGS": request.args}
    for name, text in {**texts, "PATH": ":".join(request.path)}.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CNIError(Code.INVALID_ENVIRONMENT, f"CNI_{name} is not UTF-8") from None
    return Attachment(request.network, request.container_id, request.ifname)


def namespace_of(request: Request) -> NetworkNamespace:
    """The pod's namespace, by its descriptor where one came. Raises HostError, NamespaceGone."""
    return NetworkNamespace.open(request.netns, request.netns_descriptor)


def require_still_there(namespace: NetworkNamespace) -> None:
    """Multus never cancels a call: the sandbox may be long gone when an ADD ends."""
    if namespace.was_removed():
        raise CNIError(
            Code.TRY_AGAIN, f'netns "{namespace.path}" was removed while the pod was attached'
        )


def begun(
    plugin: str,
    request: Request,
    namespace: NetworkNamespace,
    boot_id: str,
    record: msgspec.Struct,
    pod: Pod | None = None,
    device: str = "",
) -> JournalEntry:
    """The entry of an ADD that has changed nothing yet; `record` is what its undoing needs.

    `device` is the hardware that is to be this attachment's alone, if any is.
    """
    pod = pod or Pod()
    return JournalEntry(
        plugin=plugin,
        network=request.network,
        container_id=request.container_id,
        ifname=request.ifname,
        netns=request.netns,
        netns_identity=namespace.identity,
        netns_seen_from=namespace.seen_from,
        boot_id=boot_id,
        phase=ADDING,
        pod_namespace=pod.namespace,
        pod_name=pod.name,
        pod_uid=pod.uid,
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        config=request.config.raw.decode(),
        args=request.args,
        path=request.path,
        device=device,
        undo=msgspec.Raw(msgspec.json.encode(record)),
    )


def request_of(entry: JournalEntry) -> Request:
    """The DEL that the runtime would have sent for an entry."""
    environ = {
        "CNI_COMMAND": "DEL",
        "CNI_CONTAINERID": entry.container_id,
        "CNI_NETNS": entry.netns,
        "CNI_IFNAME": entry.ifname,
        "CNI_ARGS": entry.args,
        "CNI_PATH": ":".join(entry.path),
    }
    return Request(
        command="DEL",
        container_id=entry.container_id,
        netns=entry.netns,
        ifname=entry.ifname,
        args=entry.args,
        path=entry.path,
        config=decode_leniently(entry.config.encode()),
        network=entry.network,
        environ=environ,
    )


def ipam_at_add(entry: JournalEntry) -> IpamConfig:
    """The IPAM plugin that the ADD of an entry ran, and its options."""
    return ipam_of(request_of(entry))


def ipam_kept(journal: Journal, attachment: Attachment) -> IpamConfig:
    """Likewise of an attachment; none also where the journal cannot tell."""
    try:
        entry = journal.read(attachment)
    except JournalDamaged:
        return IpamConfig()
    return ipam_at_add(entry) if entry is not None else IpamConfig()


def hops(answer: Result) -> list[Hop]:
    """The routes of an IPAM result; one without a gateway goes through the addresses' own."""
    gateways: dict[int, str] = {}
    for ip in answer.ips:
        if ip.gateway:
            gateways.setdefault(ip.family, ip.gateway)
    return [
        Hop(
            destination=route.dst,
            gateway=route.gw or (None if route.scope == 253 else gateways.get(route.family)),
            table=route.table,
            scope=route.scope,
            priority=route.priority,
            mtu=route.mtu,
            advmss=route.advmss,
        )
        for route in answer.routes
    ]


def with_record(entry: JournalEntry, record: msgspec.Struct) -> JournalEntry:
    """The entry with another record of what its undoing needs."""
    return msgspec.structs.replace(entry, undo=msgspec.Raw(msgspec.json.encode(record)))


def attached(entry: JournalEntry, record: msgspec.Struct, addresses: Sequence[str]) -> JournalEntry:
    """The entry once all of the ADD is done."""
    complete = with_record(entry, record)
    return msgspec.structs.replace(complete, phase=ATTACHED, addresses=tuple(addresses))


def require_store(journal: Journal, paths: Paths) -> None:
    """A store that is gone would be taken for a new one: living pods' addresses, again."""
    if any(paths.ipam.glob("*.db")):
        return
    for entry in journal.entries():
        if isinstance(entry, JournalEntry) and entry.addresses:
            note(f"the journal has {entry.addresses[0]} of {entry.attachment}")
            raise CNIError(
                Code.STORE_DAMAGED,
                f"the address store in {paths.ipam} is gone, but the journal has addresses of "
                "attachments (the agent's log names one): no address was handed out; run "
                "`podfabric ipam fsck`",
            )


@contextmanager
def explained() -> Iterator[None]:
    """Errors from below as the runtime's."""
    try:
        yield
    except HostError as error:
        raise CNIError(Code.KERNEL, str(error)) from None
    except Busy as error:
        raise CNIError(Code.TRY_AGAIN, str(error)) from None
    except OSError as error:
        raise CNIError(
            Code.IO_FAILURE,
            f"cannot use {error.filename or 'a file'}: {error.strerror}: see that its file system "
            "is mounted, writable and not full, and that the process may open more files",
        ) from None
