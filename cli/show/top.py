"""`podfabric top`: the traffic, errors and congestion of each port, and the pods that hold it."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping

import msgspec

from base.paths import Paths
from cli import output
from cli.output import CLEAR, Cell, Lines, Table
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.pools.pool_config import ConfigError
from host.sysfs import port_counters
from host.sysfs.port_counters import PortCounters
from node import node_hcas
from node.state import ThisNode

PortKey = tuple[str, int]  # RDMA device, port

_UNITS = ("", "k", "M", "G", "T")


class PortRates(msgspec.Struct, frozen=True, kw_only=True):
    """A port's counters per second.

    A rate is `None` if the driver does not count, or if the counter was reset. `errors` and
    `congestion` map the kernel's names to rates above 0."""

    hca: str
    rdma: str
    port: int
    state: str
    rate: str
    received_bytes: float | None
    sent_bytes: float | None
    received_packets: float | None
    sent_packets: float | None
    errors: dict[str, float]
    congestion: dict[str, float]
    pods: tuple[str, ...]  # that hold the HCA


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output.add_option(parser)
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="default: 1"
    )
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    paths = Paths.from_environ(os.environ)
    try:
        for ports in _measured(paths, arguments.interval):
            if arguments.output != "table":
                output.document(ports)
            else:
                if arguments.watch and sys.stdout.isatty():
                    sys.stdout.write(CLEAR)
                output.show(*_tables(ports))
            sys.stdout.flush()
            if not arguments.watch:
                break
    except (ConfigError, CheckpointDamaged) as error:
        sys.stderr.write(f"podfabric top: {error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _measured(paths: Paths, interval: float) -> Iterator[list[PortRates]]:
    """Yield the rates after each interval, forever. Raises ConfigError or CheckpointDamaged."""
    before, since = counters(ThisNode(paths)), time.monotonic()
    while True:
        time.sleep(interval)
        node = ThisNode(paths)
        now, at = counters(node), time.monotonic()
        yield rates(node, before, now, at - since)
        before, since = now, at


def counters(node: ThisNode) -> dict[PortKey, PortCounters]:
    found = {}
    for hca in node.hcas:
        for rdma in hca.rdma:
            for port in rdma.ports:
                counters = port_counters.read(node.paths, rdma.name, port.number)
                if counters is not None:
                    found[rdma.name, port.number] = counters
    return found


def rates(
    node: ThisNode,
    before: Mapping[PortKey, PortCounters],
    now: Mapping[PortKey, PortCounters],
    seconds: float,
) -> list[PortRates]:
    """The rates of each port that is visible in this network namespace.

    Raises ConfigError or CheckpointDamaged.
    """
    found = []
    for listed in node_hcas.listed(node):
        pods = tuple(dict.fromkeys(holder.container.pod for holder in listed.held))
        for rdma in listed.hca.rdma:
            for port in rdma.ports:
                key = (rdma.name, port.number)
                old, new = before.get(key, _NONE), now.get(key, _NONE)
                found.append(
                    PortRates(
                        hca=listed.hca.id,
                        rdma=rdma.name,
                        port=port.number,
                        state=port.state,
                        rate=port.rate,
                        received_bytes=_rate(old.received_bytes, new.received_bytes, seconds),
                        sent_bytes=_rate(old.sent_bytes, new.sent_bytes, seconds),
                        received_packets=_rate(old.received_packets, new.received_packets, seconds),
                        sent_packets=_rate(old.sent_packets, new.sent_packets, seconds),
                        errors=_grown(old.errors, new.errors, seconds),
                        congestion=_grown(old.congestion, new.congestion, seconds),
                        pods=pods,
                    )
                )
    return found


_NONE = PortCounters(
    received_bytes=None,
    sent_bytes=None,
    received_packets=None,
    sent_packets=None,
    errors={},
    congestion={},
)


def _rate(old: int | None, new: int | None, seconds: float) -> float | None:
    if old is None or new is None or new < old:
        return None
    return round((new - old) / seconds, 1)


def _grown(old: Mapping[str, int], new: Mapping[str, int], seconds: float) -> dict[str, float]:
    by_name = {name: _rate(old.get(name), value, seconds) for name, value in sorted(new.items())}
    return {name: rate for name, rate in by_name.items() if rate}


def _tables(ports: list[PortRates]) -> list[Table | Lines]:
    headers = (
        "PORT", "HCA", "STATE", "RATE", "RX B/s", "TX B/s", "RX PKT/s", "TX PKT/s",
        "ERRORS/s", "CONGESTION/s", "PODS",
    )  # fmt: skip
    rows = [
        (
            f"{port.rdma}/{port.port}",
            port.hca,
            port.state,
            port.rate,
            _short(port.received_bytes),
            _short(port.sent_bytes),
            _short(port.received_packets),
            _short(port.sent_packets),
            Cell(_named(port.errors), "red"),
            Cell(_named(port.congestion), "yellow"),
            [pod or "not known" for pod in port.pods],
        )
        for port in ports
    ]
    return [Table(headers, rows) or "no RDMA port is visible here: see `podfabric devices`"]


def _named(counters: Mapping[str, float]) -> Lines:
    return [f"{name} {_short(rate)}" for name, rate in counters.items()]


def _short(rate: float | None) -> str:
    """A rate with at most four digits: "12.5G"; "" for `None`."""
    if rate is None:
        return ""
    unit = 0
    while rate >= 1000 and unit < len(_UNITS) - 1:
        rate, unit = rate / 1000, unit + 1
    return f"{rate:.3g}{_UNITS[unit]}"


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, 0.1 to 3600")
    return seconds
