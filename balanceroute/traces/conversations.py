"""Seeded synthetic conversations: many turns over shared system prompts, with prefix blocks.

Every turn's prompt is the whole conversation so far, so most of it was there a turn ago; the first blocks are the
system prompt of one of a few applications. Nobody's requests: only their shape is that of public multi-turn traces.

    CHATS    people, who think between turns
    AGENTS   loops over tools: long tool prompts, many short turns soon after one another. Rate and mean sizes are those
             of Mooncake's tool-and-agent trace (FAST25-release/README.md: 23,608 requests in an hour, 8,596 prompt and
             182 output tokens on average); how much of a prompt was there before is not taken from it
"""

import math
from dataclasses import dataclass
from itertools import count

import numpy as np

from balanceroute.errors import InputError
from balanceroute.traces.trace import BLOCK_TOKENS, Trace

MOST_PROMPT_TOKENS = 120_000


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """The shape of conversations. Sizes are lognormal: (median, sigma of the logarithm), tokens.

    `applications`: system prompts, of which the n-th most popular has a weight of 1/n. `turns`: their mean number.
    `pause_s`: mean between the arrival of one turn and that of the next. `turn`: what each adds to the prompt before
    its answer.
    """

    rate_per_s: float
    applications: int
    system: tuple[float, float]
    turns: float
    pause_s: float
    turn: tuple[float, float]
    answer: tuple[float, float]


CHATS = ConversationShape(3.4, 20, (1100.0, 1.0), 4.0, 40.0, (1340.0, 1.3), (245.0, 0.8))
AGENTS = ConversationShape(6.56, 12, (4000.0, 0.6), 6.0, 6.0, (330.0, 1.1), (120.0, 0.9))


def generate_conversations(
    rows: int, *, seed: int = 0, shape: ConversationShape = CHATS, rate_per_s: float | None = None
) -> Trace:
    """The first `rows` turns of conversations that start at random.

    `rate_per_s` turns arrive once it is under way; None: as many as is the shape's own. Raises: InputError for no rows
    or no rate.
    """
    rate_per_s = shape.rate_per_s if rate_per_s is None else rate_per_s
    if rows < 1 or not 0 < rate_per_s < math.inf:
        raise InputError(f"conversations need at least one row and a positive rate, not {rows} at {rate_per_s:g}")
    rng = np.random.default_rng(seed)

    def size(median_and_sigma: tuple[float, float]) -> int:
        median, sigma = median_and_sigma
        return int(rng.lognormal(math.log(median), sigma)) + 1

    names = count()
    system_tokens = [min(max(size(shape.system) - 1, 64), 16_000) for _ in range(shape.applications)]
    systems = [[next(names) for _ in range(tokens // BLOCK_TOKENS)] for tokens in system_tokens]
    popularity = 1.0 / np.arange(1, shape.applications + 1)
    popularity /= popularity.sum()
    turns: list[tuple[float, int, int, tuple[int, ...]]] = []
    started_s, last_s = 0.0, math.inf
    while started_s < last_s:
        started_s += rng.exponential(shape.turns / rate_per_s)
        application = int(rng.choice(shape.applications, p=popularity))
        prompt, blocks, now = system_tokens[application], list(systems[application]), started_s
        for _ in range(rng.geometric(1.0 / shape.turns)):
            prompt += size(shape.turn)
            if prompt > MOST_PROMPT_TOKENS:
                break
            blocks += [next(names) for _ in range(prompt // BLOCK_TOKENS - len(blocks))]
            answer = size(shape.answer)
            turns.append((round(now, 6), prompt, answer, tuple(blocks)))
            prompt += answer
            now += rng.exponential(shape.pause_s)
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
