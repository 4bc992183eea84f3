"""What the fuzzers share: how bytes are damaged and cut, and the command that feeds inputs by seed on all cores."""

import argparse
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from scripts.arguments import count

BATCH: Final = 2000  # inputs per seed of a worker process

Mutation = Callable[[random.Random, bytes], bytes]


# -- damages


def place(draw: random.Random, data: bytes) -> int:
    """Somewhere in `data`, its end included."""
    return draw.randint(0, len(data))


def cut(draw: random.Random, data: bytes) -> bytes:
    """The beginning."""
    return data[: place(draw, data)]


def drop(draw: random.Random, data: bytes) -> bytes:
    """Without a few bytes."""
    start = place(draw, data)
    return data[:start] + data[start + draw.choice([1, 1, 2, 8, 60]) :]


def flip(draw: random.Random, data: bytes) -> bytes:
    """One bit is another."""
    if not data:
        return data
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


def double(draw: random.Random, data: bytes) -> bytes:
    """A stretch comes twice."""
    start, length = place(draw, data), draw.choice([1, 5, 40, 300])
    return data[: start + length] + data[start:]


def inserting(pieces: Sequence[bytes]) -> Mutation:
    """The damage that puts one of these somewhere."""

    def insert(draw: random.Random, data: bytes) -> bytes:
        at = place(draw, data)
        return data[:at] + draw.choice(pieces) + data[at:]

    return insert


def reads(draw: random.Random, data: bytes, *, at_least: int = 0, bytewise_below: float = math.inf) -> list[bytes]:
    """`data` as the pieces that a socket might give, cut `at_least` so often; now and then byte by byte."""
    if len(data) < bytewise_below and draw.random() < 0.1:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(place(draw, data) for _ in range(draw.randint(at_least, at_least + 5)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# -- the command


@dataclass(frozen=True, slots=True)
class Batch:
    """What came of some inputs: how many, tracebacks by seed, and how far the process has grown since its first."""

    count: int
    failures: list[str]
    grown_bytes: int = 0


def feed(
    name: str, doc: str, run: Callable[[tuple[int, int]], Batch], *, seconds: float, growth_bytes: int = 0
) -> None:
    """Feed inputs in batches (first seed, count) to worker processes and say what came of them; ends the process.

    Args: run: called in a worker process. seconds: the default of the bound on time. growth_bytes: how far a process
    may grow; 0 where that is not looked at.
    """
    parser = argparse.ArgumentParser(prog=f"scripts/{name}", description=doc.splitlines()[0])
    parser.add_argument("--inputs", type=count, default=1_000_000, help="(1000000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first input (0)")
    parser.add_argument("--processes", type=count, default=os.cpu_count() or 1, help="(all cores)")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"stop after this, whatever was done ({seconds:g})"
    )
    arguments = parser.parse_args()
    end = arguments.seed + arguments.inputs
    batches = [(first, min(BATCH, end - first)) for first in range(arguments.seed, end, BATCH)]
    started, done, grown_bytes = time.monotonic(), 0, 0
    failures: list[str] = []
    with multiprocessing.Pool(arguments.processes) as pool:
        for batch in pool.imap_unordered(run, batches):
            done += batch.count
            failures += batch.failures
            grown_bytes = max(grown_bytes, batch.grown_bytes)
            if time.monotonic() - started > arguments.seconds:
                pool.terminate()
                break
    elapsed_s = time.monotonic() - started
    grown = f", memory grew by {grown_bytes / 2**20:.1f} MiB" if growth_bytes else ""
    print(
        f"{name}: {done} inputs from seed {arguments.seed} in {elapsed_s:.1f} s ({done / elapsed_s:.0f}/s,"
        f" {arguments.processes} processes), {len(failures)} failures{grown}"
    )
    for failure in failures[:10]:
        print(failure)
    sys.exit(0 if not failures and done == arguments.inputs and grown_bytes <= growth_bytes else 1)
