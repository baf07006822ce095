"""300 objects of each kind that a tenant or a node may write, as bad as the API server accepts.

The controller and two agents are processes. They continue to work: pools become ready, pods get
addresses, and the memory of each process stays below the limit of the chart.
"""

import http.client
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from ipam.leases.objects import AddressBlock, AddressPool, AddressReservation, Holder
from kube.encoding import document, path
from kube.resources import Conflict, NotFound, Resource
from kube.transport import KubernetesApi
from tests.api.conftest import NODE_A, NODE_B
from tests.api.server import DEFINITIONS, ApiServer, Document, definitions_of, name
from tests.api.test_agent_policies import PODFABRIC, AgentNode
from tests.api.test_policies_on_nodes import Tenant
from tests.unit.cli.commands import short_path
from tests.unit.kube.contract import block, reservation
from tests.unix_http import UnixHTTPConnection
from tests.waiting import until
from tools.manifests import CHECKOUT

COUNT = 300  # objects of each kind
DEPTH = 1500
DEEP = "@deep@"  # in a document: a deeply nested object
LARGE = 1 << 20  # bytes
VALUES = yaml.safe_load((CHECKOUT / "deploy/chart/values.yaml").read_text())


class Process:
    """A process of podfabric, its metrics and its memory."""

    def __init__(self, process: "subprocess.Popen[bytes]", metrics: Path, limit: str) -> None:
        self.pid = process.pid
        self._metrics = metrics
        self._limit = int(limit.removesuffix("Mi"))

    def get(self, what: str) -> tuple[int, str]:
        connection = UnixHTTPConnection(self._metrics)
        try:
            connection.request("GET", what)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    def value(self, sample: str) -> float:
        found = re.search(rf"^{re.escape(sample)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def require_within_limit(self) -> None:
        status = Path(f"/proc/{self.pid}/status").read_text()
        most = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        assert most is not None
        sys.stderr.write(f"process {self.pid}: {int(most[1]) >> 10} of {self._limit} MiB at most\n")
        assert int(most[1]) >> 10 < self._limit, "the kernel would have killed it"


class LeasingAgent(AgentNode):
    """A node whose agent leases addresses of the cluster."""

    def __init__(self, server: ApiServer, node: str, root: Path, stack: ExitStack) -> None:
        super().__init__(server, root, stack, node=node)
        agent = self.start()
        self.process = Process(agent.process, root / "m", VALUES["resources"]["limits"]["memory"])

    def configure(self, *, cluster: bool) -> None:
        (self.root / "etc").mkdir(parents=True, exist_ok=True)
        agent = {"listen": f"unix:{self.root / 'm'}"}
        (self.root / "etc/config.yaml").write_text(
            json.dumps({"agent": agent, "ipam": {"scope": "cluster"}})
        )

    def await_address(self, tenant: Tenant, range_: str) -> None:
        """Repeat an ADD until it succeeds."""
        answer: Document = {"code": -1}

        def has_address() -> bool:
            answer.clear()
            answer.update(self.call(tenant, range_))
            return "code" not in answer

        try:
            until(has_address, what=f"address of {range_}", pause=0.3)
        except AssertionError as error:
            raise AssertionError(f"{error}: {answer}") from None


@pytest.fixture(scope="module")
def definitions(server: ApiServer) -> None:
    server.install_kind(DEFINITIONS)


@pytest.fixture
def controller(server: ApiServer) -> Iterator[Process]:
    asked = {"expirationSeconds": 7200}
    kubeconfig = server.kubeconfig("hostile", asked, account="podfabric-controller")
    with short_path() as directory, (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(str(PODFABRIC), "controller", "--kubeconfig", str(kubeconfig)),
                *("--metrics", f"unix:{directory / 'm'}"),
            ],
            stdout=log,
            stderr=log,
        )
        try:
            limit = VALUES["controller"]["resources"]["limits"]["memory"]
            yield Process(process, directory / "m", limit)
        finally:
            process.kill()
            process.wait()
            sys.stderr.write((directory / "log").read_text(errors="replace")[-20_000:])


@pytest.fixture
def nodes(
    server: ApiServer, node_a: KubernetesApi, node_b: KubernetesApi
) -> Iterator[tuple[LeasingAgent, LeasingAgent]]:
    with short_path() as directory, ExitStack() as stack:
        a, b = (LeasingAgent(server, each, directory / each, stack) for each in (NODE_A, NODE_B))
        yield a, b


def managed() -> list[Document]:
    """Managed fields that a client may send."""
    field = {"manager": "m", "operation": "Apply", "apiVersion": "v1", "fieldsType": "FieldsV1"}
    return [{**field, "fieldsV1": DEEP, "time": "2026-01-01T00:00:00Z"}]


def written(found: Document) -> bytes:
    """The object's JSON, which no library of Python writes."""
    deep = '{"f:a":' * DEPTH + "{}" + "}" * DEPTH
    return json.dumps(found).replace(f'"{DEEP}"', deep).encode()


def bad_meta(number: int) -> Document:
    """Deep, large, or forged metadata."""
    if number % 3 == 0:
        return {"managedFields": managed()}
    if number % 3 == 1:
        return {"annotations": {"example.com/large": "x" * 250_000}}
    owner = {"apiVersion": "v1", "kind": "Node", "name": NODE_A, "uid": "7c1e", "controller": True}
    return {"ownerReferences": [owner], "finalizers": ["example.com/hold"]}


