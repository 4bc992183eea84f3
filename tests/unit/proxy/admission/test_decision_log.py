"""What is kept of decisions, for whom, and how much."""

from balanceroute.core.types import RequestSpec
from balanceroute.proxy.admission.decision_log import EVERY_S, MOST_ADMISSIONS, MOST_REQUESTS, ROWS, DecisionLog
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.admission.tickets import Tickets
from tests.unit.proxy.admission.ledgers import a_ledger
from tests.unit.proxy.stage import let_pass, on_stage


async def pooled(tickets: Tickets, *names: str) -> None:
    for name in names:
        ticket = tickets.submit(RequestSpec(name, 10))
        await ticket.prefiller()
        ticket.prefilled(10)


def decide(ledger: Ledger, log: DecisionLog) -> None:
    log.before()
    log.after(ledger.admit())


def test_the_last_admissions_are_kept_under_numbers_that_never_come_again() -> None:
    async def test() -> None:
        ledger, tickets = a_ledger(slots=2 * ROWS)
        log = DecisionLog(ledger)
        for n in range(ROWS + 5):
            await pooled(tickets, f"r{n}")
            decide(ledger, log)
        assert [row.number for row in log.rows] == list(range(5, ROWS + 5))
        assert (log.rows[-1].admission.request, log.rows[-1].policy) == (f"r{ROWS + 4}", "br_0")
        assert log.sample is None, "nobody watches"

    on_stage(test)


def test_a_state_from_before_the_decision_is_kept_while_somebody_watches_and_not_for_every_decision() -> None:
    async def test() -> None:
        ledger, tickets = a_ledger(slots=64)
        log = DecisionLog(ledger)
        log.watch()
        await pooled(tickets, "a")
        decide(ledger, log)
        assert log.sample is not None
        (decision,) = log.sample.decisions
        assert decision.admission.request == "a"
        assert [each["id"] for each in log.sample.state["waiting"]] == ["a"], "it still waits there"
        log.sample = None
        await pooled(tickets, "b")
        decide(ledger, log)
        assert log.sample is None, "the next one may be soon enough"
        await let_pass(EVERY_S)
        await pooled(tickets, "c")
        decide(ledger, log)
        assert log.sample is not None
        log.sample = None
        await let_pass(60.0)
        await pooled(tickets, "d")
        decide(ledger, log)
        assert log.sample is None, "the page was closed"

    on_stage(test)


def test_a_decision_over_too_much_is_listed_without_a_state() -> None:
    async def test() -> None:
        ledger, tickets = a_ledger(slots=2 * MOST_REQUESTS)
        log = DecisionLog(ledger)
        log.watch()
        await pooled(tickets, *(f"r{n}" for n in range(MOST_ADMISSIONS + 1)))
        decide(ledger, log)
        assert log.sample is None and len(log.rows) == MOST_ADMISSIONS + 1
        await pooled(tickets, *(f"s{n}" for n in range(MOST_REQUESTS)))
        ledger.admit()
        await pooled(tickets, "one more")
        log.watch()
        decide(ledger, log)
        assert log.sample is None and log.rows[-1].admission.request == "one more"

    on_stage(test)


def test_a_decision_that_admits_nobody_leaves_no_trace() -> None:
    async def test() -> None:
        ledger, tickets = a_ledger(slots=1)
        log = DecisionLog(ledger)
        log.watch()
        decide(ledger, log)
        assert not log.rows and log.sample is None

    on_stage(test)
