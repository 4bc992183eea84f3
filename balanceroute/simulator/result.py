"""The result of a simulation: the record of steps and requests, and figures over its steady window.

The window begins with the first step at which 30 % of the requests have been admitted and ends before the step at which
the last but one is: before, the cluster fills; after, it drains. Means of loads and step time and the throughput are
taken over it; times per token and waits over all requests.
"""

import math
from array import array
from dataclasses import dataclass

import numpy as np

from balanceroute import report
from balanceroute.arrays import FloatArray, IntArray
from balanceroute.simulator.setting import Setting

WINDOW_STARTS_AT = 0.3  # of the requests admitted
SEGMENT_STEPS = 1500  # that are shown of the loads, as in the paper


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one simulation; the names are the keys of `replay --json`.

    A wait ends with the step from which the request runs: it includes a KV transfer, and its time per token does not.
    With several barrier groups a step is one of a group, and spread and imbalance are those within it. Where some
    workers are slower, loads count times the slowdown: equal ones take equal time. Prefill latencies are
    from arrival to the end of the prefill; `prefill_computed_ratio` is the share of prompt tokens that no prefix cache
    had. Pauses are those of a balancer inside the engine: seconds without a token.
    """

    load_spread_mean: float
    excess_mean: float
    imbalance_mean: float
    step_time_mean_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    throughput_tok_s: float
    wait_p50_s: float
    wait_p99_s: float
    wait_max_s: float
    makespan_s: float
    balance: float
    steps: int
    admitted: int
    recomputed: int
    pauses: int
    pause_p99_s: float
    pause_max_s: float
    prefill_p50_s: float
    prefill_p99_s: float
    prefill_computed_ratio: float
    decision_p50_us: float
    decision_p99_us: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures and what they were taken from.

    Shapes: per-request arrays (n,) in order of arrival; `loads` (steps, G) tokens, empty unless it was recorded;
    `step_start_s` (steps,). `window` is the slice of steps that the means are over.
    """

    figures: Figures
    wait_s: FloatArray
    tpot_s: FloatArray
    prompt_tokens: IntArray
    step_start_s: FloatArray
    loads: IntArray
    window: slice
    decision_us: FloatArray

    @property
    def finished(self) -> int:
        """Requests that have finished: all of them, unless the replay was stopped."""
        return int(np.count_nonzero(~np.isnan(self.tpot_s)))

    @property
    def segment(self) -> IntArray:
        """The loads of at most `SEGMENT_STEPS` steps in the middle of the window: the same place for every policy."""
        start = max(0, (self.window.start + self.window.stop - SEGMENT_STEPS) // 2)
        return self.loads[start:][:SEGMENT_STEPS]


class Recorder:
    """Collects what happens, step by step; appending to flat arrays keeps a step cheap."""

    def __init__(self, setting: Setting, prompt_tokens: list[int], *, with_loads: bool) -> None:
        self.setting = setting
        self.prompt_tokens = prompt_tokens
        self.with_loads = with_loads
        self.most, self.least, self.total, self.level = array("d"), array("d"), array("d"), array("d")
        self.workers, self.up, self.tokens = array("q"), array("q"), array("q")
        self.start_s, self.duration_s = array("d"), array("d")
        self.loads = array("q")
        n = len(prompt_tokens)
        self.ready_s, self.admitted_s, self.finished_s = [math.nan] * n, [math.nan] * n, [math.nan] * n
        self.admitted = 0
        self.window_start = 0
        self.window_end: int | None = None
        self.recomputed = 0
        self.paused_at_s: dict[int, float] = {}
        self.pause_s = array("d")
        self.decision_us = array("d")

    def admit(self, request: int, step: int, now: float) -> None:
        """The request runs from this step on; only the first time counts."""
        if not math.isnan(self.admitted_s[request]):
            return
        self.admitted_s[request] = now
        self.admitted += 1
        n = len(self.prompt_tokens)
        if self.admitted == math.ceil(WINDOW_STARTS_AT * n):
            self.window_start = step
        if self.admitted == max(1, n - 1):
            self.window_end = step

    def pause(self, request: int, now: float) -> None:
        """The engine pauses the request."""
        self.paused_at_s[request] = now

    def resume(self, request: int, now: float) -> None:
        """It runs again."""
        self.pause_s.append(now - self.paused_at_s.pop(request))

    def step(
        self, loads: list[int] | list[float], level: float, tokens: int, start_s: float, duration_s: float, up: int
    ) -> None:
        """One step: loads of the workers at the barrier, the one that all would have if level, and how long it took.

        `up`: workers that are up, behind all barriers.
        """
        self.most.append(max(loads))
        self.least.append(min(loads))
        self.total.append(sum(loads))
        self.level.append(level)
        self.workers.append(len(loads))
        self.up.append(up)
        self.tokens.append(tokens)
        self.start_s.append(start_s)
        self.duration_s.append(duration_s)

    @property
    def window(self) -> slice:
        """The steps that the means are over."""
        start, end = self.window_start, self.window_end
        return slice(start, len(self.most) if end is None else max(end, start + 1))

    def outcome(
        self, generated: FloatArray, makespan_s: float, prefill_s: FloatArray, prefill_computed_ratio: float
    ) -> Outcome:
        """Everything, once all requests have finished; before, the figures of those that have, and of the steps so far.

        Per-request arrays hold NaN for what has not happened.
        """
        admitted_s = np.array(self.admitted_s)
        wait_s, tpot_s = admitted_s - self.ready_s, (self.finished_s - admitted_s) / generated
        return Outcome(
            self._figures(wait_s, tpot_s, prefill_s, makespan_s, prefill_computed_ratio),
            wait_s=wait_s,
            tpot_s=tpot_s,
            prompt_tokens=np.array(self.prompt_tokens),
            step_start_s=np.array(self.start_s),
            loads=np.array(self.loads, dtype=np.int64).reshape(-1, self.setting.n_workers),
            window=self.window,
            decision_us=np.array(self.decision_us),
        )

    def _figures(
        self, wait_s: FloatArray, tpot_s: FloatArray, prefill_s: FloatArray, makespan_s: float, computed_ratio: float
    ) -> Figures:
        window = self.window
        most, least, total, level = (np.array(x)[window] for x in (self.most, self.least, self.total, self.level))
        workers, up, tokens = (np.array(x)[window] for x in (self.workers, self.up, self.tokens))
        start_s, duration_s = np.array(self.start_s)[window], np.array(self.duration_s)[window]
        seconds = float((start_s + duration_s).max() - start_s[0]) if len(start_s) else math.nan  # idle ones, too
        waits, tpots, prefills = (values[~np.isnan(values)] for values in (wait_s, tpot_s, prefill_s))
        throughput = float(tokens.sum()) / seconds
        return Figures(
            load_spread_mean=mean_of(most - least),
            excess_mean=mean_of(most - total / workers),
            imbalance_mean=mean_of(workers * most - total),
            step_time_mean_s=mean_of(duration_s),
            tpot_p50_s=report.percentile(tpots, 50),
            tpot_p95_s=report.percentile(tpots, 95),
            throughput_tok_s=throughput,
            wait_p50_s=report.percentile(waits, 50),
            wait_p99_s=report.percentile(waits, 99),
            wait_max_s=float(waits.max(initial=0.0)),
            makespan_s=makespan_s,
            balance=report.balance(
                throughput / self.setting.tokens_per_step,
                mean_of(level),
                n_workers=mean_of(up),  # lost workers' slots can't be used
                slots=self.setting.slots,
                step_cost_s=self.setting.step_cost_s,
                step_overhead_s=self.setting.step_overhead_s,
            ),
            steps=len(self.most),
            admitted=self.admitted,
            recomputed=self.recomputed,
            pauses=len(self.pause_s),
            pause_p99_s=report.percentile(np.array(self.pause_s), 99) if self.pause_s else 0.0,
            pause_max_s=max(self.pause_s, default=0.0),
            prefill_p50_s=report.percentile(prefills, 50),
            prefill_p99_s=report.percentile(prefills, 99),
            prefill_computed_ratio=computed_ratio,
            decision_p50_us=report.percentile(np.array(self.decision_us), 50),
            decision_p99_us=report.percentile(np.array(self.decision_us), 99),
        )


def mean_of(values: FloatArray) -> float:
    """Their mean; NaN of none, as before the first step of a replay that was stopped."""
    return float(values.mean()) if len(values) else math.nan
