"""Every key of our configurations, found from the types that read them, and hostile values.

A key that is added to a type is attacked automatically.
"""

import json
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import inspect

from cni.ipoib import options as ipoib
from cni.macvlan import options as macvlan
from cni.spec import config as spec
from cni.spec.result import DNS, Interface, IPConfig, Route
from cni.sriov import options as sriov
from ipam.config import options as ipam
from ipam.config.range_reader import RangeOptions

Key = tuple[str | int, ...]

IPAM = {"type": "podfabric-ipam", "range": "10.9.0.0/16"}
BASES: Mapping[str, Mapping[str, Any]] = {
    "podfabric-ipam": {"ipam": IPAM},
    "ipoib": {"master": "none0", "ipam": IPAM},
    "podfabric-macvlan": {"master": "none0", "ipam": IPAM},
    "sriov": {"deviceID": "0000:ff:1f.7", "ipam": IPAM},
    "rdma": {"prevResult": {"cniVersion": "1.1.0"}},
}
"""The smallest valid configuration of each plugin, to which one hostile key is added."""

# Keys that are decoded as plain objects first, and the type of each.
SECTIONS = {
    "ipam": ipam.IpamKeys,
    "ipRanges": RangeOptions,
    "ranges": RangeOptions,
    "addresses": ipam.StaticAddress,
    "routes": Route,
    "dns": DNS,
}
# Foreign objects, of which our plugins read a few keys.
FREE: Mapping[Key, tuple[str, ...]] = {
    ("args", "cni"): ("mac", "guid", "ips", sriov.IB_KUBERNETES_KEY, "other"),
    ("runtimeConfig",): ("mac", "infinibandGUID", "deviceID", "other"),
}
SHAPES: Mapping[str, Mapping[Key, type]] = {
    "podfabric-ipam": {
        ("ipam",): ipam.IpamKeys,
        ("runtimeConfig",): ipam.RuntimeIPs,
        ("args", "cni"): ipam.ArgumentIPs,
    },
    "ipoib": {(): ipoib.IpoibKeys},
    "podfabric-macvlan": {(): macvlan.MacvlanKeys},
    "sriov": {(): sriov._SriovConfig},
    "rdma": {},
}
ARGS = ("K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_UID", "IP", "GATEWAY", "MAC", "IgnoreUnknown")
# Keys that name files.
PATHS = (("ipam", "resolvConf"),)


def keys_of(plugin: str) -> list[Key]:
    """Every key of a configuration of that plugin."""
    keys: set[Key] = set()
    for at, shape in SHAPES[plugin].items():
        keys |= set(_keys(inspect.type_info(shape), at))
    for at, names in FREE.items():
        keys |= {at, at[:1], *((*at, name) for name in names)}
    keys |= {("ipam",), ("ipam", "type")}
    ours = (*spec.RUNTIME_KEYS, *spec.VALID_ATTACHMENTS, "logFile", "logLevel", "mac")
    keys |= {(key,) for key in ours}
    if plugin == "podfabric-ipam":
        keys |= {("ipam", key) for key in ipam.WITHOUT_EFFECT}
    for name, entry in (("interfaces", Interface), ("ips", IPConfig), ("routes", Route)):
        keys |= {("prevResult", name), *_keys(inspect.type_info(entry), ("prevResult", name, 0))}
    keys |= set(_keys(inspect.type_info(DNS), ("prevResult", "dns")))
    return sorted(keys, key=str)


def _keys(shape: inspect.Type, at: Key) -> Iterator[Key]:
    """The key of a value of this type, then the keys inside it."""
    if at:
        yield at
    if isinstance(shape, inspect.StructType):
        for field in shape.fields:
            yield from _keys(field.type, (*at, field.encode_name))
    elif isinstance(shape, inspect.UnionType):
        for member in shape.types:
            yield from _keys(member, at)
    elif isinstance(shape, inspect.ListType | inspect.VarTupleType):
        yield from _keys(shape.item_type, (*at, 0))
    elif isinstance(shape, inspect.DictType):
        yield from _of_object(at)


