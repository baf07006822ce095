"""`podfabric ipam compat`: what whereabouts' objects still hold."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli import cluster_addresses
from cli.commands import run
from ipam.cluster.api import ClusterApi
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.whereabouts.objects import IPAllocation
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.beside import allocation, offsets, put_ippool
from tests.unit.ipam.cluster.nodes import ClusterNode, blocks_of, put_pool


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
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *("10.0.0.0-24", "Coexist", "0", "0", "-", "-")
    ]
    put_ippool(server, {5: allocation("old"), 6: allocation("older"), 7: allocation("oldest")})
    assert run(["ipam", "compat"]) == 1
    assert "10.0.0.5 ns/old, 10.0.0.6 ns/older, ..." in capsys.readouterr().out
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


def test_clear_leaves_the_placeholders_of_a_block_that_is_leased_meanwhile(
    server: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ClusterNode(server, tmp_path / "a", "node-a", compat="Coexist")
    gone.add("p0")
    server.remove(AddressBlock, blocks_of(server)[0])
    new = ClusterNode(server, tmp_path / "b", "node-b", compat="Coexist")

    def meanwhile(verb: str, kind: str, name: str) -> Fault | None:
        if (verb, kind) == ("patch", "IPPool") and not blocks_of(server):
            new.add("q0")
        return None

    monkeypatch.setattr(
        cluster_addresses, "connect", lambda kubeconfig: server.client("operator", meanwhile)
    )
    run(["ipam", "compat", "--clear"])
    (block,) = server.look_at_all(AddressBlock).items
    assert set(offsets(server).values()) == {f"podfabric/{block.metadata.uid}"}


def test_clear_removes_more_placeholders_than_one_patch_may(
    server: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    left = {number: IPAllocation(id="podfabric/gone") for number in range(1, 6000)}
    put_ippool(server, left, "10.0.0.0/16", "10.0.0.0-16")
    run(["ipam", "compat", "--clear"])
    assert capsys.readouterr().out.startswith("removed 5999 placeholders\n")
    assert offsets(server, "10.0.0.0-16") == {}


def test_compat_counts_the_blocks_that_are_not_yet_as_the_pool_says(
    server: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [
        ClusterNode(server, tmp_path / each, f"node-{each}", compat="Coexist") for each in "ab"
    ]
    for node in nodes:
        node.add("p0")
        node.steps(3, 15.0)
    assert run(["ipam", "compat", "-o", "json"]) == 0
    pool = server.look(AddressPool, "10.0.0.0-24")
    server.put(replace(pool, spec=replace(pool.spec, compat="Read")))
    nodes[0].steps(1, 500.0)
    capsys.readouterr()
    assert run(["ipam", "compat", "-o", "json"]) == 1
    (shown,) = json.loads(capsys.readouterr().out)["pools"]
    assert shown["behind"] == {blocks_of(server, "node-b")[0]: "node-b"}
    run(["ipam", "compat"])
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == [
        "10.0.0.0-24",
        "Read",
        "0",
        "1",
        "node-b",
    ]


def test_with_mirror_a_block_is_behind_until_its_pods_have_entries(
    server: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = ClusterNode(server, tmp_path / "a", "node-a", compat="Coexist")
    node.add("p0")
    node.steps(3, 15.0)
    pool = server.look(AddressPool, "10.0.0.0-24")
    server.put(replace(pool, spec=replace(pool.spec, mirror=True)))

    def behind() -> list[str]:
        run(["ipam", "compat", "-o", "json"])
        return list(json.loads(capsys.readouterr().out)["pools"][0]["behind"].values())

    assert behind() == ["node-a"]
    node.steps(1, 500.0)
    assert behind() == []
    node.add("p1")
    node.steps(3, 15.0)
    assert behind() == ["node-a"]


def test_a_pool_goes_by_the_compat_of_what_it_overlaps(
    server: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = put_pool(server, "10.0.0.0/25")
    overlapping = server.look(AddressPool, "10.0.0.0-24")
    server.remove(AddressPool, "10.0.0.0-24")
    ClusterNode(server, tmp_path / "a").add("p0", {"range": "10.0.0.0/25"})
    server.put(overlapping)
    assert run(["ipam", "compat", "-o", "json"]) == 1
    pools = {each["pool"]: each for each in json.loads(capsys.readouterr().out)["pools"]}
    found = pools[narrow.metadata.name]
    assert found["compat"] == "Coexist"
    assert found["behind"] == dict.fromkeys(blocks_of(server), "node-a")
