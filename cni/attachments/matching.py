"""Decides which devices an attachment may have: its pod's devices, or devices of no other pod.

CNI_ARGS name the pod. The kubelet and the device plugin's checkpoint list the pod's devices. With
`match_device` the interface must be on an HCA that the pod holds (`refusal`, CNIError 120). This
table shows which devices may be attached, or the error:

| a device that                          | with match_device        | with "match_device": false |
|----------------------------------------|--------------------------|----------------------------|
| this pod holds, or that is in no pool  | may be attached          | may be attached            |
| another pod holds exclusively          | 120                      | 121 (`unassigned_devices`) |
| a pool offers, or other pods share     | 121                      | may be attached            |
|                                        | (`unassigned_devices`)   |                            |

With the policy's `set.unassigned_devices`, the devices with 121 may be attached, too. `ipoib` takes
no device away from the host, so only the second row applies to `ipoib`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from base.locks import locked
from base.paths import Paths
from base.pod import Pod
from cni.attachments.pod_choices import PodChoices, lock_of
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from deviceplugin import pod_devices
from deviceplugin.checkpoint import AllocatedHCA
from deviceplugin.devices_for_pods import OfOtherPods, assigned, others
from deviceplugin.pod_devices import PodDevice, PodHoldings, Stale, Unknown
from host.sysfs import pci
from host.sysfs.discovery import HCAsByName, unknown
from policy.allowance import Allowance, Device

OPT_OUT = 'set "match_device": false if this is intended'
_REQUEST_ONE = "have the pod request a device of its own (resources.limits)"


class Denied(msgspec.Struct, frozen=True):
    """A device that this pod may not have, and the resource that the device belongs to."""

    device: str
    resource: str
    held: bool  # another pod holds it exclusively


class Match:
    """The HCAs of a pod, for one of its attachments. `others` are devices of other pods."""

    def __init__(
        self,
        paths: Paths,
        holdings: PodHoldings,
        key: str,
        allowance: Allowance = Allowance(),  # noqa: B008 - immutable
        others: OfOtherPods = OfOtherPods(),  # noqa: B008 - immutable
        *,
        match_device: bool = True,
    ) -> None:
        self.holdings = holdings
        self.allowance = allowance
        self._others = others
        self._match_device = match_device
        self._paths = paths
        self._choices: PodChoices | None = None
        self._key = key
        self._hcas: HCAsByName | None = None

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """The block runs for one attachment of the pod at a time. Raises Busy."""
        if not self.holdings.hcas:
            yield
            return
        pod = self.holdings.pod
        with locked(lock_of(self._paths, pod), f"pod {pod}"):
            self._choices = PodChoices(self._paths, pod)
            yield

    def candidates(self, device_id: str = "") -> list[PodDevice]:
        """The HCAs to try, in order. With `device_id`, only that HCA. Raises CNIError 120."""
        if not device_id:
            return self._ordered(self.holdings.hcas)
        held = self.holdings.hcas_of(device_id)
        if held:
            return self._ordered(held)
        hca = pod_devices.hca_of(device_id)
        if self.holdings.hcas and self.holdings.ids.isdisjoint((device_id, hca)):
            raise mismatch(
                f'"deviceID" is "{device_id}", but pod {self.holdings.pod} was given '
                f"{self.holdings.shown()}: write the same resource into the pod's limits and "
                'into the annotation "k8s.v1.cni.cncf.io/resourceName" of the definition'
            )
        # Another device plugin gave the device to the pod, and the runtime passed the device's id.
        denied = self.held((hca,))
        if denied is not None:
            raise self.error(denied, "deviceID", f'"deviceID" {device_id}')
        device = AllocatedHCA(id=hca, address=pci.canonical(hca) or "", netdevs=(), rdma=())
        return [PodDevice("deviceID", device_id, device)]

    def take(self, hca: str) -> None:
        """Record this HCA for a second ADD of the attachment."""
        if self._choices is not None and self.holdings.hca(hca) is not None:
            self._choices.record(self._key, hca)

    def using(self, hca: str, key: str, shown: str, *, parent: str = "") -> Allowance:
        """The attachment's allowance on this HCA, which `key` of the configuration selected.

        With `parent`, only this interface of the HCA counts. Raises NotAllowed unless one rule
        allows this device and all other options.
        """
        if self.allowance.has_every_device:
            return self.allowance
        if self._hcas is None:
            self._hcas = HCAsByName(self._paths)
        found = self._hcas.get(hca) or unknown(hca)
        if parent:
            found = msgspec.structs.replace(found, netdevs=(parent,))
        resources = {held.resource for held in self.holdings.hcas if held.device.id == hca}
        for resource, device_id in self.holdings.keys:
            if hca in (device_id, pod_devices.hca_of(device_id)):
                resources.add(resource)
        return self.allowance.using("devices", Device(found, frozenset(resources)), key, shown)

    def refusal(self, hca: str, what: str, rdma: Iterable[str], remedy: str) -> str | None:
        """The reason why the pod may not have an interface on `hca`, or `None`.

        `rdma` has the current names of the HCA's RDMA devices. A pod without HCAs may use any HCA.
        A pod may also use an HCA that another device plugin gave to the pod.
        """
        if not self.holdings.hcas:
            return None
        held = self.holdings.hca(hca)
        if held is not None:
            try:
                pod_devices.require_current(self._paths, held, rdma)
            except Stale as stale:
                return str(stale)
            return None
        if hca in self.holdings.ids:
            return None
        names = ", ".join(sorted(rdma)) or "no verbs device"
        return (
            f"{what} is on HCA {hca} ({names}), but pod {self.holdings.pod} was given "
            f"{self.holdings.shown()}: {remedy}, or {OPT_OUT}"
        )

    def require_own(self, hca: str, rdma: Iterable[str], what: str) -> None:
        """Raise CNIError 120 or 121 unless the pod may use the HCA of an interface, `what`."""
        rdma = tuple(rdma)
        reason = self.refusal(hca, what, rdma, 'set "master": "auto"')
        if reason is not None:
            raise mismatch(reason)
        denied = self.held((hca, *rdma))
        if denied is not None:
            raise self.error(denied, "master", what)

    def held(self, names: Iterable[str]) -> Denied | None:
        """The first of `names` (address, RDMA devices) that another pod holds exclusively."""
        if self._may_be_unassigned and not self._match_device:
            return None
        held = self._others.held
        return next((Denied(name, held[name], True) for name in names if name in held), None)

    def denied(self, names: Iterable[str]) -> Denied | None:
        """The first of `names` that this pod may not take from the host."""
        names = tuple(names)
        held = self.held(names)
        if held is not None or self._may_be_unassigned or not self._match_device:
            return held
        pooled = self._others.pooled
        return next((Denied(name, pooled[name], False) for name in names if name in pooled), None)

    def error(self, denied: Denied, key: str, what: str) -> CNIError:
        """The error for a denied device at `key`. `what` names the device or its interface."""
        if denied.held and self._match_device:
            return CNIError(
                Code.DEVICE_MISMATCH,
                f"{what} is on HCA {denied.device}, which the kubelet gave to another pod as "
                f"{denied.resource}: {_REQUEST_ONE}, and let Multus pass that device's id",
            )
        reason = "another pod has" if denied.held else "is not this pod's"
        text = f'"{key}": {what}, a device of resource {denied.resource} that {reason},'
        return self.not_assigned(text, f"{_REQUEST_ONE}, and remove the key")

    def not_assigned(self, text: str, remedy: str) -> CNIError:
        """The error for an attachment whose device the pod does not have."""
        key = "unassigned_devices"
        return self.allowance.not_settable(key, text, key, remedy)

    @property
    def _may_be_unassigned(self) -> bool:
        return self.allowance.may("unassigned_devices", True)

    def _ordered(self, held: Iterable[PodDevice]) -> list[PodDevice]:
        by_hca = {device.device.id: device for device in held}
        order = list(by_hca)
        if self._choices is not None:
            order = self._choices.ordered(self._key, order)
        return [by_hca[hca] for hca in order]


def matched(
    paths: Paths,
    request: Request,
    pod: Pod,
    *,
    needed: bool,
    match_device: bool,
    allowance: Allowance,
) -> Match:
    """The match of one ADD. Raises CNIError 11 if the pods' devices are unknown.

    `needed` is true if only the match can choose the device. A call that names no pod counts as a
    call for a pod without devices.
    """
    try:
        ours = pod_devices.recorded(paths)
        every = assigned(paths, ours)
        asked = needed or bool(every.pooled) or not allowance.has_every_device
        holdings = pod_devices.given_to(paths, pod, needed=asked, ours=ours)
    except Unknown as unknown:
        raise CNIError(Code.TRY_AGAIN, str(unknown)) from None
    return Match(
        paths,
        holdings if match_device else PodHoldings(pod),
        f"{request.network}/{request.ifname}",
        allowance,
        others(paths, every, holdings),
        match_device=match_device,
    )


def require_records(paths: Paths) -> None:
    """Raise CNIError 11 if it is unknown which devices belong to which pods."""
    try:
        assigned(paths)
    except Unknown as unknown:
        raise CNIError(Code.TRY_AGAIN, str(unknown)) from None


def without_kubelet(paths: Paths) -> str:
    """A hint for errors about missing devices. Returns "" if this node has a kubelet."""
    if paths.device_plugins.is_dir():
        return ""
    return (
        f" (this node's kubelet gives no devices to pods: {paths.device_plugins} does not exist; "
        "if the kubelet has another root directory, set PODFABRIC_KUBELET for the agent)"
    )


def none_given(paths: Paths, pod: Pod, what: str) -> CNIError:
    """The error for a pod that holds no HCA, if the match must choose one."""
    if not pod.name:
        return CNIError(
            Code.INVALID_ENVIRONMENT,
            f"{what} needs to know the pod: let the runtime pass K8S_POD_NAME, K8S_POD_NAMESPACE "
            "and K8S_POD_UID in CNI_ARGS",
        )
    return mismatch(
        f"{what}: pod {pod} was given no HCA of this node's pools: have a "
        f'container request one (resources.limits, such as "rdma/hca": 1){without_kubelet(paths)}'
    )


def mismatch(message: str) -> CNIError:
    """CNIError 120, for an interface that is not on the pod's HCA."""
    return CNIError(Code.DEVICE_MISMATCH, message)