def definition(number: int, namespace: str) -> Document:
    ipam: Document = {"type": "whereabouts", "range": f"10.{number % 200}.0.0/99"}
    config: object = {"cniVersion": "1.0.0", "type": "ipoib", "name": "n", "ipam": ipam}
    if number % 3 == 1:
        ipam["exclude"] = ["10.0.0.0/32"] * (LARGE // 14)
    if number % 3 == 2:
        config = [[], {}, 7, {"plugins": 7}, {"ipam": []}, {"ipam": {**ipam, "range": 7}}][
            number // 3 % 6
        ]
    return {
        "apiVersion": "k8s.cni.cncf.io/v1",
        "kind": "NetworkAttachmentDefinition",
        "metadata": {
            "name": f"bad-{number}",
            "namespace": namespace,
            **({"managedFields": managed()} if number % 3 == 0 else {}),
        },
        "spec": {"config": json.dumps(config)},
    }


def pod(number: int, namespace: str) -> Document:
    annotations = {"k8s.v1.cni.cncf.io/networks": "x" * 200_000} if number % 2 else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"bad-{number}",
            "namespace": namespace,
            "annotations": annotations,
            "managedFields": managed(),
        },
        "spec": {"nodeName": NODE_B, "containers": [{"name": "c", "image": "i"}]},
    }


def forged(new: Resource, number: int) -> Document:
    found = document(new)
    return {**found, "metadata": {**found["metadata"], **bad_meta(number)}}


def bad_block() -> Resource:
    """A block of a missing pool and of a node that is not the writer's."""
    made = block()
    holder = Holder(instance=name("store"), node=NODE_A)
    return replace(made, spec=replace(made.spec, holder=holder))


def status(server: ApiServer, method: str, where: str, body: object = None) -> int:
    """The status of an answer, whose body Python's JSON may be unable to read."""
    try:
        return server.send(method, where, body)[0]
    except RecursionError:
        return HTTPStatus.CREATED if method == "POST" else HTTPStatus.OK


def write_all(server: ApiServer, namespace: str) -> dict[str, int]:
    """Write 300 objects of each kind; returns how many of them the server accepted."""
    kinds: dict[str, tuple[str, Callable[[int], Document]]] = {
        "definitions": (
            definitions_of(namespace),
            lambda number: definition(number, namespace),
        ),
        "pods": (f"/api/v1/namespaces/{namespace}/pods", lambda number: pod(number, namespace)),
        "blocks": (path(AddressBlock), lambda number: forged(bad_block(), number)),
        "reservations": (
            path(AddressReservation, namespace),
            lambda number: forged(reservation(namespace), number),
        ),
    }

    account: Document = {"apiVersion": "v1", "kind": "ServiceAccount"}
    account["metadata"] = {"name": "default"}  # pods use it
    server.make(f"/api/v1/namespaces/{namespace}/serviceaccounts", account)

    def send(kind: str, number: int) -> bool:
        where, make = kinds[kind]
        return status(server, "POST", where, written(make(number))) == HTTPStatus.CREATED

    with ThreadPoolExecutor(8) as pool:
        return {
            kind: sum(pool.map(send, itertools.repeat(kind, COUNT), range(COUNT))) for kind in kinds
        }


def is_ready(server: ApiServer, range_: str) -> bool:
    found = [each for each in server.admin.list(AddressPool).items if each.spec.range == range_]
    conditions = [each for pool in found for each in pool.status.conditions]
    return any(each.type == "Ready" and each.status == "True" for each in conditions)


def make_pool(server: ApiServer, range_: str) -> None:
    """A pool of a definition of a tenant without bad intent."""
    config = {"type": "ipoib", "name": "n", "ipam": {"type": "podfabric-ipam", "range": range_}}
    server.define({"cniVersion": "1.0.0", **config})
    until(lambda: is_ready(server, range_), what=f"pool {range_}", pause=0.2)


def delete_all(server: ApiServer, namespace: str) -> None:
    """Delete all objects, so that later tests find none."""
    for kind in (AddressBlock, AddressReservation):
        for each in server.admin.list(kind).items:
            with suppress(NotFound, Conflict):
                if each.metadata.finalizers:
                    each = server.admin.update(
                        replace(each, metadata=replace(each.metadata, finalizers=()))
                    )
                server.admin.delete(each)
    status(server, "DELETE", definitions_of(namespace))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    status(server, "DELETE", f"{pods}?gracePeriodSeconds=0")


def test_hostile_objects_stop_neither_rounds_nor_leases(
    server: ApiServer,
    definitions: None,
    controller: Process,
    nodes: tuple[LeasingAgent, LeasingAgent],
) -> None:
    tenant, began = Tenant(server), time.monotonic()
    make_pool(server, "10.231.0.0/24")
    for node in nodes:
        node.await_address(tenant, "10.231.0.0/24")
    try:
        taken = write_all(server, tenant.namespace)
        sys.stderr.write(f"{taken} are written after {time.monotonic() - began:.0f} s\n")
        assert min(taken.values()) > COUNT // 2, taken
        done = controller.value("podfabric_controller_rounds_total")
        until(lambda: controller.value("podfabric_controller_rounds_total") > done + 2, pause=0.3)
        make_pool(server, "10.95.0.0/24")
        for node in nodes:
            node.await_address(tenant, "10.95.0.0/24")
        assert controller.value('podfabric_unreadable_objects{kind="AddressBlock"}') > COUNT // 6
        assert controller.get("/healthz") == (200, "alive\n")
        for process in (controller, *(node.process for node in nodes)):
            assert process.get("/readyz")[0] == 200
            process.require_within_limit()
        sys.stderr.write(f"over after {time.monotonic() - began:.0f} s\n")
    finally:
        delete_all(server, tenant.namespace)
