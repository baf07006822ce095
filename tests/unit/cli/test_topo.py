"""`podfabric topo` on made-up servers: the matrix, its documents, the drawing."""

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from base.paths import Paths
from tests.unit.cli.commands import Shell
from tests.unit.cli.gpu_server import POD_UID, GpuServer
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

Build = Callable[..., Paths]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def shell_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Build], Shell]:
    return lambda build: Shell(build(tmp_path), monkeypatch, capsys)


ShellOn = Callable[[Build], Shell]


def test_the_document_shows_what_is_printed(shell_on: ShellOn) -> None:
    shell_on(servers.dgx).as_shown("podfabric topo")


@pytest.mark.parametrize(
    ("build", "a", "b", "distance"),
    [
        (servers.dgx, "GPU0", "GPU0", "SAME"),
        (servers.dgx, "GPU0", "mlx5_1", "PIX"),
        (servers.dgx, "GPU0", "mlx5_2", "NODE"),
        (servers.dgx, "mlx5_0", "mlx5_7", "SYS"),
        (servers.domains, "GPU1", "mlx5_1", "PIX"),
        (servers.domains, "mlx5_2", "mlx5_3", "PHB"),
        (servers.flat_vm, "GPU3", "mlx5_2", "PIX"),
        (servers.flat_vm, "GPU0", "GPU1", "PHB"),
        (servers.vfs, "mlx5_0", "mlx5_1", "SAME"),
    ],
)
def test_the_document_has_the_class_of_each_pair(
    shell_on: ShellOn, build: Build, a: str, b: str, distance: str
) -> None:
    found = shell_on(build)("topo", "-o", "json").document()

    assert found["distances"][a][b] == found["distances"][b][a] == distance


def test_devices_are_listed_gpus_first_with_where_they_are(shell_on: ShellOn) -> None:
    shell = shell_on(servers.dgx)

    found = shell("topo", "-o", "json").document()["devices"]

    addresses = (*servers.DGX_GPUS, *servers.DGX_HCAS)
    assert tuple(line["address"] for line in found) == addresses
    assert [line["label"] for line in found[7:9]] == ["GPU7", "mlx5_0"]
    assert found[8]["netdevs"] == ["ib0"]
    assert found[8]["numa"] == 0
    assert found[8]["bridge"] == "pci0000:17"
    assert found[8]["switches"] == ["0000:18:00.0"] == found[0]["switches"]
    assert yaml.safe_load(shell("topo", "-o", "yaml").out)["devices"] == found


def test_the_matrix_is_nvidia_smis_with_a_legend(shell_on: ShellOn) -> None:
    lines = shell_on(servers.dgx)("topo").out.splitlines()

    header, first = lines[0].split(), lines[1].split()
    assert header[3:5] == ["GPU0", "GPU1"]
    assert first[:6] == ["GPU0", "0000:1a:00.0", "-", "0", "X", "PIX"]
    assert first[4 + header.index("mlx5_2") - 3] == "NODE"
    assert any(line.split() == ["GPU0", "mlx5_0,", "mlx5_1"] for line in lines)
    assert any(line.startswith("  PXB   several PCIe switches") for line in lines)


def test_vfs_and_sfs_are_shown_beside_their_pfs_only_if_asked_for(shell_on: ShellOn) -> None:
    shell = shell_on(servers.vfs)

    some, everything = shell("topo", "-o", "json"), shell("topo", "--all", "-o", "json")

    assert [device["label"] for device in some.document()["devices"]] == ["mlx5_0", "mlx5_1"]
    assert len(some.document()["not_shown"]) == 9
    assert len(everything.document()["devices"]) == 11
    assert "9 VFs or SFs" in shell("topo").out


def test_a_software_device_has_no_row_but_is_named(shell_on: ShellOn, tmp_path: Path) -> None:
    shell = shell_on(servers.dgx)
    Tree(tmp_path / "sys").soft_rdma("rxe0", "ib0")

    found = shell("topo", "-o", "json").document()

    assert found["without_place"] == ["rxe0"]
    assert "rxe0" not in found["distances"]
    assert "without a position: rxe0" in shell("topo").out


def test_a_node_without_gpu_and_hca_says_what_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = Paths(**{name: tmp_path / name for name in Paths.__struct_fields__})

    printed = Shell(paths, monkeypatch, capsys)("topo")

    assert printed.code == 0
    assert "no GPU and no HCA was found" in printed.out
    assert "lspci" in printed.out


def test_a_topology_file_that_is_wrong_is_an_error_that_names_it(
    shell_on: ShellOn, tmp_path: Path
) -> None:
    shell = shell_on(servers.flat_vm)
    (tmp_path / "etc/topology.xml").write_text("<systems/>")

    printed = shell("topo")

    assert printed.code == 1
    assert "topology.xml" in printed.err
    assert printed.err.count("\n") == 1


