"""`explain` on states small enough to check by hand."""

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import POLICIES, make_policy, settings_to_dict
from balanceroute.core.prefill import LONE_WEIGHT
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot_json import outline_to_dict, snapshot_to_dict
from balanceroute.core.state import state_to_dict
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec
from balanceroute.errors import InputError
from balanceroute.explain import explain, runners_up
from tests.commands import exit_code

EXAMPLE: dict[str, Any] = {
    "policy": "br_h",
    "params": {"horizon_steps": 80, "beta": 43, "gamma": 0.86, "s_greedy": 0, "r_max": 4},
    "workers": [
        {
            "id": "d0",
            "slots": 64,
            "active": [{"id": "a", "prompt_tokens": 900, "generated_tokens": 12, "expected_remaining": 80}],
        }
    ],
    "waiting": [{"id": "w1", "prompt_tokens": 4000, "wait_s": 0.4}],
}
# d0 holds 5,000 tokens in its one slot, d1 holds 2,000 in one of two: the margin of d1 is 3,000
SCARCE: dict[str, Any] = {
    "policy": "br_0",
    "params": {"s_greedy": 4, "r_max": 8},
    "workers": [
        {"id": "d0", "slots": 1, "active": [{"id": "a", "prompt_tokens": 5000}]},
        {"id": "d1", "slots": 2, "active": [{"id": "b", "prompt_tokens": 1900, "generated_tokens": 100}]},
    ],
    "waiting": [
        {"id": "small", "prompt_tokens": 500},
        {"id": "fits", "prompt_tokens": 2900},
        {"id": "big", "prompt_tokens": 3500},
    ],
}


def changed(state: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**copy.deepcopy(state), **values}


def test_the_example_of_the_design() -> None:
    result = explain(EXAMPLE).to_dict()
    admission = {"request": "w1", "worker": "d0", "stage": 1, "score": 4000.0, "sent_ahead": False}
    nothing = {"runner_up": None, "otherwise": "no other choice"}
    assert result["admissions"] == [admission | nothing]
    assert result["margins"] == {"d0": [0] * 81}
    assert (result["left_waiting"], result["reason"]) == (0, "nothing is left waiting")


def test_br_0_takes_the_largest_request_that_fits_the_margin() -> None:
    """F(2900) = 2900; F(500) = 500; F(3500) = 3500 - 2 * 500 = 2500: the runner-up is `big`."""
    result = explain(SCARCE)
    assert [(a.request, a.worker, a.stage, a.score) for a in result.admissions] == [("fits", "d1", 2, 2900.0)]
    (runner_up,) = result.runners_up
    assert runner_up.admission is not None and (runner_up.admission.request, runner_up.score) == ("big", 2500.0)
    assert [(w.load_tokens, w.margin, w.free_slots) for w in result.workers] == [(5000, 0, 0), (2000, 3000, 1)]
    assert (result.left_waiting, result.reason) == (2, "no slot is left free")


def test_br_h_sees_the_margin_shrink_when_the_fullest_worker_empties() -> None:
    """`a` (5,000) leaves after two steps: from h = 3 on d1 alone has load, so its margin there is 0."""
    state = changed(SCARCE, policy="br_h", params={"horizon_steps": 4, "s_greedy": 4})
    state["workers"][0]["active"][0]["expected_remaining"] = 2
    result = explain(state)
    assert result.workers[1].margins == (3000, 3000, 3000, 0, 0)
    assert (result.workers[1].margin, result.workers[1].least_margin) == (3000, 0)


def test_an_assigning_policy_names_the_next_worker() -> None:
    result = explain(changed(SCARCE, policy="least_kv", params={}))
    assert (result.admissions[0].request, result.admissions[0].worker) == ("small", "d1")
    runner_up = result.runners_up[0].admission
    assert runner_up is not None and (runner_up.request, runner_up.worker) == ("small", "d0")


def test_the_runner_up_of_a_later_admission_comes_after_the_draws_of_those_before() -> None:
    workers = [{"id": f"d{n}", "slots": 4, "active": []} for n in range(3)]
    state = {
        "policy": "round_robin",
        "workers": workers,
        "waiting": [{"id": name, "prompt_tokens": 9} for name in "ab"],
    }
    result = explain(state)
    assert [admission.worker for admission in result.admissions] == ["d0", "d1"]
    assert [str(runner_up) for runner_up in result.runners_up] == ["a to d1", "b to d2"]