def _of_object(at: Key) -> Iterator[Key]:
    if at in FREE:
        yield from ((*at, key) for key in FREE[at])
        return
    name = next(step for step in reversed(at) if isinstance(step, str))
    section = SECTIONS[name]  # on a KeyError, add the type of this object above
    yield from _keys(inspect.type_info(section), at)


@dataclass(frozen=True)
class Bait:
    """A directory of files that no call may touch."""

    directory: Path
    SECRET = "the-secret-of-the-node"

    @classmethod
    def laid(cls, directory: Path) -> "Bait":
        (directory / "inside").mkdir(parents=True)
        (directory / "secret").write_text(f"nameserver 10.0.0.1\nsearch {cls.SECRET}\n")
        (directory / "link").symlink_to(directory / "secret")
        os.mkfifo(directory / "fifo")
        return cls(directory)

    @property
    def paths(self) -> dict[str, str]:
        return {
            "a FIFO": f"{self.directory}/fifo",
            "a link to a secret": f"{self.directory}/link",
            "a directory": f"{self.directory}/inside",
            "a new file": f"{self.directory}/new",
            "a device": "/dev/zero",
            "a process's own": "/proc/self/environ",
            "a way up": f"../../../../../../../../../..{self.directory}/secret",
        }


def values(bait: Bait) -> dict[str, bytes]:
    """Hostile values, as JSON."""
    paths = {name: json.dumps(path).encode() for name, path in bait.paths.items()}
    listed = {f"{name} in a list": b"[%s]" % path for name, path in paths.items()}
    texts = ("\x1b[31mred", "a\0b", "a\nb", "\u202eevil", "%s%n{x}", "../..", "-", "x" * 16_000)
    return {
        **paths,
        **listed,
        **{f"text {text[:8]!r}": json.dumps(text).encode() for text in texts},
        "a lone surrogate": b'"\\ud800x"',
        "9000 numbers": b"[" + b"1," * 8999 + b"1]",
        "3000 objects": b"[" + b"{}," * 2999 + b"{}]",
        "3000 lists": b"[" + b"[[]]," * 2999 + b"[[]]]",
        "4000 keys": json.dumps({f"k{number}": number for number in range(4000)}).encode(),
        "30 deep": b"[" * 28 + b"]" * 28,
        "600 deep": b"[" * 600 + b"]" * 600,
        "a mebibyte of numbers": b"[" + b"1," * ((1 << 19) - 1000) + b"1]",
        "a mebibyte of text": b'"' + b"x" * ((1 << 20) - 2000) + b'"',
        "a huge number": b"9" * 4000,
        "a huge negative one": b"-1" + b"0" * 400,
        "beyond a float": b"1e999",
        **{word: word.encode() for word in ("true", "null", "{}", "[]", "0.5", "-1", '""', "0")},
    }


def with_value(plugin: str, key: Key, value: bytes) -> bytes:
    """A configuration of the plugin with the value at that key."""
    mark = "@hostile@"
    whole: dict[str, Any] = {"cniVersion": "1.1.0", "name": "hostile", "type": plugin}
    whole |= deepcopy(dict(BASES[plugin]))
    holder: Any = whole
    for step, following in zip(key, (*key[1:], ""), strict=True):
        inner: Any = mark if following == "" else ([] if isinstance(following, int) else {})
        if isinstance(holder, list):
            holder.append(inner)
        elif following == "" or not isinstance(holder.get(step), type(inner)):
            holder[step] = inner
        else:
            inner = holder[step]
        holder = inner
    if plugin == "podfabric-ipam" and key[:2] in (("ipam", "subnet"), ("ipam", "addresses")):
        del whole["ipam"]["range"]
    if "ipRanges" in key and key[-1] not in ("range", "subnet", "ipRanges", 0):
        _holder(whole, key[:-1])["range"] = "10.9.0.0/16"
    return json.dumps(whole).encode().replace(b'"%s"' % mark.encode(), value)


def _holder(whole: Any, key: Key) -> Any:  # noqa: ANN401 - any JSON value
    for step in key:
        whole = whole[step]
    return whole if isinstance(whole, dict) else {}
