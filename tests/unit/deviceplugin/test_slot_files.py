"""CDI files of slots: what they say, and that a file that says the same stays as it is."""

import json
from pathlib import Path

from base.paths import Paths
from deviceplugin.gpus import slot_files
from deviceplugin.gpus.slot_files import WrittenSlot
from gpu import limit_hook
from gpu.driver_files import SharedFile
from gpu.nodes import GpuNode

NODE = GpuNode(path="/dev/nvidia3", host="/dev/nvidia3", major=195, minor=3)


def test_a_device_names_the_hooks_of_its_container_as_cdi_writes_them(tmp_path: Path) -> None:
    paths = Paths(cdi=tmp_path / "cdi")
    hook = limit_hook.hook(Path("/opt/gpu-limit"), Path("/run/podfabric/gpu-limit.sock"), "a.slot")

    slot_files.write(paths, "a.slot", [NODE], hooks=[hook])

    (device,) = json.loads(slot_files.path(paths, "a.slot").read_text())["devices"]
    assert device["containerEdits"]["hooks"] == [
        {
            "hookName": "createRuntime",
            "path": "/opt/gpu-limit",
            "args": ["gpu-limit", "/run/podfabric/gpu-limit.sock", "a.slot"],
            "timeout": 20,
        }
    ]
    assert slot_files.read(paths, "a.slot").minors == {3}


def test_what_a_file_gives_is_read_again_and_nothing_of_a_damaged_one(tmp_path: Path) -> None:
    paths = Paths(cdi=tmp_path / "cdi")
    mount = SharedFile("/run/podfabric/gpu/g/limits", "/run/podfabric/gpu/limits")
    slot_files.write(paths, "a.slot", [NODE], [mount])
    mounts = ((mount.host, mount.container),)
    assert slot_files.read(paths, "a.slot") == WrittenSlot(frozenset({3}), mounts)
    file = slot_files.path(paths, "a.slot")
    whole = file.read_bytes()
    for content in (b"", whole[:-9], b"\xff", b'{"devices": [{}]}', b'{"devices": 1}'):
        file.write_bytes(content)
        assert slot_files.read(paths, "a.slot") == WrittenSlot(frozenset(), ())
    assert slot_files.read(paths, "another.slot") == WrittenSlot(frozenset(), ())


def test_a_device_without_hooks_has_none_and_its_file_is_written_once(tmp_path: Path) -> None:
    paths = Paths(cdi=tmp_path / "cdi")
    slot_files.write(paths, "a.slot", [NODE])
    file = slot_files.path(paths, "a.slot")
    before = file.stat()

    slot_files.write(paths, "a.slot", [NODE])

    assert "hooks" not in json.loads(file.read_text())["devices"][0]["containerEdits"]
    assert file.stat().st_ino == before.st_ino
