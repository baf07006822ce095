"""PCI functions, VFs, auxiliary devices, netdevs and RDMA devices, read from a artificial /sys."""

import errno
import os
from pathlib import Path

import pytest

from base.paths import Paths
from host.errors import HostError
from host.sysfs import attribute_files, pci
from tests.unit.host import sysfs
from tests.unit.host.sysfs import Tree

PF, VF0, VF1 = "0000:af:00.1", "0000:af:06.0", "0000:af:06.1"


@pytest.fixture
def ethernet(tmp_path: Path) -> Tree:
    return sysfs.ethernet(tmp_path)


@pytest.fixture
def infiniband(tmp_path: Path) -> Tree:
    return sysfs.infiniband(tmp_path)


def found(paths: Paths, address: str) -> pci.Function:
    function = pci.find(paths, address)
    assert function is not None
    return function


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:af:06.0", "0000:af:06.0"),
        ("0000:AF:06.0", "0000:af:06.0"),
        ("af:06.0", "0000:af:06.0"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("0000:af:1f.7", "0000:af:1f.7"),
        ("mlx5_core.sf.6", "mlx5_core.sf.6"),
        ("", None),
        ("0000:af:06.8", None),
        ("0000:af:20.0", None),
        ("0000:af:06", None),
        ("af:06.0\n", None),
        ("../af:06.0", None),
        ("mlx5_core.sf", None),
        ("../a.sf.6", None),
        ("enp175s6", None),
    ],
)
def test_canonical_address(text: str, address: str | None) -> None:
    assert pci.canonical(text) == address


@pytest.mark.parametrize(
    ("pf", "count"),
    [
        pytest.param(PF, (2, 8), id="SU1"),
        pytest.param("0000:05:00.0", (0, 8), id="B13-none-made"),
        pytest.param(VF0, (0, 0), id="of-a-vf"),
        pytest.param("0000:af:00.2", (0, 0), id="SU1-missing"),
        pytest.param("no address", (0, 0), id="no-address"),
    ],
)
def test_number_of_vfs(ethernet: Tree, pf: str, count: tuple[int, int]) -> None:
    assert pci.vf_count(ethernet.paths, pf) == count


def test_vf_knows_its_pf_and_index(ethernet: Tree) -> None:  # SU2, SU5
    assert pci.find(ethernet.paths, "AF:06.1") == pci.Function(
        address=VF1, driver="mlx5_core", pf=PF, index=1, netdevs=("enp175s7",), rdma=()
    )


def test_vf_index_needs_no_netdev_of_the_pf(ethernet: Tree) -> None:
    (ethernet.root / "class/net/enp175s0f1").unlink()
    (ethernet.device(PF) / "net").rename(ethernet.root / "in-another-namespace")
    assert found(ethernet.paths, VF0).index == 0
    assert pci.pf_netdev(ethernet.paths, PF) == ""


def test_vfs_are_listed_by_number_not_by_name(tmp_path: Path) -> None:  # SU4
    tree = Tree(tmp_path)
    tree.pf(PF, totalvfs=16)
    addresses = [f"0000:af:{6 + n // 8:02x}.{7 - n % 8}" for n in range(12)]
    for address in addresses:
        tree.vf(PF, address)
    listed = pci.vfs(tree.paths, PF)
    assert [vf.address for vf in listed] == addresses
    assert [vf.index for vf in listed] == list(range(12))
    assert listed == [pci.find(tree.paths, address) for address in addresses]


@pytest.mark.parametrize("pf", ["0000:05:00.0", "0000:af:00.2", VF0, "no address"])
def test_no_vfs(ethernet: Tree, pf: str) -> None:
    assert pci.vfs(ethernet.paths, pf) == []


@pytest.mark.parametrize(
    ("pf", "netdev"),
    [
        pytest.param(PF, "enp175s0f1", id="SU3"),
        pytest.param("0000:af:07.0", "", id="SU3-missing"),
        pytest.param("0000:05:00.0", "ens1", id="two-ports"),
    ],
)
def test_netdev_of_the_pf(ethernet: Tree, pf: str, netdev: str) -> None:
    assert pci.pf_netdev(ethernet.paths, pf) == netdev


