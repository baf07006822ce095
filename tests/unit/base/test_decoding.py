"""JSON that is nested too deeply is what any damaged file is, wherever podfabric reads one."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from base import decoding
from base.documents import DocumentError
from base.paths import Paths
from cli.checks import installation
from cni.attachments import journal, pod_choices
from cni.spec import config
from cni.spec.errors import CNIError
from deviceplugin import checkpoint
from deviceplugin.allocate import device_info
from deviceplugin.kubelet import records
from ipam.nv_ipam import importing as nv_importing
from policy import stored_policies

DEPTH = 5000
DEEP = b'{"a":' + b"[" * DEPTH + b"]" * DEPTH + b"}"


def in_file(read: Callable[[Path], object]) -> Callable[[Path], object]:
    def of_file(directory: Path) -> object:
        path = directory / "deep.json"
        path.write_bytes(DEEP)
        return read(path)

    return of_file


def at(where: Callable[[Paths], Path], read: Callable[[Paths], object]) -> Callable[[Path], object]:
    def of_node(directory: Path) -> object:
        paths = Paths(state=directory / "state", run=directory / "run", kubelet=directory)
        file = where(paths)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(DEEP)
        return read(paths)

    return of_node


@pytest.mark.parametrize("content", [DEEP, DEEP.decode(), b'"\xff"', b"{", b"7"])
def test_whatever_is_wrong_is_one_error(content: bytes | str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decoding.decode(content, str)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda _: journal.from_bytes(DEEP, "x"), journal.JournalDamaged),
        (lambda _: stored_policies.decode(DEEP), DocumentError),
        (in_file(lambda file: nv_importing.reservations(file, "boot")), CNIError),
        (lambda _: config.decode_for_removal(b'{"ipam":' + DEEP + b"}"), CNIError),
        (at(lambda paths: paths.checkpoint, checkpoint.read), checkpoint.CheckpointDamaged),
        (at(records.checkpoint_path, records.from_checkpoint), records.KubeletUnreadable),
    ],
    ids=["journal", "policies", "nv-ipam", "DEL", "checkpoint", "kubelet"],
)
def test_a_deep_document_is_the_readers_own_error(
    read: Callable[[Path], object], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        read(tmp_path)


@pytest.mark.parametrize(
    "read",
    [
        in_file(pod_choices._read),
        in_file(device_info._is_ours),
        in_file(installation._types),
        lambda _: journal._begins_with_json(DEEP),
    ],
    ids=["choices", "device", "networks", "torn line"],
)
def test_a_deep_document_that_decides_nothing_is_passed_over(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    assert not read(tmp_path)
