"""Public traces in their original files, read into the one table.

    azure      Azure LLM inference traces of 2023 and 2024: TIMESTAMP,ContextTokens,GeneratedTokens
    mooncake   Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids (one per 512-token block)
    burstgpt   BurstGPT CSV: Timestamp (s),Model,Request tokens,Response tokens,Total tokens,Log Type

Any of them may be compressed (.gz, .xz). Requests that generated nothing (failed ones) are left out and
counted.
"""

import csv
import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from balanceroute.errors import InputError
from balanceroute.traces.trace import Trace, finite, text_lines, trace_of, whole

Row = tuple[int, float, int, int, str]  # line number, seconds, prompt tokens, output tokens, key


class TraceFormat(StrEnum):
    """Which public trace a file is; AUTO looks at its first line."""

    AUTO = "auto"
    AZURE = "azure"
    MOONCAKE = "mooncake"
    BURSTGPT = "burstgpt"


@dataclass(frozen=True, slots=True)
class Conversion:
    """The converted trace, and how many requests were left out because nothing was generated."""

    trace: Trace
    format: TraceFormat
    without_output: int


def convert_trace(
    path: Path, format: TraceFormat = TraceFormat.AUTO, *, jitter_s: float = 0.0, seed: int = 0
) -> Conversion:
    """Read a public trace; arrivals start at 0 and are sorted.

    `jitter_s` adds a seeded uniform delay below it to each arrival: Mooncake's stamps sit on steps of about
    3 s. Raises: InputError with the file, the line and the reason.
    """
    kind = guess_format(path) if format is TraceFormat.AUTO else format
    arrivals, prompts, outputs, keys = list[float](), list[int](), list[int](), list[str]()
    without_output = 0
    for line, arrival, prompt, output, key in READERS[kind](path):
        if output == 0:
            without_output += 1
            continue
        if prompt < 1 or output < 0:
            raise InputError(f"{path}: line {line}: {prompt} prompt and {output} output tokens")
        arrivals.append(arrival)
        prompts.append(prompt)
        outputs.append(output)
        keys.append(key)
    return Conversion(in_order(trace_of(path, arrivals, prompts, outputs, keys), jitter_s, seed), kind, without_output)


def in_order(trace: Trace, jitter_s: float, seed: int) -> Trace:
    """Arrivals from 0 on, jittered and sorted; equal stamps keep the order of the file."""
    arrivals = trace.arrival_s - trace.arrival_s.min()
    if jitter_s > 0:
        arrivals = arrivals + np.random.default_rng(seed).uniform(0.0, jitter_s, len(trace))
    order = np.argsort(arrivals, kind="stable")
    return Trace(arrivals[order], trace.prompt_tokens[order], trace.output_tokens[order], trace.prompt_key[order])


def opener_of(path: Path) -> Callable[..., Any]:
    """How to open a file, by its suffix."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    return openers.get(path.suffix, open)


def lines_of(path: Path) -> Iterator[str]:
    """Text lines of a possibly compressed file."""
    try:
        yield from text_lines(path, opener_of(path))
    except lzma.LZMAError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def guess_format(path: Path) -> TraceFormat:
    """Tell the formats apart by the first line."""
    first = next(lines_of(path), "").lstrip("\ufeff")
    if first.startswith("{"):
        return TraceFormat.MOONCAKE
    if "ContextTokens" in first:
        return TraceFormat.AZURE
    if "Request tokens" in first:
        return TraceFormat.BURSTGPT
    raise InputError(f"{path}: line 1: not one of {', '.join(sorted(READERS))}; say which with --format")


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """(line number, the wanted columns) of each CSV row."""
    reader = csv.reader(lines_of(path))
    try:
        header = [name.strip().lstrip("\ufeff") for name in next(reader, [])]
        missing = [name for name in columns if name not in header]
        if missing:
            raise InputError(f"{path}: line 1: no column {', '.join(missing)}")
        places = [header.index(name) for name in columns]
        for row in reader:
            if row and len(row) < len(header):
                raise InputError(f"{path}: line {reader.line_num}: {len(row)} fields, the header has {len(header)}")
            if row:
                yield reader.line_num, [row[place] for place in places]
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}") from error


def read_azure(path: Path) -> Iterator[Row]:
    """Rows of an Azure trace; the stamps have seven decimals in 2023 and a zone in 2024."""
    for line, (stamp, prompt, output) in csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        try:
            yield line, stamp_s(stamp), whole(prompt, "ContextTokens"), whole(output, "GeneratedTokens"), ""
        except ValueError as error:
            raise InputError(f"{path}: line {line}: {error}") from error


def stamp_s(stamp: str) -> float:
    """Seconds since the epoch of an ISO stamp with up to nine decimals; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(stamp.strip())
    except ValueError:
        raise ValueError(f"TIMESTAMP {stamp!r} is not a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def read_burstgpt(path: Path) -> Iterator[Row]:
    """Rows of a BurstGPT trace."""
    for line, (stamp, prompt, output) in csv_rows(path, ("Timestamp", "Request tokens", "Response tokens")):
        try:
            yield (
                line,
                finite(stamp, "Timestamp"),
                whole(prompt, "Request tokens"),
                whole(output, "Response tokens"),
                "",
            )
        except ValueError as error:
            raise InputError(f"{path}: line {line}: {error}") from error


def read_mooncake(path: Path) -> Iterator[Row]:
    """Rows of a Mooncake trace; the key is a digest of all block hashes, so equal keys are equal prompts."""
    for line, text in enumerate(lines_of(path), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            blocks = row["hash_ids"]
            yield (
                line,
                finite(str(row["timestamp"]), "timestamp") / 1000.0,
                whole(str(row["input_length"]), "input_length"),
                whole(str(row["output_length"]), "output_length"),
                digest(blocks) if blocks else "",
            )
        except KeyError as error:
            raise InputError(f"{path}: line {line}: no field {error}") from error
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: line {line}: {error}") from error


def digest(blocks: list[int]) -> str:
    """Sixteen hex digits that stand for a list of block hashes."""
    return hashlib.blake2b(",".join(map(str, blocks)).encode(), digest_size=8).hexdigest()


READERS: dict[TraceFormat, Callable[[Path], Iterator[Row]]] = {
    TraceFormat.AZURE: read_azure,
    TraceFormat.MOONCAKE: read_mooncake,
    TraceFormat.BURSTGPT: read_burstgpt,
}