def test_with_slots_for_all_the_runner_up_is_another_worker() -> None:
    """6,900 tokens are 1,900 above the envelope of 5,000 on d0 already, and 1,400 more so than 5,500 on d1."""
    state = changed(SCARCE, policy="level_fit", params={"hold_s": 0}, waiting=[{"id": "only", "prompt_tokens": 3500}])
    state["workers"][0]["slots"] = 2
    result = explain(state)
    assert [(a.request, a.worker, a.score) for a in result.admissions] == [("only", "d1", -500.0)]
    (runner_up,) = result.runners_up
    assert str(runner_up) == "only to d0" and runner_up.score == -3500.0


def test_a_single_request_and_slot_have_no_runner_up_except_a_hold() -> None:
    alone = changed(SCARCE, policy="level_fit", params={"hold_s": 0}, waiting=[{"id": "only", "prompt_tokens": 3500}])
    assert [str(runner_up) for runner_up in explain(alone).runners_up] == ["no other choice"]
    workers = [
        {"id": name, "slots": 6, "active": [{"id": f"{name}{n}", "prompt_tokens": tokens} for n in range(4)]}
        for name, tokens in (("light", 100), ("heavy", 1250))
    ]
    held = {"policy": "level_fit", "workers": workers, "waiting": [{"id": "only", "prompt_tokens": 1000}]}
    result = explain(held)
    assert [(a.request, a.worker) for a in result.admissions] == [("only", "light")]
    assert [str(runner_up) for runner_up in result.runners_up] == ["nothing: the rest would wait"]


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"br_h"}))
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_without_a_horizon_decides_alike_on_the_outline_and_the_full_state(policy: str, seed: int) -> None:
    random = Random(seed)
    settings = PolicySettings(policy=policy)
    scheduler = Scheduler(make_policy(settings))
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    for name in ("d0", "d1", "d2"):
        scheduler.add_worker(WorkerSpec(name, Role.DECODE, slots=6, slowdown=random.choice((1.0, 1.5))), 0.0)
    scheduler.report_decoder("d1", 2, 700, 1, 0.0)
    for n in range(18):
        scheduler.submit(RequestSpec(f"r{n}", random.randint(1, 3000)), 0.0)
        scheduler.dispatch(0.0)
        scheduler.prefilled(f"r{n}", scheduler.snapshot.requests[f"r{n}"].prompt_tokens, 0.0)
        if n == 10:
            scheduler.admit(1.0)
    given = settings_to_dict(settings)
    whole, outline = (write(scheduler.snapshot, 2.0) for write in (snapshot_to_dict, outline_to_dict))
    decided = explain({**given, **whole})
    assert decided.admissions
    assert runners_up({**given, **outline}, 100) == list(zip(decided.admissions, decided.runners_up, strict=True))


