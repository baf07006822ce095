"""Every attachment definition that we give users, through the real executables."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.pods import link_names, pod
from tests.runtime import CHECKOUT, Definition, Runtime, definitions, pods

# Those of `sriov` need hardware of many kinds: tests/unit/sriov/test_examples.py reads them.
FILES = [
    file
    for file in sorted((CHECKOUT / "netattach-examples").glob("*.yaml"))
    if any(definition.config["type"] == "ipoib" for definition in definitions(file))
]


def _every() -> Iterator[tuple[str, Definition]]:
    for file in FILES:
        for definition in definitions(file):
            yield file.stem, definition


@pytest.mark.parametrize(
    "definition", [pytest.param(d, id=f"{file}-{d.name}") for file, d in _every()]
)
def test_example_attaches_and_detaches(definition: Definition, tmp_path: Path) -> None:
    runtime = Runtime()
    runtime.environ |= {"PODFABRIC_STATE": f"{tmp_path}/s", "PODFABRIC_RUN": f"{tmp_path}/r"}
    with pod("example") as netns:
        place = {"container_id": "c1", "netns": f"/var/run/netns/{netns}"}
        added = runtime.call("ADD", definition.config, **place)  # type: ignore[arg-type]
        assert (added.exit_code, added.stderr) == (0, "")
        assert added.document["cniVersion"] == definition.config["cniVersion"]
        assert added.document["ips"]
        assert link_names(netns) == {"lo", "net1"}
        removed = runtime.call("DEL", definition.config, **place)  # type: ignore[arg-type]
        assert (removed.exit_code, removed.stdout, removed.stderr) == (0, "", "")
        assert link_names(netns) == {"lo"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.stem))
def test_pods_of_an_example_name_its_definitions(file: Path) -> None:
    names = {definition.name for definition in definitions(file)}
    for one in pods(file):
        asked = one["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
        assert {name.strip() for name in asked.split(",")} == names