def test_a_drawing_that_cannot_be_written_is_an_error(shell_on: ShellOn, tmp_path: Path) -> None:
    printed = shell_on(servers.dgx)("topo", "--svg", str(tmp_path / "none" / "a.svg"))

    assert printed.code == 1
    assert "cannot be written" in printed.err


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            servers.dgx,
            ["NUMA node 0", "NUMA node 1", "host bridge pci0000:c7", "switch 0000:18:00.0",
             "GPU7", "mlx5_7", "0000:cd:00.0", "ib7"],
        ),
        (servers.domains, ["host bridge pci0000:5d", "host bridge pci0001:f0", "10000:e1:00.0"]),
        (servers.flat_vm, ["host bridge cpu 1", "switch ffff:ff:03.0", "mlx5_3"]),
        (servers.multiport, ["NUMA node 0", "mlx5_0", "ib0, ib1"]),
    ],
)  # fmt: skip
def test_the_drawing_labels_what_it_shows(
    shell_on: ShellOn, build: Build, words: list[str]
) -> None:
    drawing = ElementTree.fromstring(shell_on(build)("topo", "--svg", "-").out)

    texts = {text.text for text in drawing.iter(f"{SVG}text")}
    assert set(words) <= texts


@pytest.mark.parametrize("build", [servers.dgx, servers.domains, servers.flat_vm, servers.vfs])
def test_boxes_of_the_drawing_lie_in_each_other_or_apart(shell_on: ShellOn, build: Build) -> None:
    check_boxes(shell_on(build)("topo", "--all", "--svg", "-").out)


def check_boxes(drawn: str) -> None:
    drawing = ElementTree.fromstring(drawn)
    boxes = []
    for rectangle in drawing.iter(f"{SVG}rect"):
        x, y = float(rectangle.get("x", 0)), float(rectangle.get("y", 0))
        boxes.append(
            (x, y, x + float(rectangle.get("width", 0)), y + float(rectangle.get("height", 0)))
        )
    assert len(boxes) > 5
    for a, b in combinations(boxes, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        inside = a[0] <= b[0] and a[1] <= b[1] and b[2] <= a[2] and b[3] <= a[3]
        assert apart or inside, (a, b)  # an outer box is written before what is in it
    # Each text is in the innermost box around its beginning, and ends in it.
    for text in drawing.iter(f"{SVG}text"):
        x, y = float(text.get("x", 0)), float(text.get("y", 0))
        around = [box for box in boxes if box[0] <= x <= box[2] and box[1] <= y <= box[3]]
        assert x + 7.3 * len(text.text or "") <= around[-1][2]


def test_the_drawing_says_who_holds_what_of_each_gpu(shell_on: ShellOn, tmp_path: Path) -> None:
    server = GpuServer(servers.dgx(tmp_path, nodes=True))
    shell = shell_on(lambda _: server.paths)
    server.hold(0, ["00000000.10g-25.0", "00000000.10g-25.1"])
    server.hold(0, ["00000000.10g-25.2"])
    for n in range(20):
        server.hold_whole(3, "example.com/shared-gpu", [f"nvidia3-_-{n}"])
    server.hold(1, ["00000001.10g-25.0"], address="0000:ff:00.0")  # it is gone
    server.hold(2, ["00000002.10g-25.0"], uuid="", bdf="", minor=-1, group="")

    drawn = shell("topo", "--svg", "-").out

    check_boxes(drawn)
    texts = [text.text or "" for text in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    at = texts.index("GPU0")
    name = f"{POD_UID} container-0"[:43]
    assert texts[at + 3] == f"{name}…: 20 GiB, 50%"
    assert texts[at + 4].endswith(": 10 GiB, 25%")
    assert "and 8 more" in texts
    assert texts[texts.index("held, and the GPU is gone") + 1].endswith(": 10 GiB, 25%")
    assert texts[texts.index("held, and the GPU is chosen at the start") + 1].endswith("25%")


def test_a_drawing_without_the_records_says_so(shell_on: ShellOn, tmp_path: Path) -> None:
    server = GpuServer(servers.dgx(tmp_path, nodes=True), "gpus: [{mode: none}]")
    drawn = shell_on(lambda _: server.paths)("topo", "--svg", "-").out
    check_boxes(drawn)
    assert "who holds what is not known" in drawn
    assert "GPU7" in drawn


def test_an_hca_without_a_working_port_is_drawn_as_down(shell_on: ShellOn, tmp_path: Path) -> None:
    shell = shell_on(servers.dgx)
    before = shell("topo", "--svg", "-").out
    Tree(tmp_path / "sys").port("mlx5_3", state="1: DOWN", physical_state="2: Polling")

    after = shell("topo", "--svg", "-").out

    count = re.compile('class="down"')
    assert len(count.findall(after)) == len(count.findall(before)) + 1


def test_the_same_server_gives_the_same_drawing(shell_on: ShellOn, tmp_path: Path) -> None:
    shell = shell_on(servers.dgx)
    target = tmp_path / "topo.svg"

    assert shell("topo", "--svg", str(target)).code == 0

    assert target.read_text() == shell("topo", "--svg", "-").out


def test_a_wrong_command_line_ends_with_2(shell_on: ShellOn) -> None:
    assert shell_on(servers.dgx)("topo", "--output", "xml").code == 2
