"""Seeded synthetic traces with the published moments of two workloads that are not public.

`heavy_tailed`  the paper's proprietary trace: mean prompt 3,197 and output 1,185 tokens, both lognormal;
                half of the requests come from 400 recurring prompts whose outputs vary by about 1 %.
`capped`        Azure 2024 conversations that generated more than 1,000 tokens: mean prompt 4,652, outputs
                just above a cap (mean 1,052), no recurrence known.

Every row is drawn, none is anybody's request. Arrivals are Poisson at `load` times the ideal capacity of a
cluster, so load 1.0 is what perfect balance could just carry. All seeds share one table of recurring
prompts: a trace of another seed is a history for the predictors that knows the same prompts.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balanceroute.arrays import FloatArray
from balanceroute.errors import InputError
from balanceroute.traces.capacity import ReferenceSetting, ideal_capacity
from balanceroute.traces.convert import convert_trace, guess_format
from balanceroute.traces.source import Source
from balanceroute.traces.trace import Trace, read_trace

# bounds of the arrival rate: stamps of whole microseconds must tell requests apart, and count up to years at most
MIN_RATE_PER_S, MAX_RATE_PER_S = 1e-6, 1e5
DEFAULT_LOAD = 1.15  # of ideal capacity: the load at which the reference figures were taken
KEY_TABLE_SEED = 20_260_506  # one table of recurring prompts for all seeds
RECURRING_KEYS = 400
RECURRING_RATIO = 0.5
POPULARITY_EXPONENT = 0.6  # Zipf exponent of the recurring prompts; the most frequent one is about 2 % of all rows
OUTPUT_NOISE = 0.01  # relative spread of the outputs of one recurring prompt


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal of token counts, cut to a range and scaled to a mean."""

    mean: float
    log_sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, rows: int) -> FloatArray:
        """Unscaled draws with the shape of the distribution and about its mean."""
        return self.mean * np.exp(rng.normal(-(self.log_sigma**2) / 2.0, self.log_sigma, rows))

    def fit(self, values: FloatArray) -> NDArray[np.int64]:
        """Whole token counts in range with the wanted mean, to 0.05 % or as near as the range allows."""
        factor = 1.0
        for _ in range(20):
            tokens = np.clip(np.rint(values * factor), self.low, self.high)
            if abs(tokens.mean() / self.mean - 1.0) < 5e-4:
                break
            factor *= self.mean / tokens.mean()
        return tokens.astype(np.int64)


HEAVY_PROMPTS = Lengths(mean=3197, log_sigma=1.445, low=16, high=120_000)
HEAVY_OUTPUTS = Lengths(mean=1185, log_sigma=1.03, low=16, high=16_000)
CAPPED_PROMPTS = Lengths(mean=4652, log_sigma=0.86, low=64, high=30_000)
CAP_TOKENS = 1000  # every output of `capped` is longer
CAPPED_TAIL_RATIO = 0.147  # the part of `capped` whose outputs run on; fitted to the published quantiles
CAPPED_BODY_TOKENS, CAPPED_TAIL_TOKENS = 12.5, 278.0


def heavy_tailed(rows: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], ...]:
    """Prompt tokens, output tokens and key numbers (-1: does not recur)."""
    table = np.random.default_rng(KEY_TABLE_SEED)
    key_prompts = HEAVY_PROMPTS.draw(table, RECURRING_KEYS)
    key_outputs = HEAVY_OUTPUTS.draw(table, RECURRING_KEYS)
    popularity = np.arange(1, RECURRING_KEYS + 1) ** -POPULARITY_EXPONENT
    popularity /= popularity.sum()
    # the few popular keys must not shift the means away from those of the rows that do not recur
    key_prompts *= HEAVY_PROMPTS.mean / (key_prompts @ popularity)
    key_outputs *= HEAVY_OUTPUTS.mean / (key_outputs @ popularity)
    keys = np.where(rng.random(rows) < RECURRING_RATIO, rng.choice(RECURRING_KEYS, size=rows, p=popularity), -1).astype(
        np.int64
    )
    recurs = keys >= 0
    prompts = np.where(recurs, key_prompts[keys], HEAVY_PROMPTS.draw(rng, rows))
    noisy = key_outputs[keys] * (1.0 + OUTPUT_NOISE * rng.standard_normal(rows))
    outputs = np.where(recurs, noisy, HEAVY_OUTPUTS.draw(rng, rows))
    return HEAVY_PROMPTS.fit(prompts), HEAVY_OUTPUTS.fit(outputs), keys


