"""The barrier: all decode ranks of a group step together, in real time."""

import asyncio

from balanceroute.emulator.clock import EmulatedClock
from balanceroute.emulator.decode import DecodeWorker, Generation
from balanceroute.emulator.step_totals import StepTotals
from balanceroute.engine import DecodeGroup, StepTimeModel


class DecodeGroupRunner:
    """Steps all decode ranks of a cluster at one barrier in real time."""

    def __init__(
        self, workers: list[DecodeWorker], step_time: StepTimeModel, clock: EmulatedClock, wake: asyncio.Event
    ) -> None:
        """Without workers there is nothing to run."""
        self._workers = workers
        self._clock = clock
        self._wake = wake
        self.group = DecodeGroup([worker.rank for worker in workers], step_time) if workers else None
        self.stopped = False
        self.late_s = 0.0  # modelled seconds by which steps ended later than they should have, in sum
        self.totals = StepTotals()

    def wake(self) -> None:
        """Something changed that a resting group must look at."""
        self._wake.set()

    def resume(self) -> None:
        """The barrier works again."""
        self.stopped = False
        self._wake.set()

    async def run(self) -> None:
        """Step until cancelled; rests while nothing runs."""
        group = self.group
        assert group is not None
        deadline = self._clock.now()
        while True:
            self._wake.clear()
            if self.stopped or not group.busy:
                await self._wake.wait()
                deadline = self._clock.now()
                continue
            now = self._clock.now()
            plan = group.begin_step(now)
            self._note(plan.admitted, plan.started)
            for worker in self._workers:
                worker.pop_due()
            if not group.running:
                await self._clock.wait(self._wake, group.next_ready_s())
                deadline = self._clock.now()
                continue
            # a step that was late shortens the next one, so that the pace holds on a busy machine
            deadline = max(deadline, now - plan.duration_s) + plan.duration_s
            await self._clock.sleep_until(deadline)
            self.late_s += max(0.0, self._clock.now() - deadline)
            if not self.stopped:
                loads = [rank.load for rank in group.ranks]
                self.totals.add(loads, sum(len(rank.running) for rank in group.ranks), plan.duration_s)
                self._end_step(group)

    def _note(self, admitted: list[Generation], started: list[Generation]) -> None:
        for worker in self._workers:
            for generation in admitted:
                if worker.knows(generation):
                    worker.admitted(generation)
            for generation in started:
                if worker.knows(generation):
                    worker.started(generation)

    def _end_step(self, group: DecodeGroup[Generation]) -> None:
        for worker, outcome in zip(self._workers, group.end_step(), strict=True):
            for generation in outcome.recomputed:
                if worker.knows(generation):
                    worker.give_up(generation)
            worker.counters["generation_tokens"] += len(outcome.stepped)
            for generation in outcome.stepped:
                worker.give_token(generation)
