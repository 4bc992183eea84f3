"""What the router hears of the simulated engine, and when."""

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.types import RequestSpec, Role, WorkerSpec
from balanceroute.simulator import Setting
from balanceroute.simulator.oracle import Forecast
from balanceroute.simulator.telemetry import Channel


def a_decoding_request() -> tuple[Scheduler, Channel]:
    """Request 0 decodes, of which the channel tells two steps later."""
    scheduler = Scheduler(make_policy(PolicySettings(policy="pool_fifo")))
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=1), 0.0)
    scheduler.submit_prefilled(RequestSpec("0", 100), 0.0)
    scheduler.admit(0.0)
    setting = Setting(n_workers=2, barrier_groups=2, telemetry_lag_steps=2, step_overhead_s=0.5)
    return scheduler, Channel(scheduler, Forecast(), ["0"], setting)


def test_the_router_learns_of_a_step_after_its_lag() -> None:
    scheduler, channel = a_decoding_request()
    delivered = []
    for step in range(1, 5):
        channel.tokens([(0, 1)])
        channel.end_step(step, now=float(step))
        delivered.append(scheduler.snapshot.requests["0"].generated)
    assert delivered == [0, 0, 1, 2]
    assert channel.delivered_s(ended_s=4.0) == 5.0


def test_a_router_that_catches_up_gets_all_delayed_events() -> None:
    scheduler, channel = a_decoding_request()
    channel.tokens([(0, 3)])
    channel.end_step(1, now=1.0)
    channel.finish(0)
    assert "0" in scheduler.snapshot.requests and not channel.is_empty
    channel.deliver_all(now=2.0)
    assert not scheduler.snapshot.requests and channel.is_empty
