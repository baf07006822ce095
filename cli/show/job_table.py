"""`podfabric explain --job`: prints the pods of a job side by side, from the FabricNodes."""

import sys
from itertools import chain
from pathlib import Path

from cli import output
from cli.output import Cell, Lines, Table
from kube.resources import ApiError
from node import job_differences, job_pods
from node.job_pods import FabricOfPod

_ENDED = ("Succeeded", "Failed")


def run(kubeconfig: Path | None, namespace: str, job: str, form: str) -> int:
    """Print the pods of the job. Returns the exit code, which is 1 if no pod runs."""
    from cli.cluster_ipam import connect

    try:
        api = connect(kubeconfig)
        what, found = job_pods.of_job(api, namespace, job)
        running = [pod for pod in found if pod.status.phase not in _ENDED]
        pods = job_pods.fabric(api, running) if running else []
    except ApiError as error:
        sys.stderr.write(f"podfabric explain: {error}\n")
        return 1
    notes = []
    if len(found) > len(running):
        notes.append(f"pods that have ended: {len(found) - len(running)}")
    if len(found) == job_pods.MOST_PODS:
        notes.append(f"only {len(found)} pods were read")
    if not pods:
        why = "; ".join(notes) or f"no pod has {job_pods.searches(job)}: is the namespace wrong?"
        sys.stderr.write(f"podfabric explain: no pods of {job} run in {namespace}: {why}\n")
        return 1
    differences = job_differences.between(pods)
    if form != "table":
        output.document({"job": what, "pods": pods, "differences": differences, "notes": notes})
        return 0
    marked = {(pod, each.about) for each in differences for pod in each.pods}
    cells = {pod.pod: _cells(pod) for pod in pods}
    told = {about for _, about in marked}
    headers = [
        header
        for header in _cells(pods[0])
        if header in told or any(of[header] for of in cells.values())
    ]
    rows = [
        [_marked(of[header]) if (pod, header) in marked else Cell(of[header]) for header in headers]
        for pod, of in cells.items()
    ]
    output.show(
        f"pods of {what} in namespace {namespace}: {len(pods)}",
        Table(headers, rows),
        [f"* {each.text}" for each in differences] or "no pod differs from the others",
        [f"* {note}" for note in notes],
    )
    return 0


def _cells(pod: FabricOfPod) -> dict[str, Lines]:
    down = [f"{port.port} {port.state}" for port in pod.ports if port.state != "ACTIVE"]
    kind = ["unknown"] if pod.unknown else ["launcher"] if pod.launches else []
    return {
        "POD": pod.pod.partition("/")[2],
        "NODE": pod.node,
        "HCAS": f"{len(pod.hcas)}: {', '.join(pod.rdma)}" if pod.hcas else "",
        "PORTS": [f"{len(pod.ports) - len(down)} of {len(pod.ports)} ACTIVE", *down],
        "RATE": list(dict.fromkeys(port.rate for port in pod.ports)),
        "LINK": list(dict.fromkeys(port.link_layer for port in pod.ports)),
        "SUBNET": list(dict.fromkeys(port.subnet for port in pod.ports if port.subnet)),
        "GIDS": list(dict.fromkeys(chain.from_iterable(port.gids for port in pod.ports))),
        "P_KEY": [f"{one.pkey} {one.member}".strip() for one in pod.interfaces],
        "INTERFACES": [" ".join((one.interface, *one.addresses)) for one in pod.interfaces],
        "MTU": [str(one.mtu or "") for one in pod.interfaces],
        "GPUS": [f"{count} {word}" for word, count in job_differences.nearest(pod).items()],
        "MEMLOCK": pod.memlock,
        "QP": [f"{one.device} {one.qp}" for one in pod.objects],
        "FAULT": [*kind, *pod.faults],
    }


def _marked(lines: Lines) -> Cell:
    """The lines in red with the sign ≠, which is visible without colors."""
    first, *others = [lines] if isinstance(lines, str) else lines or [""]
    return Cell([f"≠ {first or '-'}", *others], "red")
