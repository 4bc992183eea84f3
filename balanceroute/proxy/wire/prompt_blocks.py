"""Chained hashes over blocks of a prompt: equal hashes mean equal prompts up to the end of the block.

An engine hashes blocks of token ids; the router has none before the prompt is tokenised. So its blocks are
`BLOCK_BYTES` of the prompt's canonical JSON (also for token ids), each hashed with the former hash as its seed. Fields
that affect all tokens (model or LoRA, cache_salt, chat template and its arguments, ...) are hashed first; tools and
documents stand before the messages, where chat templates put them.

A block counts for its share, by bytes, of the prompt's tokens: their number if the prompt is token ids, else the
estimate of `admission/prompt_estimates.py`.

XXH3 with a random 64-bit seed per router, the same at all relays of a brain: about 25 us per 100 kB
(`scripts/bench/prompt_blocks.py`); BLAKE2b and BLAKE3 take more than ten times as long. It is not safe against an
attacker who knows the seed, and need not be: hashes stay in the router's memory, and a false match only misplaces a
prefill, because the engine compares its own hashes.
"""

import secrets
from typing import Final

import orjson
import xxhash

from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.prompt_traits import template_fields

BLOCK_BYTES: Final = 1024  # 200 to 350 tokens of text or ids: one to three blocks of vllm-ascend's 128 tokens
MAX_BLOCKS: Final = 4096  # per prompt, about a million tokens; the rest counts as unknown

_SHAPING: Final = frozenset(
    """model cache_salt add_special_tokens truncate_prompt_tokens chat_template chat_template_kwargs reasoning_effort
    tool_choice mm_processor_kwargs media_io_kwargs""".split()
)
_hash = xxhash.xxh3_64_intdigest


def block_seed() -> int:
    """A random seed for `PromptBlocks`."""
    return secrets.randbits(64)


class PromptBlocks:
    """The hash function of one router. Args: seed: 64 bits; random if not given."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = block_seed() if seed is None else seed

    def of(self, request: ClientRequest, prompt_tokens: int) -> tuple[list[int], int]:
        """The hashes of a prompt's full blocks, and the tokens per block; no hashes for a short prompt.

        No hashes either if the prompt's logprobs are wanted: the engine then computes the whole prompt.
        O(bytes), of `MAX_BLOCKS` at most.
        """
        text, rest = request.prompt_json, request.rest
        first = template_fields(request)
        if first:
            text = b"".join((*first, text))
        size = len(text)
        if size < BLOCK_BYTES or request.prompt_wishes is not None:
            return [], 0
        shape = {name: rest[name] for name in _SHAPING.intersection(rest)}
        before = _hash(orjson.dumps(shape, option=orjson.OPT_SORT_KEYS), self._seed)
        hashes, view = [], memoryview(text)
        whole_blocks = size // BLOCK_BYTES
        if whole_blocks > MAX_BLOCKS:
            whole_blocks = MAX_BLOCKS
        for start in range(0, whole_blocks * BLOCK_BYTES, BLOCK_BYTES):
            before = _hash(view[start : start + BLOCK_BYTES], before)
            hashes.append(before)
        return hashes, prompt_tokens * BLOCK_BYTES // size or 1
