"""Stage 2's subset: which of a few candidates to admit together."""

from collections.abc import Callable, Sequence
from itertools import combinations


def best_subset(
    sizes: Sequence[int], max_count: int, peak: float, score: Callable[[int], float]
) -> tuple[tuple[int, ...], float]:
    """Indices of the non-empty subset of at most `max_count` sizes whose sum scores highest, by enumeration."""
    best: tuple[tuple[int, ...], float] = ((), float("-inf"))
    for count in range(1, min(max_count, len(sizes)) + 1):
        for picked in combinations(range(len(sizes)), count):
            value = score(sum(sizes[index] for index in picked))
            if value > best[1]:
                best = (picked, value)
    return best
