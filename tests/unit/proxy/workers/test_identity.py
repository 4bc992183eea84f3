"""Whose answer it is, and what is done where that is somebody else's."""

import logging

import pytest

from balanceroute.errors import ForeignReply
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.identity import check_id, learn_id
from tests.unit.proxy.virtual_time import a_router, with_virtual_time


class Connections:
    """Of a worker; counts how often the idle ones were dropped."""

    dropped = 0

    def drop_idle(self) -> None:
        self.dropped += 1

    def close(self) -> None:
        pass


def a_worker() -> tuple[Worker, Connections]:
    worker, connections = a_router().fleet["d0"], Connections()
    worker.upstream = connections  # type: ignore[assignment]
    return worker, connections


@with_virtual_time
async def test_a_worker_that_has_echoed_once_must_always() -> None:
    worker, connections = a_worker()
    check_id(worker, "cmpl-r1", "r1")
    with pytest.raises(ForeignReply) as foreign:
        check_id(worker, "cmpl-r2", "r1")
    assert (foreign.value.worker, foreign.value.tier) == ("d0", "decode")
    assert connections.dropped == 1


@with_virtual_time
async def test_a_worker_that_never_echoes_ids_is_unchecked_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    worker, connections = a_worker()
    with caplog.at_level(logging.INFO, "balanceroute.proxy.workers.identity"):
        for echoed in ("own-1", "own-2", None):
            check_id(worker, echoed, "r1")
    assert connections.dropped == 0
    assert [record.message for record in caplog.records] == [
        "worker does not echo X-Request-Id, its answers go unchecked"
    ]


@with_virtual_time
async def test_a_worker_that_begins_to_echo_is_checked_from_then_on() -> None:
    worker, _ = a_worker()
    learn_id(worker, False)
    check_id(worker, "cmpl-r1", "r1")
    with pytest.raises(ForeignReply):
        check_id(worker, "own", "r1")
