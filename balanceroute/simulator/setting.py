"""What is simulated: the cluster, what a step costs, and the options that the reference setting leaves out."""

from dataclasses import dataclass, replace

from balanceroute.errors import InputError
from balanceroute.traces import ReferenceSetting


@dataclass(frozen=True, slots=True)
class Failure:
    """A decode worker is gone from `start_s` on, with all it held; it comes back empty at `end_s`, if ever."""

    worker: int
    start_s: float
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A simulated cluster; the defaults are the reference setting, with every option off.

    Args:
        n_workers: decode workers that share the step barrier (G).
        slots: requests that a worker runs at most (B).
        pool: requests that may wait (W): pool entries, or requests queued at workers for policies without a pool.
        step_cost_s: seconds per KV token of the fullest worker (a).
        step_overhead_s: seconds per step whatever the load (b).
        prefillers: prefill workers, each computing one prompt at a time; 0: prompts are ready as they arrive.
        prefill_tokens_per_s: rate of one prefiller.
        transfer_steps: steps for which an admitted request holds its slot before it runs.
        telemetry_lag_steps: steps by which the router hears of starts, tokens and departures too late.
        kv_capacity_tokens: KV tokens that fit one worker; beyond, the last running request is recomputed.
        speeds: seconds per token of each worker relative to the others; empty: all 1.
        speed_aware: whether the router knows `speeds`.
        failures: workers that are lost, and when.
    """

    n_workers: int = 8
    slots: int = 64
    pool: int = 128
    step_cost_s: float = 1.2e-7
    step_overhead_s: float = 0.025
    prefillers: int = 0
    prefill_tokens_per_s: float = 20_000.0
    transfer_steps: int = 0
    telemetry_lag_steps: int = 0
    kv_capacity_tokens: int | None = None
    speeds: tuple[float, ...] = ()
    speed_aware: bool = True
    failures: tuple[Failure, ...] = ()

    @property
    def requeues(self) -> bool:
        """Whether a request may have to be prefilled again."""
        return self.kv_capacity_tokens is not None or bool(self.failures)

    @property
    def reference(self) -> ReferenceSetting:
        """The part of the setting that ideal capacity depends on."""
        return ReferenceSetting(self.n_workers, self.slots, self.step_cost_s, self.step_overhead_s)

    def checked(self) -> "Setting":
        """The setting itself. Raises: InputError that names the first value which makes no sense."""
        positive = {"workers": self.n_workers, "slots": self.slots, "pool": self.pool}
        for name, value in positive.items():
            if value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        if self.speeds and (len(self.speeds) != self.n_workers or not min(self.speeds) > 0):
            raise InputError(f"speeds: {self.n_workers} positive numbers, one per worker")
        for name, number in (("step cost", self.step_cost_s), ("step overhead", self.step_overhead_s)):
            if not number >= 0:
                raise InputError(f"{name} must not be negative")
        if not self.step_cost_s + self.step_overhead_s > 0:
            raise InputError("a step must take some time: step cost and step overhead are both 0")
        if self.prefillers and not self.prefill_tokens_per_s > 0:
            raise InputError("prefill tokens per second must be above 0")
        for failure in self.failures:
            if not 0 <= failure.worker < self.n_workers:
                raise InputError(f"failure of worker {failure.worker}: there are workers 0 to {self.n_workers - 1}")
            if failure.end_s is not None and not failure.end_s > failure.start_s:
                raise InputError(f"failure of worker {failure.worker} ends before it starts")
        return replace(self)