@pytest.mark.parametrize("policy", ["br_0", "br_h", "level_fit", "pool_fifo", "target_fit"])
@pytest.mark.parametrize("free", [0, 2], ids=["no slot free", "two slots free"])
def test_sent_ahead_requests_are_explained_as_the_scheduler_sends_them(policy: str, free: int) -> None:
    settings = PolicySettings(policy=policy)
    scheduler = Scheduler(make_policy(settings), SchedulerConfig(overlap_requests=1))
    for name in ("d0", "d1"):
        scheduler.add_worker(WorkerSpec(name, Role.DECODE, slots=3), 0.0)
    for n in range(8):
        scheduler.submit_prefilled(RequestSpec(f"a{n}", 1000 + 100 * n), 0.0, 40.0)
    assert len(scheduler.admit(0.0)) == 8
    for worker in scheduler.snapshot.workers:  # which has three slots and one request beyond them
        for request_id in list(worker.active)[: 1 + free // 2]:
            scheduler.finish(request_id, Outcome.FINISHED, 1.0)
    for n, tokens in enumerate((2000, 500, 1200, 900, 100)):
        scheduler.submit_prefilled(RequestSpec(f"w{n}", tokens), 50.0, 40.0)
    document = orjson.loads(orjson.dumps(state_to_dict(settings, scheduler.snapshot, 100.0)))
    outline = {**document, **outline_to_dict(scheduler.snapshot, 100.0)}
    result = explain(document)
    made = scheduler.admit(100.0)
    assert list(result.admissions) == made
    assert result.sent_ahead == 2 and len(made) == 2 + free
    assert [each["sent_ahead"] for each in result.to_dict()["admissions"]] == [False] * free + [True] * 2
    assert result.reason == "no slot is left free, and no place ahead of one"
    assert [worker["ahead"] for worker in result.to_dict()["workers"]] == [1, 1]
    assert all(str(runner_up).split()[0] in ("w0", "w1", "w2", "w3", "w4") for runner_up in result.runners_up)
    if not scheduler.policy.horizon_steps:
        assert [admission for admission, _ in runners_up(outline, 100)] == made


@pytest.mark.parametrize("policy", ["br_0", "level_fit", "pool_fifo"])
def test_a_state_in_sums_includes_the_places_taken_ahead(policy: str) -> None:
    settings = PolicySettings(policy=policy)
    scheduler = Scheduler(make_policy(settings), SchedulerConfig(overlap_requests=2))
    for name, slots in (("d0", 1), ("d1", 2)):
        scheduler.add_worker(WorkerSpec(name, Role.DECODE, slots=slots), 0.0)
    for n in range(5):  # of six: d0 is sent no more than one beyond its one slot
        scheduler.submit_prefilled(RequestSpec(f"a{n}", 1000 + 100 * n), 0.0)
    first = scheduler.admit(0.0)
    for n, tokens in enumerate((2000, 500, 1200, 900)):
        scheduler.submit_prefilled(RequestSpec(f"w{n}", tokens), 50.0)
    outline = {**settings_to_dict(settings), **outline_to_dict(scheduler.snapshot, 100.0, scheduler)}
    found = [admission for admission, _ in runners_up(outline, 100)]
    assert len(first) == 5
    assert found == scheduler.admit(100.0)
    assert len(found) == 1


def test_a_place_ahead_of_a_slot_is_named_in_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state = copy.deepcopy(SCARCE)
    state["workers"][0]["ahead"] = 1
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    assert run(monkeypatch, str(file)) == 0
    shown = capsys.readouterr().out
    assert "sent ahead" in shown and "2 admitted, 1 of them ahead of a slot, 1 left waiting" in shown


def test_a_state_without_waiting_requests_has_nothing_to_decide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "state.json"
    file.write_text(json.dumps(changed(SCARCE, waiting=[])))
    assert run(monkeypatch, str(file)) == 0
    assert capsys.readouterr().out.endswith("No request waits, so there is nothing to decide.\n")


def test_a_request_that_waited_too_long_goes_first_even_in_a_hand_made_file() -> None:
    state = copy.deepcopy(SCARCE)
    state["waiting"][0]["wait_s"] = 1000.0
    admission = explain(state).admissions[0]
    assert (admission.request, admission.stage) == ("small", 0)


def test_the_time_at_which_a_request_is_overdue_is_taken_from_the_file() -> None:
    state = changed(SCARCE, now_s=10.0)
    state["waiting"][2] |= {"ready_s": 9.0, "overdue_s": 9.5}
    assert explain(state).admissions[0].request == "big"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_can_be_explained_as_json(policy: str) -> None:
    result = explain(changed(SCARCE, policy=policy, params={})).to_dict()
    assert json.loads(json.dumps(result))["admissions"]
    assert result["reason"]


def test_a_down_worker_has_no_margin_and_sets_no_envelope() -> None:
    state = copy.deepcopy(SCARCE)
    state["workers"][0]["state"] = "down"
    views = explain(state).workers
    assert views[0].margin is None
    assert views[1].margin == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "magic"}, "policy: 'magic'; accepted: br_0"),
        ({"params": {"r_max": 0}}, "params.r_max: expected a whole number from 1 to 64, found 0"),
        ({"params": {"slowdown": 1}}, "params.slowdown: unknown; accepted: horizon_steps"),
        ({"params": {"guard": "none"}}, "params.guard: expected pool or head, found 'none'"),
        ({"params": {"pool_bypass": 1}}, "params.pool_bypass: expected true or false, found 1"),
        ({"policy": "br_h", "params": {"pool_bypass": True}}, "params: pool_bypass works with br_0 only"),
        ({"params": [1]}, "params: expected an object"),
        ({"waiting": [{"id": "w", "prompt_tokens": 1, "order": 3}] * 2}, "waiting.*is there twice"),
        (
            {"waiting": [{"id": name, "prompt_tokens": 1, "order": 3} for name in "xy"]},
            "waiting: two requests have the same order",
        ),
        ({"now_s": float("nan")}, "now_s: expected a number, found nan"),
        ({"now_s": 10**400}, "now_s: expected a number, found 1000"),
    ],
)
def test_a_wrong_state_is_refused_with_the_path_of_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        explain(changed(SCARCE, **change))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return exit_code(monkeypatch, "explain", *arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_poled": 3}, "^max_poled: unknown; did you mean max_pooled?"),
        (
            {"workers": [{"id": "d", "slots": 1, "slow_down": 2}]},
            r"^workers\[0\].slow_down: unknown; did you mean slowd",
        ),
        ({"waiting": [{"id": "r", "prompt_tokens": 1, "prio_rity": 1}]}, r"^waiting\[0\].prio_rity: .* mean priority"),
        ({"waiting": [{"id": "r", "prompt_tokens": 1, "overdue": 1}]}, r"^waiting\[0\].overdue: .* mean overdue_s"),
        ({"means": {"prompt_tokens": 1, "answer_token": 3}}, r"^means.answer_token: unknown; did you mean answer_to"),
    ],
)
def test_a_misspelt_name_is_refused_and_its_default_not_taken(change: dict[str, Any], message: str) -> None:
    workers = [{"id": "d0", "slots": 1}]
    with pytest.raises(InputError, match=message):
        explain({"policy": "br_0", "workers": workers, **change})
    assert explain({"policy": "br_0", "workers": workers, "of_another_version": 1}).workers


