"""The queue pairs of pods on a shared Soft-RoCE device: on the page and in the metrics."""

import re
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import images
from tests.cluster.cluster import PATIENCE, Cluster, Namespace, pod
from tests.cluster.installation import configured
from tests.kernel.vm import layout
from tests.waiting import until

RXE, DEVICE = "rdma/rxe", "rxe7"
NUMBERS = {"few": 20, "many": 200}


@pytest.fixture
def soft_roce(cluster: Cluster) -> Iterator[None]:
    """A pool of a Soft-RoCE device that two pods can share."""
    command = f"cd {layout.CHECKOUT} && {layout.PYTHON} -m tests.kernel.verbs"
    cluster.node.run(f"{command} {DEVICE}")
    selectors = {"drivers": ["rdma_rxe"]}
    pool = {"name": RXE, "mode": "shared", "slots": 2, "selectors": selectors}
    try:
        with configured(cluster, {"pools": [pool]}, {RXE: 2}):
            yield
    finally:
        cluster.node.run(f"ip link delete {DEVICE}-net")


@pytest.mark.long
@pytest.mark.usefixtures("soft_roce")
def test_the_queue_pairs_of_each_pod_are_shown(cluster: Cluster, namespace: Namespace) -> None:
    for name, number in NUMBERS.items():
        document = pod(name, devices={RXE: 1})
        (container,) = document["spec"]["containers"]
        container |= {"image": images.VERBS, "command": ["hold_objects", DEVICE, str(number)]}
        document["spec"]["restartPolicy"] = "Never"
        namespace.apply(document)
    namespace.running(*NUMBERS)

    def read(path: str) -> str:
        text: str = cluster.node.run(f"busybox wget -q -O - http://127.0.0.1:9810/{path}")
        return text

    def in_metrics() -> dict[str, float]:
        return {
            sample.labels["pod"]: sample.value
            for family in text_string_to_metric_families(read("metrics"))
            for sample in family.samples
            if sample.name == "podfabric_pod_rdma_objects" and sample.labels["type"] == "qp"
        }

    def on_page() -> dict[str, int]:
        row = rf"<td>{namespace.name}/(\w+)</td><td>{DEVICE}</td><td>(\d+)</td>"
        return {pod: int(number) for pod, number in re.findall(row, read(""))}

    until(lambda: in_metrics() == NUMBERS, PATIENCE, "the numbers in the metrics", pause=0.5)
    until(lambda: on_page() == NUMBERS, PATIENCE, "the numbers on the page", pause=0.5)
    cluster.node.run(f"pkill -9 -f '[h]old_objects {DEVICE} 200'")
    began = time.monotonic()
    until(lambda: on_page().get("many", 0) == 0, PATIENCE, "no queue pairs", pause=0.2)
    print(f"the page shows the end of the process after {time.monotonic() - began:.1f} s")
    assert in_metrics().get("many", 0) == 0
    assert in_metrics()["few"] == 20
