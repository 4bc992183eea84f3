"""The engine's prefix cache: blocks of computed prompts, the one used longest ago evicted first.

A block's name stands for all tokens up to its end, as vLLM's block hashes do, so equal names mean equal prefixes. Only
full blocks are cached, and of a prompt the last block goes first: vLLM frees a request's blocks in reverse order.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence


def block_names(ids: Sequence[int], block_size: int, salt: Hashable = None) -> list[int]:
    """Names of a prompt's full blocks, each for all ids up to its end; other salts give other names."""
    names, before = [], hash(salt)
    for start in range(0, len(ids) - block_size + 1, block_size):
        before = hash((before, tuple(ids[start : start + block_size])))
        names.append(before)
    return names


class PrefixCache:
    """Blocks by name. Args: capacity_blocks: how many fit; 0: nothing is cached."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def found(self, prompt: Sequence[Hashable]) -> int:
        """How many leading blocks of the prompt are there."""
        for count, block in enumerate(prompt):
            if block not in self._blocks:
                return count
        return len(prompt)

    def compute(self, prompt: Sequence[Hashable]) -> int:
        """The prompt's blocks are there from now on; how many leading ones were before."""
        found = self.found(prompt)
        for block in reversed(prompt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity_blocks:
            self._blocks.popitem(last=False)
        return found

    def clear(self) -> None:
        """Empty the cache."""
        self._blocks.clear()
