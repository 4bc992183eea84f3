"""The setting of a simulation: the cluster, the step's cost, and options beyond the reference setting."""

from dataclasses import dataclass, fields, replace

from balanceroute.arrays import plain
from balanceroute.core.bounds import (
    MOST_OVERLAP,
    MOST_REQUEST_TOKENS,
    MOST_SLOTS,
    MOST_SLOWDOWN,
    check_flag,
    check_number,
)
from balanceroute.core.prefill import PREFILL_POLICIES
from balanceroute.errors import InputError
from balanceroute.traces import ReferenceSetting, Trace, ideal_capacity

# the least and the most of each number, far beyond any cluster: a typing error is refused before it fills the memory
BOUNDS = {
    "n_workers": ("workers", 1, 4096),
    "slots": ("slots", 1, MOST_SLOTS),
    "pool": ("pool", 1, 1_000_000),
    "step_cost_s": ("step cost", 0, 1),
    "step_overhead_s": ("step overhead", 0, 1_000_000),
    "request_tokens": ("request tokens", 0, MOST_REQUEST_TOKENS),
    "prefillers": ("prefillers", 0, 4096),
    "prefill_tokens_per_s": ("prefill rate", 1, 1_000_000_000),
    "prefix_cache_tokens": ("prefix cache", 0, 1_000_000_000),
    "transfer_steps": ("transfer steps", 0, 10_000),
    "telemetry_lag_steps": ("telemetry lag", 0, 10_000),
    "draft_tokens": ("draft tokens", 0, 64),
    "draft_acceptance": ("draft acceptance", 0, 1),
    "barrier_groups": ("barrier groups", 1, 4096),
}
FLAGS = {
    "transfers_by_size": "transfers by size",
    "transfers_beside_full": "transfers beside full",
    "cost_aware": "cost aware",
}
FRACTIONS = {"step_cost_s", "step_overhead_s", "prefill_tokens_per_s", "draft_acceptance"}
REFERENCE = ReferenceSetting()
MOST_BLOCKS = 1_000_000
MOST_KV_TOKENS = 10**12
SHORTEST_STEP_S = 1e-9
LATEST_FAILURE_S = 1_000_000_000
LOADS = (0.001, 1000)  # the least and the most of a fraction of ideal capacity


@dataclass(frozen=True, slots=True)
class Failure:
    """A decode worker is gone from `start_s` on, with all it held; it comes back empty at `end_s`, if ever."""

    worker: int
    start_s: float
    end_s: float | None = None

    def plain(self) -> "Failure":
        """The same in Python's own numbers."""
        return Failure(plain(self.worker), plain(self.start_s), plain(self.end_s))


