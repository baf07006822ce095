"""The netlink messages of podfabric: pyroute2's messages, with corrections and additions.

Attributes have the kernel's names. At the first use of a class, pyroute2 makes the class's table.
Subclasses inherit the table. So no class here may derive from a class that was used already.
"""

import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self, TypeVar

from pyroute2.netlink import NLA_F_NESTED, nla, nlmsg, nlmsg_base, nlmsgerr
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

RTEXT_FILTER_VF, RTEXT_FILTER_SKIP_STATS = 0x1, 0x8  # linux/rtnetlink.h
NETLINK_CAP_ACK = 10  # linux/netlink.h
NETLINK_RDMA = 20
# rdma/rdma_netlink.h: RDMA_NL_NLDEV << 10 | RDMA_NLDEV_CMD_GET and so on
RDMA_GET, RDMA_SET, RDMA_SYS_GET = (5 << 10 | command for command in (1, 2, 6))
RDMA_RES_GET, RDMA_RES_QP_GET, RDMA_RES_CM_ID_GET, RDMA_RES_CQ_GET, RDMA_RES_MR_GET = (
    5 << 10 | command for command in (9, 10, 11, 12, 13)
)

Message = TypeVar("Message", bound=nlmsg)
RDMA_OBJECTS = tuple(f"RDMA_NLDEV_ATTR_RES_{kind}" for kind in ("QP", "CM_ID", "CQ", "MR"))
_ATTRIBUTE = struct.Struct("HH")  # struct nlattr: length with this header, type
_RES_PID, _PID = 28, struct.Struct("I")  # RDMA_NLDEV_ATTR_RES_PID


def message(
    form: type[Message], attributes: Iterable[tuple[str, object]] = (), **fields: int
) -> Message:
    """A message to send, with these fields and attributes. It can be encoded only once."""
    made: Message = form()
    made.update(fields)
    made["attrs"] = list(attributes)
    return made


def attributes(decoded: Any) -> dict[str, Any]:  # noqa: ANN401 - pyroute2 is not typed
    """The attributes of a decoded message, or of a nested attribute: values by name."""
    return {attribute[0]: attribute[1] for attribute in decoded["attrs"]}


