"""The node's records of used addresses, for a store that is opened or rebuilt."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from base.paths import Paths
from cni.attachments import node_facts
from cni.attachments.journal import Journal, JournalEntry, Phase

NOW = datetime.now(UTC).isoformat(timespec="seconds")


def entry(container_id: str, phase: Phase, ipam: object, *addresses: str) -> JournalEntry:
    config = {"cniVersion": "1.0.0", "name": "n1", "type": "ipoib", "ipam": ipam}
    return JournalEntry(
        plugin="ipoib",
        network="n1",
        container_id=container_id,
        ifname="net1",
        netns="/run/netns/x",
        netns_identity="cookie:1",
        boot_id=Paths().boot_id(),
        phase=phase,
        pod_namespace="ml",
        pod_name="worker-0",
        since=NOW,
        config=json.dumps(config),
        addresses=addresses,
        segment="ib0 0x8001",
    )


OURS = {"type": "podfabric-ipam", "range": "10.0.0.0/24", "network_name": "blue"}


@pytest.mark.root
def test_the_journal_gives_addresses_begun_adds_and_what_cannot_be_read(tmp_path: Path) -> None:
    paths = Paths(state=tmp_path, run=tmp_path / "run")
    journal = Journal(paths)
    journal.write(entry("c1", Phase.ATTACHED, OURS, "10.0.0.7/24", "192.0.2.9/30"))
    journal.write(entry("c2", Phase.ADDING, OURS))
    journal.write(entry("c3", Phase.ATTACHED, {"type": "static"}, "10.0.0.8/24"))
    journal.write(
        entry("c4", Phase.ATTACHED, {"type": "podfabric-ipam", "range": "x"}, "10.0.0.9/24")
    )
    damaged = entry("c5", Phase.ATTACHED, OURS, "10.0.0.10/24")
    journal.write(damaged)
    journal.path_of(damaged.attachment).write_bytes(b"{")
    facts = node_facts.look(paths)
    found = {each.address: each for each in facts.journal}
    assert found.keys() == {"10.0.0.7", "192.0.2.9"}
    ours = found["10.0.0.7"]
    assert (ours.domain, ours.range, ours.segment) == ("blue", "10.0.0.0/24", "ib0 0x8001")
    assert (ours.pod_name, ours.attachment.container_id) == ("ml/worker-0", "c1")
    assert found["192.0.2.9"].range == "192.0.2.8/30"
    assert facts.begun == (datetime.fromisoformat(NOW).timestamp(),)
    assert [name in line for name, line in zip(("c4", "c5"), sorted(facts.unseen), strict=True)]
    assert facts.boot == paths.boot_id()
