"""Where the driver's files are on a node, and what a container gets of them."""

from pathlib import Path

import pytest

from gpu.driver import driver_files
from gpu.driver.driver_files import INSIDE, REAL, installed, resolved, shared
from host.errors import HostError

VERSION = "580.65.06"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    directory = tmp_path / "shim"
    directory.mkdir()
    for name in ("libpfcuda.so", "libpfnvml.so"):
        (directory / name).touch()
    return directory


def install(root: Path, directory: str = "usr/lib64", version: str = VERSION) -> None:
    """A driver's libraries as its installer lays them."""
    libraries = root / directory
    libraries.mkdir(parents=True, exist_ok=True)
    for name, links in (
        ("libcuda.so", (".1", "")),
        ("libnvidia-ml.so", (".1",)),
        ("libnvidia-ptxjitcompiler.so", (".1",)),
        ("libnvidia-gpucomp.so", ()),
        ("libnvidia-glcore.so", ()),
    ):
        (libraries / f"{name}.{version}").touch()
        target = f"{name}.{version}"
        for link in links:
            (libraries / f"{name}{link}").unlink(missing_ok=True)
            (libraries / f"{name}{link}").symlink_to(target)
            target = f"{name}{link}"


@pytest.mark.parametrize("directory", driver_files.DIRECTORIES)
def test_the_driver_is_found_where_distributions_have_it(root: Path, directory: str) -> None:
    install(root, directory)
    cuda, nvml, *others = installed(root).libraries
    assert nvml.file == f"{directory}/libnvidia-ml.so.{VERSION}"
    assert cuda.file == f"{directory}/libcuda.so.{VERSION}"
    assert cuda.names == ("libcuda.so", "libcuda.so.1", f"libcuda.so.{VERSION}")
    assert [library.name for library in others] == [
        "libnvidia-gpucomp.so",
        "libnvidia-ptxjitcompiler.so",
    ]


def test_debians_alternatives_lead_to_the_driver_below_the_root(root: Path) -> None:
    """Absolute links, which lead elsewhere for who sees the root in another place."""
    private = f"usr/lib/{driver_files.TRIPLET}/nvidia/current"
    install(root, private)
    (root / "etc/alternatives").mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (root / "etc/alternatives" / f"glx--{name}").symlink_to(f"/{private}/{name}")
        public = root / f"usr/lib/{driver_files.TRIPLET}" / name
        public.symlink_to(f"/etc/alternatives/glx--{name}")
    cuda, *_ = installed(root).libraries
    assert cuda.file == f"{private}/libcuda.so.{VERSION}"
    assert "libcuda.so.1" in cuda.names


def test_what_an_earlier_driver_left_is_not_taken(root: Path) -> None:
    install(root, version="570.1.2")
    install(root)
    names = {name for each in installed(root).libraries for name in each.names}
    assert not [name for name in names if "570" in name]


def test_links_are_followed_below_the_root_and_not_for_ever(root: Path) -> None:
    root.mkdir()
    (root / "up").symlink_to("../../up/file")
    (root / "loop").symlink_to("/loop")
    (root / "file").touch()
    assert resolved(root, "up") is None
    (root / "up").unlink()
    (root / "up").symlink_to("../../../file")
    assert resolved(root, "up") == "file"
    assert resolved(root, "loop") is None


def test_a_node_without_a_driver_or_with_half_of_one_is_an_error(root: Path) -> None:
    root.mkdir()
    with pytest.raises(HostError, match=r"no libcuda.so.1 below .*gpuLimits.driverRoot"):
        installed(root)
    install(root)
    (root / f"usr/lib64/libnvidia-ml.so.{VERSION}").unlink()
    with pytest.raises(HostError, match=f"but no libnvidia-ml.so.{VERSION}"):
        installed(root)


def test_the_shims_lie_over_every_name_in_the_directories_of_both_families(
    root: Path, shims: Path
) -> None:
    install(root)
    (root / "usr/bin").mkdir()
    (root / "usr/bin/nvidia-smi").touch()
    files = shared(installed(root), Path("/opt/driver"), shims)
    by_path = {file.container: file.host for file in files}
    assert len(by_path) == len(files)
    for directory in INSIDE:
        for name in ("libcuda.so", "libcuda.so.1", f"libcuda.so.{VERSION}"):
            assert by_path[f"{directory}/{name}"] == str(shims / "libpfcuda.so")
        assert by_path[f"{directory}/libnvidia-ml.so.1"] == str(shims / "libpfnvml.so")
        compiler = "libnvidia-ptxjitcompiler.so"
        own = f"/opt/driver/usr/lib64/{compiler}.{VERSION}"
        assert by_path[f"{directory}/{compiler}.1"] == own
    assert by_path["/usr/bin/nvidia-smi"] == "/opt/driver/usr/bin/nvidia-smi"
    own = f"/opt/driver/usr/lib64/libcuda.so.{VERSION}"
    assert [path for path, host in by_path.items() if host == own] == [REAL["libcuda.so"]]
    assert all(file.read_only for file in files)


def test_missing_shims_are_an_error(root: Path, shims: Path) -> None:
    install(root)
    (shims / "libpfnvml.so").unlink()
    with pytest.raises(HostError, match=r"has no libpfnvml.so: run `podfabric install --gpu`"):
        shared(installed(root), Path("/"), shims)
