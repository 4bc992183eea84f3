"""Composition root: makes a scheduler from a configuration, for the proxy and for other drivers."""

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from balanceroute.config import Config, DecodeWorker, Worker
from balanceroute.config.sections.tiers import Decode
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.policy import StageTimer
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Role, WorkerSpec
from balanceroute.journal import RecordingScheduler


def policy_settings(config: Config) -> PolicySettings:
    """The `routing` section with what it leaves unset filled in: a field there is a knob of the same name here."""
    routing = config.routing
    knobs = {knob.name: getattr(routing, knob.name) for knob in fields(PolicySettings)}
    options = tuple(routing.options.items())
    return PolicySettings(**{**knobs, "beta": config.beta, "max_wait_s": config.max_wait_s, "options": options})


def predicts(config: Config) -> bool:
    """Whether the policy asks a predictor, and there is one."""
    return config.predictor.kind != "none" and (
        config.routing.policy == "br_h" or make_policy(policy_settings(config)).horizon_steps > 0
    )


def scheduler_config(config: Config) -> SchedulerConfig:
    """Bounds and cadences of the live scheduler."""
    return replace(bounds(config), refresh_every_tokens=config.refresh_period_steps if predicts(config) else None)


def bounds(config: Config) -> SchedulerConfig:
    """What of that a process may know that does not decide, and has not imported the policy."""
    return SchedulerConfig(
        max_queued=config.queue.max_queued,
        max_pooled=config.pool.max_entries,
        pool_ttl_s=config.pool_ttl_s,
        queue_deadline_s=config.queue.deadline_s,
        kv_usage_limit=config.prefill.kv_usage_limit,
        max_prefill_inflight=config.prefill.max_inflight,
        prefill_policy=config.prefill.policy,
        decode_first=config.decode_first,
        overlap_requests=_overlap_requests(config),
        shared_barrier=any_waits(config.decode.barrier_group_of(worker) for worker in config.decode.workers),
    )


def _overlap_requests(config: Config) -> int | None:
    """m, or None where it is measured. A decode worker that asks for its prefill itself is sent nothing ahead."""
    if config.decode.overlap_requests != "auto":
        return config.decode.overlap_requests
    return 0 if config.decode_first else None


def any_waits(barrier_groups: Iterable[str]) -> bool:
    """Whether any decode worker of these groups ("" for none) waits for another; a single one counts as if it did."""
    known: set[str] = set()
    workers = 0
    for group in barrier_groups:
        if group in known:
            return True
        workers += 1
        if group:
            known.add(group)
    return workers < 2


def worker_specs(config: Config) -> list[WorkerSpec]:
    """Every worker of the configuration, prefillers first."""
    prefillers = [prefiller_spec(worker) for worker in config.prefill.workers]
    return prefillers + [decoder_spec(worker, config.decode) for worker in config.decode.workers]


def prefiller_spec(worker: Worker) -> WorkerSpec:
    """A prefiller as the scheduler knows it."""
    return WorkerSpec(worker.worker_id, Role.PREFILL, worker.url, worker.dp_rank)


def decoder_spec(worker: DecodeWorker, decode: Decode) -> WorkerSpec:
    """A decode worker as the scheduler knows it; what it does not say itself is said by the section."""
    return WorkerSpec(
        id=worker.worker_id,
        role=Role.DECODE,
        url=worker.url,
        dp_rank=worker.dp_rank,
        slots=decode.slots_of(worker),
        slowdown=worker.slowdown,
        barrier_group=decode.barrier_group_of(worker),
        request_tokens=decode.request_tokens,
    )


def build_scheduler(
    config: Config, now: float, stage_timer: StageTimer | None = None, journal: Path | str | None = None
) -> Scheduler:
    """A scheduler with the configured policy and all configured workers, up, at `now`.

    With `journal` it is a `RecordingScheduler` that writes there; the caller closes it.
    """
    settings, bounds = policy_settings(config), scheduler_config(config)
    if journal is None:
        scheduler = Scheduler(make_policy(settings, stage_timer), bounds, stage_timer)
    else:
        scheduler = RecordingScheduler(settings, bounds, Path(journal), stage_timer)
    for spec in worker_specs(config):
        scheduler.add_worker(spec, now)
    return scheduler
