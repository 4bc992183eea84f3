"""A pure model of the serving engine: step time, slots, KV blocks, the barrier, the prefix cache.

No clock, no tasks, no sockets: times are arguments in seconds on any monotonic axis. The step simulator and
the emulated cluster drive the same objects.

- `StepTimeModel`: what a step costs; `DecodeGroup` of `DecodeRank`s: the barrier, slots, queue, preemption.
- `DpBalancer`: which of its requests each rank of a group runs, where the engine balances by pauses.
- `Prefiller`: prompt time, and KV that stays pinned until a decoder pulls it or a lease passes.
- `KvBlocks`: the memory of both; `PrefixCache`: which prompts a prefiller need not compute again.
- `tokens`: a reversible tokenizer and a deterministic model, so that every answer can be checked.
"""

from balanceroute.engine.decode import (
    DecodeGroup,
    DecodeRank,
    EngineRequest,
    Place,
    Preemption,
    StepOutcome,
    StepPlan,
)
from balanceroute.engine.dp_balancer import DpBalancer, Held, RankBatch, blocks_of
from balanceroute.engine.kv_blocks import KvBlocks
from balanceroute.engine.prefill import Prefiller, PrefillJob
from balanceroute.engine.prefix_cache import PrefixCache, block_names
from balanceroute.engine.step_time import StepTimeModel
from balanceroute.engine.tokens import OutputLengths, TokenStream, continuation, decode, encode

__all__ = [
    "DecodeGroup",
    "DecodeRank",
    "DpBalancer",
    "EngineRequest",
    "Held",
    "KvBlocks",
    "OutputLengths",
    "Place",
    "Preemption",
    "PrefillJob",
    "Prefiller",
    "PrefixCache",
    "RankBatch",
    "StepOutcome",
    "StepPlan",
    "StepTimeModel",
    "TokenStream",
    "block_names",
    "blocks_of",
    "continuation",
    "decode",
    "encode",
]
