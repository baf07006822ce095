"""HCAs as sysfs shows them, for tests of what is made of them."""

from collections.abc import Sequence

from host.sysfs.discovery import HCA, CharacterDevice, Port, RdmaDevice
from tests.unit.deviceplugin.made import hca


def port(
    link_layer: str = "InfiniBand", *, state: str = "ACTIVE", pkeys: Sequence[int] = ()
) -> Port:
    """Port 1 of an RDMA device."""
    return Port(
        number=1,
        link_layer=link_layer,
        state=state,
        physical_state="LinkUp" if state == "ACTIVE" else "Disabled",
        rate="100 Gb/sec (4X EDR)",
        guid="0011:2233:4455:6677",
        pkeys=tuple(pkeys) or (0xFFFF,),
        netdevs=(),
        umad=None,
        issm=None,
    )


def rdma(name: str, *ports: Port) -> RdmaDevice:
    """An RDMA device; it has one working InfiniBand port unless `ports` are given."""
    return RdmaDevice(
        name=name,
        uverbs=CharacterDevice(f"uverbs{name[-1]}", 231, 192),
        ports=ports or (port(),),
    )


def card(address: str, *devices: RdmaDevice, **changed: object) -> HCA:
    """An mlx5 function at that address, with these fields."""
    given: dict[str, object] = {"device": "101b", "software": False, **changed}
    return hca(address, *devices, **given)


def vf(pf: HCA, index: int, *devices: RdmaDevice, **changed: object) -> HCA:
    """A VF of that PF, at an address behind it."""
    address = f"{pf.address[:-4]}{index // 8 + 2:02x}.{index % 8}"
    given = {"device": "101c", "pf": pf.id, "pf_netdevs": pf.netdevs, "index": index, **changed}
    return card(address, *devices, **given)


def sf(pf: HCA, number: int, *devices: RdmaDevice, **changed: object) -> HCA:
    """An SF of that PF."""
    given = {
        "driver": "mlx5_core.sf",
        "aux_type": "sf",
        "pf": pf.id,
        "pf_netdevs": pf.netdevs,
        "index": number,
        **changed,
    }
    return card(f"mlx5_core.sf.{number}", *devices, **given)


def rxe(name: str, netdev: str) -> HCA:
    """A Soft-RoCE device."""
    return card(
        name,
        rdma(name, port("Ethernet")),
        vendor="",
        device="",
        driver="rdma_rxe",
        numa=None,
        netdevs=(netdev,),
        link_types=("ether",),
        software=True,
    )
