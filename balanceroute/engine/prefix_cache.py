"""The engine's prefix cache: blocks of computed prompts, the one used longest ago evicted first.

A block's name stands for all tokens up to its end, as vLLM's block hashes do, so equal names mean equal prefixes. Only
full blocks are cached, and of a prompt the last block goes first: vLLM frees a request's blocks in reverse order.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence


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
        """Nothing is cached any more."""
        self._blocks.clear()
