"""Seeded synthetic conversations: many turns over shared system prompts, with the blocks that say who begins alike.

Every turn's prompt is the whole conversation so far, so most of it was there a turn ago; the first blocks are the
system prompt of one of a few applications. Nobody's requests: only the shape is that of public multi-turn traces.
"""

import math
from itertools import count

import numpy as np

from balanceroute.errors import InputError
from balanceroute.traces.trace import BLOCK_TOKENS, Trace

APPLICATIONS = 20  # system prompts, of which the n-th most popular has a weight of 1/n
MEAN_TURNS = 4.0
MEAN_THINK_S = 40.0  # between the arrival of one turn and that of the next
MOST_PROMPT_TOKENS = 120_000


def generate_conversations(rows: int, *, seed: int = 0, rate_per_s: float = 3.4) -> Trace:
    """The first `rows` turns of conversations that start at random; `rate_per_s` turns arrive once it is under way.

    Raises: InputError for no rows or no rate.
    """
    if rows < 1 or not 0 < rate_per_s < math.inf:
        raise InputError(f"conversations need at least one row and a positive rate, not {rows} at {rate_per_s:g}")
    rng = np.random.default_rng(seed)
    names = count()
    system_tokens = np.clip(rng.lognormal(7.0, 1.0, APPLICATIONS), 64, 16_000).astype(int).tolist()
    systems = [[next(names) for _ in range(tokens // BLOCK_TOKENS)] for tokens in system_tokens]
    popularity = 1.0 / np.arange(1, APPLICATIONS + 1)
    popularity /= popularity.sum()
    turns: list[tuple[float, int, int, tuple[int, ...]]] = []
    started_s, last_s = 0.0, math.inf
    while started_s < last_s:
        started_s += rng.exponential(MEAN_TURNS / rate_per_s)
        application = int(rng.choice(APPLICATIONS, p=popularity))
        prompt, blocks, now = system_tokens[application], list(systems[application]), started_s
        for _ in range(rng.geometric(1.0 / MEAN_TURNS)):
            prompt += int(rng.lognormal(7.2, 1.3)) + 1
            if prompt > MOST_PROMPT_TOKENS:
                break
            blocks += [next(names) for _ in range(prompt // BLOCK_TOKENS - len(blocks))]
            answer = int(rng.lognormal(5.5, 0.8)) + 1
            turns.append((round(now, 6), prompt, answer, tuple(blocks)))
            prompt += answer
            now += rng.exponential(MEAN_THINK_S)
        if len(turns) >= rows and last_s == math.inf:
            # later starts may still arrive before the last of these
            last_s = sorted(turn[0] for turn in turns)[rows - 1]
    turns.sort(key=lambda turn: turn[0])
    arrivals, prompts, answers, prefix = zip(*turns[:rows], strict=True)
    return Trace(
        np.array(arrivals) - arrivals[0],
        np.array(prompts, dtype=np.int64),
        np.array(answers, dtype=np.int64),
        np.full(rows, "", dtype=np.str_),
        prefix,
    )