@dataclass(frozen=True, slots=True)
class Setting:
    """A simulated cluster; the defaults are the reference setting, with every option off.

    Args:
        n_workers: decode workers (G); all share the step barrier, but for `barrier_groups`.
        slots: requests that a worker runs at most (B).
        pool: requests that may wait (W): pool entries, or requests queued at workers for policies without a pool.
        step_cost_s: seconds per KV token of the fullest worker (a).
        step_overhead_s: seconds per step whatever the load (b).
        prefillers: prefill workers, each computing one prompt at a time; 0: prompts are ready as they arrive.
        prefill_tokens_per_s: rate of one prefiller.
        prefill_policy: which prefiller computes a prompt (`core.prefill`).
        prefix_cache_tokens: what the prefix cache of one prefiller holds; 0: none.
        transfer_steps: steps that the KV of a request is on its way to its worker, before it can run.
        transfers_by_size: whether that is how long a mean prompt takes, and others take it in proportion to their KV.
        transfers_beside_full: whether a worker whose slots are all in use begins a transfer; vLLM does not
            (`simulator.ranks`).
        overlap_requests: requests that the router sends each worker beyond its slots (m); None: as measured, as by
            default in `serve` and `replay`.
        telemetry_lag_steps: steps by which the router hears of starts, tokens and departures too late.
        kv_capacity_tokens: KV tokens that fit one worker; beyond, the last running request is recomputed.
        request_tokens: KV tokens that every request of the fullest worker costs like, beside its own (c).
        slowdowns: seconds per token of each worker relative to the others; empty: all 1.
        cost_aware: whether the router knows `slowdowns` and `request_tokens`.
        failures: workers that are lost, and when.
        barrier_groups: groups of workers that end their steps together, each on its own clock; as many as workers: each
            alone.
        draft_tokens: tokens that speculative decoding guesses for each request and step; 0: one token per step.
        draft_acceptance: how likely each guess holds where the one before did.
        engine_balancer_blocks: threshold of a balancer inside the engine, which pauses requests (`engine.dp_balancer`);
            None: the engine runs what it has.
    """

    n_workers: int = REFERENCE.n_workers
    slots: int = REFERENCE.slots
    pool: int = 128
    step_cost_s: float = REFERENCE.step_cost_s
    step_overhead_s: float = REFERENCE.step_overhead_s
    prefillers: int = 0
    prefill_tokens_per_s: float = 20_000.0
    prefill_policy: str = "prefix_affinity"
    prefix_cache_tokens: int = 0
    transfer_steps: int = 0
    transfers_by_size: bool = False
    transfers_beside_full: bool = False
    overlap_requests: int | None = 0
    telemetry_lag_steps: int = 0
    kv_capacity_tokens: int | None = None
    request_tokens: int = 0
    slowdowns: tuple[float, ...] = ()
    cost_aware: bool = True
    failures: tuple[Failure, ...] = ()
    engine_balancer_blocks: float | None = None
    barrier_groups: int = 1
    draft_tokens: int = 0
    draft_acceptance: float = 0.7

    @property
    def requeues(self) -> bool:
        """Whether a request may have to be prefilled again."""
        return self.kv_capacity_tokens is not None or bool(self.failures)

    @property
    def reference(self) -> ReferenceSetting:
        """The part of the setting that ideal capacity depends on: with full slots, c is part of every step."""
        requests_s = self.step_cost_s * self.request_tokens * self.slots
        tokens = self.tokens_per_step
        return ReferenceSetting(
            self.n_workers, self.slots, self.step_cost_s / tokens, (self.step_overhead_s + requests_s) / tokens
        )

    @property
    def tokens_per_step(self) -> float:
        """Of one request, on average."""
        return sum(self.draft_acceptance**index for index in range(self.draft_tokens + 1))

    @property
    def lock_step(self) -> bool:
        """Whether every step gives each running request of the cluster one token."""
        return self.engine_balancer_blocks is None and self.barrier_groups == 1 and not self.draft_tokens

    def checked(self) -> "Setting":
        """The same setting in Python's own numbers. Raises: InputError that names the first value which makes no
        sense.
        """
        given = {field.name: plain(getattr(self, field.name)) for field in fields(self)}
        try:
            given["slowdowns"] = tuple(map(plain, self.slowdowns))
            given["failures"] = tuple(map(Failure.plain, self.failures))
        except (TypeError, AttributeError):
            raise InputError("slowdowns, failures: accepted are lists, of numbers and of Failure objects") from None
        setting = replace(self, **given)
        setting._check()
        return setting

    def _check(self) -> None:
        for name, (label, least, most) in BOUNDS.items():
            check_number(label, getattr(self, name), least, most, whole=name not in FRACTIONS)
        for name, label in FLAGS.items():
            check_flag(label, getattr(self, name))
        if self.step_cost_s + self.step_overhead_s < SHORTEST_STEP_S:
            raise InputError(
                f"step cost {self.step_cost_s} and step overhead {self.step_overhead_s}: a step must take some time, "
                f"{SHORTEST_STEP_S:g} s or more"
            )
        if self.prefill_policy not in PREFILL_POLICIES:
            raise InputError(f"prefill policy {self.prefill_policy!r:.60}: one of {', '.join(PREFILL_POLICIES)}")
        if self.overlap_requests is not None:
            check_number("overlap", self.overlap_requests, 0, MOST_OVERLAP, whole=True)
        if self.prefix_cache_tokens and not self.prefillers:
            raise InputError(f"prefix cache {self.prefix_cache_tokens}: changes nothing without prefillers")
        if self.barrier_groups > self.n_workers:
            raise InputError(f"barrier groups {self.barrier_groups}: there are {self.n_workers} workers")
        self.check_slowdowns()
        self.check_engine_balancer()
        if self.kv_capacity_tokens is not None:
            check_number("KV capacity", self.kv_capacity_tokens, 1, MOST_KV_TOKENS, whole=True)
        for failure in self.failures:
            self.check_failure(failure)

    def check_slowdowns(self) -> None:
        """Raises: InputError where they are not one sensible number per worker."""
        if self.slowdowns and len(self.slowdowns) != self.n_workers:
            raise InputError(f"slowdowns: {len(self.slowdowns)} numbers for {self.n_workers} workers")
        for slowdown in self.slowdowns:
            check_number("slowdown", slowdown, 0, MOST_SLOWDOWN, whole=False, above_least=True)

    def check_engine_balancer(self) -> None:
        """Raises: InputError for a threshold that is none, or options that it is not modelled with."""
        blocks = self.engine_balancer_blocks
        if blocks is None:
            return
        check_number("engine balancer", blocks, 0, MOST_BLOCKS, whole=False, above_least=True)
        for name in ("prefillers", "transfer_steps", "telemetry_lag_steps", "kv_capacity_tokens", "failures"):
            if getattr(self, name):
                raise InputError(f"engine balancer: it is not modelled together with {name.replace('_', ' ')}")
        if self.overlap_requests != 0:
            raise InputError("engine balancer: it is not modelled together with overlap requests")
        if self.barrier_groups > 1 or self.draft_tokens:
            raise InputError("engine balancer: it is not modelled together with barrier groups or draft tokens")

    def check_failure(self, failure: Failure) -> None:
        """Raises: InputError where it names no worker of the cluster, or no span of time."""
        of = f"failure of worker {failure.worker}"
        if not isinstance(failure.worker, int) or not 0 <= failure.worker < self.n_workers:
            raise InputError(f"{of}: there are workers 0 to {self.n_workers - 1}")
        for moment in (failure.start_s, failure.end_s):
            if moment is not None:
                check_number(f"{of} at second", moment, 0, LATEST_FAILURE_S, whole=False)
        if failure.end_s is not None and failure.end_s <= failure.start_s:
            raise InputError(f"{of} ends before it starts")


def at_load(trace: Trace, load: float, setting: Setting) -> Trace:
    """The same requests at a rate that is this fraction of the setting's ideal capacity (`traces.capacity`).

    Capacity counts workers, slots and step time, not what a setting adds to them: with slower or lost workers, a
    transfer that holds slots or too few prefillers, less than the ideal can be carried.

    Raises: InputError for a load that is none, or a trace whose requests all arrive at one time.
    """
    check_number("load", load, *LOADS, whole=False)
    if len(trace) < 2 or trace.arrival_s[0] == trace.arrival_s[-1]:
        raise InputError(f"load {load:g}: all requests of the trace arrive at one time, so it can be given no load")
    return trace.at_rate(load * ideal_capacity(trace, setting.reference))
