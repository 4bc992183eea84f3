"""Damaged requests into the client protocol, in process and in pieces; nothing may raise, nothing may be kept.

    scripts/fuzz_http [--inputs N] [--seed N] [--processes N] [--seconds N]

An input is what one connection says: one to four requests put together of good, odd and bad parts (request lines,
fields, framings, chunks, trailers), then damaged by up to three mutations, cut at random places, and ended by a
half-close or a disconnect. The protocol must

* raise nothing, and leave no connection, task or byte of a body behind;
* answer only with statuses that it knows, one for each request that it served and at most one refusal as the last;
* take the same for requests whatever the pieces are: the input goes in once whole and once cut;
* not grow: resident memory is compared over the run of each process.

Reproduce a failure with its seed: `--seed S --inputs 1 --processes 1`.
"""

import asyncio
import os
import random
import traceback
from collections.abc import Sequence
from typing import Final

import uvloop

from balanceroute.proxy.client.inbox import MAX_WAITING_BYTES
from scripts.chaos_run.edge_stage import HOT_PATH, Outcome, Stage
from scripts.chaos_run.fuzzing import Batch, Mutation, cut, double, drop, feed, flip, inserting, reads
from scripts.proc import resident_bytes

# of a process after its first batch: its allocator's, 8.2 MiB after 150,000 inputs and 8.6 after 1,000,000
GROWTH_BYTES: Final = 16 * 2**20
REFUSALS: Final = frozenset({400, 405, 408, 413, 414, 417, 431, 505})

