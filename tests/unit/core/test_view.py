"""What others see of the snapshot: true when it is made, and nothing to write through."""

import pytest

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec, WorkerState
from balanceroute.core.view import ClusterView, DecoderView, PrefillerView, view_cluster


@pytest.fixture
def scheduler() -> Scheduler:
    """`a` decodes on d0, `b` is pooled, `c` is being prefilled, `d` is queued behind a full pool."""
    scheduler = Scheduler(make_policy(PolicySettings(policy="br_0")))
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=1), 0.0)
    for name in "abc":
        scheduler.submit(RequestSpec(name, 100), 0.0)
    scheduler.dispatch(0.0)
    for name in "ab":
        scheduler.prefilled(name, 110, 1.0)
    scheduler.admit(1.0)
    scheduler.progress("a", 5, 2.0)
    scheduler.submit(RequestSpec("d", 100), 2.0)
    scheduler.report_decoder("d0", 2, 300, 0, 2.0)
    scheduler.show_report("d0", {"num_requests_waiting": 3.0})
    return scheduler


def test_a_view_lists_the_load_of_every_worker_and_the_waiting_requests(scheduler: Scheduler) -> None:
    view = view_cluster(scheduler.snapshot)
    assert view == ClusterView(
        decoders=(DecoderView("d0", WorkerState.UP, 1, 0, 1, 115, 2, 300, 115.0, 3),),
        prefillers=(
            PrefillerView(
                "p0",
                WorkerState.UP,
                0.0,
                1,
                1,
                110,
                inflight_s=scheduler.snapshot.prefillers[0].inflight_s,
                prompt_tokens=220,  # of the two that are done
            ),
        ),
        queued=1,
        asking=0,
        pooled=1,
        pooled_tokens=110,
        draining=False,
        oldest_ready_s=1.0,
    )
    assert view.prefilling == 1


def test_a_view_is_unaffected_by_later_calls(scheduler: Scheduler) -> None:
    view = view_cluster(scheduler.snapshot)
    scheduler.finish("a", Outcome.FINISHED, 3.0)
    assert view.decoders[0].active == 1 and view_cluster(scheduler.snapshot).decoders[0].active == 0


def test_without_running_requests_the_mean_request_is_a_mean_prompt(scheduler: Scheduler) -> None:
    scheduler.finish("a", Outcome.FINISHED, 3.0)
    assert (
        view_cluster(scheduler.snapshot).decoders[0].mean_request_tokens == scheduler.snapshot.means.prompt_tokens > 0
    )
