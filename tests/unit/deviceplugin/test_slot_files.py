"""CDI files of slots: what they say, and that a file that says the same stays as it is."""

from pathlib import Path

from base.paths import Paths
from deviceplugin.gpus import slot_files
from gpu.driver_files import SharedFile
from gpu.nodes import GpuNode

NODE = GpuNode(path="/dev/nvidia3", host="/dev/nvidia3", major=195, minor=3)


def test_what_a_file_gives_is_read_again_and_nothing_of_a_damaged_one(tmp_path: Path) -> None:
    paths = Paths(cdi=tmp_path / "cdi")
    mount = SharedFile("/run/podfabric/gpu/g/limits", "/run/podfabric/gpu/limits")
    slot_files.write(paths, "a.slot", [NODE], [mount], {})
    assert slot_files.read(paths, "a.slot") == {3}
    file = slot_files.path(paths, "a.slot")
    whole = file.read_bytes()
    for content in (b"", whole[:-9], b"\xff", b'{"devices": [{}]}', b'{"devices": 1}'):
        file.write_bytes(content)
        assert slot_files.read(paths, "a.slot") == set()
    assert slot_files.read(paths, "another.slot") == set()


def test_a_file_that_says_the_same_is_written_once(tmp_path: Path) -> None:
    paths = Paths(cdi=tmp_path / "cdi")
    slot_files.write(paths, "a.slot", [NODE], [], {})
    file = slot_files.path(paths, "a.slot")
    before = file.stat()

    slot_files.write(paths, "a.slot", [NODE], [], {})

    assert file.stat().st_ino == before.st_ino
