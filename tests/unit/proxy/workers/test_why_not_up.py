"""What an operator is told of a worker that gets nothing."""

from collections.abc import Callable

import pytest

from balanceroute.core.types import WorkerState
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.workers.fleet import Worker, why_not_up
from tests.unit.proxy.virtual_time import a_router, with_virtual_time

Change = Callable[[Services, Worker], object]


def fail(services: Services, worker: Worker, times: int = 1) -> None:
    for _ in range(times):
        worker.circuit.fault(services.ledger.now(), "status 500")


def go_down(services: Services, worker: Worker) -> None:
    worker.seen_healthy = True
    services.fleet.set_healthy(worker, False)


def doubt(services: Services, worker: Worker) -> None:
    worker.seen_healthy = True
    services.fleet.await_answer(worker)


def stall(services: Services, worker: Worker) -> None:
    worker.stalled = True
    services.fleet.update(worker)


CHANGES: dict[str, tuple[Change, str]] = {
    "stalled": (stall, "generates no tokens"),
    "never seen": (lambda services, worker: services.fleet.set_healthy(worker, False), "has not answered /health yet"),
    "never asked": (lambda services, worker: services.fleet.await_answer(worker), "has not answered /health yet"),
    "gone": (go_down, "it does not answer /health"),
    "circuit open": (lambda services, worker: fail(services, worker, 3), "requests to it fail (status 500)"),
    "leaving": (lambda services, worker: services.fleet.leave(worker), "removed"),
    "drained": (lambda services, worker: services.fleet.drain(worker), "drained by an operator"),
    "doubted": (doubt, "last health check had no answer"),
    "resting": (fail, "gets a pause (status 500)"),
    "busy": (lambda services, worker: worker.circuit.busy(services.ledger.now()), "gets a pause (status 429 or 503"),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES.keys())
@with_virtual_time
async def test_every_cause_that_keeps_requests_from_a_worker_is_reported(change: Change, expected: str) -> None:
    services = a_router()
    worker = services.fleet["d0"]
    assert why_not_up(worker) == ""
    change(services, worker)
    assert worker.state is not WorkerState.UP
    assert expected in why_not_up(worker)


@with_virtual_time
async def test_the_most_severe_of_several_causes_is_reported() -> None:
    services = a_router()
    worker = services.fleet["d0"]
    services.fleet.drain(worker)
    fail(services, worker)
    assert "drained" in why_not_up(worker)
    go_down(services, worker)
    assert "/health" in why_not_up(worker)


@pytest.mark.parametrize("cause", ["stalled", "gone", "circuit open"])
@with_virtual_time
async def test_the_log_line_of_a_worker_that_goes_down_has_the_reason(
    cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    services = a_router()
    change, expected = CHANGES[cause]
    change(services, services.fleet["d0"])
    (line,) = [record for record in caplog.records if record.message == "worker state"]
    assert expected in vars(line)["reason"]
    assert not hasattr(line, "before")  # of one whose circuit rests it is "draining", which no operator asked for


@with_virtual_time
async def test_the_log_line_of_a_worker_that_comes_up_has_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    services = a_router()
    worker = services.fleet["d0"]
    go_down(services, worker)
    services.fleet.set_healthy(worker, True)
    assert [hasattr(record, "reason") for record in caplog.records if record.message == "worker state"] == [
        True,
        False,
    ]


@with_virtual_time
async def test_a_worker_whose_first_check_was_in_vain_is_down_and_no_longer_unknown() -> None:
    """Whoever asks whether the router is ready would wait for its first answer each time."""
    services = a_router()
    worker = services.fleet["d0"]
    services.fleet.await_answer(worker)
    assert worker.unknown
    services.fleet.set_healthy(worker, False)
    assert worker.doubted and not worker.unknown