def test_the_command_prints_tables_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "state.json"
    file.write_text(json.dumps(SCARCE))
    assert run(monkeypatch, str(file)) == 0
    shown = capsys.readouterr().out
    assert "2 scarce" in shown and "big to d1" in shown and "2,500.0" in shown and "3,000" in shown
    assert run(monkeypatch, str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out) == explain(SCARCE).to_dict()


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text(json.dumps(SCARCE), encoding="utf-8-sig")
    assert run(monkeypatch, str(tmp_path / "state.json")) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"error":{"message":"no"}}',
        '{"policy": "br_0"}',
        '{"policy":"br_0","workers":[{"id":"d","slots":1e99}]}',
    ],
)
def test_a_bad_file_is_reported_in_one_line_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "state.json"
    file.write_text(text)
    assert run(monkeypatch, str(file)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"balanceroute: {file}: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "state.json: nothing in it"),
        ("9" * 5000, "state.json: a number of too many digits"),
        (
            '{"error": {"message": "admin routes are for this machine", "type": "permission_error"}}',
            "no state, but an error of the router: admin routes are for this machine",
        ),
        (
            '{"status": "ready", "workers_up": {"prefill": 1, "decode": 2}}',
            "no state: it has neither policy nor workers, as GET /state of the router has",
        ),
    ],
    ids=["no answer", "too many digits", "refused", "another route's"],
)
def test_an_answer_in_place_of_a_state_is_quoted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: str
) -> None:
    """`curl -s ROUTER/state | balanceroute explain -` shows nothing else of why there is no decision."""
    (tmp_path / "state.json").write_text(text)
    assert run(monkeypatch, str(tmp_path / "state.json")) == 2
    assert capsys.readouterr().err.endswith(f"{expected}\n")


