"""The rules of one node: safe defaults, and the changes in config.yaml.

    policy:
      log_directories: [/var/log/podfabric]
      whole_pfs: true

docs/security.md has the table for administrators.
"""

import typing
from collections.abc import Callable
from pathlib import Path

import msgspec

from base import documents
from base.documents import DocumentError
from cni.policy import document
from cni.policy.document import PART, Rule
from cni.spec.errors import CNIError, Code


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What network configurations may ask for on this node. The defaults are the safe ones."""

    log_directories: tuple[str, ...] = ()  # where "log_file" may be
    resolv_conf_directories: tuple[str, ...] = ()  # where "resolvConf" may be
    # Types of other IPAM plugins that may be started, if their executable is installed.
    ipam_types: tuple[str, ...] = ("dhcp", "host-local", "static", "whereabouts")
    ipam_directories: tuple[str, ...] = ()  # where paths in their options may lead
    unmatched_devices: bool = False  # "match_device": false
    whole_pfs: bool = False  # "pfOnly": true
    # "deviceID" of a device plugin's device that was not allocated to the pod.
    unassigned_devices: bool = False
    # A private range ("network_name") whose addresses another network uses on the same link.
    private_ranges: bool = False
    # Whether FabricPolicies are followed, whose rules are added (cni/policy/cluster.py).
    cluster: bool = False
    # Where one of them is for a pod, only they count for it, and not the settings above.
    rules: tuple[Rule, ...] = ()


Source = Callable[[], Policy]
"""Returns the present rules. Raises CNIError if they cannot be read."""


def on_node(path: Path) -> Source:
    """The rules in the configuration file at `path`, which is read again at each call."""

    def read() -> Policy:
        try:
            return load(path)
        except DocumentError as error:
            raise CNIError(
                Code.IO_FAILURE,
                f"{error}: nothing was done, since the rules of this node are in that file",
            ) from None
        except OSError as error:
            raise CNIError(
                Code.IO_FAILURE,
                f"{path}: cannot be read: {error.strerror}: nothing was done, since the rules of "
                "this node are in that file",
            ) from None

    return read


def load(path: Path) -> Policy:
    """The rules in that file; the defaults if it is missing. Raises DocumentError, OSError."""
    try:
        content = documents.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Policy()
    whole = documents.mapping(documents.decode(content, str(path)), str(path))
    return of(whole.get(PART), str(path))


def of(part: object, name: str) -> Policy:
    """The rules in the part `policy` of the file `name`. Raises DocumentError."""
    shapes = {**typing.get_type_hints(Policy, include_extras=True), "rules": object}
    where = f"{name}: {PART}"
    values = documents.fields(part, shapes, where)
    values["rules"] = document.rules_of(values.get("rules"), f"{where}.rules")
    if not values.get("cluster"):
        _require_namespaces(values["rules"], f"{where}.rules")
    for key in ("log_directories", "resolv_conf_directories", "ipam_directories"):
        for index, directory in enumerate(values.get(key, ())):
            if not directory.startswith("/") or "\0" in directory:
                raise DocumentError(
                    f"{where}.{key}[{index}]: {documents.shown(directory)}: write an absolute path"
                )
    return Policy(**values)


def _require_namespaces(rules: tuple[Rule, ...], where: str) -> None:
    """Raise DocumentError for a subject that a node cannot match which asks no API server.

    A rule that matches no pod would leave its pods with the settings of the node.
    """
    for index, rule in enumerate(rules):
        for place, subject in enumerate(rule.subjects):
            for key, value in (
                ("namespaceSelector", subject.namespace_selector),
                ("serviceAccounts", subject.service_accounts),
            ):
                if value is not None:
                    raise DocumentError(
                        f"{where}[{index}].subjects[{place}].{key}: only the API server knows it, "
                        f'and this node does not ask: set "{PART}.cluster" to true, or name the '
                        "namespaces alone"
                    )


def not_allowed(what: str, setting: str, remedy: str = "remove it") -> CNIError:
    """The error for what the rules do not allow. `what` names the key, `setting` the rule."""
    return CNIError(
        Code.NOT_ALLOWED,
        f"{what} is not allowed on this node: {remedy}, or ask the administrator, who can set "
        f'"{PART}.{setting}" in config.yaml',
    )
