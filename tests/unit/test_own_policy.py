"""A policy of one's own that raises, or chooses what cannot be: whoever waits, waits on, and can leave."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import balanceroute
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec
from balanceroute.errors import ConfigError, InvariantError
from balanceroute.explain import explain, outlook
from balanceroute.journal import RecordingScheduler, rerun
from balanceroute.plugins import learn_policy
from tests.commands import run_command


class ThirdFails(AdmissionPolicy):
    """Whoever is oldest goes to the first worker with room; something is wrong with the third choice."""

    name = "third_fails"

    def __init__(self, fault: str = "raises") -> None:
        self.fault = fault

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        while len(snapshot.pool):
            worker = next((worker for worker in snapshot.workers if worker.free_slots), None)
            if worker is None:
                return
            choice = Choice(snapshot.pool.front[0], worker, 1, 0.0)
            yield self.spoilt(choice) if sum(1 for _ in snapshot.decoding()) == 2 else choice

    def spoilt(self, choice: Choice) -> Choice:
        """The choice with what is wrong with it."""
        if self.fault == "raises":
            raise ZeroDivisionError("nothing to divide by")
        if self.fault == "exits":
            raise SystemExit(3)
        if self.fault == "no score":
            choice.score = None  # type: ignore[assignment]
        elif self.fault == "a stranger":
            choice.worker = copy.copy(choice.worker)
        else:
            choice.request = copy.copy(choice.request)
        return choice


class FirstWorker(AdmissionPolicy):
    """Everybody goes there, whether it has room or not."""

    name = "first_worker"

    def __init__(self, waits_for_slots: bool) -> None:
        self.waits_for_slots = waits_for_slots

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        while len(snapshot.pool):
            yield Choice(snapshot.pool.front[0], snapshot.workers[0], 1, 0.0)


class NoPatience(AdmissionPolicy):
    """Cannot say how long anybody may wait."""

    name = "no_patience"

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        return iter(())

    def patience_s(self, prompt_tokens: int, snapshot: ClusterSnapshot) -> float:
        raise LookupError("no such size")


class AdmitsNobody(AdmissionPolicy):
    name = "admits_nobody"

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        return iter(())


class AdmitsNobodyYet(AdmitsNobody):
    name = "admits_nobody_yet"
    waits_for_slots = False


def five_wait(scheduler: Scheduler, slots: int = 3) -> None:
    """Five prefilled requests, and two workers."""
    scheduler.add_worker(WorkerSpec("p", Role.PREFILL), 0.0)
    for name in ("d0", "d1"):
        scheduler.add_worker(WorkerSpec(name, Role.DECODE, slots=slots), 0.0)
    for index in range(4):
        scheduler.submit(RequestSpec(f"r{index}", 100 + index), float(index))
    for prefill in scheduler.dispatch(4.0):
        scheduler.prefilled(prefill.request, 200, 5.0)
    scheduler.submit_prefilled(RequestSpec("r4", 500), 5.0)


FAULTS = pytest.mark.parametrize("fault", ["raises", "exits", "no score", "a stranger", "a copy"])


def test_a_policy_that_waits_for_slots_cannot_choose_a_worker_without_one() -> None:
    scheduler = Scheduler(FirstWorker(waits_for_slots=True), SchedulerConfig())
    five_wait(scheduler)
    with pytest.raises(InvariantError, match="first_worker chose d0, which has no free slot"):
        scheduler.admit(6.0)
    assert len(scheduler.snapshot.pool) == 5 and not scheduler.snapshot.workers[0].active
    scheduler = Scheduler(FirstWorker(waits_for_slots=False), SchedulerConfig())
    five_wait(scheduler)
    assert [admission.worker for admission in scheduler.admit(6.0)] == ["d0"] * 5


@FAULTS
@pytest.mark.parametrize("slots", [3, 1], ids=["into slots", "ahead of slots"])
def test_a_decision_that_raises_admits_no_request_and_the_next_policy_decides_on_all(fault: str, slots: int) -> None:
    scheduler = Scheduler(ThirdFails(fault), SchedulerConfig(overlap_requests=2))
    five_wait(scheduler, slots)
    before = [(tracker.id, tracker.ready_s, tracker.order) for tracker in scheduler.snapshot.pool]
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, SystemExit, TypeError, InvariantError)):
            scheduler.admit(6.0)
        scheduler.snapshot.check_invariants()
        assert [(tracker.id, tracker.ready_s, tracker.order) for tracker in scheduler.snapshot.pool] == before
        assert [worker.own_slots for worker in scheduler.snapshot.workers] == [slots, slots]
    scheduler.reroute(PolicySettings(policy="pool_fifo"), 7.0)
    assert [admission.request for admission in scheduler.admit(7.0)] == [
        f"r{index}" for index in range(min(5, 4 * slots))
    ]


def test_a_request_that_arrives_while_patience_s_fails_still_waits_and_can_leave() -> None:
    scheduler = Scheduler(NoPatience())
    with pytest.raises(LookupError):
        five_wait(scheduler)
    with pytest.raises(LookupError):
        scheduler.submit_prefilled(RequestSpec("late", 10), 6.0)
    scheduler.snapshot.check_invariants()
    assert [tracker.id for tracker in scheduler.snapshot.pool] == ["r0", "late"]
    for request in list(scheduler.snapshot.requests):
        scheduler.finish(request, Outcome.FAILED, 7.0)
    scheduler.snapshot.check_invariants()
    assert scheduler.snapshot.prefillers[0].pinned == 0


def test_no_request_leaves_the_pool_when_a_new_policys_patience_s_raises() -> None:
    learn_policy(f"{__name__}:NoPatience")
    scheduler = Scheduler(ThirdFails())
    five_wait(scheduler)
    with pytest.raises(LookupError):
        scheduler.reroute(PolicySettings(policy=f"{__name__}:NoPatience"), 6.0)
    scheduler.snapshot.check_invariants()
    assert len(scheduler.snapshot.pool) == 5


@FAULTS
def test_a_journal_records_what_a_policy_raised_and_reruns(fault: str, tmp_path: Path) -> None:
    policy = f"{__name__}:ThirdFails"
    learn_policy(policy)
    settings = PolicySettings(policy=policy, options=(("fault", fault),))
    scheduler = RecordingScheduler(settings, SchedulerConfig(), tmp_path / "journal")
    five_wait(scheduler)
    with pytest.raises((ZeroDivisionError, SystemExit, TypeError, InvariantError)):
        scheduler.admit(6.0)
    scheduler.reroute(PolicySettings(policy="least_kv"), 7.0)
    assert len(scheduler.admit(7.0)) == 5
    scheduler.close()
    report = rerun(tmp_path / "journal")
    assert report.difference is None and report.admissions == 5
    assert (tmp_path / "journal").read_text().count('"raised":') == 1


class UnknownStage(ThirdFails):
    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        if len(snapshot.pool) and (free := snapshot.open_workers()):
            yield Choice(snapshot.pool.front[0], free[0], stage=9, score=1.0)


def test_explain_shows_a_choice_in_a_stage_that_it_does_not_know(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"workers": [{"id": "d0", "slots": 2}], "waiting": [{"id": "r", "prompt_tokens": 5}]}))
    code, printed, _ = run_command(capsys, monkeypatch, "explain", str(state), "--policy", f"{__name__}:UnknownStage")
    assert code == 0 and "9 unknown" in printed


FAILING = pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ("ThirdFails", "ZeroDivisionError: nothing to divide by (test_own_policy.py, line "),
        ("NoPatience", "LookupError: no such size (test_own_policy.py, line "),
    ],
)


@FAILING
def test_replay_and_explain_report_in_one_line_what_a_policy_raised_and_where(
    policy: str, problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    workers = [{"id": name, "slots": 2} for name in ("d0", "d1")]
    waiting = [{"id": f"r{index}", "prompt_tokens": 5} for index in range(4)]
    state.write_text(json.dumps({"workers": workers, "waiting": waiting}))
    of_trace, named = ("--trace", "capped", "--max-requests", "9"), f"{__name__}:{policy}"
    for command in (("replay", *of_trace, "--policy", named), ("explain", str(state), "--policy", named)):
        code, _, err = run_command(capsys, monkeypatch, *command)
        assert code == 2 and err.count("\n") == 1
        assert err.startswith(f"balanceroute: policy {named}: {problem}")


class AnswersNothing(ThirdFails):
    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        return None  # type: ignore[return-value]


def test_replay_refers_to_the_check_of_rules_where_no_line_of_the_policy_has_raised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = f"{__name__}:AnswersNothing"
    code, _, err = run_command(capsys, monkeypatch, "replay", "--max-requests", "9", "--policy", named)
    assert code == 2 and err.startswith(f"balanceroute: policy {named}: 'NoneType' object is not iterable; ")
    assert err.endswith("python -m balanceroute.testing names the rule that it breaks\n")


@FAILING
def test_an_outlook_names_the_policy_that_raised(policy: str, problem: str) -> None:
    """The dashboard's page, which shows it, gets a refusal then: it was an internal error."""
    workers = [{"id": name, "slots": 2} for name in ("d0", "d1")]
    waiting = [{"id": f"r{index}", "prompt_tokens": 5} for index in range(4)]
    with pytest.raises(ConfigError, match=f"^policy {__name__}:{policy}: {re.escape(problem)}"):
        outlook({"workers": workers, "waiting": waiting}, f"{__name__}:{policy}")


