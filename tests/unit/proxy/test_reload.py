"""A reload changes what may change, all of it or nothing."""

import asyncio
from pathlib import Path

import pytest

from balanceroute.config import Config
from balanceroute.core.types import RequestSpec, Role, WorkerSpec
from balanceroute.errors import ConfigError, QueueFull
from balanceroute.journal import RecordingScheduler, replay
from balanceroute.proxy.app import build_services
from balanceroute.proxy.reload import apply
from tests.unit.proxy.stage import a_config, a_router, on_stage


def with_decoders(config: Config, *names: str, slots: int = 64) -> Config:
    workers = [{"url": f"http://{name}:1", "id": name} for name in names]
    return a_config(decode={"workers": workers, "max_num_seqs": slots}, queue=config.queue.model_dump())


def test_bounds_and_times_count_from_the_reload_on() -> None:
    async def test() -> None:
        services = a_router()
        changed = apply(services, a_config(queue={"max_queued": 0, "deadline_s": 5.0}, retry={"max_attempts": 9}))
        assert changed == ["queue", "retry"] and services.config.retry.max_attempts == 9
        assert services.ledger.scheduler.config.queue_deadline_s == 5.0
        with pytest.raises(QueueFull):
            services.ledger.submit(RequestSpec("r", 1))

    on_stage(test)


def test_workers_of_the_file_come_and_go_and_those_added_by_hand_stay() -> None:
    async def test() -> None:
        services = a_router()
        services.fleet.add(WorkerSpec("hand", Role.DECODE, "http://hand:1"), join_attempts=3)
        apply(services, with_decoders(services.config, "d1", "d2", "d9"))
        services.fleet.sweep()
        assert {worker.id for worker in services.fleet} == {"p0", "d1", "d2", "d9", "hand"}
        assert not services.fleet["d9"].healthy  # it has to answer first

    on_stage(test)


def test_a_worker_that_is_leaving_stays_when_the_file_names_it_again() -> None:
    async def test() -> None:
        services = a_router()
        worker = services.fleet["d0"]
        worker.in_use = 1  # so that it can't go at once
        apply(services, with_decoders(services.config, "d1", "d2"))
        assert worker.leaving
        apply(services, with_decoders(services.config, "d0", "d1", "d2"))
        worker.in_use = 0
        assert services.fleet.sweep() == [] and services.fleet["d0"] is worker

    on_stage(test)


@pytest.mark.parametrize(
    ("new", "named"),
    [
        (a_config(routing={"policy": "random"}, queue={"max_queued": 1}), "routing"),
        (a_config(listen={"port": 1}, queue={"max_queued": 1}), "listen"),
        (a_config(decode={"max_num_seqs": 7}, queue={"max_queued": 1}), "worker d0"),
    ],
    ids=["routing", "listen", "slots of a worker in use"],
)
def test_what_needs_a_restart_is_named_and_nothing_of_the_rest_is_taken_over(new: Config, named: str) -> None:
    async def test() -> None:
        services = a_router()
        before, bounds = services.config, services.ledger.scheduler.config
        with pytest.raises(ConfigError, match=named):
            apply(services, new)
        assert services.config is before and services.ledger.scheduler.config == bounds

    on_stage(test)


def test_a_journal_that_runs_over_a_reload_replays_to_the_same(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "journal"
        services = build_services(a_config(), asyncio.get_running_loop(), None, True, path)
        scheduler = services.ledger.scheduler
        assert isinstance(scheduler, RecordingScheduler)
        apply(services, a_config(queue={"max_queued": 0}))
        with pytest.raises(QueueFull):
            services.ledger.submit(RequestSpec("r", 1))
        scheduler.close()
        assert replay(path).difference is None

    on_stage(test)
