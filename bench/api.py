"""`python -m bench.api`: leases that many clients make and give back, with no address management.

Row A0: the ceiling, to which all other rates are relative. The API server and etcd are real, on
this machine's CPUs.
"""

import statistics
import threading
import time

from ipam.addresses import MAPPED_FIRST, text
from ipam.cluster.api import Meta
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.names import block_name
from ipam.cluster.objects import AddressBlock, BlockSpec, Holder
from tests.api.server import api_server

SECONDS = 15.0
CLIENTS = (1, 16)


def main() -> None:
    """Print the table."""
    print("leases made and given back, for 15 s")
    print("clients   leases/s   POST p50      p99   client's CPU")
    with api_server() as server:
        for clients in CLIENTS:
            kubeconfig = server.plane.kubeconfig("admin")
            each = [server.client(kubeconfig) for _ in range(clients)]
            rate, cpu, took = _ceiling(each)
            p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
            shown = " ".join(f"{seconds * 1e3:8.1f} ms" for seconds in (p50, p99, cpu))
            print(f"{clients:7} {rate:10.0f} {shown}")


def _ceiling(clients: list[KubernetesApi]) -> tuple[float, float, list[float]]:
    """Leases a second of all clients together, the client's CPU time of one, and how long each POST
    took."""
    took: list[float] = []
    cpu: list[float] = []
    end = time.monotonic() + SECONDS

    def lease(client: KubernetesApi, number: int) -> None:
        first = MAPPED_FIRST | 10 << 24 | number << 8
        while time.monotonic() < end:
            began = time.monotonic()
            made = client.create(_block(first))
            took.append(time.monotonic() - began)
            client.delete(made)
        cpu.append(time.thread_time())

    threads = [
        threading.Thread(target=lease, args=(client, number))
        for number, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(took) / SECONDS, sum(cpu) / len(took), took


def _block(first: int) -> AddressBlock:
    return AddressBlock(
        metadata=Meta(name=block_name("bench", first, 27)),
        spec=BlockSpec(
            pool="bench-10.0.0.0-8",
            range=f"{text(first)}/27",
            holder=Holder(instance="bench", node="bench"),
        ),
    )


if __name__ == "__main__":
    main()
