"""Processes stay in their container's group under any name of their cgroups and mounts."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from gpu.limits import layout, processes
from tests.host.gpu.pods import GroupsNode, removed
from tests.waiting import until


def test_a_container_that_names_its_cgroups_after_another_pods_stays_what_it_is(
    node: GroupsNode,
) -> None:
    """The runtime may let the container write to its cgroup and make directories of any name."""
    ours, theirs = node.container("a"), node.container("b")
    names = ours.directory / "x\f0::"
    below = names / "kubepods" / f"pod{theirs.container.pod_uid}" / theirs.container.id
    below.mkdir(parents=True)
    try:
        with ours.client(node.socket("b")) as stranger, ours.client(node.socket("a")) as own:
            for client in (stranger, own):
                (below / "cgroup.procs").write_text(f"{client.pid}\n")
            assert stranger.register(0) == [layout.STATUS_STRANGER, 0, 0]
            assert own.register(0)[0] == layout.STATUS_OK
    finally:
        for directory in (below, *list(below.parents)[:3]):
            until(partial(removed, directory), what="end of the processes there")


SEEN = """
set -e
mkdir -p /run/podfabric/gpu
mount -t tmpfs none /run/podfabric/gpu
touch /run/podfabric/gpu/region
mount --bind "$0" /run/podfabric/gpu/region
mkdir /run/podfabric/gpu/odd && mount -t tmpfs "$1" "/run/podfabric/gpu/odd"
echo mounted
exec cat
"""


@pytest.mark.parametrize("name", ["a\fb", "a\rb", "a\u2028b", processes.MOUNTED_REGION], ids=ascii)
def test_the_region_of_a_process_is_found_beside_mounts_of_any_name(
    tmp_path: Path, name: str
) -> None:
    directory = tmp_path / "group\f\r"
    directory.mkdir()
    region = directory / "region"
    region.touch()
    with _mounting(SEEN, str(region), name) as process:
        found = processes.mounted_region(process.pid)
        process.communicate()
    assert found == processes.place_of(region)


def test_a_process_with_far_too_many_mounts_sees_no_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant with a user namespace can make 100,000, which would be read at each connection."""
    region = tmp_path / "region"
    region.touch()
    with _mounting(SEEN, str(region), "odd") as process:
        size = len(Path(f"/proc/{process.pid}/mountinfo").read_bytes())
        monkeypatch.setattr(processes, "_MOST_MOUNTINFO", size)
        assert processes.mounted_region(process.pid) is not None
        monkeypatch.setattr(processes, "_MOST_MOUNTINFO", size - 1)
        assert processes.mounted_region(process.pid) is None
        process.communicate()


@contextmanager
def _mounting(script: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A process with separate mounts, made by a script that prints a line and then waits."""
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mounted\n"
        yield process