def _walk(data: bytes, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The offset, type and length of each attribute. The length includes the header."""
    while offset + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        yield offset, kind & ~NLA_F_NESTED, length
        offset += max(length + 3 & ~3, _ATTRIBUTE.size)


def _number(form: str) -> tuple[Callable[[Any], bytes], Callable[[bytes], object]]:
    number = struct.Struct(form)
    return number.pack, lambda payload: number.unpack_from(payload)[0]


def _packed_ip(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)


def _ip(payload: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET if len(payload) == 4 else socket.AF_INET6, payload)


_HEX = (
    lambda text: bytes.fromhex(text.replace(":", "")),
    lambda payload: payload.hex(":"),
)
_ATOMS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], object]]] = {
    **{kind: _number(getattr(nla, kind).fields[0][1]) for kind in ("uint8", "uint32", "uint64")},
    # pyroute2 decodes a name as UTF-8; in the kernel a name may have any bytes.
    "asciiz": (
        lambda text: text.encode(errors="surrogateescape") + b"\0",
        lambda payload: payload.rstrip(b"\0").decode(errors="surrogateescape"),
    ),
    # pyroute2 cuts an address after 6 bytes; InfiniBand addresses have 20.
    "l2addr": _HEX,
    "hex": _HEX,
    "ipaddr": (_packed_ip, _ip),
    "target": (_packed_ip, _ip),
}


class _Attributes(nlmsg_base):
    """Encodes and decodes attributes that are numbers, texts or addresses, by pyroute2's tables.

    pyroute2 makes an object of each attribute, which takes 6 to 15 µs of CPU. The kernel sends 41
    attributes for an interface. pyroute2 still encodes attributes of all other types. Other
    attributes are decoded only if `nested` has them.
    """

    data: Any
    length: int
    nested: ClassVar[tuple[str, ...]] = ()
    _named: ClassVar[dict[str, tuple[int, Callable[[Any], bytes] | None]]]
    _numbered: ClassVar[dict[int, tuple[str, Callable[[bytes], object] | None]]]

    def __init_subclass__(cls) -> None:
        cls._named, cls._numbered = {}, {}
        for position, entry in enumerate(cls.nla_map):
            kind, name, form = entry if len(entry) == 3 else (position, *entry)
            encode, decode = _ATOMS.get(form, (None, None))
            cls._named[name] = kind, encode
            if decode or name in cls.nested:
                decode = decode or getattr(getattr(cls, form, None), "of_payload", None)
                cls._numbered[kind] = name, decode

    @classmethod
    def of_payload(cls, payload: bytes) -> Self:
        """A nested attribute, decoded."""
        decoded = cls(payload, 0, len(payload))
        decoded.decode_nlas(0)
        return decoded

    def encode_nlas(self, offset: int) -> int:
        rest = []
        for name, value in self["attrs"]:
            kind, encode = self._named[name]
            if encode is None:
                rest.append((name, value))
            else:
                payload = encode(value)
                length = _ATTRIBUTE.size + len(payload)
                self.data += _ATTRIBUTE.pack(length, kind) + payload + bytes(-length % 4)
        self["attrs"] = rest
        return int(super().encode_nlas(len(self.data)))

    def decode_nlas(self, offset: int) -> None:
        rest = [self.data[:offset]]
        listed: list[Any] = self["attrs"]
        for at, kind, length in _walk(self.data, offset, self.length):
            if kind not in self._numbered:
                continue
            name, decode = self._numbered[kind]
            if decode is None:
                rest.append(self.data[at : at + (length + 3 & ~3)])
            else:
                listed.append((name, decode(self.data[at + _ATTRIBUTE.size : at + length])))
        self.data = b"".join(rest)
        self.length = len(self.data)
        super().decode_nlas(offset)


class _Message(_Attributes):
    """Encodes and decodes the header and the fields of a message in one step, which saves 30 µs."""

    _names: ClassVar[list[str]]
    _fixed: ClassVar[struct.Struct]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._names = [name for name, form in cls.fields if form != "x"]
        cls._fixed = struct.Struct("".join(form for _, form in (*nlmsg.header, *cls.fields)))

    def encode(self) -> None:
        header, fields = self["header"], (self[name] for name in self._names)
        self.data += self._fixed.pack(0, header["type"], header["flags"], 0, 0, *fields)
        self.encode_nlas(len(self.data))
        struct.pack_into("I", self.data, 0, len(self.data))

    def decode(self) -> None:
        fixed = self._fixed.unpack_from(self.data)
        names = [name for name, _ in nlmsg.header]
        self["header"] = dict(zip(names, fixed, strict=False))
        self.update(zip(self._names, fixed[len(names) :], strict=True))
        self.length = len(self.data)
        self.decode_nlas(self._fixed.size)


class AddressMessage(_Message, ifaddrmsg):
    """RTM_NEWADDR and RTM_GETADDR."""


class RouteMessage(_Message, rtmsg):
    """RTM_NEWROUTE and RTM_GETROUTE."""

    nested = ("RTA_MULTIPATH",)


class LinkMessage(_Message, ifinfmsg):
    """RTM_NEWLINK and the related messages."""

    # A request excludes statistics, because the kernel adds some of them up over all CPUs.
    ext_mask = RTEXT_FILTER_SKIP_STATS
    nested = ("IFLA_LINKINFO", "IFLA_XDP", "IFLA_PROP_LIST")
    nla_map = (
        *ifinfmsg.nla_map,  # which lacks the attributes since Linux 6.3
        ("IFLA_DEVLINK_PORT", "none"),
        ("IFLA_GSO_IPV4_MAX_SIZE", "uint32"),
        ("IFLA_GRO_IPV4_MAX_SIZE", "uint32"),
    )

    class proplist(_Attributes, ifinfmsg.proplist):
        """The alternative names."""

    class xdp(_Attributes, ifinfmsg.xdp):
        """The XDP programs."""

    class ifinfo(_Attributes, ifinfmsg.ifinfo):
        """The kind of the interface, and the data of that kind."""

        nested = ("IFLA_INFO_DATA",)
        kind = ""  # of a request: `encode_nlas` removes the attribute before the data's turn

        def encode_nlas(self, offset: int) -> int:
            self.kind = self.get_attr("IFLA_INFO_KIND")
            return super().encode_nlas(offset)

        @staticmethod
        def info_data(info: Any, *_: Any, **__: Any) -> type[nla]:  # noqa: ANN401
            """The class of the data."""
            kind = info.kind or info.get_attr("IFLA_INFO_KIND")
            form: type[nla] = info.data_map.get(kind, info.hex)
            return form

    class vflist(ifinfmsg.vflist):
        class vfinfo(ifinfmsg.vflist.vfinfo):
            """The settings of a VF, with the structs of linux/if_link.h."""

            class vf_mac(nla):
                """All 32 bytes (MAX_ADDR_LEN): pyroute2 decodes 6, and InfiniBand uses 20."""

                fields = (("vf", "I"), ("mac", "32s"))

            class vf_ib_node_guid(nla):
                """A 64-bit number in the host's byte order, which pyroute2 decodes as 32 bytes."""

                fields = (("vf", "I"), ("__align", "4x"), ("guid", "Q"))

            vf_ib_port_guid = vf_ib_node_guid

            class vf_vlist(ifinfmsg.vflist.vfinfo.vf_vlist):
                """The VLANs of a VF. The kernel accepts only one."""

                class ivvi(nla):
                    """pyroute2 lacks the last two bytes; the kernel refuses a shorter struct."""

                    fields = (*ifinfmsg.vflist.vfinfo.vf_vlist.ivvi.fields, ("__align", "2x"))


class PFMessage(LinkMessage):
    """A PF, with its undecoded VFs in `self["vfs"]`.

    The kernel writes the length of the list of VFs modulo 64 KiB (nla_nest_end). About 300 VFs
    exceed 64 KiB. So this class reads the list up to the first attribute that is not a VF, and
    skips the rest of the message.
    """

    ext_mask = RTEXT_FILTER_SKIP_STATS | RTEXT_FILTER_VF

    def decode_nlas(self, offset: int) -> None:
        self["vfs"] = []
        for at, kind, _ in _walk(self.data, offset, self.length):
            if kind == _VFINFO_LIST:
                for start, entry, length in _walk(self.data, at + _ATTRIBUTE.size, self.length):
                    if entry != 1:  # IFLA_VF_INFO
                        break
                    self["vfs"].append(self.vflist.vfinfo(self.data, start, length, self))
                self.length = at
                break
        super().decode_nlas(offset)


_VFINFO_LIST = [name for name, _ in LinkMessage.nla_map].index("IFLA_VFINFO_LIST")


class RdmaMessage(_Message, nlmsg):
    """NETLINK_RDMA's messages about devices (rdma/rdma_netlink.h), which pyroute2 lacks."""

    nla_map = (
        (1, "RDMA_NLDEV_ATTR_DEV_INDEX", "uint32"),
        (2, "RDMA_NLDEV_ATTR_DEV_NAME", "asciiz"),
        (6, "RDMA_NLDEV_ATTR_NODE_GUID", "uint64"),
        (15, "RDMA_NLDEV_ATTR_RES_SUMMARY", "hex"),
        (19, "RDMA_NLDEV_ATTR_RES_QP", "pids"),
        (30, "RDMA_NLDEV_ATTR_RES_CM_ID", "pids"),
        (35, "RDMA_NLDEV_ATTR_RES_CQ", "pids"),
        (40, "RDMA_NLDEV_ATTR_RES_MR", "pids"),
        (66, "RDMA_NLDEV_SYS_ATTR_NETNS_MODE", "uint8"),
        (67, "RDMA_NLDEV_ATTR_DEV_PROTOCOL", "asciiz"),
        (68, "RDMA_NLDEV_NET_NS_FD", "uint32"),
    )
    nested = RDMA_OBJECTS

    class pids(nla):
        """A table of RDMA objects."""

        @staticmethod
        def of_payload(table: bytes) -> list[int]:
            """The pid of each object. Objects of the kernel have no pid."""
            return [
                _PID.unpack_from(table, at + _ATTRIBUTE.size)[0]
                for start, _, length in _walk(table, 0, len(table))
                for at, kind, _ in _walk(table, start + _ATTRIBUTE.size, start + length)
                if kind == _RES_PID
            ]


class ErrorMessage(_Message, nlmsg):
    """NLMSG_ERROR with NETLINK_CAP_ACK. pyroute2's class has no fields for the request's header."""

    fields = (*nlmsgerr.fields, *((f"request_{name}", form) for name, form in nlmsg.header))
    nla_map = nlmsgerr.nla_map
