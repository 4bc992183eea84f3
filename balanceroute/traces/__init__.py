"""Request traces: when requests arrive, how long their prompts are and how many tokens they will generate.

A trace is four columns, one row per request in order of arrival:

    arrival_s,prompt_tokens,output_tokens,prompt_key

`prompt_key` names prompts that recur (empty where that is unknown); requests with one key have one prompt.
`trace.py` holds the table and its CSV, `convert.py` reads public traces, `generate.py` draws synthetic
ones, and `capacity.py` says how many requests per second a cluster can carry at best, which is what the
word *load* refers to.
"""

from balanceroute.traces.capacity import ReferenceSetting, ideal_capacity, mean_kv_tokens
from balanceroute.traces.convert import Conversion, TraceFormat, convert_trace
from balanceroute.traces.generate import PRESETS, generate_trace, load_trace
from balanceroute.traces.trace import Trace, TraceSummary, describe_trace, read_trace, write_trace

__all__ = [
    "PRESETS",
    "Conversion",
    "ReferenceSetting",
    "Trace",
    "TraceFormat",
    "TraceSummary",
    "convert_trace",
    "describe_trace",
    "generate_trace",
    "ideal_capacity",
    "load_trace",
    "mean_kv_tokens",
    "read_trace",
    "write_trace",
]
