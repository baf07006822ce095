"""An attachment and its pod's HCAs: the interface is to be on one that the kubelet gave to the pod.

Design, decision 10. Who the pod is comes from CNI_ARGS; what it was given from the kubelet and
the device plugin's checkpoint. The choice among several HCAs is written down for the pod, so that
a second ADD of an attachment makes the same one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from base.locks import locked
from base.paths import Paths
from base.text import printable
from cni.attachments.entitlement import Entitlement
from cni.policy.rules import Policy
from cni.spec import arguments
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from cni.spec.request import Request
from cni.spec.result import Interface
from deviceplugin import pod_devices
from deviceplugin.allocate import device_info
from deviceplugin.assigned import assigned, others
from deviceplugin.checkpoint import AllocatedHCA
from deviceplugin.claims import Claims, Pod, lock_of
from deviceplugin.pod_devices import GivenToPod, PodDevice, Stale, Unknown
from host import pci
from host.discovery import CharacterDevice

OPT_OUT = '"match_device": false if that is meant'


class Match:
    """What the pod was given, as one attachment of it sees it."""

    def __init__(
        self, paths: Paths, given: GivenToPod, key: str, entitlement: Entitlement | None = None
    ) -> None:
        self.given = given
        self.entitlement = entitlement or Entitlement()
        self._paths = paths
        self._claims: Claims | None = None
        self._key = key

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """One attachment of the pod at a time chooses and takes. Raises Busy."""
        if not self.given.faces:
            yield
            return
        pod = self.given.pod
        with locked(lock_of(self._paths, pod), f"pod {pod}"):
            self._claims = Claims(self._paths, pod)
            yield

    def candidates(self, device_id: str = "") -> list[PodDevice]:
        """The HCAs to be tried, in order; only those of `device_id`, if one is named.

        CNIError 120 if the pod does not hold that one.
        """
        if not device_id:
            return self._ordered(self.given.faces)
        faces = self.given.faces_of(device_id)
        if faces:
            return self._ordered(faces)
        hca = pod_devices.hca_of(device_id)
        if self.given.faces and self.given.ids.isdisjoint((device_id, hca)):
            raise mismatch(
                f'"deviceID" is "{device_id}", but pod {self.given.pod} was given '
                f"{self.given.shown()}: let both come from one resource: the annotation "
                '"k8s.v1.cni.cncf.io/resourceName" of the definition, and the pod\'s limits'
            )
        # Another driver's: the runtime says that it is the pod's.
        self.require_not_held(hca, "deviceID", f'"deviceID" {device_id}')
        return [PodDevice("deviceID", device_id, _unrecorded(hca))]

    def _ordered(self, faces: Iterable[PodDevice]) -> list[PodDevice]:
        by_id = {face.device.id: face for face in faces}
        order = list(by_id)
        if self._claims is not None:
            order = self._claims.ordered(self._key, order)
        return [by_id[device] for device in order]

    def require_not_held(self, hca: str, key: str, what: str) -> None:
        """Raise CNIError if another pod has the HCA for itself: none may be beside it."""
        held = self.entitlement.held((hca,))
        if held is not None:
            raise self.entitlement.error(held, key, what)

    def take(self, hca: str) -> None:
        """The attachment is on this HCA from now on, and when it comes again."""
        if self._claims is not None and self.given.face(hca) is not None:
            self._claims.take(self._key, hca)

    def refusal(self, hca: str, what: str, names: Iterable[str], remedy: str) -> str:
        """Why an interface on `hca` is not for this pod, "" if it is.

        `names` are the RDMA devices of the HCA now. A pod that was given no HCA has none to
        differ from, and an HCA that the kubelet gave to it by another resource is right.
        """
        if not self.given.faces:
            return ""
        face = self.given.face(hca)
        if face is not None:
            return self.staleness(face, names)
        if hca in self.given.ids:
            return ""
        verbs = ", ".join(sorted(names)) or "no verbs device"
        return (
            f"{what} is on HCA {hca} ({verbs}), but pod {self.given.pod} was given "
            f"{self.given.shown()}: {remedy}, or {OPT_OUT}"
        )

    def staleness(self, face: PodDevice, names: Iterable[str]) -> str:
        """That the HCA's verbs devices are others than the pod's containers were given, or ""."""
        try:
            pod_devices.require_current(self._paths, face, names)
        except Stale as stale:
            return str(stale)
        return ""


def _unrecorded(hca: str) -> AllocatedHCA:
    return AllocatedHCA(id=hca, address=pci.canonical(hca) or "", netdevs=(), rdma=())


def matched(
    paths: Paths,
    request: Request,
    pod: arguments.Pod,
    *,
    needed: bool,
    wanted: bool,
    policy: Policy,
) -> Match:
    """The match of one ADD. CNIError 11 if it cannot be told what is for this pod and for others.

    `needed`: without it nothing can be chosen. `wanted` is false if the configuration asks for no
    match, so that what the pod was given does not count. A call without a pod is about one that
    was given nothing.
    """
    whose = Pod(pod.namespace, pod.name, pod.uid)
    try:
        every = assigned(paths)
        given = pod_devices.given_to(paths, whose, needed=needed or bool(every.pooled))
    except Unknown as unknown:
        raise CNIError(Code.TRY_AGAIN, str(unknown)) from None
    return Match(
        paths,
        given if wanted else GivenToPod(whose),
        f"{request.network}/{request.ifname}",
        Entitlement(others(paths, every, given), policy, match_device=wanted),
    )


def require_records(paths: Paths) -> None:
    """Raise CNIError 11 if no ADD could be told which devices are for which pods."""
    try:
        assigned(paths)
    except Unknown as unknown:
        raise CNIError(Code.TRY_AGAIN, str(unknown)) from None


def rdma_beside(paths: Paths, names: Iterable[str]) -> tuple[str, str]:
    """The first RDMA device of these that has a character device, and that one: ("", "") if none.

    Their names are as sysfs has them now: "mlx5_3", "uverbs3".
    """
    numbers = pci.uverbs_numbers(paths)
    for name in names:
        if name in numbers:
            return name, numbers[name][0]
    return "", ""


def tell(paths: Paths, request: Request, interface: Interface) -> None:
    """Say in Multus' device-information file, if it passes one, which verbs device this is."""
    path = _device_information(request)
    if not path or not interface.uverbs:
        return
    # Multus names it so. A definition may carry the key too, and name another attachment's file.
    if not path.endswith(f"-{request.container_id}_{request.ifname}"):
        note(printable(f"device information {path}: it is not this attachment's: left alone"))
        return
    try:
        _, major, minor = pci.uverbs_numbers(paths)[interface.rdmaDevice]
        node = CharacterDevice(interface.uverbs, major, minor)
        device_info.update_cni(paths, path, interface.pciID, interface.rdmaDevice, node)
    except (OSError, KeyError, ValueError) as error:
        # The attachment is as good without it.
        note(printable(f"device information {path}: {error}"))


def _device_information(request: Request) -> str:
    try:
        return request.config.at("runtimeConfig.CNIDeviceInfoFile", str) or ""
    except CNIError:
        return ""


def none_given(pod: arguments.Pod, what: str) -> CNIError:
    """The error for a choice that is left to the match, where the pod holds no HCA."""
    if not pod.name:
        return CNIError(
            Code.INVALID_ENVIRONMENT,
            f"{what} needs to know the pod: the runtime passes K8S_POD_NAME, K8S_POD_NAMESPACE and "
            "K8S_POD_UID in CNI_ARGS",
        )
    return mismatch(
        f"{what}: pod {pod.namespace}/{pod.name} was given no HCA of this node's pools: have a "
        'container request one (resources.limits, such as "rdma/hca": 1)'
    )


def mismatch(message: str) -> CNIError:
    """The pod's verbs device and its interface would be on different HCAs."""
    return CNIError(Code.DEVICE_MISMATCH, message)
