"""What reading the workers costs: the router's own client and reader, beside httpx and prometheus-client's parser.

    .venv/bin/python -m scripts.bench.polls

CPU of this thread per GET of a page over loopback, and per parse of it, minimum of the rounds (the rest of the machine
only adds), with what 144 workers make of it: one page per second and one /health every two. Not measured: the server,
which runs in a process of its own, and connecting.
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from typing import Final

import httpx
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from balanceroute.proxy.wire.metrics_page import read_samples
from balanceroute.proxy.workers.upstream import Upstream

WORKERS: Final = 144
PAGE_BYTES: Final = 100_000
ROUNDS: Final = 20
GETS: Final = 20  # per round


def page() -> bytes:
    """A page like vLLM's: the gauges that are read, and histograms until it has the size."""
    registry = CollectorRegistry()
    labels = ("engine", "model_name")
    for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
        Gauge(f"vllm:{name}", name, labels, registry=registry).labels("0", "model").set(0.5)
    number = 0
    while len(generate_latest(registry)) < PAGE_BYTES:
        bounds = [step / 8 for step in range(1, 40)]
        Histogram(f"vllm:figure_{number}", "Of requests.", labels, buckets=bounds, registry=registry).labels(
            "0", "model"
        )
        number += 1
    return generate_latest(registry)


async def _serve(body: bytes, tell: Callable[[int], None]) -> None:
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(reply)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    tell(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _server(body: bytes, ports: "multiprocessing.SimpleQueue[int]") -> None:
    asyncio.run(_serve(body, ports.put))


async def _cpu_s(get: Callable[[], Awaitable[object]]) -> float:
    await get()
    rounds = []
    for _ in range(ROUNDS):
        since_s = time.thread_time()
        for _ in range(GETS):
            await get()
        rounds.append((time.thread_time() - since_s) / GETS)
    return min(rounds)


async def _gets(url: str) -> tuple[float, float]:
    upstream = Upstream(url)

    async def own() -> bytes:
        reply = await upstream.request("GET", "/metrics")
        return await reply.read(2**23)

    async with httpx.AsyncClient(trust_env=False) as client:
        theirs_s = await _cpu_s(lambda: client.get(f"{url}/metrics"))
    own_s = await _cpu_s(own)
    upstream.close()
    return own_s, theirs_s


def _parse_s(read: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS):
        since_s = time.thread_time()
        read()
        taken.append(time.thread_time() - since_s)
    return min(taken)


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    body = page()
    text = body.decode()
    ports: multiprocessing.SimpleQueue[int] = multiprocessing.SimpleQueue()
    server = multiprocessing.Process(target=_server, args=(body, ports), daemon=True)
    server.start()
    own_get_s, httpx_get_s = asyncio.run(_gets(f"http://127.0.0.1:{ports.get()}"))
    server.terminate()
    parses_s = _parse_s(lambda: read_samples(body)), _parse_s(lambda: list(text_string_to_metric_families(text)))
    print(f"{WORKERS} workers, pages of {len(body)} bytes")
    for name, get_s, parse_s in (
        ("own client, own reader", own_get_s, parses_s[0]),
        ("httpx, prometheus-client", httpx_get_s, parses_s[1]),
    ):
        core = WORKERS * (1.5 * get_s + parse_s)
        stall_ms = 1e3 * parse_s
        print(f"{name:26} {1e3 * get_s:7.2f} ms per GET {stall_ms:7.2f} ms per parse, in one go {core:7.1%} of a core")


if __name__ == "__main__":
    main()