def capped(rows: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], ...]:
    """Prompt tokens, output tokens and key numbers (all -1)."""
    scale = np.where(rng.random(rows) < CAPPED_TAIL_RATIO, CAPPED_TAIL_TOKENS, CAPPED_BODY_TOKENS)
    outputs = CAP_TOKENS + np.ceil(rng.exponential(scale)).astype(np.int64)
    return (
        CAPPED_PROMPTS.fit(CAPPED_PROMPTS.draw(rng, rows)),
        np.maximum(outputs, CAP_TOKENS + 1),
        np.full(rows, -1),
    )


PRESETS: dict[str, Callable[[int, np.random.Generator], tuple[NDArray[np.int64], ...]]] = {
    "heavy_tailed": heavy_tailed,
    "capped": capped,
}


def generate_trace(
    preset: str,
    *,
    rows: int = 8000,
    seed: int = 0,
    load: float = DEFAULT_LOAD,
    setting: ReferenceSetting | None = None,
) -> Trace:
    """Draw a synthetic trace; equal arguments give equal traces.

    `load` is the arrival rate as a fraction of the ideal capacity of `setting`. Raises: InputError on
    unknown presets and on numbers from which no trace can be drawn.
    """
    cluster = (setting or ReferenceSetting()).checked()
    if preset not in PRESETS:
        raise InputError(f"unknown preset {preset!r}; one of {', '.join(sorted(PRESETS))}")
    if rows < 1 or not 0 < load < math.inf:
        raise InputError(f"a trace needs at least one row and a positive load, not {rows} rows at load {load:g}")
    if seed < 0:
        raise InputError(f"seed must be at least 0, not {seed}")
    lengths_rng, arrivals_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    prompts, outputs, keys = PRESETS[preset](rows, lengths_rng)
    names = np.array(["", *(f"k{key}" for key in range(RECURRING_KEYS))])[keys + 1]
    arrivals = np.cumsum(arrivals_rng.exponential(1.0, rows))
    unscaled = Trace(arrivals, prompts, outputs, names)
    rate_per_s = load * ideal_capacity(unscaled, cluster)
    if not MIN_RATE_PER_S <= rate_per_s <= MAX_RATE_PER_S:
        raise InputError(
            f"load {load:g} of this cluster is {rate_per_s:.3g} requests per second, "
            f"not {MIN_RATE_PER_S:g} to {MAX_RATE_PER_S:g}"
        )
    # the load holds exactly for the drawn rows (rows / last arrival), not just on average over seeds
    scaled = unscaled.scaled(rows / rate_per_s / float(arrivals[-1]))
    # whole microseconds, so that a written trace reads back as itself
    return Trace(np.round(scaled.arrival_s, 6), prompts, outputs, names)


def load_trace(
    name: str, *, seed: int = 0, rows: int | None = None, on_note: Callable[[str], None] = lambda _: None
) -> Trace:
    """A trace by file name, or a generated one by the name of a preset; a file in another form is converted.

    `-` is standard input. The first `rows` of it: of a preset, of the 8,000 requests that it draws without a limit.
    `on_note`: told what a conversion left out or estimated, and that a file has the name of a preset.
    """
    missing = name != "-" and is_missing(name)
    if missing and name in PRESETS:
        return generate_trace(name, seed=seed).head(rows)
    if missing:
        raise InputError(f"{name}: no such file, nor one of {', '.join(sorted(PRESETS))}")
    if name in PRESETS:
        on_note(f"this is the file {name}, not the generated trace; rename the file to have that")
    source = Source(name)  # one for both: a pipe gives its bytes once
    form = guess_format(source)
    if form is None:
        return read_trace(source, on_note).head(rows)
    conversion = convert_trace(source)
    for note in conversion.notes:
        on_note(note)
    return conversion.trace.head(rows)


def is_missing(name: str) -> bool:
    """Whether there is no file of this name. One that cannot be looked for may be there; its reader says why."""
    try:
        os.stat(name)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    except ValueError:  # a name that no file can have
        return True
    return False
