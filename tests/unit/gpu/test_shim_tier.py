"""What containers see of the driver and the shims, by the node's settings."""

from pathlib import Path

from base.paths import Paths
from gpu.driver_files import SharedFile
from gpu.settings import GpuLimitSettings
from gpu.shim_tier import ShimTier
from tests.unit.gpu.test_driver_files import install


def made(tmp_path: Path, **settings: object) -> ShimTier:
    paths = Paths(host=tmp_path / "root", state=tmp_path / "state")
    if not paths.shims.exists():
        install(paths.host)
        paths.shims.mkdir(parents=True)
        for name in ("libpfcuda.so", "libpfnvml.so"):
            (paths.shims / name).touch()
    return ShimTier(paths, GpuLimitSettings(**settings), lambda: None)  # type: ignore[arg-type]


def test_an_empty_directory_lies_over_the_compatibility_package_where_that_is_configured(
    tmp_path: Path,
) -> None:
    plain = made(tmp_path).files(None)
    *files, mask = made(tmp_path, mask_compat=True).files(None)
    assert tuple(files) == plain
    assert mask == SharedFile(str(tmp_path / "state/gpu/empty"), "/usr/local/cuda/compat")
    assert mask.read_only
    assert Path(mask.host).stat().st_mode & 0o777 == 0o755
    assert list(Path(mask.host).iterdir()) == []


def test_a_directory_that_cannot_be_made_is_an_obstacle(tmp_path: Path) -> None:
    tier = made(tmp_path, mask_compat=True)
    (tmp_path / "state/gpu/empty").write_text("a file")
    assert str(tier.obstacle(None)).endswith("gpu/empty: cannot be made: File exists")
