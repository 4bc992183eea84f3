"""How much a cluster of barrier-synchronised decode workers can carry at best.

With every slot of G workers busy and all loads equal, each step yields G * B tokens and costs a * L + b
seconds, where L is B times the mean KV tokens that an active request holds. A request of s prompt and o
output tokens holds s + j tokens on its j-th step, so the mean over all active steps is weighted by length:
long outputs are seen more often.
"""

from dataclasses import dataclass

import numpy as np

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
