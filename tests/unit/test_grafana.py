"""The Grafana dashboard asks for nothing that the router does not export."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.proxy.instruments import CounterFamily
from balanceroute.proxy.metrics import Metrics

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "deploy/grafana/balanceroute.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS += [variable["query"]["query"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}


def exported() -> set[str]:
    metrics = Metrics(ClusterSnapshot(), "br_h")
    return {f"{family.name}{suffix}" for family in metrics.collect() for suffix in SUFFIXES[family.type]}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_of_an_expression_is_exported(expression: str) -> None:
    names = set(re.findall(r"balanceroute_\w+", expression))
    assert names and names <= exported()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_label_of_an_expression_is_one_that_its_metric_has(expression: str) -> None:
    metrics = Metrics(ClusterSnapshot(), "br_h")
    counters = {c.name + "_total": set(c._labels) for c in vars(metrics).values() if isinstance(c, CounterFamily)}
    gauges = {family.name: set(getattr(family, "_labelnames", ())) for family in metrics.collect()}
    known = {"le", "job"}
    for name in re.findall(r"balanceroute_\w+", expression):
        known |= counters.get(name, set()) | gauges.get(re.sub(r"_(bucket|sum|count|info)$", "", name), set())
    asked = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    asked |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\"", expression))
    assert asked <= known


def test_what_an_operator_is_woken_for_is_on_the_board() -> None:
    shown = " ".join(EXPRESSIONS)
    unseen = {name for name in exported() if re.search(r"_(bucket|total|info)$|^(?!.*_(sum|count)$)", name)}
    assert {name for name in unseen if name not in shown} == set()


def test_panels_have_their_own_ids_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken
        taken |= cells