@pytest.mark.parametrize(
    "representor", ["pf0vf0", "pf0sf88", "c1pf0vf3", "pf0", "pf0hpf", "c1pf0", "0"]
)
@pytest.mark.parametrize("uplink", ["p0", "p0s1", "", None])
def test_representor_is_not_the_pfs_netdev(
    tmp_path: Path, representor: str, uplink: str | None
) -> None:
    tree = Tree(tmp_path)
    tree.pf(PF, totalvfs=8)
    tree.netdev(PF, "a_representor", phys_port_name=representor)
    tree.netdev(PF, "uplink", phys_port_name=uplink, dev_port=3)
    tree.netdev(PF, "z_representor", phys_port_name=representor)
    assert pci.pf_netdev(tree.paths, PF) == "uplink"


def test_first_port_is_used_with_any_name(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.pf(PF)
    tree.netdev(PF, "a", phys_port_name="p1", dev_port=1)
    tree.netdev(PF, "b", phys_port_name="p0", dev_port=0)
    tree.netdev(PF, "c", phys_port_name="pf0vf0", dev_port=0)
    assert pci.pf_netdev(tree.paths, PF) == "b"


@pytest.mark.parametrize(
    ("address", "is_vf", "userspace"),
    [
        pytest.param(VF0, True, False, id="B14-vf"),
        pytest.param(PF, False, False, id="B14-pf"),
        pytest.param(VF1, True, True, id="B14-B15-vfio"),
    ],
)
def test_kind_of_function(infiniband: Tree, address: str, is_vf: bool, userspace: bool) -> None:
    function = found(infiniband.paths, address)
    assert (function.is_vf, function.userspace) == (is_vf, userspace)


def test_missing_device_is_none(infiniband: Tree) -> None:  # B14, B15
    assert pci.find(infiniband.paths, "0000:af:06.3") is None
    assert pci.find(infiniband.paths, "no address") is None


@pytest.mark.parametrize(
    ("driver", "userspace"),
    [
        ("vfio-pci", True),
        ("uio_pci_generic", True),
        ("igb_uio", True),
        ("mlx5_vfio_pci", True),
        ("hisi-acc-vfio-pci", True),
        ("mlx5_core", False),
        ("", False),
    ],
)
def test_drivers_for_userspace(infiniband: Tree, driver: str, userspace: bool) -> None:
    infiniband.bound(VF1, driver)
    assert found(infiniband.paths, VF1).userspace is userspace


def test_vf_without_driver(infiniband: Tree) -> None:
    infiniband.bound(VF1, "")
    function = found(infiniband.paths, VF1)
    assert (function.driver, function.netdevs, function.rdma) == ("", (), ())


def test_other_pci_domains(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.pf("10000:01:00.0", totalvfs=2)
    tree.vf("10000:01:00.0", "10000:01:00.1")
    tree.netdev("10000:01:00.1", "eth7")
    assert found(tree.paths, "10000:01:00.1").pf == "10000:01:00.0"
    under = pci.of_netdev(tree.paths, "eth7")
    assert under is not None
    assert (under.address, under.index) == ("10000:01:00.1", 0)


def test_scalable_function(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.pf(PF, totalvfs=8)
    tree.sf(PF, "mlx5_core.sf.6")
    tree.netdev("mlx5_core.sf.6", "enp175s0f1s6")
    tree.rdma("mlx5_core.sf.6", "mlx5_4")
    function = found(tree.paths, "mlx5_core.sf.6")
    assert function == pci.Function(
        address="mlx5_core.sf.6",
        driver="mlx5_core.sf",
        pf="",
        index=None,
        netdevs=("enp175s0f1s6",),
        rdma=("mlx5_4",),
        above=PF,
    )
    assert pci.of_netdev(tree.paths, "enp175s0f1s6") == function
    assert pci.holder_of_rdma(tree.paths, "mlx5_4") == "mlx5_core.sf.6"


def test_function_under_a_netdev(ethernet: Tree) -> None:
    ethernet.netdev("", "veth0")
    platform = ethernet.root / "devices/platform/ibloop.0"
    platform.mkdir(parents=True)
    (ethernet.netdev("", "ib9") / "device").symlink_to(platform)
    under = pci.of_netdev(ethernet.paths, "enp175s6")
    assert under == pci.find(ethernet.paths, VF0)
    assert pci.of_netdev(ethernet.paths, "veth0") is None
    assert pci.of_netdev(ethernet.paths, "ib9") is None
    assert pci.of_netdev(ethernet.paths, "none") is None


def test_virtio_netdev_is_on_a_device_below_the_function(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    function = tree.pf("0000:00:03.0", driver="virtio-pci")
    netdev = function / "virtio2/net/eth0"
    netdev.mkdir(parents=True)
    (netdev / "device").symlink_to("../../../virtio2")
    (tree.root / "class/net").mkdir(parents=True)
    (tree.root / "class/net/eth0").symlink_to(netdev)
    under = pci.of_netdev(tree.paths, "eth0")
    assert under is not None
    assert (under.address, under.netdevs) == ("0000:00:03.0", ("eth0",))


def test_unplugged_device_reads_as_absent(ethernet: Tree) -> None:
    ethernet.remove(VF0)  # the links in bus/ and class/, and virtfn0, dangle
    assert pci.find(ethernet.paths, VF0) is None
    assert pci.of_netdev(ethernet.paths, "enp175s6") is None
    assert [vf.address for vf in pci.vfs(ethernet.paths, PF)] == [VF1]


def test_rdma_devices_of_a_function(infiniband: Tree) -> None:
    assert found(infiniband.paths, VF0).rdma == ("mlx5_1",)
    assert pci.holder_of_rdma(infiniband.paths, "mlx5_1") == VF0
    assert pci.holder_of_rdma(infiniband.paths, "mlx5_9") == ""


@pytest.mark.parametrize("parent", [True, False])
def test_soft_roce_belongs_to_the_function_of_its_netdev(ethernet: Tree, parent: bool) -> None:
    ethernet.soft_rdma("rxe1", "enp175s6", parent=parent)
    ethernet.soft_rdma("rxe0", "enp175s6", parent=parent)
    ethernet.netdev("", "dummy0")
    ethernet.soft_rdma("rxe2", "dummy0", parent=parent)
    assert found(ethernet.paths, VF0).rdma == ("rxe0", "rxe1")
    assert pci.vfs(ethernet.paths, PF)[0].rdma == ("rxe0", "rxe1")
    assert found(ethernet.paths, VF1).rdma == ()
    assert pci.holder_of_rdma(ethernet.paths, "rxe1") == VF0
    assert pci.holder_of_rdma(ethernet.paths, "rxe2") == ""


def test_hardware_rdma_device_is_not_found_by_its_netdev(ethernet: Tree) -> None:
    rdma = ethernet.rdma(PF, "mlx5_bond_0")  # RoCE LAG: one device for the ports of several
    (rdma / "ports/1/gid_attrs/ndevs/0").write_text("enp175s6\n")
    assert found(ethernet.paths, VF0).rdma == ()
    assert found(ethernet.paths, PF).rdma == ("mlx5_bond_0",)


def test_renumbered_uverbs_are_read_again(infiniband: Tree) -> None:
    assert pci.uverbs_of(infiniband.paths, "mlx5_1") == "uverbs1"
    infiniband.uverbs("uverbs0", "mlx5_1")
    infiniband.uverbs("uverbs1", "mlx5_0")
    assert pci.uverbs_of(infiniband.paths, "mlx5_1") == "uverbs0"
    assert pci.uverbs_of(infiniband.paths, "mlx5_9") == ""


class Kernel:
    """Answers to unbind and bind as drivers/base/bus.c does, on a artificial tree."""

    def __init__(self, tree: Tree, by_id: dict[str, str]) -> None:
        self.tree = tree
        self.by_id = by_id  # which driver's IDs match a function
        self.refusal = 0

    def write(self, attribute: str, text: str) -> None:
        path = Path(attribute)
        if path.name == "driver_override":
            path.write_text(text)
            return
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        device = self.tree.root / "bus" / path.parts[-4] / "devices" / text
        driver, now = path.parent.name, device / "driver"
        bound = now.resolve().name if now.exists() else ""
        if path.name == "unbind":
            if bound != driver:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            self.tree.bound(text, "")
            return
        override = device / "driver_override"
        wanted = override.read_text().strip() if override.exists() else ""
        if driver != (wanted if wanted not in ("", "(null)") else self.by_id[text]):
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        if bound:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        self.tree.bound(text, driver)


@pytest.fixture
def kernel(infiniband: Tree, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    infiniband.sf(PF, "mlx5_core.sf.6")
    answering = Kernel(
        infiniband, {VF0: "mlx5_core", VF1: "mlx5_core", "mlx5_core.sf.6": "mlx5_core.sf"}
    )
    monkeypatch.setattr(attribute_files, "write", answering.write)
    return answering


def _override(tree: Tree) -> str:
    return (tree.device(VF0) / "driver_override").read_text().strip()


@pytest.mark.parametrize("address", [VF0, "mlx5_core.sf.6"])
def test_unbind_and_bind_to_the_same_driver(kernel: Kernel, address: str) -> None:
    tree = kernel.tree
    function = found(tree.paths, address)
    pci.unbind(tree.paths, function)
    assert found(tree.paths, address).driver == ""
    pci.bind(tree.paths, function, function.driver)
    assert found(tree.paths, address) == function
    assert _override(tree) == "(null)"  # never touched


def test_another_driver_is_bound_by_an_override_that_goes_again(kernel: Kernel) -> None:
    tree = kernel.tree
    for driver, override in (("vfio-pci", "vfio-pci"), ("mlx5_core", ""), ("vfio-pci",) * 2):
        pci.unbind(tree.paths, found(tree.paths, VF0))
        pci.bind(tree.paths, found(tree.paths, VF0), driver)
        assert (found(tree.paths, VF0).driver, _override(tree)) == (driver, override)


def test_unbinding_and_binding_twice_is_fine(kernel: Kernel) -> None:
    tree = kernel.tree
    bound = found(tree.paths, VF0)
    pci.bind(tree.paths, bound, "mlx5_core")
    pci.unbind(tree.paths, bound)
    pci.unbind(tree.paths, bound)
    pci.unbind(tree.paths, found(tree.paths, VF0))
    assert found(tree.paths, VF0).driver == ""


def test_refusals_name_device_driver_and_answer(kernel: Kernel) -> None:
    tree = kernel.tree
    bound = found(tree.paths, VF0)
    kernel.refusal = errno.EPERM
    with pytest.raises(HostError) as caught:
        pci.unbind(tree.paths, bound)
    assert str(caught.value) == (
        "cannot unbind 0000:af:06.0 from driver mlx5_core: Operation not permitted (EPERM)"
    )
    kernel.refusal = 0
    pci.unbind(tree.paths, bound)
    kernel.refusal = errno.ENODEV
    with pytest.raises(HostError) as caught:
        pci.bind(tree.paths, bound, "vfio-pci")
    assert str(caught.value) == (
        "cannot bind 0000:af:06.0 to driver vfio-pci: No such device (ENODEV)"
    )
    assert _override(tree) == ""  # not left behind


def test_missing_driver(kernel: Kernel) -> None:
    with pytest.raises(HostError, match="to driver igb_uio: the kernel has no such driver"):
        pci.bind(kernel.tree.paths, found(kernel.tree.paths, VF0), "igb_uio")


def test_writes_to_a_drivers_files(infiniband: Tree) -> None:
    function = found(infiniband.paths, VF0)
    pci.unbind(infiniband.paths, function)
    assert (infiniband.root / "bus/pci/drivers/mlx5_core/unbind").read_text().startswith(VF0)
    infiniband.bound(VF0, "")
    pci.bind(infiniband.paths, function, "mlx5_core")
    assert (infiniband.root / "bus/pci/drivers/mlx5_core/bind").read_text().startswith(VF0)
