"""`podfabric`: the store is rebuilt from the attachments' journal, dead attachments are swept."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from base.paths import Paths
from cli.commands import run
from cni.attachments.journal import Journal, JournalEntry, Phase


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setenv("PODFABRIC_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PODFABRIC_RUN", str(tmp_path / "run"))
    return Paths(state=tmp_path / "state", run=tmp_path / "run")


def _attached(container_id: str, cidr: str, **ipam: Any) -> JournalEntry:  # noqa: ANN401
    config = {"name": "fabric", "type": "ipoib", "master": "ib0", "ipam": ipam}
    return JournalEntry(
        plugin="ipoib",
        network="fabric",
        container_id=container_id,
        ifname="net1",
        netns="/var/run/netns/gone",
        netns_identity="cookie:1",
        boot_id="an-earlier-boot",
        phase=Phase.ATTACHED,
        pod_namespace="ns",
        pod_name="p",
        addresses=(cidr,),
        segment="ib0 0x8001",
        config=json.dumps(config),
    )


def _listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["ipam", "list", "-o", "json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_fsck_takes_from_the_journal_what_the_store_has_lost(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(paths)
    ours = {"type": "podfabric-ipam", "range": "10.0.0.0/24", "network_name": "blue"}
    journal.write(_attached("c1", "10.0.0.7/24", **ours))
    journal.write(_attached("c2", "10.9.0.7/24", type="host-local", subnet="10.9.0.0/24"))
    unfinished = msgspec.structs.replace(_attached("c3", "10.0.0.8/24", **ours), phase=Phase.ADDING)
    journal.write(msgspec.structs.replace(unfinished, addresses=()))
    journal.write(_attached("c4", "10.0.0.9/24", **ours))
    journal.path_of(_attached("c4", "").attachment).write_bytes(b"{")

    assert run(["ipam", "fsck"]) == 1  # also with an empty store
    assert "10.0.0.7 of pod ns/p, fabric/c1/net1 is in the journal" in capsys.readouterr().out
    assert run(["ipam", "fsck", "--rebuild"]) == 0
    assert "is damaged" in capsys.readouterr().out  # of c4: a person must know
    (held,) = _listed(capsys)
    assert {
        key: held[key] for key in ("address", "segment", "range", "domain", "container_id")
    } == {
        "address": "10.0.0.7",
        "segment": "ib0 0x8001",
        "range": "10.0.0.0/24",
        "domain": "blue",
        "container_id": "c1",
    }


def test_sweep_releases_what_an_earlier_boot_held(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {"type": "podfabric-ipam", "range": "10.0.0.0/24"}
    Journal(paths).write(_attached("c1", "10.0.0.7/24", **ours))
    assert run(["ipam", "fsck", "--rebuild"]) == 0
    assert len(_listed(capsys)) == 1
    assert run(["sweep"]) == 0
    assert "removed fabric/c1/net1: its sandbox is gone" in capsys.readouterr().out
    assert _listed(capsys) == []
    assert list(Journal(paths).entries()) == []
    assert run(["sweep"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
