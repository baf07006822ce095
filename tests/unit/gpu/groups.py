"""Groups of limits as files, for tests of who asks for which."""

import json
import shutil
from pathlib import Path

from base import files
from gpu.limits.groups import GroupFiles, Groups
from gpu.limits.limits_file import GroupError, Limit
from gpu.limits.region_tmpfs import RegionTmpfs


class PlainRegions(RegionTmpfs):
    """Regions that are plain files, for tests that make no mounts."""

    def put(self, path: Path, content: bytes) -> None:
        files.write_atomically(path, content, 0o666, durable=False)

    def remove(self, path: Path) -> None:
        files.remove(path, durable=False)

    def obstacle(self, root: Path) -> str | None:
        return None


class FileGroups(Groups):
    """A directory for each group, with `limits` as JSON and an empty `region`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, regions=PlainRegions())
        self.gone: list[str] = []  # groups that were removed
        self.given: dict[str, Limit] = {}  # the last of each group
        self.broken = False

    def make(self, group: str, limit: Limit) -> Path:
        self._perhaps_fail()
        directory = self.root / group
        if not directory.exists():
            directory.mkdir(parents=True)
            (directory / "region").touch()
            (directory / "agent").mkdir()
        self._put(group, limit)
        return directory

    def read(self, group: str) -> GroupFiles:
        try:
            limit = Limit(*json.loads((self.root / group / "limits").read_text()))
        except FileNotFoundError:
            raise GroupError(group) from None
        return GroupFiles(limit=limit, processes={}, allocation=b"", sequence=2)

    def remove(self, group: str) -> None:
        self.gone.append(group)
        shutil.rmtree(self.root / group, ignore_errors=True)

    def names(self) -> list[str]:
        return [path.parent.name for path in self.root.glob("*/limits")]

    def limits(self) -> dict[str, tuple[str, int, float]]:
        """UUID, bytes and share of each group."""
        return {
            path.parent.name: tuple(json.loads(path.read_text()))
            for path in self.root.glob("*/limits")
        }

    def _put(self, group: str, limit: Limit) -> None:
        self._perhaps_fail()
        self.given[group] = limit
        content = limit.uuid, limit.memory_bytes, limit.compute_share
        (self.root / group / "limits").write_text(json.dumps(content))

    def _perhaps_fail(self) -> None:
        if self.broken:
            raise OSError(28, "No space left on device", str(self.root))
