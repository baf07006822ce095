"""Attributes, directories and links, readable and not."""

from pathlib import Path

import pytest

from host.sysfs import attribute_files


def _written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_attribute_is_read_without_its_newline(tmp_path: Path) -> None:
    assert attribute_files.text(_written(tmp_path / "state", b"4: ACTIVE\n")) == "4: ACTIVE"


@pytest.mark.parametrize("path", ["/nowhere/state", "/proc", "/proc/version/state"])
def test_missing_or_unreadable_attribute_is_empty(path: str) -> None:
    assert attribute_files.text(path) == ""


def test_attribute_that_the_kernel_refuses_to_read_is_empty() -> None:
    assert attribute_files.text("/proc/self/mem") == ""  # EIO: nothing is mapped at 0


def test_undecodable_attribute_is_empty_unless_replaced(tmp_path: Path) -> None:
    path = _written(tmp_path / "ibdev", b"mlx5\xff_0\n")
    assert attribute_files.text(path) == ""
    assert attribute_files.text(path, errors="replace") == "mlx5\ufffd_0"


def test_attribute_of_the_largest_page_is_read(tmp_path: Path) -> None:
    path = _written(tmp_path / "resource", b"x" * 65536)
    assert len(attribute_files.text(path)) == 65536


@pytest.mark.parametrize(
    ("content", "number", "node"),
    [
        (b"12\n", 12, 12),
        (b"0\n", 0, 0),
        (b"-1\n", -1, None),
        (b"0x1\n", 1, 1),
        (b"\n", None, None),
        (b"\xff", None, None),
    ],
)
def test_number_and_numa_node(
    tmp_path: Path, content: bytes, number: int | None, node: int | None
) -> None:
    assert attribute_files.number(_written(tmp_path / "numa_node", content)) == number
    assert attribute_files.numa_node(f"{tmp_path}/none", str(tmp_path)) == node


def test_names_of_a_directory(tmp_path: Path) -> None:
    _written(tmp_path / "uverbs0", b"")
    (tmp_path / "uverbs1").symlink_to("nowhere")
    assert sorted(attribute_files.names(str(tmp_path))) == ["uverbs0", "uverbs1"]
    for other in ("uverbs0", "uverbs1", "uverbs2"):
        assert attribute_files.names(f"{tmp_path}/{other}") == []


def test_link_text_and_target_name(tmp_path: Path) -> None:
    (tmp_path / "driver").symlink_to("../../drivers/mlx5_core")
    assert attribute_files.link(f"{tmp_path}/driver") == "../../drivers/mlx5_core"
    assert attribute_files.target(f"{tmp_path}/driver") == "mlx5_core"
    for other in (str(tmp_path), f"{tmp_path}/physfn"):
        assert (attribute_files.link(other), attribute_files.target(other)) == ("", "")


def test_dangling_link_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("gone")
    assert attribute_files.exists(str(tmp_path))
    assert not attribute_files.exists(f"{tmp_path}/device")
