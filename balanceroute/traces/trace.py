"""The table of a trace, its CSV form, and a summary of it."""

import csv
import gzip
import io
import lzma
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balanceroute.bounded import lines
from balanceroute.errors import InputError
from balanceroute.traces.source import Source
from balanceroute.whole_file import write_whole

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "prompt_key")
REQUIRED = COLUMNS[:3]  # a trace without keys is a trace
PREFIX_COLUMN = "prefix_blocks"  # written where it is known
BLOCK_TOKENS = 512  # of prefix blocks, as in Mooncake's traces
MAX_BLOCK = 2**63 - 1  # characters of a block's name
MAX_TOKENS = 2**31 - 1  # of one prompt or output: sums over millions of requests still fit 64 bits
MAX_ARRIVAL_S = 1e10  # a clock's stamps until the year 2286; of larger numbers a step would be lost in rounding
CLOCK_STAMPS_S = 86_400.0  # no trace idles for a day before its first request: such times are a clock's
MAX_TIME = 1e15  # seconds or milliseconds; sums and squares of what is larger would leave the range of a float


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; all arrays have one entry per request.

    `arrival_s` float64 seconds since the start, non-decreasing; `prompt_tokens` and `output_tokens` int64,
    at least 1; `prompt_key` strings, empty where the prompt is not known to recur. `prefix` names the blocks of
    `BLOCK_TOKENS` of each prompt, the last of which may not be full; a name stands for the prompt up to the block's
    end, so equal names mean equal beginnings. It is empty where nothing is known of any prompt.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prompt_key: NDArray[np.str_]
    prefix: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in COLUMNS:  # whoever makes one by hand may give lists, or columns of a data frame
            object.__setattr__(self, name, np.asarray(getattr(self, name)))

    def __len__(self) -> int:
        return len(self.arrival_s)

    def checked(self) -> "Trace":
        """The trace in arrays of the types above; one made by hand may have others.

        Raises: InputError that names the first column which makes no sense.
        """
        for name in REQUIRED:
            check_numbers(getattr(self, name), name)
        arrival_s, prompts, outputs = self.arrival_s.astype(np.float64), self.prompt_tokens, self.output_tokens
        keys = np.array([text_of(key) for key in self.prompt_key.ravel().tolist()], dtype=np.str_)
        rows = len(arrival_s)
        for name, column in zip(COLUMNS, (arrival_s, prompts, outputs, keys), strict=True):
            if column.shape != (rows,):
                raise InputError(f"{name}: expected one value for each of {rows} arrivals")
        if not rows:
            raise InputError("trace: no requests in it")
        for name, tokens in (("prompt_tokens", prompts), ("output_tokens", outputs)):
            # a column of a data frame may hold whole numbers as floats
            if not 1 <= tokens.min() <= tokens.max() <= MAX_TOKENS or np.any(tokens % 1):
                raise InputError(f"{name}: accepted are whole numbers from 1 to {MAX_TOKENS}")
        if not np.all((arrival_s >= 0) & (arrival_s <= MAX_ARRIVAL_S)):  # NaN is neither
            raise InputError(f"arrival_s: accepted are numbers from 0 to {MAX_ARRIVAL_S:g}")
        if np.any(np.diff(arrival_s) < 0):
            raise InputError("arrival_s: not in order")
        checked = Trace(arrival_s, prompts.astype(np.int64), outputs.astype(np.int64), keys)
        return replace(checked, prefix=self._checked_prefix(prompts.tolist()))

    def _checked_prefix(self, prompts: list[int]) -> tuple[tuple[int, ...], ...]:
        if not len(self.prefix):
            return ()
        if len(self.prefix) != len(prompts):
            raise InputError(f"prefix: expected the blocks of each of {len(prompts)} prompts")
        try:
            prefix = tuple(tuple(map(index, names)) for names in self.prefix)
            for names, tokens in zip(prefix, prompts, strict=True):
                checked_blocks(names, tokens, "prefix")
        except TypeError:
            raise InputError("prefix: accepted are lists of whole numbers") from None
        except ValueError as error:
            raise InputError(str(error)) from error
        return prefix if any(prefix) else ()

    def full_blocks(self, request: int) -> tuple[int, ...]:
        """The names of the blocks that one prompt fills: what an engine caches."""
        return self.prefix[request][: int(self.prompt_tokens[request]) // BLOCK_TOKENS] if self.prefix else ()

    def head(self, rows: int | None) -> "Trace":
        """The first `rows` requests; all of them for `None`."""
        return self.part(0, rows)

    def part(self, first: int, end: int | None) -> "Trace":
        """The requests from `first` on, to before `end`; to the last one for `None`."""
        here = slice(first, end)
        columns = (self.arrival_s[here], self.prompt_tokens[here], self.output_tokens[here], self.prompt_key[here])
        return Trace(*columns, self.prefix[here])

    def at_rate(self, requests_per_s: float) -> "Trace":
        """The same requests with their gaps stretched so that they arrive at the given mean rate."""
        span = float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0
        if span <= 0.0:
            return self
        factor = (len(self) - 1) / span / requests_per_s
        return self.scaled(factor)

    def with_lengths(self, prompt_scale: float, output_scale: float) -> "Trace":
        """The same arrivals with lengths multiplied, rounded, and kept at 1 or more; their blocks are other ones.

        Raises: InputError where that makes one longer than any may be.
        """
        if prompt_scale == output_scale == 1.0:
            return self
        prompts = scaled_lengths(self.prompt_tokens, prompt_scale, "prompt tokens")
        outputs = scaled_lengths(self.output_tokens, output_scale, "output tokens")
        return Trace(self.arrival_s, prompts, outputs, self.prompt_key)

    def scaled(self, factor: float) -> "Trace":
        """The same requests with every arrival time multiplied by `factor`; infinite where that is too much."""
        with np.errstate(over="ignore", invalid="ignore"):
            return replace(self, arrival_s=self.arrival_s * factor)


def check_numbers(column: NDArray[Any], name: str) -> None:
    """Raises: InputError where the column is none of numbers."""
    if column.ndim != 1 or column.dtype.kind not in "iuf":
        raise InputError(f"{name}: expected a column of numbers, found {column.dtype} of shape {column.shape}")


def text_of(key: object) -> str:
    """A prompt's key as text; nothing where a column has none (None, NaN)."""
    return "" if key is None or key != key else str(key)


def scaled_lengths(tokens: NDArray[np.int64], scale: float, name: str) -> NDArray[np.int64]:
    """Lengths times that, at least 1. Raises: InputError that names the column."""
    with np.errstate(over="ignore"):
        scaled: NDArray[np.float64] = np.maximum(1.0, np.rint(tokens * scale))
    if not scaled.max() <= MAX_TOKENS:
        raise InputError(f"{name} times {scale:g}: the largest is more than {MAX_TOKENS}")
    return scaled.astype(np.int64)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What `trace describe` prints."""

    rows: int
    span_s: float
    rate_per_s: float
    interarrival_cv: float
    prompt_mean: float
    prompt_p50: float
    prompt_p95: float
    prompt_p99: float
    prompt_max: int
    output_mean: float
    output_p50: float
    output_p95: float
    output_p99: float
    output_max: int
    keyed_ratio: float
    distinct_keys: int


def describe_trace(trace: Trace) -> TraceSummary:
    """Rates, moments and quantiles of a trace. Raises: InputError for one that makes no sense."""
    trace = trace.checked()
    gaps = np.diff(trace.arrival_s)
    span = float(trace.arrival_s[-1] - trace.arrival_s[0])
    keyed = trace.prompt_key[trace.prompt_key != ""]
    return TraceSummary(
        rows=len(trace),
        span_s=span,
        rate_per_s=(len(trace) - 1) / span if span > 0 else math.nan,
        interarrival_cv=float(gaps.std() / gaps.mean()) if span > 0 else math.nan,
        **_lengths("prompt", trace.prompt_tokens),
        **_lengths("output", trace.output_tokens),
        keyed_ratio=len(keyed) / len(trace),
        distinct_keys=len(np.unique(keyed)),
    )


def _lengths(name: str, tokens: NDArray[np.int64]) -> dict[str, Any]:
    p50, p95, p99 = np.percentile(tokens, (50, 95, 99)).tolist()
    mean, most = float(tokens.mean()), int(tokens.max())
    return {f"{name}_mean": mean, f"{name}_p50": p50, f"{name}_p95": p95, f"{name}_p99": p99, f"{name}_max": most}


def read_trace(path: str | Path | Source, on_note: Callable[[str], None] | None = None) -> Trace:
    """Read a trace CSV, possibly compressed (.gz, .xz); `-` is standard input.

    Where the first arrival is a clock's stamp (a day or more after 0), times count from it. A last line that is cut
    short, because the file is still being written, is left out with a warning, or `on_note` is told.

    Raises: InputError with the file, the line and the reason, on the first row that cannot be used.
    """
    path = Source.of(path)
    rows = csv_rows(path)
    header = header_of(path, rows, REQUIRED, (*COLUMNS, PREFIX_COLUMN))
    at_arrival, at_prompt, at_output = (header.index(name) for name in REQUIRED)
    at_key = header.index("prompt_key") if "prompt_key" in header else -1
    at_prefix = header.index(PREFIX_COLUMN) if PREFIX_COLUMN in header else -1
    columns = Columns()
    try:
        for line, row in rows:
            try:
                arrival = finite(row[at_arrival], "arrival_s", most=MAX_ARRIVAL_S)
                if columns.arrivals and arrival < columns.arrivals[-1]:
                    above = columns.arrivals[-1]
                    raise ValueError(f"arrival_s {arrival:g} is before the row above ({above:g}); sort the rows by it")
                prompt = token_count(row[at_prompt], "prompt_tokens", least=1)
                output = token_count(row[at_output], "output_tokens", least=1)
                prefix = block_names(row[at_prefix], prompt) if at_prefix >= 0 else ()
            except ValueError as error:
                raise InputError(f"{path}: line {line}: {error}") from error
            columns.add(arrival, prompt, output, row[at_key] if at_key >= 0 else "", prefix)
    except InputError:
        if path.half_line is None or not columns.arrivals:
            raise
        note = left_out([path.half_line])
        if on_note is None:
            warnings.warn(f"{path}: {note}", stacklevel=2)
        else:
            on_note(note)
    trace = columns.trace(path)
    clock = float(trace.arrival_s[0]) if trace.arrival_s[0] >= CLOCK_STAMPS_S else 0.0
    return replace(trace, arrival_s=np.round(trace.arrival_s - clock, 6)) if clock else trace


def left_out(lines: Sequence[int]) -> str:
    """A note of the lines that could not be read, by their numbers."""
    if len(lines) == 1:
        return f"left out 1 line that is cut short or damaged, line {lines[0]}"
    return f"left out {len(lines):,} lines that are cut short or damaged, the first of them line {lines[0]}"


def header_of(
    path: Source, rows: Iterator[tuple[int, list[str]]], needed: Sequence[str], read: Sequence[str]
) -> list[str]:
    """The names of the columns, from the first row.

    Raises: InputError: one that is needed is not there, or one that is read is there twice.
    """
    line, names = next(rows)
    header = [name.strip() for name in names]
    missing = [name for name in needed if name not in header]
    twice = [name for name in read if header.count(name) > 1]
    if missing:
        raise InputError(f"{path}: line {line}: no column {', '.join(missing)}; expected {','.join(needed)}")
    if twice:
        raise InputError(f"{path}: line {line}: more than one column {', '.join(twice)}")
    return header


def block_names(text: str, prompt_tokens: int) -> tuple[int, ...]:
    """The names of a prompt's blocks, separated by blanks, or ValueError that says what is wrong with them."""
    try:
        names = tuple(int(name) for name in text.split())
    except ValueError:
        raise ValueError(f"{PREFIX_COLUMN} {text!r:.60}: expected whole numbers separated by blanks") from None
    return checked_blocks(names, prompt_tokens, PREFIX_COLUMN)


def checked_blocks(
    names: tuple[int, ...], prompt_tokens: int, column: str, block_tokens: int = BLOCK_TOKENS
) -> tuple[int, ...]:
    """The names themselves, or ValueError where one is out of range or the prompt has no room for so many blocks."""
    if any(not -MAX_BLOCK <= name <= MAX_BLOCK for name in names):
        raise ValueError(f"{column}: a number is out of range")
    if len(names) > -(-prompt_tokens // block_tokens):
        raise ValueError(
            f"{column}: {len(names)} blocks of {block_tokens} tokens in a prompt of {prompt_tokens} tokens"
        )
    return names


@dataclass(slots=True)
class Columns:
    """The requests of a file while it is read."""

    arrivals: list[float] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    prefixes: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, arrival_s: float, prompt_tokens: int, output_tokens: int, key: str, prefix: tuple[int, ...]) -> None:
        """Add a request."""
        self.arrivals.append(arrival_s)
        self.prompts.append(prompt_tokens)
        self.outputs.append(output_tokens)
        self.keys.append(key)
        self.prefixes.append(prefix)

    def trace(self, path: Source) -> Trace:
        """All of them. Raises: InputError: there is none, or their times are impossible."""
        if not self.arrivals:
            raise InputError(f"{path}: no requests in it")
        span_s = max(self.arrivals) - min(self.arrivals)
        if span_s > MAX_ARRIVAL_S:
            raise InputError(f"{path}: arrivals are up to {span_s:g} s apart: too far")
        return Trace(
            np.asarray(self.arrivals, dtype=np.float64),
            np.asarray(self.prompts, dtype=np.int64),
            np.asarray(self.outputs, dtype=np.int64),
            np.asarray(self.keys, dtype=np.str_),
            tuple(self.prefixes) if any(self.prefixes) else (),
        )


def finite(text: str, name: str, *, most: float = MAX_TIME) -> float:
    """A number from 0 to `most`, or ValueError that names the column."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} {text!r:.60} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} {text!r:.60} is not a finite number >= 0")
    if value > most:
        raise ValueError(f"{name} {text!r:.60} is too large: more than {most:g}")
    return value


def token_count(text: str, name: str, *, least: int) -> int:
    """A whole number from `least` to `MAX_TOKENS`, or ValueError that names the column."""
    try:
        value = int(text.removesuffix(".0"))  # as pandas writes a column that had gaps once
    except ValueError:
        raise ValueError(f"{name} {text!r:.60} is not a whole number") from None
    if value < least:
        raise ValueError(f"{name} {text!r:.60} is below {least}")
    if value > MAX_TOKENS:
        raise ValueError(f"{name} {text!r:.60} is too large: more than {MAX_TOKENS}")
    return value


def csv_rows(path: Source) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of each row of a CSV, its header first; all have as many fields.

    Every line is parsed by itself: across lines, a quote that is never closed would swallow the rest of the file.
    """
    width = 0
    for line, text in text_lines(path):
        try:
            fields = next(csv.reader([text], strict=True))
        except csv.Error as error:
            reason = "a quote is not closed on its line" if text.count('"') % 2 else error
            raise InputError(f"{path}: line {line}: {reason}") from error
        width = width or len(fields)
        if len(fields) != width:  # such as a stamp with a comma, which would shift the columns behind it
            raise InputError(f"{path}: line {line}: {len(fields)} fields, the header has {width}")
        yield line, fields


def text_lines(path: Source, *, any_bytes: bool = False) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line that is not blank, of a text file that may be compressed (.gz, .xz).

    `any_bytes`: bytes that are not UTF-8 come as surrogates. Raises: InputError that names the file, and else the line
    of such bytes; of a file of no such lines, too.
    """
    line, blank, path.half_line = 0, True, None
    try:
        with path.open() as file:
            for line, text in enumerate(lines(file), start=1):
                if text.strip() and not text.endswith(("\n", "\r")):
                    path.half_line = line
                if not any_bytes:
                    text.encode()
                if text.strip():
                    blank = False
                    yield line, text
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except UnicodeEncodeError as error:
        others = "; of compressed files .gz and .xz are read" if line == 1 else ""
        raise InputError(f"{path}: line {line}: not UTF-8 text{others}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if blank:
        raise InputError(f"{path}: nothing in it")


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as CSV, compressed where the name ends in .gz or .xz; equal traces give equal bytes.

    Raises: InputError for one that could not be read back, or a file that cannot be written.
    """
    path, trace = Path(path), trace.checked()
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, PREFIX_COLUMN] if trace.prefix else COLUMNS)
    columns = zip(
        trace.arrival_s.tolist(),
        trace.prompt_tokens.tolist(),
        trace.output_tokens.tolist(),
        trace.prompt_key.tolist(),
        strict=True,
    )
    for request, (arrival, prompt, output, key) in enumerate(columns):
        if "\n" in key or "\r" in key:  # a row is read as one line
            raise InputError(f"prompt_key {key!r:.60}: accepted are texts without line breaks")
        row = [f"{arrival:.6f}", prompt, output, key]
        if trace.prefix:
            row.append(" ".join(map(str, trace.prefix[request])))
        writer.writerow(row)
    data = text.getvalue().encode()
    suffix = path.suffix.lower()
    if suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # the time of writing would make equal traces differ
    elif suffix == ".xz":
        data = lzma.compress(data)
    write_whole(path, data)
