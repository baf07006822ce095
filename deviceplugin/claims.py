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
from contextlib import contextmanager
from pathlib import Path

import msgspec
from filelock import FileLock

from host import files
from host.paths import Paths

VERSION = 1
YOUNG = 600.0  # seconds in which the kubelet may not yet tell of a pod
LOCK_TIMEOUT = 30.0  # seconds; it is held for one small file


class Pod(msgspec.Struct, frozen=True):
    """A pod as CNI_ARGS name it; "" where they do not."""

    namespace: str
    name: str
    uid: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class _File(msgspec.Struct, kw_only=True):
    version: int = VERSION
    namespace: str
    name: str
    uid: str
    claims: dict[str, str] = {}


class Claims:
    """The claims of one pod, under its lock."""

    def __init__(self, path: Path, pod: Pod) -> None:
        self._path = path
        self._pod = pod
        self._claims = _read(path)

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
        """Write down that the attachment has the device."""
        if self._claims.get(attachment) == device:
            return
        self._claims[attachment] = device
        file = _File(
            namespace=self._pod.namespace,
            name=self._pod.name,
            uid=self._pod.uid,
            claims=self._claims,
        )
        # Without it another HCA of the pod may be taken after a power cut, when no pod is left.
        files.write_atomically(self._path, msgspec.json.encode(file), durable=False)


@contextmanager
def claims_of(paths: Paths, pod: Pod) -> Iterator[Claims]:
    """The claims of a pod, for one caller at a time. Raises OSError, filelock.Timeout."""
    path = _path(paths, pod)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths.locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(paths.locks / f"pod-{path.stem}", timeout=LOCK_TIMEOUT)
    with lock:
        try:
            yield Claims(path, pod)
        finally:
            Path(lock.lock_file).unlink(missing_ok=True)


def prune(paths: Paths, names: Collection[tuple[str, str]], uids: Collection[str]) -> list[Path]:
    """Remove the files of pods that the kubelet knows neither by name nor by UID."""
    removed = []
    for path in sorted((paths.devices / "pods").glob("[!.]*.json")):
        try:
            young = time.time() - path.stat().st_mtime < YOUNG
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except OSError:
            continue
        except msgspec.MsgspecError:
            file = _File(namespace="", name="", uid="")
        if not young and file.uid not in uids and (file.namespace, file.name) not in names:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _path(paths: Paths, pod: Pod) -> Path:
    # A UID from CNI_ARGS is any text; a name of a file is not.
    text = pod.uid or f"{pod.namespace}/{pod.name}"
    return paths.devices / "pods" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> dict[str, str]:
    """The claims of a file; a damaged one is none, for it only keeps choices as they were."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).claims
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
