"""What others run on a worker counts in decisions exactly as if it were ours, and nowhere else."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balanceroute.core.policies import POLICIES
from balanceroute.core.snapshot_json import snapshot_to_dict
from balanceroute.core.state import state_from_dict
from balanceroute.core.types import Outcome
from balanceroute.explain import explain
from tests.examples import examples
from tests.unit.core.builders import a_scheduler, admitted, pool_all

SLOTS = 4
held = st.lists(st.integers(1, 2_000), max_size=SLOTS)
clusters = st.lists(st.tuples(held, held), min_size=1, max_size=4)


def a_state(policy: str, workers: list[dict[str, Any]], waiting: list[int], **params: Any) -> dict[str, Any]:
    return {
        "policy": policy,
        "params": {"horizon_steps": 12, **params},
        "workers": workers,
        "waiting": [{"id": f"w{i}", "prompt_tokens": size, "wait_s": 3.0} for i, size in enumerate(waiting)],
        "means": {"prompt_tokens": 300.0},
    }


def actives(worker: int, sizes: list[int], whose: str) -> list[dict[str, Any]]:
    return [{"id": f"{whose}{worker}-{i}", "prompt_tokens": size} for i, size in enumerate(sizes)]


@pytest.mark.parametrize(("policy", "bypass"), [*((policy, False) for policy in sorted(POLICIES)), ("br_0", True)])
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cluster=clusters, waiting=st.lists(st.integers(1, 2_000), min_size=1, max_size=8))
def test_a_policy_decides_as_if_foreign_requests_were_its_own(
    policy: str, bypass: bool, cluster: list[tuple[list[int], list[int]]], waiting: list[int]
) -> None:
    ours = [
        {"id": f"d{g}", "slots": 2 * SLOTS, "active": actives(g, own, "own") + actives(g, others, "other")}
        for g, (own, others) in enumerate(cluster)
    ]
    theirs = [
        {
            "id": f"d{g}",
            "slots": 2 * SLOTS,
            "active": actives(g, own, "own"),
            "foreign": {"requests": len(others), "tokens": sum(others)},
        }
        for g, (own, others) in enumerate(cluster)
    ]
    expected = explain(a_state(policy, ours, waiting, pool_bypass=bypass))
    found = explain(a_state(policy, theirs, waiting, pool_bypass=bypass))
    assert found.admissions == expected.admissions
    assert found.workers == expected.workers
    assert found.runners_up == expected.runners_up


def test_unnamed_foreign_tokens_count_on_every_step_of_the_horizon() -> None:
    workers = [{"id": "d0", "slots": 4, "foreign": {"tokens": 900}}, {"id": "d1", "slots": 4, "active": []}]
    shown = {view.id: view.margins for view in explain(a_state("br_h", workers, [100])).workers}
    assert shown == {"d0": (0,) * 13, "d1": (900,) * 13}


@pytest.mark.parametrize("policy", ["br_0", "br_h", "target_fit", "pool_fifo"])
def test_a_worker_full_of_foreign_requests_gets_none_until_they_leave(policy: str) -> None:
    scheduler = a_scheduler(policy, workers=2, slots=2)
    scheduler.report_decoder("d0", 5, 9_000, 0, 0.0)
    pool_all(scheduler, {name: 100 for name in "abc"})
    assert {worker for _, worker in admitted(scheduler)} == {"d1"}
    assert len(scheduler.snapshot.pool) == 1 and not scheduler.snapshot.has_room
    assert admitted(scheduler) == []
    scheduler.report_decoder("d0", 0, 0, 0, 1.0)
    assert [worker for _, worker in admitted(scheduler)] == ["d0"]


def test_the_router_keeps_least_own_slots_whatever_others_hold() -> None:
    scheduler = a_scheduler("target_fit", workers=1, slots=4)
    scheduler.report_decoder("d0", 9, 9_000, 2, 0.0)
    pool_all(scheduler, {name: 100 for name in "abc"})
    assert len(admitted(scheduler)) == 2
    assert len(scheduler.snapshot.pool) == 1


def test_foreign_requests_do_not_change_the_routers_own_load() -> None:
    scheduler = a_scheduler("br_h", workers=1, slots=4)
    pool_all(scheduler, {"a": 100})
    scheduler.report_decoder("d0", 2, 9_000, 0, 0.0)
    admitted(scheduler)
    worker = scheduler.snapshot.worker("d0")
    assert (worker.load, len(worker.active), worker.total_load, worker.occupied) == (100, 1, 9_100, 3)
    scheduler.finish("a", Outcome.FINISHED, 1.0)
    scheduler.snapshot.check_invariants()
    assert (worker.load, worker.total_load) == (0, 9_000)


def test_a_written_snapshot_includes_foreign_load() -> None:
    scheduler = a_scheduler("br_0", workers=2, slots=4)
    scheduler.report_decoder("d1", 3, 700, 2, 0.0)
    written = snapshot_to_dict(scheduler.snapshot, 0.0)
    assert written["workers"][1]["foreign"] == {"requests": 3, "tokens": 700, "least_own_slots": 2}
    _, snapshot, _ = state_from_dict({"policy": "br_0", **written})
    assert snapshot_to_dict(snapshot, 0.0)["workers"] == written["workers"]
