"""What the brain alone can do: CPU of a hub and a ledger that are fed what relays say, without the relays.

    .venv/bin/python scripts/bench/brain.py

144 decode workers hold 64 streams each, told by two relays. Counted is the CPU of this process for one second's worth
of 150,000 tokens, in frames of 5 ms, one per relay; and for requests that come, are prefilled, admitted from a pool in
which 512 wait, and finish. Both are fed as fast as they are taken, so that the rest of the machine only adds; the
smallest of the rounds counts. Not measured: reading the sockets, the predictor, polls of workers.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import uvloop

from balanceroute.core.policies import PolicySettings, make_policy
from balanceroute.core.scheduler import Scheduler, SchedulerConfig
from balanceroute.core.types import Outcome, Phase, RequestSpec, Role, Standing, WorkerSpec
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.link.hub import Hub
from balanceroute.proxy.link.messages import VERSION, Finish, Held, Hello, Prefilled, Progress, Submit, frame
from balanceroute.proxy.workers.fleet import Fleet, FleetConfig
from balanceroute.proxy.workers.relay_reports import RelayReports

WORKERS: Final = 144
SLOTS: Final = 64
RELAYS: Final = 2
WAITING: Final = 512
TOKENS_PER_S: Final = 150_000
FRAMES_PER_S: Final = 200
REQUESTS: Final = 240
ROUNDS: Final = 5


class Wire(asyncio.Transport):
    """Takes what is written."""

    def write(self, data: Any) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class Brain:
    """A hub whose relays have said Hello with all their streams."""

    def __init__(self, policy: str, horizon_steps: int) -> None:
        loop = asyncio.get_running_loop()
        settings = PolicySettings(policy=policy, horizon_steps=horizon_steps)
        self.scheduler = Scheduler(make_policy(settings), SchedulerConfig())
        for number in range(8):
            self.scheduler.add_worker(WorkerSpec(f"p{number}", Role.PREFILL), 0.0)
        for number in range(WORKERS):
            self.scheduler.add_worker(WorkerSpec(f"d{number}", Role.DECODE, slots=SLOTS), 0.0)
        self.ledger = Ledger(self.scheduler, loop)
        reports = RelayReports(Fleet(self.ledger, FleetConfig()), loop, frozen=())
        self.hub = Hub(self.ledger, reports, loop, 1, RELAYS)
        self.relays = [self.hub.connected() for _ in range(RELAYS)]
        per_relay = WORKERS * SLOTS // RELAYS
        for number, relay in enumerate(self.relays):
            relay.connection_made(Wire())
            held = [self._stream(ticket, number * per_relay + ticket) for ticket in range(per_relay)]
            relay.data_received(frame([Hello(VERSION, f"relay-{number}", 1, 0, tuple(held))]))
        self.streams = per_relay
        assert self.hub.settled.is_set()

    @staticmethod
    def _stream(ticket: int, number: int) -> Held:
        spec = RequestSpec(f"cmpl-{number:020d}", 1000)
        return Held(ticket, 2, Standing(spec, Phase.DECODING, 1000, decoder=f"d{number // SLOTS}", tokens=1))

    def tokens(self) -> Callable[[], None]:
        """One second of them."""
        each = TOKENS_PER_S // FRAMES_PER_S // RELAYS
        frames = [
            frame([Progress(tuple((turn * each + n) % self.streams for n in range(each)), (1,) * each)])
            for turn in range(FRAMES_PER_S)
        ]

        def feed() -> None:
            for told in frames:
                for relay in self.relays:
                    relay.data_received(told)

        return feed

    def requests(self, first: int) -> Callable[[], None]:
        """So many come and go, while `WAITING` others wait: one stream leaves for each that is admitted."""
        relay = self.relays[0]
        tickets = range(self.streams + first, self.streams + first + REQUESTS)
        leaving = iter(range(first, first + REQUESTS))

        def feed() -> None:
            for ticket in tickets:
                relay.data_received(frame([Submit(ticket, RequestSpec(f"new-{ticket}", 900))]))
                relay.data_received(frame([Prefilled(ticket, 900, None)]))
                relay.data_received(frame([Finish(next(leaving), Outcome.FINISHED, "stop")]))
                admitted = self.ledger.admit()
                assert len(admitted) == 1

        return feed

    def fill_pool(self) -> None:
        """As many as wait."""
        for ticket in range(WAITING):
            number = 10**6 + ticket
            self.relays[1].data_received(frame([Submit(number, RequestSpec(f"waiting-{ticket}", 900))]))
            self.relays[1].data_received(frame([Prefilled(number, 900, None)]))
        assert len(self.scheduler.snapshot.pool) == WAITING


def cpu_s(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


async def measure(policy: str, horizon_steps: int) -> None:
    brain = Brain(policy, horizon_steps)
    tokens = min(cpu_s(brain.tokens()) for _ in range(ROUNDS))
    brain.fill_pool()
    requests = min(cpu_s(brain.requests(round_ * REQUESTS)) for round_ in range(ROUNDS)) / REQUESTS
    load = tokens + 120 * requests
    print(
        f"{policy:8} H={horizon_steps:<3} {tokens:6.3f} s per second of tokens, {1e3 * requests:6.2f} ms per request"
        f" -> {load:6.1%} of a core at 150,000 tokens/s and 120 requests/s"
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for policy, horizon_steps in (("br_0", 0), ("br_h", 80)):
            runner.run(measure(policy, horizon_steps))


if __name__ == "__main__":
    main()
