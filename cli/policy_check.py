"""What the rules of a policy say of definitions, before a pod asks: `podfabric policy check`.

Devices, and what only a node knows of them, are compared when a pod is attached.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from base.pod import Pod
from cni.ipoib import options as ipoib_options
from cni.spec.config import decode
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.sriov import options as sriov_options
from cni.sriov import vf_policy as sriov_permitted
from ipam import address_policy as ipam_permitted
from ipam import store_choice
from ipam.delegation import OURS, TAKEN_OVER, require_allowed
from policy import allowance
from policy.allowance import Allowance, NotAllowed
from policy.rules import Policy

SRIOV = ("sriov", "ib-sriov")


class WrittenDefinition(msgspec.Struct, frozen=True):
    """A NetworkAttachmentDefinition: its namespace, its name, and its `spec.config`."""

    namespace: str
    name: str
    config: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules say of one plugin of a definition, for the pods of a namespace."""

    definition: str
    namespace: str
    plugin: str
    allowed: bool
    rules: tuple[str, ...] = ()  # that allow it; of what is refused, those that were left before
    key: str = ""
    value: str = ""
    said: str = ""  # the error that a pod would get


def verdicts(
    definitions: Sequence[WrittenDefinition],
    policy: Policy,
    labels: Mapping[str, Mapping[str, str]],
    namespaces: Sequence[str] = (),
) -> list[Verdict]:
    """Of each definition, for the pods of its own namespace, and of `namespaces`.

    `labels` are those of the namespaces that are known.
    """
    return [
        verdict
        for definition in definitions
        for namespace in dict.fromkeys((definition.namespace, *namespaces))
        for verdict in _of_definition(definition, namespace, policy, labels)
    ]


def _of_definition(
    definition: WrittenDefinition,
    namespace: str,
    policy: Policy,
    labels: Mapping[str, Mapping[str, str]],
) -> Iterator[Verdict]:
    policy = msgspec.structs.replace(policy, labels=lambda of: labels.get(of, {}))
    name, plugin = f"{definition.namespace}/{definition.name}", ""
    verdict = partial(Verdict, definition=name, namespace=namespace)
    try:
        for config in _plugins(definition):
            plugin = str(config.get("type", ""))
            allowed = allowance.of_pod(policy, Pod(namespace, "pod"))
            request = Request(
                command="ADD",
                args=f"K8S_POD_NAMESPACE={namespace};K8S_POD_NAME=pod",
                network=definition.name,
                config=decode(msgspec.json.encode(config)),
            )
            left = _judged(plugin, request, allowed)
            yield verdict(plugin=plugin, allowed=True, rules=left.titles())
    except CNIError as error:
        refused = verdict(plugin=plugin, allowed=False, said=error.message)
        if isinstance(error, NotAllowed):
            told = {"rules": error.rules, "key": error.key, "value": error.value}
            refused = msgspec.structs.replace(refused, **told)
        yield refused


def _plugins(definition: WrittenDefinition) -> list[dict[str, Any]]:
    """The configurations of a definition's plugins, as a runtime passes them."""
    whole = decode(definition.config.encode()).keys
    shared = {key: whole[key] for key in ("cniVersion",) if key in whole}
    listed = whole.get("plugins")
    if not isinstance(listed, list):
        return [whole]
    return [
        {**each, **shared, "name": definition.name} for each in listed if isinstance(each, dict)
    ]


def _judged(plugin: str, request: Request, allowed: Allowance) -> Allowance:
    """What is left of the allowance. CNIError 7 and 121."""
    if plugin == "ipoib":
        wanted = ipoib_options.read(request)
        return _addresses(request, ipoib_options.allowed(wanted, allowed))
    if plugin in SRIOV:
        options = sriov_options.read(request, needs_device=False)
        return _addresses(request, sriov_permitted.by_options(options, allowed))
    if request.config.ipam.type in (OURS, *TAKEN_OVER):
        return _addresses(request, allowed)
    return allowed  # another program's interface, with addresses that are not ours


def _addresses(request: Request, allowed: Allowance) -> Allowance:
    config = request.config.ipam
    if not config.type:
        return allowed
    allowed = ipam_permitted.of_type(allowed, config.type)
    if config.type in (OURS, *TAKEN_OVER):
        return ipam_permitted.of_configuration(allowed, *store_choice.declared(request))
    require_allowed(config, allowed)
    return allowed
