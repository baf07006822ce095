"""Counts objects and lines of the quick starts and of NVIDIA's Network Operator's.

`python -m tools.quick_start` prints a table. It fails if a quick start has more than two objects,
an object has more than 25 lines, or one names an interface or an address, which differ between
nodes.
"""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

EXAMPLES = Path(__file__).parent.parent / "netattach-examples"
MOST_OBJECTS, MOST_LINES = 2, 25
_AUTO = "auto"  # the plugin finds the interface on each node
_NAMING_KEYS = ("master", "pfNames", "ifNames", "rootDevices", "pciAddresses", "rdmaDevices")


class QuickStart(NamedTuple):
    """An example, and the size of the Network Operator's generated manifest (26.4) for the same
    task."""

    profile: str
    file: str
    their_objects: int
    their_lines: int  # without blanks and comments


QUICK_STARTS = (
    QuickStart("IPoIB, RDMA shared", "ipoib-auto.yaml", 10, 187),
    QuickStart("SR-IOV InfiniBand", "sriov-infiniband.yaml", 5, 87),
    QuickStart("SR-IOV Ethernet RDMA", "sriov-roce.yaml", 6, 130),
    QuickStart("host device RDMA", "sriov-whole-pf.yaml", 4, 80),
    QuickStart("macvlan RDMA shared", "roce-macvlan.yaml", 4, 81),
)


class Counted(NamedTuple):
    """The size of an example, and the names in it."""

    objects: tuple[int, ...]  # the lines of each, without blanks and comments
    values: int  # lines of config.yaml in the comments at its head
    names: tuple[str, ...]  # names of interfaces and addresses that it depends on


def counted(path: Path) -> Counted:
    """Count an example."""
    text = path.read_text()
    head, _, _ = text.partition("apiVersion:")
    values = _values(head)
    objects = [
        sum(1 for line in part.splitlines() if line.strip() and not line.lstrip().startswith("#"))
        for part in re.split(r"^---$", text, flags=re.MULTILINE)
    ]
    configs = [
        yaml.safe_load(document["spec"]["config"])
        for document in yaml.safe_load_all(text)
        if document["kind"] == "NetworkAttachmentDefinition"
    ]
    names = [name for part in (yaml.safe_load(values), *configs) for name in _names(part)]
    return Counted(tuple(objects), len(values.splitlines()), tuple(names))


def problems(found: Counted) -> list[str]:
    """The reasons why an example is too large for a quick start."""
    said = []
    if len(found.objects) > MOST_OBJECTS:
        said.append(f"{len(found.objects)} objects, not {MOST_OBJECTS}")
    said += [f"{lines} lines, not {MOST_LINES}" for lines in found.objects if lines > MOST_LINES]
    said += [f"the name {name}" for name in found.names]
    return said


def table() -> list[str]:
    """A row for each profile, in Markdown."""
    rows = ["| profile | file | objects | lines | of configuration | theirs: objects | lines |"]
    rows.append("|---|---|---|---|---|---|---|")
    for quick in QUICK_STARTS:
        found = counted(EXAMPLES / quick.file)
        lines = " + ".join(map(str, found.objects))
        ours = [f"`{quick.file}`", str(len(found.objects)), lines, str(found.values)]
        theirs = [str(quick.their_objects), str(quick.their_lines)]
        rows.append(f"| {' | '.join([quick.profile, *ours, *theirs])} |")
    return rows


def _values(head: str) -> str:
    """The lines of config.yaml in comments, under the keys `pools` and `policy`."""
    kept: list[str] = []
    inside = False
    for line in head.splitlines():
        key = re.fullmatch(r"#   ((?:pools|policy):.*)", line)
        item = re.fullmatch(r"#   (  - .*)", line)
        inside = bool(key) or (inside and bool(item))
        if inside:
            kept.append((key or item)[1])  # type: ignore[index]
    return "\n".join(kept)


def _names(part: Any) -> list[str]:  # noqa: ANN401 - any YAML value
    """The names among the values of a configuration."""
    if isinstance(part, list):
        return [name for item in part for name in _names(item)]
    if not isinstance(part, dict):
        return []
    found = []
    for key, value in part.items():
        if key in _NAMING_KEYS:
            listed = value if isinstance(value, list) else [value]
            found += [str(name) for name in listed if name != _AUTO]
        else:
            found += _names(value)
    return found


def main() -> int:
    """Print the table; returns 1 if a quick start is too large."""
    print("\n".join(table()))
    failed = False
    for quick in QUICK_STARTS:
        for problem in problems(counted(EXAMPLES / quick.file)) if quick.file else ():
            print(f"{quick.file}: {problem}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
