"""Reads public traces in their original formats, and servers' logs, into a trace's table.

    azure      Azure LLM inference traces of 2023 and 2024: TIMESTAMP,ContextTokens,GeneratedTokens
    mooncake   Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids (one per 512-token block)
    bailian    Alibaba's Qwen-Bailian JSONL: the same fields and chat_id, parent_chat_id, turn, type; timestamp in s,
               and hash_ids one per 16-token block, each of which stands for that block's own tokens alone
    burstgpt   BurstGPT CSV: Timestamp (s),Model,Request tokens,Response tokens,Total tokens,Log Type
    router     this router's JSON log (`traces.logs`)
    vllm       vLLM's request log (`traces.logs`)

Any of them may be compressed (.gz, .xz). Requests that generated nothing (failed ones) are left out and
counted.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from balanceroute.errors import InputError
from balanceroute.traces.logs import PLAIN_ROUTER, STAMP, RouterLog, VllmLog, log_lines
from balanceroute.traces.rows import Row, field_of, json_object, stamp_s
from balanceroute.traces.source import Source
from balanceroute.traces.trace import (
    BLOCK_TOKENS,
    MAX_TIME,
    REQUIRED,
    Columns,
    Trace,
    checked_blocks,
    csv_rows,
    finite,
    header_of,
    left_out,
    text_lines,
    token_count,
)

CLOCK_S = (1e9, 1e10)  # seconds of a clock between 2001 and 2286; as milliseconds, 12 to 115 days after a start
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # columns of arrivals, prompts and outputs
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
BAILIAN_ONLY = ("chat_id", "parent_chat_id")  # beside the fields of Mooncake's lines
BAILIAN_BLOCK_TOKENS = 16


class TraceFormat(StrEnum):
    """The format of a file; AUTO decides by its first lines, or by the first one of a log."""

    AUTO = "auto"
    AZURE = "azure"
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"
    BURSTGPT = "burstgpt"
    ROUTER = "router"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Conversion:
    """The converted trace, and how many requests were left out because nothing was generated.

    `estimated`: of how many a length was not counted but estimated; `unanswered`: of how many of these the log says
    nothing of the answer, which counts as long as was allowed. `promptless`: how many others were left out because the
    log says nothing of the prompt. `damaged`: numbers of the lines that could not be read:
    of a log, and of any file the last one, where no line end follows. `like_seconds`: the first time stamp, where it
    was read as milliseconds and looks like seconds.
    """

    trace: Trace
    format: TraceFormat
    without_output: int
    estimated: int = 0
    unanswered: int = 0
    damaged: tuple[int, ...] = ()
    like_seconds: float | None = None
    promptless: int = 0

    @property
    def notes(self) -> list[str]:
        """Notes for users of the trace: what was left out or estimated."""
        notes = []
        if self.without_output:
            notes.append(f"left out {self.without_output:,} requests that generated nothing")
        if self.promptless:
            notes.append(f"left out {self.promptless:,} requests whose prompts are not in the log")
        if self.estimated:
            notes.append(f"estimated the lengths of {self.estimated:,} requests whose tokens the log does not list")
        if self.like_seconds is not None:
            notes.append(
                f"took timestamp {self.like_seconds:.15g} as milliseconds, though a clock's seconds look like it"
            )
        if self.unanswered:
            notes.append(
                f"took max_tokens as the answers of {self.unanswered:,} requests, of which the log says nothing: start "
                "vllm serve with --enable-log-outputs (it logs those of chats, and none of /v1/completions)"
            )
        if self.damaged:
            notes.append(left_out(self.damaged))
        return notes


def convert_trace(
    path: str | Path | Source, format: TraceFormat | str = TraceFormat.AUTO, *, jitter_s: float = 0.0, seed: int = 0
) -> Conversion:
    """Read a public trace; arrivals start at 0 and are sorted. `-` is standard input.

    `format`: of `TraceFormat`, also as a text. `jitter_s` adds a seeded uniform delay below it to each arrival:
    Mooncake's stamps sit on steps of about 3 s. Raises: InputError with the file, the line and the reason.
    """
    if format not in set(TraceFormat):
        raise InputError(f"format {format}: one of {', '.join(TraceFormat)}")
    if not 0 <= jitter_s <= MAX_TIME:
        raise InputError(f"jitter must be 0 to {MAX_TIME:g} seconds, not {jitter_s:g}")
    path = Source.of(path)
    kind = guess_format(path) if format == TraceFormat.AUTO else TraceFormat(format)
    if kind is None:
        header_of(path, csv_rows(path), REQUIRED, REQUIRED)
        raise InputError(f"{path}: is a trace already, which replay and describe read as it is")
    router_log, vllm_log = RouterLog(), VllmLog()
    readers = READERS | {TraceFormat.ROUTER: router_log.rows, TraceFormat.VLLM: vllm_log.rows}
    columns, without_output, cut = _read(path, readers[kind](path), may_be_cut=kind in READERS)
    foreign = router_log.foreign or vllm_log.foreign
    if format == TraceFormat.AUTO and foreign:
        raise InputError(
            f"{path}: holds requests of this router and of vLLM (the first of the other kind is line {foreign}); "
            "name one of them: trace convert --format router or vllm"
        )
    if without_output and not columns.arrivals:
        raise InputError(f"{path}: none of its {without_output:,} requests generated anything")
    trace = in_order(columns.trace(path), jitter_s, seed)
    first = min(columns.arrivals) * 1000.0
    like_seconds = first if kind is TraceFormat.MOONCAKE and CLOCK_S[0] <= first < CLOCK_S[1] else None
    return Conversion(
        trace,
        kind,
        without_output,
        estimated=vllm_log.estimated,
        unanswered=vllm_log.unanswered,
        damaged=(*cut, *router_log.damaged, *vllm_log.damaged),
        like_seconds=like_seconds,
        promptless=vllm_log.promptless,
    )


def _read(path: Source, rows: Iterator[Row], *, may_be_cut: bool) -> tuple[Columns, int, list[int]]:
    """The requests that generated something, the number of others, and the last line if it is cut short and left out.

    `may_be_cut`: it may be; readers of logs have told half lines from others already. Raises: InputError.
    """
    columns, without_output = Columns(), 0
    try:
        for line, arrival, prompt, output, key, blocks in rows:
            if output == 0:
                without_output += 1
                continue
            if prompt < 1:
                raise InputError(f"{path}: line {line}: a prompt of {prompt} tokens; accepted are 1 or more")
            columns.add(arrival, prompt, output, key, blocks)
    except InputError:
        if not may_be_cut or path.half_line is None or not columns.arrivals:
            raise
        return columns, without_output, [path.half_line]
    return columns, without_output, []


def in_order(trace: Trace, jitter_s: float, seed: int) -> Trace:
    """Arrivals from 0 on, jittered and sorted; equal stamps keep the order of the file."""
    arrivals = trace.arrival_s - trace.arrival_s.min()
    if jitter_s > 0:
        arrivals = arrivals + np.random.default_rng(seed).uniform(0.0, jitter_s, len(trace))
    arrivals = np.round(arrivals, 6)  # whole microseconds, so that a written trace reads back as itself
    order = np.argsort(arrivals, kind="stable")
    return Trace(
        arrivals[order],
        trace.prompt_tokens[order],
        trace.output_tokens[order],
        trace.prompt_key[order],
        tuple(trace.prefix[row] for row in order.tolist()) if trace.prefix else (),
    )


def guess_format(path: Source) -> TraceFormat | None:
    """Tell the formats apart: the tables and JSON traces by their first line, the logs by the first line that is of
    either, however many lines of others (a banner, accesses, probes) stand before it.

    None is a trace's own table, which may lack a column. Raises: InputError for a file that cannot be read, one of
    something else, or this router's log in a form that says too little.
    """
    lines = log_lines(path)
    begins = list(islice(lines, 1))
    first = begins[0][1].lstrip() if begins else ""
    names = {name.strip(' \r\n"') for name in first.split(",")}
    if names >= set(REQUIRED):
        return None
    for separator in ";\t|":
        parts = {name.strip(' \r\n"') for name in first.split(separator)}
        if not parts.isdisjoint({*REQUIRED, *AZURE, *BURSTGPT}):
            raise InputError(f"{path}: line 1: {separator!r} separates its columns; accepted are commas")
    if AZURE[1] in first:
        return TraceFormat.AZURE
    if BURSTGPT[1] in first:
        return TraceFormat.BURSTGPT
    is_json = first.startswith(("{", "["))
    if is_json and any(f'"{name}"' in first for name in MOONCAKE[1:]):  # many a log has a timestamp
        of_chats = any(f'"{name}"' in first for name in BAILIAN_ONLY)
        return TraceFormat.BAILIAN if of_chats else TraceFormat.MOONCAKE
    for line, text in chain(begins, lines):
        before, _, rest = text.partition("{")
        if STAMP.search(before):
            return TraceFormat.VLLM
        if '"event"' in rest:
            return TraceFormat.ROUTER
        if PLAIN_ROUTER.search(before):
            raise InputError(
                f"{path}: line {line}: this is the router's plain-text log, which has no dates; "
                "run the router with log.format: json"
            )
    if first and names.isdisjoint(REQUIRED):
        raise unknown(path, first)
    return None


def unknown(path: Source, first: str) -> InputError:
    """The error for an unknown format, with the accepted beginnings; `first`: its first line."""
    if any(char == "\0" or "\udc80" <= char <= "\udcff" for char in first):
        return InputError(f"{path}: line 1: not UTF-8 text; of compressed files .gz and .xz are read")
    return InputError(
        f"{path}: no known trace: expected a CSV with {','.join(REQUIRED)}, or with {','.join(AZURE)} (azure), or with "
        f"{','.join(BURSTGPT)} (burstgpt), or JSON lines with {', '.join(MOONCAKE)} (mooncake), and {BAILIAN_ONLY[0]} "
        "(bailian), or a JSON log of this router (router), or of vllm serve --enable-log-requests (vllm); "
        "trace convert --format NAME names one"
    )


def read_table(path: Source, columns: tuple[str, str, str], seconds: Callable[[str, str], float]) -> Iterator[Row]:
    """Rows of a CSV with such columns of arrivals, prompts and outputs; `seconds` reads an arrival of a column."""
    at, of_prompt, of_output = columns
    rows = csv_rows(path)
    header = header_of(path, rows, columns, columns)
    places = [header.index(name) for name in columns]
    for line, row in rows:
        stamp, prompt, output = (row[place] for place in places)
        try:
            arrival_s = seconds(stamp, at)
            tokens = token_count(prompt, of_prompt, least=0), token_count(output, of_output, least=0)
            yield line, arrival_s, *tokens, "", ()
        except ValueError as error:
            raise InputError(f"{path}: line {line}: {error}") from error


def read_hashed(path: Source, stamps_per_s: float, block_tokens: int) -> Iterator[Row]:
    """Rows of JSON lines with such stamps, and a hash per block of so many tokens of the prompt.

    The key is a digest of all block hashes, so equal keys are equal prompts. Others write the same lines without
    `hash_ids`: then nothing is known of how prompts begin.
    """
    for line, text in text_lines(path):
        try:
            row = json_object(text)
            hash_ids = row.get("hash_ids") or []  # null, too, is no key
            prompt = token_count(field_of(row, "input_length"), "input_length", least=0)
            yield (
                line,
                finite(field_of(row, "timestamp"), "timestamp") / stamps_per_s,
                prompt,
                token_count(field_of(row, "output_length"), "output_length", least=0),
                digest(hash_ids),
                names_of(checked_blocks(tuple(hash_ids), prompt, "hash_ids", block_tokens), block_tokens),
            )
        except KeyError as error:
            raise InputError(f"{path}: line {line}: no field {error}") from error
        except ValueError as error:
            raise InputError(f"{path}: line {line}: {error}") from error
        except RecursionError as error:
            raise InputError(f"{path}: line {line}: JSON nested too deeply") from error


def digest(blocks: Any) -> str:
    """Sixteen hex digits that stand for a list of block hashes; nothing for none. ValueError for anything else."""
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise ValueError(f"hash_ids: expected a list of integers, found {json.dumps(blocks):.60}")
    return hashlib.blake2b(",".join(map(str, blocks)).encode(), digest_size=8).hexdigest() if blocks else ""


def names_of(hash_ids: tuple[int, ...], block_tokens: int) -> tuple[int, ...]:
    """Names of a prompt's blocks of `BLOCK_TOKENS`, from the hashes of blocks of so many tokens.

    Hashes of smaller blocks stand for their own tokens alone, so a name is a digest of all of them up to its end. There
    is one for each block that is full: nobody shares another.
    """
    per_name = BLOCK_TOKENS // block_tokens
    if per_name == 1:
        return hash_ids
    so_far = hashlib.blake2b(digest_size=7)  # any number of so many bytes is a name
    names = []
    for end in range(per_name, len(hash_ids) + 1, per_name):
        so_far.update(",".join(map(str, hash_ids[end - per_name : end])).encode() + b";")
        names.append(int.from_bytes(so_far.digest()))
    return tuple(names)


READERS: dict[TraceFormat, Callable[[Source], Iterator[Row]]] = {
    # the stamps have seven decimals in 2023 and a zone in 2024
    TraceFormat.AZURE: partial(read_table, columns=AZURE, seconds=stamp_s),
    TraceFormat.MOONCAKE: partial(read_hashed, stamps_per_s=1000.0, block_tokens=BLOCK_TOKENS),
    TraceFormat.BAILIAN: partial(read_hashed, stamps_per_s=1.0, block_tokens=BAILIAN_BLOCK_TOKENS),
    TraceFormat.BURSTGPT: partial(read_table, columns=BURSTGPT, seconds=finite),
}