def test_a_prompt_that_is_being_prefilled_is_explained_by_what_each_prefiller_would_have_cost() -> None:
    scheduler = Scheduler(make_policy(PolicySettings(policy="br_0")), SchedulerConfig(prefill_policy="prefix_affinity"))
    for name in ("p0", "p1"):
        scheduler.add_worker(WorkerSpec(name, Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    for turn, blocks in enumerate(((1, 2, 3), (1, 2, 3, 4))):
        scheduler.submit(RequestSpec(f"t{turn}", 100 * len(blocks), prefix=blocks, block_tokens=100), 0.0)
        scheduler.dispatch(0.0)
        if not turn:
            scheduler.prefilled("t0", 300, 0.0)
            for hit_tokens in (0, 100):
                scheduler.report_prefix_hits("p0", 1000, hit_tokens, 0.0)
    document = orjson.loads(orjson.dumps(state_to_dict(PolicySettings(policy="br_0"), scheduler.snapshot, 0.0)))
    (prefill,) = explain(document).prefills
    assert (prefill.request, prefill.prefiller, prefill.uncached_tokens) == ("t1", "p0", 100)
    assert prefill.costs == {"p0": LONE_WEIGHT * 100.0, "p1": LONE_WEIGHT * 400.0}  # no other conversation begins so
    assert list(prefill.costs) == ["p0", "p1"]


@pytest.mark.parametrize("entry", [[1], [{"id": "a"}], {"id": 1}, 7, [{"id": "a", "prefiller": "p", "costs": 1}]])
def test_unreadable_prefills_are_refused_in_one_line(entry: object) -> None:
    document = {"policy": "br_0", "workers": [{"id": "d0", "slots": 1, "active": []}], "waiting": []}
    with pytest.raises(InputError, match="prefilling"):
        explain({**document, "prefilling": entry})


def test_a_request_that_fits_no_memory_is_reported_to_wait_for_memory() -> None:
    def worker(name: str, tokens: int) -> dict[str, Any]:
        active = [{"id": f"on {name}", "prompt_tokens": tokens, "generated_tokens": 100}]
        return {"id": name, "slots": 4, "kv_capacity_tokens": 100_000, "active": active}

    state = {"policy": "level_fit", "workers": [worker("a", 90_000), worker("b", 80_000)]}
    large, small = ({"id": f"w{size}", "prompt_tokens": size, "wait_s": 0.1} for size in (30_000, 2_000))
    assert "KV memory" in explain({**state, "waiting": [large]}).reason
    both = explain({**state, "waiting": [large, small]})
    assert [admission.request for admission in both.admissions] == ["w2000"] and "KV memory" in both.reason


def test_means_of_nothing_but_empty_requests_give_a_decision() -> None:
    means = {"prompt_tokens": 0, "answer_tokens": 0, "token_s": 0.05, "answers": 1000}
    workers = [{"id": "d0", "slots": 1, "active": []}]
    waiting = [{"id": f"w{tokens}", "prompt_tokens": tokens} for tokens in (0, 100)]
    assert explain({"policy": "level_fit", "workers": workers, "waiting": waiting, "means": means}).left_waiting == 1


def test_a_smaller_request_of_a_later_class_does_not_hide_that_the_front_one_waits_for_memory() -> None:
    active = [{"id": f"a{index}", "prompt_tokens": 1_000} for index in range(3)]
    workers = [{"id": "d0", "slots": 4, "kv_capacity_tokens": 5_000, "active": active}]
    large = [{"id": f"w{index}", "prompt_tokens": 4_500, "wait_s": 0.1} for index in range(2)]
    small = {"id": "w2", "prompt_tokens": 10, "wait_s": 0.1, "priority": 1}
    result = explain({"policy": "level_fit", "workers": [*workers, _full("d1")], "waiting": [*large, small]})
    assert not result.admissions and "KV memory" in result.reason


def test_a_slot_that_a_slower_worker_keeps_free_is_explained_by_what_it_would_cost() -> None:
    slow = {**_full("d7"), "slots": 9, "slowdown": 2.0}
    workers = [{**worker, "request_tokens": 5_000} for worker in [*map(_full, ("d0", "d1", "d2", "d3")), slow]]
    for waiting in (1, 9):
        requests = [{"id": f"w{index}", "prompt_tokens": 1_000} for index in range(waiting)]
        result = explain({"policy": "level_fit", "workers": workers, "waiting": requests})
        assert not result.admissions and "slower worker" in result.reason


def _full(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "slots": 8,
        "active": [{"id": f"{name}.{index}", "prompt_tokens": 1_000} for index in range(8)],
    }
