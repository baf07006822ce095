"""The chart's dashboards and alerts use metrics that exist, and the page has each alert."""

import json
import re
from itertools import chain
from typing import Any

import pytest

from tools import reference
from tools.manifests import CHART, CHECKOUT

BOARDS = {path.stem: path.read_text() for path in sorted(CHART.glob("boards/*.json"))}
ALERTS = (CHART / "templates/alerts.yaml").read_text()
# collector/infiniband_linux.go of node_exporter, which adds the prefix node_infiniband_.
NODE_EXPORTER = {
    f"node_infiniband_{name}_total"
    for name in (
        *("port_data_received_bytes", "port_data_transmitted_bytes", "port_errors_received"),
        *("port_discards_transmitted", "link_error_recovery", "link_downed"),
    )
}


def known() -> set[str]:
    """The names of all metrics that a board or an alert may use."""
    lists = [reference.LISTS[name]() for name in reference.LISTS if name.startswith("metrics-")]
    ours = {found[1] for text in chain(*lists) for found in reference.ITEM.finditer(text)}
    assert "podfabric_request_seconds" in ours
    return ours | {"podfabric_request_seconds_bucket"} | NODE_EXPORTER


def metrics(text: str) -> set[str]:
    return set(re.findall(r"\b(?:podfabric|node_infiniband)_\w+", text))


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_uses_metrics_that_exist(name: str) -> None:
    assert metrics(BOARDS[name]) <= known()
    for expression in expressions(json.loads(BOARDS[name])):
        assert metrics(expression), expression


def test_every_listed_metric_of_node_exporter_is_used() -> None:
    assert set.union(*map(metrics, BOARDS.values())) >= NODE_EXPORTER


def test_boards_have_names_of_their_own() -> None:
    boards = [json.loads(text) for text in BOARDS.values()]
    assert BOARDS.keys() == {"addresses", "cluster", "node", "pod"}
    assert [board["uid"] for board in boards] == [f"podfabric-{name}" for name in BOARDS]
    assert len({board["title"] for board in boards}) == len(boards)
    for board in boards:
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_uses_only_its_own_variables(name: str) -> None:
    board = json.loads(BOARDS[name])
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", BOARDS[name]))
    assert used == variables
    for panel in board["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_do_not_overlap() -> None:
    for text in BOARDS.values():
        places = [panel["gridPos"] for panel in json.loads(text)["panels"]]
        cells = [
            (at["x"] + x, at["y"] + y)
            for at in places
            for x in range(at["w"])
            for y in range(at["h"])
        ]
        assert len(set(cells)) == len(cells)
        assert max(x for x, _ in cells) < 24


def test_alerts_use_metrics_that_exist_and_have_a_heading_each() -> None:
    found = re.findall(r"- alert: (\w+)\n +expr: (.*)\n", ALERTS)
    assert len(found) == ALERTS.count("- alert: ")
    page = (CHECKOUT / "docs/operate/alerts.md").read_text()
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == [alert for alert, _ in found]
    for alert, expression in found:
        assert metrics(expression), alert
        assert metrics(expression) <= known(), alert
