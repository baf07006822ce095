"""Which HCA of its pod an attachment took, so that a second ADD of it takes the same.

One file per pod, kept when the attachment goes and removed when the kubelet no longer knows the
pod:

    {"version": 1, "namespace": "ml", "name": "worker-0", "uid": "...",
     "claims": {"fabric/net1": "0000:3b:00.0", "fabric/net2": "0000:af:00.0"}}
"""

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from base import files
from base.paths import Paths

VERSION = 1
YOUNG = 600.0  # seconds in which the kubelet may not yet tell of a pod


class Pod(msgspec.Struct, frozen=True):
    """A pod as CNI_ARGS name it; "" where they do not."""

    namespace: str
    name: str
    uid: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class PodChoices(msgspec.Struct, kw_only=True):
    """The file of one pod."""

    version: int = VERSION
    namespace: str
    name: str
    uid: str
    claims: dict[str, str] = {}  # the HCA by "network/interface"


class Claims:
    """The claims of one pod, as they are when this is made: the caller has `lock_of` the pod."""

    def __init__(self, paths: Paths, pod: Pod) -> None:
        self._path = _path(paths, pod)
        self._pod = pod
        kept = _read(self._path)
        self._claims = kept.claims if kept is not None else {}

    def ordered(self, attachment: str, candidates: Sequence[str]) -> list[str]:
        """The candidates as this attachment is to try them.

        First its own of before, then those that no other attachment of the pod has, then those
        that the fewest have; each in the given order.
        """
        own = self._claims.get(attachment)
        taken = Counter(device for name, device in self._claims.items() if name != attachment)
        place = {device: position for position, device in enumerate(candidates)}
        return sorted(place, key=lambda device: (device != own, taken[device], place[device]))

    def take(self, attachment: str, device: str) -> None:
        """Write down that the attachment has the device. Raises OSError."""
        if self._claims.get(attachment) == device:
            return
        self._claims[attachment] = device
        kept = PodChoices(
            namespace=self._pod.namespace,
            name=self._pod.name,
            uid=self._pod.uid,
            claims=self._claims,
        )
        # Without it another HCA of the pod may be taken after a power cut, when no pod is left.
        files.write_atomically(self._path, msgspec.json.encode(kept), durable=False)


def lock_of(paths: Paths, pod: Pod) -> Path:
    """The file by which one attachment of the pod chooses at a time."""
    return paths.locks / f"pod-{_path(paths, pod).stem}"


def every(paths: Paths) -> Iterator[PodChoices]:
    """The claims of all pods, as files have them now, the latest last.

    What cannot be read is left out.
    """
    for _, path in sorted((written, path) for path, written in _files(paths).items()):
        kept = _read(path)
        if kept is not None:
            yield kept


def prune(paths: Paths, names: Collection[tuple[str, str]], uids: Collection[str]) -> list[Path]:
    """Remove the files of pods that the kubelet knows neither by UID nor by name.

    A name does not count any more once a pod with a known UID has it: a StatefulSet's pod comes
    again with another one.
    """
    written = _files(paths)
    kept = {path: _read(path) or PodChoices(namespace="", name="", uid="") for path in written}
    borne = {(one.namespace, one.name) for one in kept.values() if one.uid in uids}
    removed = []
    for path, one in kept.items():
        name = one.namespace, one.name
        known = one.uid in uids or (name in names and name not in borne)
        if not known and time.time() - written[path] >= YOUNG:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _files(paths: Paths) -> dict[Path, float]:
    """The files of all pods, and when each was written."""
    found = {}
    for path in sorted((paths.devices / "pods").glob("[!.]*.json")):
        with suppress(OSError):
            found[path] = path.stat().st_mtime
    return found


def _path(paths: Paths, pod: Pod) -> Path:
    # A UID from CNI_ARGS is any text; a name of a file is not.
    text = pod.uid or f"{pod.namespace}/{pod.name}"
    return paths.devices / "pods" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> PodChoices | None:
    """A file; a damaged one is none, for it only keeps choices as they were."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PodChoices)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
