"""Request traces: when requests arrive, how long their prompts are and how many tokens they will generate.

A trace is four columns, one row per request in order of arrival:

    arrival_s,prompt_tokens,output_tokens,prompt_key

and a fifth, `prefix_blocks`, where it is known which prompts begin alike: the names of the prompt's blocks of 512
tokens, separated by blanks, each standing for the prompt up to its end (Mooncake's `hash_ids`).
`prompt_key` names prompts that recur (empty where that is unknown); requests with one key have one prompt.
`trace.py` holds the table and its CSV, `convert.py` reads public traces, `generate.py`, `conversations.py` and
`drawn.py` draw synthetic ones, and `capacity.py` says how many requests per second a cluster can carry at best, which
is what the word *load* refers to.
"""

from balanceroute.traces.capacity import ReferenceSetting, ideal_capacity, mean_kv_tokens
from balanceroute.traces.conversations import AGENTS, CHATS, ConversationShape, generate_conversations
from balanceroute.traces.convert import Conversion, TraceFormat, convert_trace
from balanceroute.traces.generate import PRESETS, generate_trace, load_trace
from balanceroute.traces.trace import BLOCK_TOKENS, Trace, TraceSummary, describe_trace, read_trace, write_trace

__all__ = [
    "AGENTS",
    "BLOCK_TOKENS",
    "CHATS",
    "PRESETS",
    "ConversationShape",
    "Conversion",
    "ReferenceSetting",
    "Trace",
    "TraceFormat",
    "TraceSummary",
    "convert_trace",
    "describe_trace",
    "generate_conversations",
    "generate_trace",
    "ideal_capacity",
    "load_trace",
    "mean_kv_tokens",
    "read_trace",
    "write_trace",
]
