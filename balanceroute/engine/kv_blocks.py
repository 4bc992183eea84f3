"""KV memory in blocks of a fixed number of tokens, held by requests or free.

Blocks have ids because a prefiller names them to the decoder that pulls them. Invariant: every id is either
free or held by exactly one owner; `free + used == num_blocks`.
"""

from collections import deque
from collections.abc import Hashable

from balanceroute.errors import ConfigError, InvariantError


class KvBlocks:
    """A pool of `num_blocks` blocks of `block_size` tokens; ids count from 1, as vLLM keeps block 0 for itself."""

    __slots__ = ("_free", "_held", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"KV blocks: num_blocks and block_size must be 1 or more, got {num_blocks} x {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(1, num_blocks + 1))
        self._held: dict[Hashable, list[int]] = {}

    @property
    def free(self) -> int:
        """Free blocks."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks held by requests."""
        return self.num_blocks - len(self._free)

    @property
    def usage_ratio(self) -> float:
        """Held blocks over all blocks, 0 to 1: vLLM's `kv_cache_usage_perc`."""
        return self.used / self.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one request has all blocks."""
        return self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens of one request need."""
        return -(-tokens // self.block_size)

    def held_by(self, owner: Hashable) -> tuple[int, ...]:
        """Ids of the blocks that `owner` holds, in the order in which it got them."""
        return tuple(self._held.get(owner, ()))

    def grow(self, owner: Hashable, tokens: int) -> bool:
        """Give `owner` what it lacks to hold `tokens` tokens, all or nothing; False when not enough are free."""
        held = self._held.get(owner)
        missing = self.blocks_for(tokens) - (len(held) if held else 0)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        if held is None:
            held = self._held[owner] = []
        held.extend(self._free.popleft() for _ in range(missing))
        return True

    def release(self, owner: Hashable) -> int:
        """Take everything from `owner`; returns how many blocks that was.

        Raises: InvariantError when `owner` holds nothing, since every hold is released once.
        """
        held = self._held.pop(owner, None)
        if held is None:
            raise InvariantError(f"KV blocks: {owner!r} holds none, so it cannot release any")
        self._free.extend(held)
        return len(held)

    def holds(self, owner: Hashable) -> bool:
        """Whether `owner` holds any block."""
        return owner in self._held

    def check_invariants(self) -> None:
        """Recount; raises InvariantError when an id is lost or held twice."""
        seen = sorted([*self._free, *(block for held in self._held.values() for block in held)])
        if seen != list(range(1, self.num_blocks + 1)):
            raise InvariantError("KV blocks: an id is lost or held twice")
