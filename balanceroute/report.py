"""The figures of latency and balance that balanceroute reports, and the computation of those of requests.

Latency, from the times at which a client saw the tokens of one answer:

    TTFT  first token - request sent
    TPOT  (last token - first token) / (tokens - 1); undefined for a single token
    ITL   the gaps between successive tokens; a chunk of n tokens counts as n equal gaps

Balance, from the KV tokens L_g that each of G decode workers holds during one step (`load` in the code):

    load_spread  max L - min L       what the paper's tables call average imbalance
    excess       max L - mean L      what the barrier costs: step time = a * max L + b
    imbalance    G * max L - sum L   the paper's model (I)
    balance      throughput against that of perfectly level workers with every slot busy; 1.0 is the bound

The first three are of one step, and their means are summed up where steps are made: `simulator/result.py`,
`emulator/step_totals.py`.

Waits are unfair when big prompts wait and small ones do not; `wait_p99_by_size` shows who waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from balanceroute.arrays import FloatArray


def ttft_s(sent_s: float, first_token_s: float) -> float:
    """Time to first token, seconds."""
    return first_token_s - sent_s


def tpot_s(first_token_s: float, last_token_s: float, tokens: int) -> float | None:
    """Mean time per output token after the first, seconds; `None` where there is no second token."""
    return (last_token_s - first_token_s) / (tokens - 1) if tokens > 1 else None


def itl_s(chunk_times_s: Sequence[float], chunk_tokens: Sequence[int]) -> FloatArray:
    """Gaps between successive tokens, seconds: one entry per token after the first chunk.

    The n tokens of a chunk share the time since the chunk before equally; those of the first chunk have no
    gap.
    """
    times = np.asarray(chunk_times_s, dtype=np.float64)
    tokens = np.asarray(chunk_tokens[1:], dtype=np.int64)
    if len(times) < 2:
        return np.empty(0)
    shares = np.diff(times) / np.maximum(tokens, 1)
    return np.repeat(shares, tokens)


def percentile(values: ArrayLike, q: float) -> float:
    """The q-th percentile (0-100) with linear interpolation; NaN of nothing."""
    array = np.asarray(values, dtype=np.float64)
    return float(np.percentile(array, q)) if array.size else float("nan")


def balance(
    throughput_tok_s: float,
    mean_load_tokens: float,
    *,
    n_workers: float,
    slots: int,
    step_cost_s: float,
    step_overhead_s: float,
) -> float:
    """Throughput as a fraction of G * B tokens per perfectly level step; 1.0 is the bound.

    `n_workers`: G, of the workers that are up; the mean over the steps where some were lost.
    """
    return throughput_tok_s * (step_cost_s * mean_load_tokens + step_overhead_s) / (n_workers * slots)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and quantiles of one figure; NaN where nothing was measured."""

    n: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: ArrayLike) -> "Distribution":
        """Summarise values of any number."""
        array = np.asarray(values, dtype=np.float64)
        if not array.size:
            nan = float("nan")
            return cls(0, nan, nan, nan, nan, nan)
        p50, p95, p99 = (float(x) for x in np.percentile(array, (50, 95, 99)))
        return cls(int(array.size), float(array.mean()), p50, p95, p99, float(array.max()))


SIZE_CLASSES = (0.0, 0.5, 0.9, 0.99, 1.0)  # quantiles of the prompts


def wait_p99_by_size(wait_s: ArrayLike, prompt_tokens: ArrayLike) -> tuple[float, ...]:
    """The p99 wait of each of `SIZE_CLASSES`: equal ones mean that no size pays for the others."""
    waits = np.asarray(wait_s, dtype=np.float64)[np.argsort(np.asarray(prompt_tokens), kind="stable")]
    edges = [round(edge * len(waits)) for edge in SIZE_CLASSES]
    return tuple(percentile(waits[first:end], 99) for first, end in pairwise(edges))
