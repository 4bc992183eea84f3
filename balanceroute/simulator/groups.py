"""The workers of the simulated cluster by barrier: each group has its own clock and its own reports to the router."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from balanceroute.simulator.arrivals import NEVER
from balanceroute.simulator.ranks import DraftingRanks, Ranks
from balanceroute.simulator.setting import Setting
from balanceroute.simulator.telemetry import Channel


@dataclass(slots=True, eq=False)
class Group:
    """The workers of one barrier, from the one with the number `first` on, and their clock.

    `channel`: what happens here, on its way to the router. `ends_s`: when the step under way ends, NEVER where there
    is none; `ended_s`: when the last one ended.
    """

    ranks: Ranks
    first: int
    channel: Channel
    steps: int = 0
    ends_s: float = NEVER
    ended_s: float = 0.0


def ranks_by_barrier(setting: Setting, prompt_tokens: list[int], lengths: list[int]) -> list[tuple[int, Ranks]]:
    """The workers of each barrier with the number of the first, as equal in number as can be."""
    kv, left = list(prompt_tokens), list(lengths)
    kind = partial(DraftingRanks, draws={}) if setting.draft_tokens else Ranks
    return [(first, kind(setting, end - first, kv, left)) for first, end in pairwise(_bounds(setting))]


def group_names(setting: Setting) -> list[str]:
    """The name of each worker's barrier group."""
    return [f"g{number}" for number, (first, end) in enumerate(pairwise(_bounds(setting))) for _ in range(first, end)]


def _bounds(setting: Setting) -> list[int]:
    """The number of the first worker of each group, and the number of workers."""
    return [setting.n_workers * index // setting.barrier_groups for index in range(setting.barrier_groups + 1)]


def up_capacity(ranks: Ranks, slowdowns: Sequence[float]) -> float:
    """The capacity of the workers that are up, per token of the common level: the sum of the inverse slowdowns."""
    slowdowns = slowdowns or (1.0,) * len(ranks.ranks)
    return sum(1.0 / slowdown for slowdown, rank in zip(slowdowns, ranks.ranks, strict=True) if rank.up)
