"""The Grafana dashboard and the alerts ask for nothing that the router does not export."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.view import view_cluster
from balanceroute.proxy.telemetry.instruments import CounterFamily
from balanceroute.proxy.telemetry.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/balanceroute.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS += [variable["query"]["query"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]

ALERTS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus-alerts.yaml").read_text())["groups"][0]["rules"]
WOKEN_FOR = sorted(
    {metric for rule in ALERTS for metric in re.findall(r"balanceroute_\w+", rule["expr"])}
    | {"balanceroute_upstream_errors_total", "balanceroute_ledger_divergence", "balanceroute_kv_orphans"}
    | {"balanceroute_waiting_requests", "balanceroute_decode_imbalance_tokens"}
)
ASKED = [*EXPRESSIONS, *(rule["expr"] for rule in ALERTS if "up{" not in rule["expr"])]

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}


def exported() -> set[str]:
    metrics = Metrics(lambda: view_cluster(ClusterSnapshot()), "br_h")
    return {f"{family.name}{suffix}" for family in metrics.collect() for suffix in SUFFIXES[family.type]}


def test_every_metric_of_every_expression_is_exported() -> None:
    known = exported()
    for expression in ASKED:
        names = set(re.findall(r"balanceroute_\w+", expression))
        assert names and names <= known, expression


def test_every_label_of_an_expression_is_one_that_its_metric_has() -> None:
    metrics = Metrics(lambda: view_cluster(ClusterSnapshot()), "br_h")
    counters = {c.name + "_total": set(c._labels) for c in vars(metrics).values() if isinstance(c, CounterFamily)}
    gauges = {family.name: set(getattr(family, "_labelnames", ())) for family in metrics.collect()}
    for expression in ASKED:
        known = {"le", "job", "instance"}
        for name in re.findall(r"balanceroute_\w+", expression):
            known |= counters.get(name, set()) | gauges.get(re.sub(r"_(bucket|sum|count|info)$", "", name), set())
        asked = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        asked |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\"", expression))
        assert asked <= known, expression


@pytest.mark.parametrize("metric", WOKEN_FOR)
def test_every_alerting_metric_is_on_the_dashboard(metric: str) -> None:
    assert any(metric in expression for expression in EXPRESSIONS)


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


def test_an_alert_wakes_somebody_when_all_workers_of_a_tier_were_removed() -> None:
    """A series that is not there is never below a bound."""
    (rule,) = [rule for rule in ALERTS if rule["alert"] == "BalancerouteNoWorkers"]
    name, bound = rule["expr"].split(" == ")
    (family,) = [f for f in Metrics(lambda: view_cluster(ClusterSnapshot()), "br_h").collect() if f.name == name]
    assert {s.labels["tier"]: s.value for s in family.samples} == {"prefill": float(bound), "decode": float(bound)}


def test_no_alert_counts_an_event_more_than_happened() -> None:
    """Prometheus extrapolates `increase` to its whole window: of three events it makes up to 3.7, never less than 3."""
    compared = [found for rule in ALERTS for found in re.findall(r"increase\(.*?\)+ (>=?) (\d+)", rule["expr"])]
    assert compared and all(operator == ">=" or bound == "0" for operator, bound in compared)