@FAILING
def test_a_simulation_names_the_policy_that_raised_and_keeps_what_it_was(policy: str, problem: str) -> None:
    made = globals()[policy]()
    with pytest.raises(ConfigError, match=f"^policy {policy}: {re.escape(problem)}") as raised:
        balanceroute.simulate("capped", made, max_requests=9)
    assert isinstance(raised.value.__cause__, ZeroDivisionError | LookupError)


def test_a_request_that_waits_beside_a_free_slot_is_reported_as_held_back_by_the_policy() -> None:
    """Nothing is known of why one of one's own admits nobody."""
    named = f"{__name__}:AdmitsNobody"
    state = {"workers": [{"id": "d0", "slots": 2}], "waiting": [{"id": "r0", "prompt_tokens": 5}]}
    assert explain(state, named).reason == "held back by the policy, though a slot is free"


def test_what_a_policy_that_does_not_wait_for_slots_leaves_waiting_is_reported_as_held_back_by_it() -> None:
    named = f"{__name__}:AdmitsNobodyYet"
    for slots, reason in ((2, ", though a slot is free"), (1, "")):
        worker = {"id": "d0", "slots": slots, "active": [{"id": "a", "prompt_tokens": 5}]}
        state = {"workers": [worker], "waiting": [{"id": "r0", "prompt_tokens": 5}]}
        assert explain(state, named).reason == f"held back by the policy{reason}"
