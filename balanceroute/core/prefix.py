"""What a prefiller's prefix cache is believed to hold.

An engine keeps the KV of prompts that it has computed, in blocks, and skips the leading blocks of a new prompt that
it still has. A block is named by a *chained* hash: of its own content and of the hash before it, so equal hashes mean
equal prompts up to there. A request brings the hashes of its full blocks (`RequestTracker.prefix`); what they are
hashes of is the driver's affair.

The index does what the engine does: every prompt that is sent there is used whole, its last block first, and the blocks
used longest ago go when it is full. So a block never outlives one before it in its chain, the held blocks of any prompt
are its first ones, and how many they are is found by bisection.

It is a belief: the engine evicts what others use, restarts, or caches nothing at all. `correct` takes in what the
engine says of a request. A block that should have been there and was not has been evicted, and then so has everything
used before it.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

MAX_BLOCKS: Final = 65_536
"""Blocks that an index remembers at most, whatever the engine's size: about 10 MB, 32M tokens in blocks of 512."""

TOLERANCE: Final = 0.125
"""Share of what was predicted by which an engine may hold less without contradiction: its blocks are other ones."""


@dataclass(slots=True)
class PrefixUse:
    """One prompt's use of an index: how many of its blocks were held, when each had last been used, and now."""

    matched: int
    stamps: list[int]
    began: int


def leading(prefix: Sequence[int], blocks: Container[int]) -> int:
    """How many leading blocks of a prompt are among these, which hold no block without those before it. O(log n)."""
    low, high = 0, len(prefix)
    while low < high:
        middle = (low + high) // 2
        if prefix[middle] in blocks:
            low = middle + 1
        else:
            high = middle
    return low


class PrefixIndex:
    """The blocks of one prefiller's cache, the one used longest ago first.

    Args: capacity_tokens: what the engine's cache holds; None: not known, bounded by `MAX_BLOCKS` alone.
    """

    __slots__ = ("_blocks", "_clock", "capacity_tokens", "tokens")

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self.capacity_tokens = capacity_tokens
        self.tokens = 0
        self._blocks: OrderedDict[int, tuple[int, int]] = OrderedDict()  # hash -> (tokens, when it was last used)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, prefix: Sequence[int]) -> int:
        """How many leading blocks of a prompt are held. O(log n)."""
        return leading(prefix, self._blocks)

    def use(self, prefix: Sequence[int], block_tokens: int) -> PrefixUse:
        """The prompt is computed here: all of its blocks are held from now on, as far as they fit. O(n)."""
        blocks, matched = self._blocks, self.matched(prefix)
        use = PrefixUse(matched, [blocks[block][1] for block in prefix[:matched]], self._clock)
        for block in reversed(prefix):
            self._clock += 1
            held = blocks.get(block)
            self.tokens += block_tokens - (0 if held is None else held[0])
            blocks[block] = (block_tokens, self._clock)
            blocks.move_to_end(block)
        self._evict()
        return use

    def withdraw(self, prefix: Sequence[int], use: PrefixUse) -> None:
        """The prompt was not computed after all: what it brought, and nobody has used since, is not held.

        A block used since has kept those before it in its chain, so what stays is still the first ones of each prompt.
        """
        last = use.began + len(prefix)
        for block in prefix[use.matched :]:
            held = self._blocks.get(block)
            if held is not None and use.began < held[1] <= last:
                self._drop(block)

    def correct(self, use: PrefixUse, found: int) -> None:
        """The engine held the prompt's first `found` blocks: if clearly fewer than was thought, forget what is older.

        One block is rounding, unless nothing at all was found.
        """
        if found >= use.matched or (found and found >= use.matched - max(1.0, TOLERANCE * use.matched)):
            return
        gone = use.stamps[found]
        while self._blocks:
            block, (_, stamp) = next(iter(self._blocks.items()))
            if stamp > gone:
                break
            self._drop(block)

    def resize(self, capacity_tokens: int | None) -> None:
        """The engine's size is known, or has changed; 0: it caches nothing."""
        self.capacity_tokens = capacity_tokens
        self._evict()

    def clear(self) -> None:
        """The engine has lost its cache."""
        self._blocks.clear()
        self.tokens = 0

    def _evict(self) -> None:
        blocks, most = self._blocks, self.capacity_tokens
        while len(blocks) > MAX_BLOCKS or (most is not None and self.tokens > most):
            self.tokens -= blocks.popitem(last=False)[1][0]

    def _drop(self, block: int) -> None:
        self.tokens -= self._blocks.pop(block)[0]
