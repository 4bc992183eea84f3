"""The snapshot as JSON: whole when written by us, forgiving when written by hand, clear when wrong."""

import json
from typing import Any

import pytest

from balanceroute.core.snapshot_json import snapshot_from_dict, snapshot_to_dict
from balanceroute.errors import InputError
from tests.unit.core.builders import a_scheduler, pool_all

BY_HAND: dict[str, Any] = {
    "workers": [
        {
            "id": "d0",
            "slots": 64,
            "active": [{"id": "a", "prompt_tokens": 900, "generated_tokens": 12, "expected_remaining": 80}],
        }
    ],
    "waiting": [{"id": "w1", "prompt_tokens": 4000, "wait_s": 0.4}],
}


def test_a_hand_made_snapshot_needs_only_the_fields_of_the_example() -> None:
    snapshot, now = snapshot_from_dict(BY_HAND, 80)
    snapshot.check_invariants()
    assert (snapshot.workers[0].load, snapshot.workers[0].free_slots, now) == (912, 63, 0.0)
    assert snapshot.pool.front[0].ready_s == -0.4


def test_a_written_snapshot_reads_back_the_same() -> None:
    scheduler = a_scheduler("br_h", workers=3, slots=2, horizon_steps=8)
    pool_all(scheduler, {name: 100 + index for index, name in enumerate("abcdefgh")}, now=5.0)
    scheduler.admit(6.0)
    scheduler.progress("a", 3, 7.0)
    scheduler.refresh("b", 3.25, 7.0)
    scheduler.progress("b", 1, 7.5)
    written = json.loads(json.dumps(snapshot_to_dict(scheduler.snapshot, 8.0)))
    assert written["means"]["class_wait_s"].keys() == {"0"}
    snapshot, now = snapshot_from_dict(written, 8)
    snapshot.check_invariants()
    again = snapshot_to_dict(snapshot, now)
    assert {k: again[k] for k in ("workers", "waiting", "means", "draws")} == {
        k: written[k] for k in ("workers", "waiting", "means", "draws")
    }


def test_a_router_that_has_served_billions_of_requests_writes_what_can_be_read() -> None:
    scheduler = a_scheduler("random", workers=2, slots=2)
    served = 3_000_000_000
    scheduler._arrivals = scheduler.snapshot.draws = served
    pool_all(scheduler, {"a": 100})
    scheduler.snapshot.means.prompts = scheduler.snapshot.means.answers = served
    written = json.loads(json.dumps(snapshot_to_dict(scheduler.snapshot, 8.0)))
    snapshot, now = snapshot_from_dict(written, 0)
    assert snapshot_to_dict(snapshot, now)["waiting"] == written["waiting"]
    assert snapshot.draws == snapshot.means.prompts == snapshot.means.answers == served


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 3}, "workers: expected a list, found 3"),
        ({"workers": [{"slots": 4}]}, r"workers\[0\].id: expected a name"),
        ({"workers": [{"id": "d0", "slots": "x"}]}, r"workers\[0\].slots: expected a whole number from 1"),
        ({"workers": [{"id": "d0", "slots": 1, "slowdown": 0}]}, r"workers\[0\].slowdown: expected a number from 1e"),
        (
            {"workers": [{"id": "d0", "slots": 1, "tokens_per_step": 0}]},
            r"workers\[0\].tokens_per_step: expected a number of at least 1, found 0",
        ),
        ({"workers": [{"id": "d0", "slots": 1, "state": "odd"}]}, r"state: 'odd'; accepted: up, draining, down"),
        (
            {"workers": [{"id": "d0", "slots": 1, "active": [{"id": "a", "prompt_tokens": 4, "running": "false"}]}]},
            r"workers\[0\].active\[0\].running: expected true or false, found 'false'",
        ),
        ({"waiting": [{"id": "a", "prompt_tokens": 4}]}, r"waiting\[0\].id: 'a' is there twice"),
        (
            {"waiting": [{"id": "w", "prompt_tokens": -4}]},
            r"waiting\[0\].prompt_tokens: expected a whole number from 0",
        ),
        ({"waiting": ["w"]}, r"waiting\[0\]: expected an object"),
        (
            {"means": {"prompt_tokens": 3, "class_wait_s": {"x": 1.0}}},
            "means.class_wait_s: expected priorities, found 'x'",
        ),
        ({"means": {"prompt_tokens": 3, "class_wait_s": {"0": -1}}}, "means.class_wait_s.0: expected a number of at"),
    ],
    ids=["no list", "no id", "no number", "slowdown", "step", "state", "no flag", "twice", "negative", "no object"]
    + ["no class", "no wait"],
)
def test_a_wrong_snapshot_is_refused_with_the_path_of_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        snapshot_from_dict(BY_HAND | change, 80)
