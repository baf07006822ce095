"""`podfabric ipam compat`: what whereabouts' objects still hold."""

import json
from pathlib import Path

import pytest

from cli import cluster_addresses
from cli.commands import run
from ipam.cluster.api import ClusterApi
from ipam.cluster.objects import AddressBlock
from tests.fake_api import FakeApi
from tests.unit.ipam.cluster.nodes import ClusterNode, blocks_of, put_pool
from tests.unit.ipam.cluster.test_whereabouts import allocation, offsets, put_ippool


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    server = FakeApi()
    put_pool(server, compat="Coexist")

    def connect(kubeconfig: Path | None) -> ClusterApi:
        return server.client("operator")

    monkeypatch.setattr(cluster_addresses, "connect", connect)
    return server


def test_compat_counts_what_is_held_and_tells_by_its_exit_code(
    server: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ipam", "compat"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["10.0.0.0-24", "Coexist", "0", "-"]
    put_ippool(server, {5: allocation("old"), 6: allocation("older"), 7: allocation("oldest")})
    assert run(["ipam", "compat"]) == 1
    assert "3     10.0.0.5 ns/old, 10.0.0.6 ns/older, ..." in capsys.readouterr().out
    assert run(["ipam", "compat", "-o", "json"]) == 1
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    assert pool["held"]["10.0.0.7"] == "ns/oldest"


def test_clear_removes_the_placeholders_of_blocks_that_are_gone_only(
    server: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_ippool(server, {5: allocation("old")})
    for name in ("a", "b"):
        ClusterNode(server, tmp_path / name, f"node-{name}", compat="Coexist").add("p0")
    (gone,) = blocks_of(server, "node-a")
    (kept,) = (block for block in blocks_of(server) if block != gone)
    server.remove(AddressBlock, gone)
    run(["ipam", "compat", "--clear"])
    assert capsys.readouterr().out.startswith("removed 16 placeholders\n")
    first = int(kept.removeprefix("default.10.0.0.").removesuffix("-28"))
    assert set(offsets(server)) == {5, *range(first, first + 16)}
