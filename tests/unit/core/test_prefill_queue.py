"""The order in which requests get a prefiller, as requests leave from the middle and come back."""

from random import Random

from balanceroute.core.pool import SPARE_ENTRIES
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec, WorkerState
from tests.unit.core.builders import a_scheduler


def queued(sizes: list[int]) -> Scheduler:
    """Requests of these sizes that came at once, while no prefiller takes any."""
    scheduler = a_scheduler(config=SchedulerConfig(max_prefill_inflight=1))
    scheduler.set_worker_state("p0", WorkerState.DRAINING, 0.0)
    for number, size in enumerate(sizes):
        scheduler.submit(RequestSpec(f"{number}", size), 0.0)
    assert not scheduler.dispatch(0.0)
    return scheduler


def served(scheduler: Scheduler) -> list[str]:
    """The order in which they get the only prefiller."""
    scheduler.set_worker_state("p0", WorkerState.UP, 0.0)
    order = []
    while prefills := scheduler.dispatch(1.0):
        order += [prefill.request for prefill in prefills]
        scheduler.finish(order[-1], Outcome.CANCELLED, 1.0)
    return order


def test_the_queue_keeps_its_order_when_many_requests_leave_from_the_middle() -> None:
    random = Random(1)
    sizes = [random.randint(100, 90_000) for _ in range(4 * SPARE_ENTRIES)]
    scheduler = queued(sizes)
    left = random.sample(range(len(sizes)), 3 * SPARE_ENTRIES)
    for number in left:
        scheduler.finish(f"{number}", Outcome.CANCELLED, 0.5)
    scheduler.submit(RequestSpec("last", 100_000), 0.5)
    stay = sorted(set(range(len(sizes))) - set(left), key=lambda number: (sizes[number], number))
    assert served(scheduler) == [*map(str, stay), "last"]


def test_a_request_whose_probe_failed_keeps_its_place_in_the_queue() -> None:
    """By now prefills are known to take a thousand times as long, which would put a large one behind all others."""
    scheduler = queued([6_000, 100])
    scheduler.submit(RequestSpec("later", 100), 10.0)
    scheduler.submit(RequestSpec("latest", 100), 10.0)
    scheduler.finish("1", Outcome.CANCELLED, 10.0)
    scheduler.set_worker_state("p0", WorkerState.UP, 10.0)
    assert [prefill.request for prefill in scheduler.dispatch(10.0)] == ["0"]
    scheduler.snapshot.prefillers[0].pace.pass_time(1_000.0, True)
    scheduler.snapshot.prefillers[0].pace.done(1_000.0)
    scheduler.prefill_failed("0", 1_000.0)
    assert served(scheduler) == ["0", "later", "latest"]
