"""An estimate of the contents of each prefiller's prefix cache.

An engine keeps the KV of prompts that it has computed, in blocks, and skips the leading blocks of a new prompt that
it still has. A block is named by a *chained* hash: of its own content and of the hash before it, so equal hashes mean
equal prompts up to there. A request brings the hashes of its full blocks (`RequestTracker.prefix`); what they are
hashes of is the driver's affair.

The index does what the engine does: a prompt that is sent there uses all its blocks, the last one first, and when the
index is full, the blocks used longest ago are evicted. So a block never outlives one before it in its chain, the held
blocks of any prompt are its first ones, and their number is found by bisection.

It is an estimate: the engine may evict blocks for other clients, restart, or cache nothing. `correct` takes the
engine's figure for a request: if an expected block is missing, it was evicted, and so was everything used before it. If
an engine reports nothing per request, its counters are compared with the predictions (`PrefixHits`): if it finds far
less, the index shrinks, as if the cache were smaller.

Beside the indexes, `SharedPrefixes` knows the prefixes that many conversations share, on any prefiller.
"""

import math
from bisect import bisect_left
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
    """The number of leading blocks of a prompt in `blocks`, which holds no block without those before it. O(log n)."""
    if not prefix or prefix[0] not in blocks:
        return 0
    low, high = 1, len(prefix)
    while low < high:
        middle = (low + high) // 2
        if prefix[middle] in blocks:
            low = middle + 1
        else:
            high = middle
    return low


class SharedPrefixes:
    """How many conversations begin with a block, as far as their prompts were sent; those used longest ago forgotten.

    A prompt that begins with all blocks of the one before, and has more, is the same conversation a turn later. Any
    other is another conversation: it parts from what is known, or ends where blocks cannot tell it apart.
    """

    __slots__ = ("_ends", "_max_blocks", "conversations")

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self.conversations: OrderedDict[int, int] = OrderedDict()  # by block; never more than of the block before it
        self._ends: set[int] = set()  # last blocks of conversations, as far as these are known

    def shared(self, prefix: Sequence[int], least: int) -> int:
        """With how many of a prompt's leading blocks at least so many conversations begin. O(log n)."""
        conversations = self.conversations
        if not prefix or conversations.get(prefix[0], 0) < least:
            return 0
        return bisect_left(prefix, True, lo=1, key=lambda block: conversations.get(block, 0) < least)

    def use(self, prefix: Sequence[int]) -> None:
        """Count a prompt that is sent. O(n)."""
        conversations, ends = self.conversations, self._ends
        known = leading(prefix, conversations)
        more = 1
        if 0 < known < len(prefix) and prefix[known - 1] in ends:
            ends.remove(prefix[known - 1])
            more = 0
        for block in reversed(prefix):
            conversations[block] = conversations.pop(block, 1 - more) + more
        if known < len(prefix):
            ends.add(prefix[-1])
        while len(conversations) > self._max_blocks:
            ends.discard(conversations.popitem(last=False)[0])

    def clear(self) -> None:
        """Forget all."""
        self.conversations.clear()
        self._ends.clear()


MOST_COUNTED: Final = 2**53
"""Tokens that an engine's counters may add up to over all its restarts: more is no count."""

JUDGED_TOKENS: Final = 32_768
"""Predicted hits that are compared with an engine's counters at a time: enough for chance not to decide."""

LEAST_FOUND: Final = 0.75
"""Share of the predicted hits below which an index remembers too much. Counters run a little ahead of answers."""

LEAST_KEPT: Final = 0.5
"""Share of its tokens that an index keeps at least when it is found to remember too much."""

LIMIT_GROWTH: Final = 2.0
"""Factor by which the limit of an index grows each time when its predictions are confirmed again."""

BLOCK_TOKENS: Final = 512
"""Tokens of a block of ours, by which `MAX_BLOCKS` are counted as tokens."""


@dataclass(slots=True)
class PrefixHits:
    """What one prefiller was predicted to have cached, and had: tokens, since it joined.

    `real_tokens` are by the engine's counters, where it has any, and else by answers; `missed_tokens` are those
    predicted since any were found last, where it is known that none were.
    """

    prompt_tokens: int = 0
    predicted_tokens: int = 0
    answered_tokens: int = 0  # by answers
    counted_tokens: int = 0  # by counters
    missed_tokens: int = 0
    _counters: tuple[float, float] | None = None
    _judged: tuple[int, int] = (0, 0)  # predicted and counted, up to the last judgement
    _unchecked: int = 0  # predicted of answers that do not tell, less what the counters had before these

    @property
    def real_tokens(self) -> int | None:
        """None: neither counters nor answers had any."""
        if self._counters is not None:
            return self.counted_tokens
        return self.answered_tokens or None

    def answered(self, prompt_tokens: int, predicted_tokens: int, cached_tokens: int | None) -> None:
        """A prompt was prefilled; `cached_tokens`: as the answer says, None where it doesn't."""
        self.prompt_tokens += prompt_tokens
        self.predicted_tokens += predicted_tokens
        if cached_tokens is None:
            self._unchecked += predicted_tokens
        else:
            self.answered_tokens += cached_tokens
            self._found(cached_tokens, predicted_tokens)

    def count(self, queried_tokens: float, hit_tokens: float, under_way: int = 0) -> bool:
        """The engine's counters now; whether they began anew, and with them the engine.

        `under_way`: tokens predicted of prompts that are not answered yet; the counters may have these already.
        """
        before, self._counters = self._counters, (queried_tokens, hit_tokens)
        unchecked, self._unchecked = self._unchecked, 0
        if before is None:
            self.counted_tokens = self.answered_tokens  # these were before the first look: what is known never falls
        if before is None or queried_tokens < before[0] or hit_tokens < before[1]:
            self._judged = (self.predicted_tokens, self.counted_tokens)
            return before is not None
        found = round(hit_tokens - before[1])
        self.counted_tokens = min(MOST_COUNTED, self.counted_tokens + found)
        self._unchecked = -max(0, min(found - unchecked, under_way))
        self._found(found, max(0, unchecked))
        return False

    def found_ratio(self) -> float | None:
        """Share of the predicted hits that the counters confirm; None until there is enough to judge anew."""
        predicted, counted = self.predicted_tokens - self._judged[0], self.counted_tokens - self._judged[1]
        if max(predicted, counted) < JUDGED_TOKENS:
            return None
        self._judged = (self.predicted_tokens, self.counted_tokens)
        return counted / max(1, predicted)

    def _found(self, found: int, predicted: int) -> None:
        self.missed_tokens = 0 if found else self.missed_tokens + predicted


