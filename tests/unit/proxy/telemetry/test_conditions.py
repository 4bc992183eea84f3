"""What is wrong although requests are served is said once, and held until it is over."""

import logging

import pytest

from balanceroute.proxy.telemetry.conditions import CONNECTOR, METRICS, QUIET_S, Conditions


def test_a_condition_is_logged_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    conditions = Conditions()
    for reason in ("refused", "refused", "late"):
        conditions.hold(METRICS, "p0", reason)
    assert conditions.reasons == ["p0: late"]
    conditions.clear(METRICS, "p0")
    conditions.clear(METRICS, "p0")
    assert [record.message for record in caplog.records] == ["degraded", "no longer degraded"]
    assert conditions.reasons == []


def test_a_flapping_condition_is_logged_rarely_and_a_lasting_one_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    conditions = Conditions(lambda: now[0])
    for _ in range(int(QUIET_S / 2) - 1):
        conditions.hold(METRICS, "p0", "late")
        assert conditions.count(METRICS) == 1
        now[0] += 1.0
        conditions.clear(METRICS, "p0")
        now[0] += 1.0
    assert [record.message for record in caplog.records] == ["degraded", "no longer degraded"]
    for _ in range(3):
        conditions.hold(METRICS, "p0", "late")
        now[0] += 1.0
    assert [record.message for record in caplog.records] == ["degraded", "no longer degraded", "degraded"]


def test_workers_with_the_same_reason_are_reported_together() -> None:
    conditions = Conditions()
    for number in range(6):
        conditions.hold(METRICS, f"p{number}", "status 404")
    conditions.hold(CONNECTOR, "p0", "other")
    assert conditions.reasons == ["p0, p1, p2, p3 and 2 more: status 404", "p0: other"]
    assert (conditions.count(METRICS), conditions.count(CONNECTOR)) == (6, 1)


def test_a_worker_that_has_left_is_under_no_condition() -> None:
    conditions = Conditions()
    conditions.hold(METRICS, "p0", "a")
    conditions.hold(CONNECTOR, "p0", "b")
    conditions.forget("p0")
    assert conditions.reasons == []
