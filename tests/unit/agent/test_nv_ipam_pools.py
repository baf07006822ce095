"""nv-ipam in the agent: there where it is followed, and with its threads."""

import logging
from contextlib import closing
from pathlib import Path

import pytest

from agent.nv_ipam_pools import plugin_of, service_of
from agent.settings import load
from base.paths import Paths
from cni.spec.errors import CNIError, Code
from ipam.cluster.nv_ipam.service import NvPoolService, OwnPoolService
from ipam.nv_ipam import plugin
from ipam.nv_ipam.own import OwnNvIpam
from ipam.nv_ipam.plugin import NvIpam
from ipam.nv_ipam.pools import OWN_FILE, NodePool, NodePools, PoolsFile
from ipam.plugin import AddressPlugin
from ipam.scope import AddressSettings, Stores
from ipam.store_files import StoreFiles
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import request
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE, NETWORK, put_cidrpool, put_ippool
from tests.waiting import until

FOLLOW = AddressSettings(scope="cluster", nv_ipam="follow")
OWN = AddressSettings(scope="cluster", nv_ipam="own")


def test_a_node_that_does_not_follow_says_what_to_set(tmp_path: Path) -> None:
    paths, plain = Paths(state=tmp_path), AddressSettings(scope="cluster")
    files = StoreFiles(paths.ipam, kept=False)
    assert service_of(paths, files, plain, {"NODE_NAME": "a"}) is None
    none = plugin_of(paths, plain, None)
    calls = AddressPlugin(Stores(files), lambda: "boot-1", nv_ipam=none)
    with pytest.raises(CNIError, match="to follow or own in config") as caught:
        calls.add(request("ADD", {"type": "nv-ipam"}, "c1"))
    assert caught.value.code == Code.INVALID_CONFIG
    calls.delete(request("DEL", {"type": "nv-ipam"}, "c1"))


def test_an_agent_without_a_cluster_serves_by_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = Paths(state=tmp_path)
    with caplog.at_level(logging.ERROR):
        assert (
            service_of(paths, StoreFiles(paths.ipam, kept=False), FOLLOW, {"NODE_NAME": "a"})
            is None
        )
    assert "no cluster to ask" in caplog.text
    assert plugin_of(paths, FOLLOW, None)() is not None
    assert service_of(paths, StoreFiles(paths.ipam, kept=False), OWN, {"NODE_NAME": "a"}) is None
    assert isinstance(plugin_of(paths, OWN, None)(), OwnNvIpam)


def test_following_needs_the_clusters_scope(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("ipam: {nv_ipam: follow}\n")
    assert 'ipam.nv_ipam: "follow" needs "scope: cluster"' in load(path).mistakes["ipam"]
    path.write_text("ipam: {scope: cluster, nv_ipam: follow, nv_ipam_namespace: nv}\n")
    assert load(path).settings.ipam == AddressSettings(
        scope="cluster", nv_ipam="follow", nv_ipam_namespace="nv"
    )


def test_a_process_for_one_call_serves_where_the_file_says_so(tmp_path: Path) -> None:
    paths = Paths(state=tmp_path / "state", etc=tmp_path)
    served = plugin.on_node(paths)
    assert served() is None
    (tmp_path / "config.yaml").write_text("ipam: {scope: cluster, nv_ipam: follow}\n")
    assert served() is not None
    assert not isinstance(served(), OwnNvIpam)
    (tmp_path / "config.yaml").write_text("ipam: {scope: cluster, nv_ipam: own}\n")
    assert isinstance(served(), OwnNvIpam)


def test_pools_that_the_node_owns_come_into_a_file_of_their_own(tmp_path: Path) -> None:
    server, files = FakeApi(), StoreFiles(tmp_path, report=lambda line: None, kept=False)
    former = {
        key: NodePool(key=key, network="10.0.0.0/24") for key in ("ippool/old", "cidrpool/old")
    }
    PoolsFile(tmp_path).write(NodePools(node="a", pools=former, is_named=True))  # of mode follow
    with closing(OwnPoolService(server.client("a"), files, "a", "boot-1", NAMESPACE)) as service:
        service.start()
        put_ippool(server, {}, per_node_block_size=8)
        file = PoolsFile(tmp_path, OWN_FILE)

        def keys() -> set[str]:
            known = file.read()
            return set(known.pools) if known is not None else set()

        until(lambda: keys() == {"ippool/pool"}, what="pool in the file")
        put_cidrpool(server, {"a": ("10.8.0.8/29", "10.8.0.9")})

        def followed() -> set[str]:
            known = PoolsFile(tmp_path).read()
            return set(known.pools) if known is not None else set()

        until(lambda: followed() == {"cidrpool/routed"}, what="only CIDRPools in the other file")


def test_watches_wake_the_follower_and_adds_follow_the_pools(tmp_path: Path) -> None:
    server, files = FakeApi(), StoreFiles(tmp_path, report=lambda line: None, kept=False)
    server.add_node("a")
    with closing(NvPoolService(server.client("a"), files, "a", "boot-1", NAMESPACE)) as service:
        service.start()
        nv_ipam = NvIpam(tmp_path, tmp_path / "nv-ipam.conf", service.follower)
        calls = AddressPlugin(Stores(files), lambda: "boot-1", nv_ipam=lambda: nv_ipam)
        keys = {"type": "nv-ipam", "poolName": "pool"}
        given: list[str] = []

        def add(container: str) -> bool:
            try:
                result, _ = calls.reserve(request("ADD", keys, container, network=NETWORK))
            except CNIError as error:
                assert error.code in (Code.TRY_AGAIN, Code.NO_FREE_ADDRESS)
                return False
            given.extend(ip.address for ip in result.ips)
            return True

        put_ippool(server, {"a": ("10.0.0.1", "10.0.0.1")})
        until(lambda: add("c1"), what="an entry")
        calls.check(
            request(
                "CHECK",
                keys,
                "c1",
                network=NETWORK,
                config={"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": given[0]}]}},
            )
        )
        with pytest.raises(CNIError, match="no free address"):
            calls.status(request("STATUS", keys, "", network=NETWORK))
        server.end_watches()
        put_ippool(server, {"a": ("10.0.0.1", "10.0.0.2")})
        until(lambda: add("c2"), what="the wider entry")
        assert given == ["10.0.0.1/24", "10.0.0.2/24"]
        with pytest.raises(CNIError, match="is not reserved") as caught:
            calls.check(
                request(
                    "CHECK",
                    keys,
                    "c2",
                    network=NETWORK,
                    config={
                        "prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.9/24"}]}
                    },
                )
            )
        assert caught.value.code == Code.CHECK_FAILED
