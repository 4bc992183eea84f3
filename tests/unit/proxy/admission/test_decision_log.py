"""What is kept of decisions, for whom, and how much."""

import pytest

from balanceroute.proxy.admission.decision_log import MOST_ROWS, PAUSE_S, ROWS, TOO_MANY, UNWATCHED, DecisionLog
from balanceroute.proxy.admission.ledger import Ledger
from tests.unit.proxy.admission.ledgers import a_ledger, pooled
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time


def decide(ledger: Ledger, log: DecisionLog) -> None:
    log.before()
    log.after(ledger.admit())


@with_virtual_time
async def test_the_last_admissions_are_kept_under_unique_numbers() -> None:
    ledger, tickets = a_ledger(slots=2 * ROWS)
    log = DecisionLog(ledger)
    for n in range(ROWS + 5):
        await pooled(tickets, f"r{n}")
        decide(ledger, log)
    assert [row.number for row in log.rows] == list(range(5, ROWS + 5))
    assert (log.rows[-1].admission.request, log.rows[-1].policy) == (f"r{ROWS + 4}", "br_0")
    assert not log.samples and {row.runner_up for row in log.rows} == {UNWATCHED}
    assert log.count == ROWS + 5


@with_virtual_time
async def test_a_watched_decision_keeps_its_prior_state_with_pauses_proportional_to_its_size() -> None:
    ledger, tickets = a_ledger(slots=64)
    log = DecisionLog(ledger)
    log.watch()
    await pooled(tickets, "a")
    decide(ledger, log)
    sample = log.samples.pop()
    (decision,) = sample.decisions
    assert (decision.admission.request, decision.runner_up) == ("a", None)
    assert [each["id"] for each in sample.state["waiting"]] == ["a"], "it still waits there"
    rows = len(sample.state["workers"]) + 1
    await pooled(tickets, "b")
    decide(ledger, log)
    assert not log.samples and log.rows[-1].runner_up is None, "too soon: it is counted, and never worked out"
    await let_pass(rows * PAUSE_S)
    await pooled(tickets, "c")
    decide(ledger, log)
    assert log.samples.pop().decisions[0].admission.request == "c"
    await let_pass(60.0)
    await pooled(tickets, "d")
    decide(ledger, log)
    assert not log.samples and log.rows[-1].runner_up == UNWATCHED, "the page was closed"


@with_virtual_time
async def test_a_decision_over_too_much_is_listed_without_a_state_and_says_so() -> None:
    ledger, tickets = a_ledger(slots=64)
    log = DecisionLog(ledger)
    for n in range(MOST_ROWS):
        await pooled(tickets, f"r{n}")
    log.watch()
    decide(ledger, log)
    assert not log.samples and {row.runner_up for row in log.rows} == {TOO_MANY}


@pytest.mark.parametrize(("policy", "listed"), [("level_fit", 0), ("br_h", 1)])
@with_virtual_time
async def test_running_requests_are_listed_only_for_a_policy_with_a_horizon(policy: str, listed: int) -> None:
    ledger, tickets = a_ledger(policy, slots=64)
    log = DecisionLog(ledger)
    await pooled(tickets, "runs")
    ledger.admit()
    log.watch()
    await pooled(tickets, "waits")
    decide(ledger, log)
    (worker,) = log.samples.pop().state["workers"]
    assert len(worker["active"]) == listed
    assert worker.get("load_tokens", 0) + worker["foreign"]["tokens"] == 10


@with_virtual_time
async def test_a_decision_without_an_admission_is_not_recorded() -> None:
    ledger, tickets = a_ledger(slots=1)
    log = DecisionLog(ledger)
    log.watch()
    decide(ledger, log)
    assert not log.rows and not log.samples
