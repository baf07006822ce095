"""The agent in a container that is not privileged: with what docs/agent.md says, and no more."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugins import CHECKOUT
from tests.plugins.contained import documented
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.plugins.contained` saw, with namespaces of its own as the host's."""
    root = tmp_path_factory.mktemp("contained")
    done = subprocess.run(
        [
            *("unshare", "--mount", "--net"),
            *(sys.executable, "-m", "tests.plugins.contained", str(root)),
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 3,
        check=False,
    )
    log = root / "container/log"
    assert done.returncode == 0, (done.stderr, log.read_text() if log.exists() else "no log")
    return dict(json.loads(done.stdout))


def test_interface_is_attached_and_detached(seen: dict[str, Any]) -> None:
    assert [one["name"] for one in seen["added"]["interfaces"]] == ["net1"]
    assert seen["inside"] == ["lo", "net1"]
    assert seen["deleted"] == {}
    assert seen["back"] == ["lo", "veth0", "veth1"]
    assert seen["left"] == []


def test_namespace_that_was_mounted_after_the_start_is_seen_at_its_path(
    seen: dict[str, Any],
) -> None:
    entry = json.loads(seen["entry"].splitlines()[-1])["entry"]  # the latest
    assert entry["netns_seen_from"].startswith(f"{seen['view']} ")


def test_process_in_a_namespace_without_a_path_is_seen(seen: dict[str, Any]) -> None:
    """By the host's /proc: the container's own shows no other process."""
    assert seen["hidden"] is True


def test_probe_in_the_container_learns_what_its_agent_does(seen: dict[str, Any]) -> None:
    assert seen["state"] == "serving"


def test_container_has_five_capabilities_and_may_write_nothing_else(seen: dict[str, Any]) -> None:
    (effective,) = re.findall(r"^CapEff:\s+([0-9a-f]+)$", seen["status"], re.MULTILINE)
    assert int(effective, 16).bit_count() == seen["capabilities"] == 5
    assert "NoNewPrivs:\t1" in seen["status"]
    assert "Read-only" in seen["write"]
    assert "Read-only" in seen["sysctl"]


def test_page_lists_the_mounts() -> None:
    mounts = {mount.destination: mount for mount in documented()}
    assert mounts["/host/proc"].source == Path("/proc")
    assert mounts["/run/netns"].propagation == "HostToContainer"
    assert len(mounts) == 13
