"""Stores the HCA that each attachment of a pod took, so that a second ADD takes the same HCA.

Each pod has one file, which stays until the kubelet no longer lists the pod:

    {"version": 1, "namespace": "ml", "name": "worker-0", "uid": "...",
     "claims": {"fabric/net1": "0000:3b:00.0", "fabric/net2": "0000:af:00.0"}}
"""

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from base import decoding, files
from base.paths import Paths
from base.pod import Pod

VERSION = 1
YOUNG = 600.0  # seconds: the kubelet may not list a younger pod yet


class ChoicesFile(msgspec.Struct, kw_only=True):
    version: int = VERSION
    namespace: str
    name: str
    uid: str
    claims: dict[str, str] = {}  # the HCA by "network/interface"


class PodChoices:
    """Reads and stores the choices of one pod. The caller holds the lock `lock_of`."""

    def __init__(self, paths: Paths, pod: Pod) -> None:
        self._path = _path(paths, pod)
        self._pod = pod
        file = _read(self._path)
        self._hcas = file.claims if file is not None else {}

    def ordered(self, attachment: str, candidates: Sequence[str]) -> list[str]:
        """First the HCA that the attachment took before, then HCAs with the fewest attachments."""
        own = self._hcas.get(attachment)
        taken = Counter(hca for name, hca in self._hcas.items() if name != attachment)
        position = {hca: number for number, hca in enumerate(candidates)}
        return sorted(position, key=lambda hca: (hca != own, taken[hca], position[hca]))

    def record(self, attachment: str, hca: str) -> None:
        """Store the HCA of the attachment. Raises OSError."""
        if self._hcas.get(attachment) == hca:
            return
        self._hcas[attachment] = hca
        file = ChoicesFile(
            namespace=self._pod.namespace,
            name=self._pod.name,
            uid=self._pod.uid,
            claims=self._hcas,
        )
        # A power cut that loses the file also ends the pod.
        files.write_atomically(self._path, msgspec.json.encode(file), durable=False)


def lock_of(paths: Paths, pod: Pod) -> Path:
    """The lock file for the choices of the pod."""
    return paths.locks / f"pod-{_path(paths, pod).stem}"


def prune(paths: Paths, names: Collection[tuple[str, str]], uids: Collection[str]) -> list[Path]:
    """Remove the files of pods that the kubelet lists neither by UID nor by (namespace, name).

    A name does not count if another file has the name and a listed UID. A StatefulSet's new pod has
    the name of the old pod.
    """
    written = _files(paths)
    files_ = {path: _read(path) or ChoicesFile(namespace="", name="", uid="") for path in written}
    reused = {(file.namespace, file.name) for file in files_.values() if file.uid in uids}
    removed = []
    for path, file in files_.items():
        name = file.namespace, file.name
        is_known = file.uid in uids or (name in names and name not in reused)
        if not is_known and time.time() - written[path] >= YOUNG:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _files(paths: Paths) -> dict[Path, float]:
    """The file of each pod, with its modification time."""
    times = {}
    for path in sorted((paths.devices / "pods").glob("[!.]*.json")):
        with suppress(OSError):
            times[path] = path.stat().st_mtime
    return times


def _path(paths: Paths, pod: Pod) -> Path:
    # A UID from CNI_ARGS can be any text; a file name cannot.
    text = pod.uid or f"{pod.namespace}/{pod.name}"
    return paths.devices / "pods" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> ChoicesFile | None:
    """The content of a file, or `None` if the file is missing or damaged."""
    try:
        return decoding.decode(path.read_bytes(), ChoicesFile)
    except (OSError, msgspec.MsgspecError):
        return None
