"""Cheap instruments against the real client library's."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from balanceroute.proxy.telemetry.instruments import CounterFamily, Histogram, HistogramFamily, StageClock


@given(st.lists(st.floats(0, 20) | st.sampled_from([1.0, 2.0, 5.0])))
def test_a_histogram_counts_as_the_client_library_does(values: list[float]) -> None:
    registry = CollectorRegistry()
    reference = Reference("x", "x", buckets=(1.0, 2.0, 5.0), registry=registry)
    ours = Histogram((1.0, 2.0, 5.0))
    for value in values:
        reference.observe(value)
        ours.observe(value)
    samples = {s.labels["le"]: s.value for s in next(iter(registry.collect())).samples if s.name == "x_bucket"}
    assert {bound: count for bound, count in ours.cumulative()} == samples
    assert math.isclose(ours.total, sum(values), abs_tol=1e-9)
    assert ours.count == len(values)


@given(st.lists(st.floats(0, 20) | st.sampled_from([1.0, 2.0, 5.0]), min_size=100, max_size=200))
@settings(max_examples=25)  # of so many values each
def test_many_values_are_counted_at_once_as_one_by_one(values: list[float]) -> None:
    together, apart = Histogram((1.0, 2.0, 5.0)), Histogram((1.0, 2.0, 5.0))
    for value in values:
        together.observe(value)
        apart.observe(value)
        apart.fold()
    together.fold(len(values) + 1)
    assert together.cumulative() == apart.cumulative() and math.isclose(together.total, apart.total)


def test_counters_keep_their_labels_apart_and_forget_a_worker_s() -> None:
    counters = CounterFamily("errors", "x", ["worker", "kind"])
    counters.inc("d0", "a")
    counters.inc("d0", "a", by=2)
    counters.inc("d1", "a")
    counters.forget_worker("d0")
    assert counters.value("d0", "a") == 0 and counters.value("d1", "a") == 1


def test_a_family_gives_one_histogram_per_label_value() -> None:
    family = HistogramFamily("waits", "x", (1.0,), "stage")
    assert family.child("a") is family.child("a") is not family.child("b")


def test_the_stages_of_a_decision_are_timed_apart() -> None:
    clock = StageClock()
    clock.begin()
    for stage in ("prepare", "stage1", "stage2"):
        clock(stage)
    family = clock.stages.family()
    counts = {s.labels["stage"]: s.value for s in family.samples if s.name.endswith("_count")}
    assert counts == {"prepare": 1, "stage1": 1, "stage2": 1}
