"""Reads the counters of RDMA ports from sysfs.

Sources: Documentation/ABI/stable/sysfs-class-infiniband; for hw_counters the drivers mlx5
(drivers/infiniband/hw/mlx5/counters.c) and rxe (drivers/infiniband/sw/rxe/rxe_hw_counters.c).
"""

from collections.abc import Mapping

import msgspec

from base.paths import Paths
from host.sysfs import attribute_files

_WORD = 4  # bytes: port_rcv_data and port_xmit_data count words

# Each counter grows with a packet or a connection that was damaged, dropped, repeated or refused.
_ERRORS = frozenset(
    (
        "VL15_dropped",
        "excessive_buffer_overrun_errors",
        "link_downed",
        "link_error_recovery",
        "local_link_integrity_errors",
        "port_rcv_constraint_errors",
        "port_rcv_errors",
        "port_rcv_remote_physical_errors",
        "port_rcv_switch_relay_errors",
        "port_xmit_constraint_errors",
        "port_xmit_discards",
        "symbol_error",
        # hw_counters of mlx5
        "duplicate_request",
        "implied_nak_seq_err",
        "local_ack_timeout_err",
        "out_of_buffer",
        "out_of_sequence",
        "packet_seq_err",
        "req_cqe_error",
        "req_remote_access_errors",
        "req_remote_invalid_request",
        "resp_cqe_error",
        "resp_local_length_error",
        "resp_remote_access_errors",
        "rnr_nak_retry_err",
        "rx_icrc_encapsulated",
        # hw_counters of rxe
        "completer_retry_err",
        "out_of_seq_request",
        "rcvd_rnr_err",
        "rcvd_seq_err",
        "retry_exceeded_err",
        "retry_rnr_exceeded_err",
        "send_err",
        "send_rnr_err",
    )
)
# Each counter grows while the fabric or a receiver slows down a sender.
_CONGESTION = frozenset(
    (
        "np_cnp_sent",
        "np_ecn_marked_roce_packets",
        "port_xmit_wait",
        "rp_cnp_handled",
        "rp_cnp_ignored",
    )
)


class PortCounters(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a port since the driver's start or the port's last reset.

    A number is `None` if the driver lacks the counter. The mappings use the kernel's names.
    """

    received_bytes: int | None
    sent_bytes: int | None
    received_packets: int | None
    sent_packets: int | None
    errors: Mapping[str, int]
    congestion: Mapping[str, int]


def read(paths: Paths, device: str, port: int) -> PortCounters | None:
    """The counters of a port of an RDMA device.

    Returns `None` if the driver has no counters, or if the device is not visible in this network
    namespace. Omits each counter that cannot be read.
    """
    found = every(paths, device, port)
    if not found:
        return None
    return PortCounters(
        received_bytes=_bytes(found.get("port_rcv_data")),
        sent_bytes=_bytes(found.get("port_xmit_data")),
        received_packets=found.get("port_rcv_packets", found.get("rcvd_pkts")),
        sent_packets=found.get("port_xmit_packets", found.get("sent_pkts")),
        errors={name: value for name, value in found.items() if name in _ERRORS},
        congestion={name: value for name, value in found.items() if name in _CONGESTION},
    )


def every(paths: Paths, device: str, port: int) -> dict[str, int]:
    """The counters of a port that can be read, by the kernel's names, in the kernel's units."""
    found: dict[str, int] = {}
    for folder in ("counters", "hw_counters"):
        directory = f"{paths.sys}/class/infiniband/{device}/ports/{port}/{folder}"
        for name in attribute_files.names(directory):
            value = attribute_files.number(f"{directory}/{name}")
            if value is not None and name != "lifespan":  # how long the kernel keeps a reading
                found[name] = value
    return found


def _bytes(words: int | None) -> int | None:
    return None if words is None else words * _WORD