class PrefixIndex:
    """The blocks of one prefiller's cache, the one used longest ago first.

    Args: capacity_tokens: what the engine's cache holds; None: not known, bounded by `max_blocks` alone.

    `blocks`: by hash, (tokens, when it was last used), for looking only. `engine_block_tokens`: size of the engine's
    own blocks, 0 where that is not known; it caches no part of one. `limit_tokens`: what it seems to hold of ours, by
    its hits.
    """

    __slots__ = ("_clock", "blocks", "capacity_tokens", "engine_block_tokens", "limit_tokens", "max_blocks", "tokens")

    def __init__(self, capacity_tokens: int | None = None, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self.capacity_tokens = capacity_tokens
        self.engine_block_tokens = 0
        self.limit_tokens = math.inf
        self.tokens = 0
        self.blocks: OrderedDict[int, tuple[int, int]] = OrderedDict()  # hash -> (tokens, when it was last used)
        self._clock = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def matched(self, prefix: Sequence[int]) -> int:
        """How many leading blocks of a prompt are held. O(log n)."""
        return leading(prefix, self.blocks)

    def use(self, prefix: Sequence[int], block_tokens: int) -> PrefixUse:
        """Add the blocks of a prompt that is computed here, as far as they fit. O(n)."""
        blocks, clock = self.blocks, self._clock
        stamps = []  # of those held, which are the first ones
        for block in reversed(prefix):
            held = blocks.pop(block, None)
            if held is not None:
                self.tokens -= held[0]
                stamps.append(held[1])
            clock += 1
            blocks[block] = (block_tokens, clock)
        stamps.reverse()
        use = PrefixUse(len(stamps), stamps, self._clock)
        self.tokens += block_tokens * len(prefix)
        self._clock = clock
        self._evict()
        return use

    def withdraw(self, prefix: Sequence[int], use: PrefixUse) -> None:
        """Remove the blocks of a prompt that was not computed after all, unless another prompt has used them since.

        A block used since has kept those before it in its chain, so what stays is still the first ones of each prompt.
        """
        last = use.began + len(prefix)
        for block in prefix[use.matched :]:
            held = self.blocks.get(block)
            if held is not None and use.began < held[1] <= last:
                self._drop(block)

    def correct(self, use: PrefixUse, found: int) -> None:
        """Correct by the engine's figure: it held the prompt's first `found` blocks. If clearly fewer than predicted,
        drop what is older.

        One block is rounding, unless nothing at all was found. O(blocks forgotten).
        """
        if found >= use.matched or (found and found >= use.matched - max(1.0, TOLERANCE * use.matched)):
            return
        gone = use.stamps[found]
        while self.blocks:
            block, (_, stamp) = next(iter(self.blocks.items()))
            if stamp > gone:
                break
            self._drop(block)

    def resize(self, capacity_tokens: int | None) -> None:
        """Set the size of the engine's cache; 0: it caches nothing."""
        self.capacity_tokens = capacity_tokens
        self._evict()

    def trust(self, found_ratio: float) -> None:
        """Shrink the index if this share of the predicted hits is too small; else let it grow again."""
        if found_ratio < LEAST_FOUND:
            self.limit_tokens = self.tokens * max(found_ratio, LEAST_KEPT)
            self._evict()
        elif self.limit_tokens < math.inf:
            self.limit_tokens = max(LIMIT_GROWTH * self.limit_tokens, JUDGED_TOKENS)
            if self.limit_tokens >= (self.capacity_tokens or self.max_blocks * BLOCK_TOKENS):
                self.limit_tokens = math.inf

    def clear(self) -> None:
        """Empty the index: the engine has lost its cache."""
        self.blocks.clear()
        self.tokens = 0

    def _evict(self) -> None:
        blocks, most = self.blocks, self.limit_tokens
        if self.capacity_tokens is not None:
            most = min(most, self.capacity_tokens)
        while len(blocks) > self.max_blocks or self.tokens > most:
            self.tokens -= blocks.popitem(last=False)[1][0]

    def _drop(self, block: int) -> None:
        self.tokens -= self.blocks.pop(block)[0]
