"""Small clusters for tests: a scheduler with workers, and requests in a wanted phase."""

from collections.abc import Sequence

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import RequestSpec, Role, WorkerSpec, WorkerState


def a_scheduler(
    policy: str = "pool_fifo",
    *,
    workers: int = 2,
    slots: int = 2,
    prefillers: int = 1,
    slowdowns: Sequence[float] = (),
    request_tokens: int = 0,
    config: SchedulerConfig | None = None,
    **settings: object,
) -> Scheduler:
    """A scheduler with decode workers d0.. and prefillers p0.., all up. `slowdowns`: of each; empty: of none."""
    scheduler = Scheduler(make_policy(PolicySettings(policy=policy, **settings)), config)  # type: ignore[arg-type]
    for index in range(prefillers):
        scheduler.add_worker(WorkerSpec(f"p{index}", Role.PREFILL), 0.0)
    for index, slowdown in enumerate(slowdowns or [1.0] * workers):
        spec = WorkerSpec(f"d{index}", Role.DECODE, slots=slots, slowdown=slowdown, request_tokens=request_tokens)
        scheduler.add_worker(spec, 0.0)
    return scheduler


def a_request(request_id: str = "r", prompt_tokens: int = 100, priority: int = 0) -> RequestSpec:
    """A request as it arrives."""
    return RequestSpec(request_id, prompt_tokens, priority)


def pool_all(scheduler: Scheduler, sizes: dict[str, int], now: float = 0.0) -> None:
    """Put requests of these prompt sizes into the pool, in this order."""
    for request_id, prompt_tokens in sizes.items():
        scheduler.submit_prefilled(a_request(request_id, prompt_tokens), now)


def hold(scheduler: Scheduler, loads: Sequence[Sequence[int]], now: float = 0.0) -> None:
    """Have d0, d1, .. hold requests of these sizes, d0.0, d0.1, ..: only one of them is up while it gets its own."""
    workers = [f"d{index}" for index in range(len(loads))]
    for worker, sizes in zip(workers, loads, strict=True):
        for other in workers:
            scheduler.set_worker_state(other, WorkerState.UP if other == worker else WorkerState.DRAINING, 0.0)
        pool_all(scheduler, {f"{worker}.{number}": size for number, size in enumerate(sizes)}, now)
        assert len(scheduler.admit(0.0)) == len(sizes)
    for worker in workers:
        scheduler.set_worker_state(worker, WorkerState.UP, 0.0)


def admitted(scheduler: Scheduler, now: float = 0.0) -> list[tuple[str, str]]:
    """Decide once; (request, worker) pairs in the order of admission."""
    pairs = [(action.request, action.worker) for action in scheduler.admit(now)]
    scheduler.snapshot.check_invariants()
    return pairs
