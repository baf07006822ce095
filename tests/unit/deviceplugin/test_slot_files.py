"""CDI files of slots: an unchanged file is not written again."""

from pathlib import Path

from base.paths import Paths
from gpu.pools import slot_files
from host.device_nodes import DeviceNode

NODE = DeviceNode(path="/dev/nvidia3", host="/dev/nvidia3", major=195, minor=3)


def test_a_file_that_says_the_same_is_written_once(tmp_path: Path) -> None:
    paths = Paths(cdi=tmp_path / "cdi")
    slot_files.write(paths, "a.slot", [NODE], [], {})
    file = slot_files.path(paths, "a.slot")
    before = file.stat()

    slot_files.write(paths, "a.slot", [NODE], [], {})

    assert file.stat().st_ino == before.st_ino
