"""The namespace is gone and the interface is nowhere: DEL waits, but not for ever."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from cni.attachments.entry import ATTACHED, LEAVING, Entry
from cni.attachments.journal import Journal
from cni.attachments.requests import request_of
from cni.ipoib import child
from cni.ipoib.plugin import IPoIB
from cni.ipoib.removal import PATIENCE
from cni.spec.errors import CNIError
from host.paths import Paths


def test_delete_keeps_the_address_until_the_interface_had_time_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "RETURN_TIME", 0.1)
    paths = Paths(run=tmp_path / "run", state=tmp_path / "state")
    journal, plugin = Journal(paths), IPoIB(paths)
    entry = Entry(
        plugin="ipoib",
        network="fabric",
        container_id="c1",
        ifname="net1",
        netns="/var/run/netns/gone",
        netns_identity="cookie:0",
        boot_id=paths.boot_id(),
        phase=ATTACHED,
        config=json.dumps({"name": "fabric", "type": "ipoib", "master": "ib0"}),
    )
    journal.write(entry)
    for _ in range(2):
        with pytest.raises(CNIError, match="has not come back from it yet") as caught:
            plugin.delete(request_of(entry))
        assert caught.value.code == 104
    waiting = journal.read(entry.attachment)
    assert waiting is not None
    assert waiting.phase == LEAVING
    long_ago = (datetime.now(UTC) - PATIENCE - timedelta(seconds=1)).isoformat()
    journal.write(msgspec.structs.replace(waiting, since=long_ago))
    plugin.delete(request_of(entry))
    assert journal.read(entry.attachment) is None
