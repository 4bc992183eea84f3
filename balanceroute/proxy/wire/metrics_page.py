"""Reads the gauges and counters that the router uses from the text of an engine's metrics page.

It runs on the event loop that relays streams; a parser of whole pages would stop it for too long
(`scripts/bench/polls.py`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

_MAX_REQUESTS: Final = 1e6  # of one engine
_GAUGES: Final = (b"kv_cache_usage_perc", b"num_requests_running", b"num_requests_waiting")
_COUNTERS: Final = (b"prefix_cache_queries_total", b"prefix_cache_hits_total")
_DRAFTS: Final = (b"spec_decode_num_drafts_total", b"spec_decode_num_accepted_tokens_total")
_MOST_TOKENS: Final = 1e18
_MOST_KV_TOKENS: Final = 2**40  # of one engine, or of a block of it
_MOST_PER_STEP: Final = 256.0  # tokens of a request
_MOST_ENGINES: Final = 1024  # of one page
_MOST_BYTES: Final = 2**18  # bytes of one metric's samples, which may have a kilobyte of labels each
_FOR_CAPACITY: Final = b'reason="capacity"'
_OFF: Final = b'enable_prefix_caching="False"'
_SAMPLE = re.compile(rb"vllm:\w+\{(.*?)\}[ \t]+(\S+)")
_CACHE = re.compile(rb"vllm:cache_config_info\{(.*)\}")
# whole names: there are also mamba_block_size and effective_attention_block_size
_CACHE_SIZE = re.compile(rb'(?:^|,)\s*(block_size|kv_cache_size_tokens|num_gpu_blocks)="(\d{1,12})"')
_ENGINE = re.compile(rb'(?:^|,)\s*engine="([^"]*)"')


def read_samples(text: bytes) -> dict[str, dict[str, float]]:
    """Samples per engine (DP rank as text): KV usage, running and waiting requests, and the figures below.

    Invalid values are skipped: a usage that is no ratio, an impossible number of requests or size.
    `waiting_for_capacity`: waiting requests without those that wait for their KV; newer engines report it.
    `kv_capacity_tokens`, `kv_block_tokens` and `prefix_caching` (0 or 1) come from the labels of `cache_config_info`,
    if it has them; `prefix_cache_queries_total` and `..._hits_total` are tokens. `tokens_per_step`, of a running
    request, exists with speculative decoding: each step yields one token and the accepted ones of its draft.
    """
    engines: dict[str, dict[str, float]] = defaultdict(dict)
    text = b"\n" + text
    for name in (*_GAUGES, *_COUNTERS, *_DRAFTS):
        for line in _lines(text, name):
            match = _SAMPLE.match(line)
            if match is not None and 0.0 <= (value := _number(match[2])) <= _most(name):
                engines[_engine(match[1])][name.decode()] = value
    for line in _lines(text, b"num_requests_waiting_by_reason"):
        match = _SAMPLE.match(line)
        if match is not None and _FOR_CAPACITY in match[1] and 0.0 <= (value := _number(match[2])) <= _MAX_REQUESTS:
            engines[_engine(match[1])]["waiting_for_capacity"] = value
    for line in _lines(text, b"cache_config_info"):
        if (labels := _CACHE.match(line)) is not None:
            size = {name: int(value) for name, value in _CACHE_SIZE.findall(labels[1])}
            block = size.get(b"block_size", 0)
            engines[_engine(labels[1])] |= {
                "kv_block_tokens": _size(block),
                "kv_capacity_tokens": _size(size.get(b"kv_cache_size_tokens", block * size.get(b"num_gpu_blocks", 0))),
            }
            if b"enable_prefix_caching=" in labels[1]:
                engines[_engine(labels[1])]["prefix_caching"] = float(_OFF not in labels[1])
    for samples in engines.values():
        drafts, accepted = (samples.pop(name.decode(), 0.0) for name in _DRAFTS)
        if 0.0 < drafts and accepted < drafts * _MOST_PER_STEP:
            samples["tokens_per_step"] = 1.0 + accepted / drafts
    return dict(engines)


def _most(name: bytes) -> float:
    """The largest valid value of a sample of that name."""
    if name in _COUNTERS or name in _DRAFTS:
        return _MOST_TOKENS
    return 1.0 if name == _GAUGES[0] else _MAX_REQUESTS


def _size(tokens: int) -> int:
    """A size in tokens; 0: absent or impossible."""
    return tokens if tokens <= _MOST_KV_TOKENS else 0


def _lines(text: bytes, name: bytes) -> Iterator[bytes]:
    """The samples of one metric, a bounded number: the event loop waits meanwhile.

    To search for each name is ten times as fast as one pattern for all lines.
    """
    start, left_bytes = b"\nvllm:" + name + b"{", _MOST_BYTES
    at = text.find(start)
    for _ in range(_MOST_ENGINES):
        if at < 0:
            return
        end = text.find(b"\n", at + 1)
        end = len(text) if end < 0 else end
        left_bytes -= end - at
        if left_bytes < 0:
            return
        yield text[at + 1 : end]
        at = text.find(start, end)


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _engine(labels: bytes) -> str:
    engine = _ENGINE.search(labels)
    return engine[1].decode("latin-1") if engine else "0"


def of_worker(engines: dict[str, dict[str, float]], dp_rank: int | None) -> dict[str, float] | None:
    """The samples of one worker: of its rank, or without a rank, of the only engine; None: unknown.

    Of several engines behind one URL without ranks, the maximum of each sample is taken.
    """
    if dp_rank is not None and len(engines) > 1:
        return engines.get(_engine_of_rank(engines, dp_rank))
    merged: dict[str, float] = {}
    for samples in engines.values():
        for name, value in samples.items():
            merged[name] = max(merged.get(name, value), value)
    return merged or None


def _engine_of_rank(engines: Iterable[str], dp_rank: int) -> str:
    """The label `engine` of a rank's samples.

    With hybrid load balancing engines are numbered over all nodes, and `dp_rank` counts those of its own node.
    """
    numbers = sorted(int(engine) for engine in engines if re.fullmatch("[0-9]{1,9}", engine))
    first = numbers[0] if numbers else 0
    if not first:
        return str(dp_rank)
    return str(numbers[dp_rank]) if dp_rank < len(numbers) else ""