LINES: Final = (
    *(b"GET / HTTP/1.1\r\n", b"GET /a?b=c HTTP/1.1\r\n", b"HEAD /a HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n"),
    *(b"POST %b HTTP/1.1\r\n" % HOT_PATH.encode(), b"POST /b HTTP/1.1\r\n", b"PUT /%2e%2e/%00 HTTP/1.1\r\n"),
    *(b"POST http://router/a HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n", b"POST /a HTTP/1.0\r\n"),
)
ODD_LINES: Final = (
    *(b"GET  / HTTP/1.1\r\n", b"GET / HTTP/1.1\n", b"GET / HTTP/2.0\r\n", b"GET /\r\n", b"\r\nGET / HTTP/1.1\r\n"),
    *(b"CONNECT a:1 HTTP/1.1\r\n", b"GET a HTTP/1.1\r\n", b"GET /\x00 HTTP/1.1\r\n", b"G\xc3T / HTTP/1.1\r\n"),
    *(b"get / HTTP/1.1\r\n", b"FROB / HTTP/1.1\r\n", b"GET http:///a HTTP/1.1\r\n", b"GET /%zz HTTP/1.1\r\n"),
    *(b"PRI * HTTP/2.0\r\n", b"GET ftp://a/ HTTP/1.1\r\n", b"GET / HTTP/1.1 \r\n", b"GET /" + b"a" * 9000),
)
HOSTS: Final = (b"Host: router\r\n", b"Host: router:8000\r\n", b"host:[::1]:80\r\n", b"HOST: \t127.0.0.1 \r\n")
FIELDS: Final = (
    *(b"Accept: */*\r\n", b"X-A: b\r\n", b"X-A:\r\n", b"X-A: b\tc\r\n", b"X-A: \xe9\r\n", b"Connection: close\r\n"),
    *(b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n", b"X-Long: %b\r\n" % (b"a" * 3000)),
    *(b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
)
ODD_FIELDS: Final = (
    *(b"Host: a\r\n", b"Host: a, b\r\n", b"X-A\r\n", b": b\r\n", b" folded\r\n", b"X A: b\r\n", b"X-A : b\r\n"),
    *(
        b"X-A: \x00\r\n",
        b"X-A: \x7f\r\n",
        b"X-A: b\n",
        b"X-A: b\r",
        b"X-\xe9: b\r\n",
        b"Expect: a\r\n",
        b"a:\r\n" * 200,
    ),
    *(b"Content-Length: 3\r\n", b"Content-Length: +3\r\n", b"Content-Length: 3, 3\r\n", b"Content-Length: 3 \r\n"),
    *(b"Content-Length: %b\r\n" % (b"9" * 30), b"Content-Length:\r\n", b"Content-Length: 0x3\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: identity\r\n"),
    *(b"Transfer-Encoding: xchunked\r\n", b"Transfer-Encoding: chunked, chunked\r\n", b"Transfer-Encoding:\r\n"),
    *(b"Transfer-Encoding : chunked\r\n", b"Transfer-Encoding: \x0bchunked\r\n", b"TE: trailers\r\n"),
)
CHUNKS: Final = (
    *(b"5\r\nhello\r\n", b"1\r\nx\r\n", b"A\r\n0123456789\r\n", b"00003\r\nabc\r\n", b"3;a=b\r\nabc\r\n"),
    *(
        b'3;a="b c"\r\nabc\r\n',
        b"7d0\r\n" + b"y" * 2000 + b"\r\n",
        b"3;a;b;c\r\nabc\r\n",
        b"14\r\n%b\r\n" % (b"\r\n" * 10),
    ),
)
ODD_CHUNKS: Final = (
    *(
        b"3\nabc\r\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabc",
        b"-3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b" 3\r\nabc\r\n",
        b"3 \r\nabc\r\n",
    ),
    *(
        b"\r\nabc\r\n",
        b"g\r\n",
        b"%b\r\n" % (b"f" * 16),
        b"%b3\r\nabc\r\n" % (b"0" * 20),
        b"3;%b\r\nabc\r\n" % (b"a" * 600),
    ),
    *(b"3;\x00\r\nabc\r\n", b"3\rabc\r\n", b"3\r\nabc\n", b"3;a\nb\r\nabc\r\n"),
)
ENDS: Final = (
    b"0\r\n\r\n",
    b"0\r\n\r\n",
    b"000\r\n\r\n",
    b"0;a\r\n\r\n",
    b"0\r\nx-a: b\r\n\r\n",
    b"0\r\nHost: evil\r\n\r\n",
)
ODD_ENDS: Final = (
    *(b"0\n\n", b"0\r\n", b"0\r\nx\r\n\r\n", b"0\r\n folded\r\n\r\n", b"0\r\nx: \x00\r\n\r\n", b"", b"0\r\n\n"),
    *(b"0\r\nx: %b\r\n\r\n" % (b"a" * 9000), b"0\r\n" + b"a: b\r\n" * 2000 + b"\r\n", b"0\r\nx : b\r\n\r\n"),
)
_PIECES: Final = (
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b"\n\n",
        b"\x00",
        b"\xff",
        b" ",
        b"\t",
        b":",
        b";",
        b"0",
        b"HTTP/1.1",
        b"chunked",
    ),
    *(b"Host: a\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"A" * 70_000, b"%0d%0a", b"[]", b"-", b"+"),
)


def _some(draw: random.Random, good: Sequence[bytes], odd: Sequence[bytes], odd_share: float) -> bytes:
    return draw.choice(odd if draw.random() < odd_share else good)


def request(draw: random.Random, odd_share: float) -> bytes:
    """One request, each of its parts odd with this chance."""
    fields = [draw.choice(FIELDS) for _ in range(draw.choice([0, 0, 1, 2, 5]))]
    if draw.random() >= odd_share:
        fields.append(draw.choice(HOSTS))
    if draw.random() < odd_share:
        fields += [draw.choice(ODD_FIELDS) for _ in range(draw.choice([1, 1, 2]))]
    content, framing = b"", draw.random()
    if framing < 0.35:
        content = draw.choice([b"", b"{}", b"abc", b"z" * 5000, b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"])
        fields.append(b"Content-Length: %d\r\n" % len(content))
    elif framing < 0.7:
        count = draw.choice([0, 1, 2, 8])
        content = b"".join(_some(draw, CHUNKS, ODD_CHUNKS, odd_share) for _ in range(count))
        content += _some(draw, ENDS, ODD_ENDS, odd_share)
        fields.append(b"Transfer-Encoding: chunked\r\n")
    draw.shuffle(fields)
    return _some(draw, LINES, ODD_LINES, odd_share) + b"".join(fields) + b"\r\n" + content


def stream(draw: random.Random) -> bytes:
    """What one connection says: some all good, most with something odd in them, some damaged besides."""
    odd_share = draw.choice([0.0, 0.05, 0.05, 0.2])
    data = b"".join(request(draw, odd_share) for _ in range(draw.randint(1, 4)))
    for _ in range(draw.choice([0, 0, 0, 1, 1, 3])):
        data = draw.choice(_MUTATIONS)(draw, data)
    return data


_MUTATIONS: Final[tuple[Mutation, ...]] = (cut, drop, flip, inserting(_PIECES), double)


def pieces(draw: random.Random, data: bytes) -> list[bytes]:
    """`data` as the reads that a socket might give, two at least."""
    return reads(draw, data, at_least=1, bytewise_below=2000)


async def one_input(stage: Stage, seed: int) -> None:
    """One input, whole and in pieces. Raises what is wrong."""
    draw = random.Random(seed)
    data = stream(draw)
    in_reads = pieces(draw, data)
    half_close = draw.random() < 0.8
    await stage.connection([data], at_once=True)
    whole = await stage.connection([data], half_close=half_close)
    check(whole)
    in_pieces = await stage.connection(in_reads, half_close=half_close)
    check(in_pieces)
    same(whole, in_pieces, ended=half_close, large=len(data) > MAX_WAITING_BYTES)
    if left := stage.left():
        raise AssertionError(f"left behind: {left}")


def check(outcome: Outcome) -> None:
    """An outcome by itself. Raises: AssertionError."""
    statuses = outcome.statuses
    answered = [status for status in statuses if status == 200]
    if len(answered) != len(outcome.requests):
        raise AssertionError(f"{len(outcome.requests)} requests, {statuses}")
    refused = [status for status in statuses if status != 200]
    if len(refused) > 1 or not REFUSALS.issuperset(refused) or (refused and statuses[-1] == 200):
        raise AssertionError(f"refused with {statuses}")


def same(one: Outcome, other: Outcome, *, ended: bool, large: bool) -> None:
    """Two outcomes of the same bytes. Raises: AssertionError.

    Which of two faults a refusal names may depend on which came first, and a head that has not `ended` may be refused
    as soon as it can't become one any more; whether there is a refusal in the end may not. Where a connection says so
    much (`large`) that it may end with the answer under way, one outcome may be the beginning of the other.
    """
    if large:
        common = min(len(one.requests), len(other.requests))
        if one.requests[:common] != other.requests[:common]:
            raise AssertionError(f"depends on the pieces: {one.requests} or {other.requests}")
        return
    refused = [outcome.refusal is not None for outcome in (one, other)]
    if one.requests != other.requests or (ended and refused[0] != refused[1]):
        raise AssertionError(
            f"depends on the pieces: {one.requests} and {one.refusal}, or {other.requests} and {other.refusal}"
        )


async def _inputs(first_seed: int, count: int) -> list[str]:
    """`count` inputs from `first_seed` on; the tracebacks by seed."""
    failures = []
    stage = Stage(asyncio.get_running_loop())
    for seed in range(first_seed, first_seed + count):
        try:
            await one_input(stage, seed)
        except Exception:  # that there is none is what is being tested
            failures.append(f"seed {seed}: {traceback.format_exc(limit=-4)}")
            stage = Stage(asyncio.get_running_loop())
    return failures


_warm_bytes: int | None = None  # of this process, after its first batch


def run(arguments: tuple[int, int]) -> Batch:
    """So many inputs from a seed on, in a worker process."""
    global _warm_bytes
    failures = uvloop.run(_inputs(*arguments))
    rss_bytes = resident_bytes([os.getpid()])
    if _warm_bytes is None:
        _warm_bytes = rss_bytes
    return Batch(arguments[1], failures, rss_bytes - _warm_bytes)


if __name__ == "__main__":
    feed("fuzz_http", __doc__, run, seconds=3600.0, growth_bytes=GROWTH_BYTES)
