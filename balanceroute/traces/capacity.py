"""The capacity of a cluster of barrier-synchronised decode workers.

With every slot of G workers busy and all loads equal, each step yields G * B tokens and costs a * L + b
seconds, where L is B times the mean KV tokens that an active request holds. A request of s prompt and o
output tokens holds s + j tokens on its j-th step, so the mean over all active steps is weighted by length:
long outputs are seen more often.
"""

import math
from dataclasses import dataclass

import numpy as np

from balanceroute.errors import InputError
from balanceroute.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class ReferenceSetting:
    """A decode cluster: its width and what one step costs.

    The defaults are the setting of the published comparison: eight workers of 64 slots. The step cost is
    inferred from the paper's throughput and TPOT, not measured by us.
    """

    n_workers: int = 8
    slots: int = 64
    step_cost_s: float = 1.2e-7  # a: seconds per KV token of the fullest worker
    step_overhead_s: float = 0.025  # b: seconds per step whatever the load

    def checked(self) -> "ReferenceSetting":
        """The setting itself. Raises: InputError that names the first value which makes no sense."""
        for name, count in (("workers", self.n_workers), ("slots", self.slots)):
            if count < 1:
                raise InputError(f"{name} must be at least 1, not {count}")
        for name, seconds in (("step cost", self.step_cost_s), ("step overhead", self.step_overhead_s)):
            if not 0 <= seconds < math.inf:
                raise InputError(f"{name} must be a finite number >= 0, not {seconds:g}")
        if self.step_cost_s == self.step_overhead_s == 0:
            raise InputError("a step must take some time: step cost and step overhead are both 0")
        return self


def mean_kv_tokens(trace: Trace) -> float:
    """Mean KV tokens held by an active request, over all the steps on which requests are active."""
    outputs = trace.output_tokens.astype(np.float64)
    held = trace.prompt_tokens * outputs + outputs * (outputs - 1.0) / 2.0
    return float(held.sum() / outputs.sum())


def ideal_capacity(trace: Trace, setting: ReferenceSetting | None = None) -> float:
    """Requests per second of this trace's mix that perfectly level, always full workers would finish."""
    cluster = setting or ReferenceSetting()
    step_s = cluster.step_cost_s * cluster.slots * mean_kv_tokens(trace) + cluster.step_overhead_s
    return cluster.n_workers * cluster.slots / (float(trace.output_tokens.mean()) * step_s)
