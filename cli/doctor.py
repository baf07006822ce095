"""`podfabric doctor`: checks the node's setup, and prints a remedy for each failure."""

import argparse
import os
from collections.abc import Iterator, Sequence

from base.paths import Paths
from cli import output
from cli.checks import Check, Finding, fabric, gpu_driver, installation, kernel, kubelet
from cli.output import Cell, Table
from node.state import ThisNode

CHECKS: Sequence[tuple[str, Check]] = (
    ("configuration", kubelet.configuration),
    ("pools", kubelet.pools),
    ("policy", kubelet.rules_of_node),
    ("module rdma_ucm", kernel.connection_manager),
    ("module ib_ipoib", kernel.ipoib_module),
    ("module ib_umad", kernel.mad_module),
    ("device nodes", kernel.device_nodes),
    ("RDMA namespaces", kernel.namespaces),
    ("locked memory", kernel.memory_limits),
    ("ports", fabric.ports),
    ("IPoIB parents", fabric.ipoib_parents),
    ("GPUs and HCAs", fabric.gpu_distances),
    ("GPU memory", kernel.peer_memory),
    ("GPU nodes", gpu_driver.gpu_nodes),
    ("GPU driver", gpu_driver.driver),
    ("GPU plugins", gpu_driver.other_plugins),
    ("kubelet", kubelet.registration_socket),
    ("PodResources", kubelet.pod_resources),
    ("resources", kubelet.registered),
    ("checkpoint", kubelet.checkpoint),
    ("agent", kubelet.agent),
    ("Multus", installation.multus),
    ("CNI executables", installation.our_executables),
)
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "not applicable": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output.add_option(parser)
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Returns exit code 1 if a check failed."""
    findings = examine(ThisNode(Paths.from_environ(os.environ), tolerant=True))
    if arguments.output != "table":
        output.document(findings)
    else:
        _show(findings)
    return 1 if any(finding.status == "failed" for finding in findings) else 0


def examine(node: ThisNode, checks: Sequence[tuple[str, Check]] = CHECKS) -> list[Finding]:
    """Run all checks in their order. A check that raises an error counts as failed."""
    return [finding for name, check in checks for finding in _findings(name, check, node)]


def _findings(name: str, check: Check, node: ThisNode) -> Iterator[Finding]:
    try:
        for status, seen, remedy in check(node):
            yield Finding(check=name, status=status, seen=seen, remedy=remedy)
    except Exception as error:  # noqa: BLE001 - the other checks must run
        text = str(error) or type(error).__name__
        yield Finding(
            check=name,
            status="failed",
            seen=f"the check failed: {text}",
            remedy="correct that first, and run doctor again",
        )


def _show(findings: list[Finding]) -> None:
    rows = []
    for finding in findings:
        remedy = (f"-> {finding.remedy}",) if finding.remedy else ()
        status = Cell(finding.status, _STYLES[finding.status])
        rows.append((finding.check, status, (finding.seen, *remedy)))
    counts = {status: sum(finding.status == status for finding in findings) for status in _STYLES}
    output.show(
        Table(("CHECK", "STATUS", "SEEN, AND WHAT TO DO"), rows, folded=True),
        f"{counts['failed']} failed, {counts['warning']} warnings, {counts['ok']} ok, "
        f"{counts['not applicable']} not applicable",
    )
