"""The coroutines of a running router: what a bug ends, and which one takes the place of another."""

import asyncio
import logging
from unittest.mock import create_autospec

import pytest

from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.app import start
from balanceroute.proxy.coroutines import QUIET_S, start_refits, stop, supervised
from balanceroute.proxy.ops.dashboard.recorder import Recorder
from balanceroute.proxy.ops.services import Services
from tests.unit.proxy.virtual_time import a_router, let_pass, with_virtual_time
from tests.waiting import until


@pytest.mark.parametrize("strict", [False, True])
@with_virtual_time
async def test_a_background_task_that_fails_is_restarted_unless_failures_are_fatal(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    services = a_router()
    services.strict = strict
    fails = [SystemExit("of a policy of one's own"), RuntimeError("a bug")]
    fold = services.metrics.fold

    def broken() -> None:
        if fails:
            raise fails.pop()
        fold()

    services.metrics.fold = broken  # type: ignore[method-assign]
    start(services, a_recorder(services))
    await let_pass(5.0)
    assert services.metrics.tasks_failed.value("pool_reaper") == (1 if strict else 2)
    assert services.tasks["pool_reaper"].done() == strict
    if strict:
        with pytest.raises(RuntimeError):
            await stop(services)
    else:
        await stop(services)
    assert all(task.done() for task in services.tasks.values())
    (record, *_) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(record)["where"] == "pool_reaper" and "state" in vars(record)


@with_virtual_time
async def test_a_background_task_is_restarted_even_if_the_state_cannot_be_logged() -> None:
    services, begun = a_router(), []
    services.strict = False
    services.ledger = None  # type: ignore[assignment]  # as a bug may leave it

    async def run() -> None:
        begun.append(True)
        if len(begun) == 1:
            raise RuntimeError("a bug")
        await asyncio.Event().wait()

    task = services.loop.create_task(supervised(services, "mine", run))
    await let_pass(1.0)
    assert len(begun) == 2 and not task.done()
    task.cancel()


@with_virtual_time
async def test_a_bug_that_comes_again_and_again_is_counted_each_time_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    services = a_router()
    services.strict = False

    async def broken() -> None:
        raise RuntimeError("a bug")

    task = services.loop.create_task(supervised(services, "mine", broken))
    await let_pass(QUIET_S + 10)
    assert services.metrics.tasks_failed.value("mine") > 600
    assert [record.message for record in caplog.records] == 2 * ["internal error"]
    task.cancel()


def a_recorder(services: Services) -> Recorder:
    return Recorder(lambda: services)


@with_virtual_time
async def test_a_new_predictors_refits_replace_those_of_the_last_one() -> None:
    services, begun = a_router(), []

    async def refit() -> None:
        begun.append(True)
        await asyncio.Event().wait()

    services.ledger.forecasts = forecasts = create_autospec(Forecasts)
    forecasts.runner.return_value = refit
    start_refits(services)
    first = services.tasks["refits"]
    await until(lambda: len(begun) == 1)
    start_refits(services)
    await until(lambda: len(begun) == 2)
    assert first.cancelled() and not services.tasks["refits"].done()
    services.ledger.forecasts = None
    start_refits(services)
    assert "refits" not in services.tasks
