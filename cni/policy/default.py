"""The safe settings of a node, written as a rule: a start for rules of one's own."""

from typing import Any

from cni.policy.document import SETTABLE, USE
from cni.spec.config import SERVED

NAME = "default"
# Each of these needs a word of the administrator.
_UNSAFE = ("match_device", "pfOnly", "private_ranges", "unassigned_devices")
_IPAM_TYPES = [*SERVED, "dhcp", "host-local", "static"]


def document() -> list[dict[str, Any]]:
    """The rules, as in `policy.rules`: for everybody, what `rules.Policy()` allows."""
    use = {key: ["*"] for key in USE} | {"devices": [{}], "ipamTypes": _IPAM_TYPES}
    options = {key: ["*"] for key in SETTABLE if key not in _UNSAFE}
    subjects = [{"namespaces": ["*"]}]
    return [{"name": NAME, "subjects": subjects, "use": use, "set": options}]
