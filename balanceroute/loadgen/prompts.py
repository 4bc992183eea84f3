"""Token-id prompts of exact lengths, cheap to make.

A prompt is a run of eight token ids that only its key has, then a stretch of one long random text; so
prompts of different keys share no prefix (a server's prefix cache finds nothing), and equal keys give equal
prompts. Where a trace names the blocks of its prompts, equal names give equal blocks, and the last, unfinished one is
the row's own. All ids have three digits: any vocabulary of a thousand tokens has them, and a stretch is a slice
of bytes.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

FIRST_ID, LAST_ID = 100, 999
OWN_IDS = 8  # 900 ** 8 different beginnings
ID_BYTES = 4  # three digits and a comma
TEXT_IDS = 1 << 17


class PromptText:
    """The common text, and the prompts cut from it; equal seeds give equal prompts."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        ids = np.random.default_rng(seed).integers(FIRST_ID, LAST_ID + 1, TEXT_IDS)
        self.text = (",".join(map(str, ids.tolist())) + ",").encode()

    def prompt(self, key: str, tokens: int) -> bytes:
        """A JSON array of exactly `tokens` ids that depends on the seed and the key alone."""
        digest = hashlib.blake2b(f"{self.seed}/{key}".encode(), digest_size=2 * OWN_IDS + 4).digest()
        numbers = np.frombuffer(digest, dtype="<u2")
        own = b"".join(b"%d," % (FIRST_ID + int(n) % (LAST_ID - FIRST_ID + 1)) for n in numbers[:OWN_IDS])
        offset = int.from_bytes(digest[-4:], "little") % TEXT_IDS
        ids = (own + self.stretch(offset, max(0, tokens - OWN_IDS)))[: tokens * ID_BYTES]
        return b"[" + ids[:-1] + b"]"

    def of_blocks(self, names: Sequence[int], block_tokens: int, key: str, tokens: int) -> bytes:
        """A JSON array of exactly `tokens` ids: a block for each name, as far as they go, then ids of the key alone."""
        blocks = [self.prompt(f"block {name}", block_tokens)[1:-1] for name in names[: tokens // block_tokens]]
        rest = tokens - len(blocks) * block_tokens
        if rest:
            blocks.append(self.prompt(key, rest)[1:-1])
        return b"[" + b",".join(blocks) + b"]"

    def stretch(self, offset: int, tokens: int) -> bytes:
        """That many ids of the text from an offset on, starting over at its end."""
        parts = []
        while tokens > 0:
            part = self.text[offset * ID_BYTES : (offset + tokens) * ID_BYTES]
            parts.append(part)
            tokens -= len(part) // ID_BYTES
            offset = 0
        return b"".join(parts)
