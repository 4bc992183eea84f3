"""Hold 9,216 streams through 144 emulated decode ranks and a router with relays: every token right, memory per stream.

    .venv/bin/python -m scripts.bench.held --relays 2

A cluster of `balanceroute emulate` makes a step every few seconds, so that all streams are open at once on a small
machine. Each stream has a prompt of its own and its answer is compared with the one that the emulated model gives.
Memory is resident memory of all processes of the router with all streams open; per stream, without what they took
before.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any, Final, cast

import uvloop

from balanceroute.demo.processes import emulated, free_ports, process, temporary_folder, wait_ready
from balanceroute.engine.tokens import continuation, decode, encode
from scripts.bench.processes import allow_many_sockets
from scripts.proc import resident_bytes, tree

RANKS: Final = 144
SLOTS: Final = 64


class Stream(asyncio.Protocol):
    """One answer, from its first byte to the end of its connection."""

    def __init__(self, number: int, tokens: int) -> None:
        self.prompt, self.tokens = f"Stream number {number} of many tells of load", tokens
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        request = {"model": "emulated", "prompt": self.prompt, "max_tokens": self.tokens, "stream": True}
        body = json.dumps(request).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n"
        cast(asyncio.WriteTransport, transport).write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        self.began.set()
        self._parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.began.set()
        self.ended.set()

    @property
    def right(self) -> bool:
        """Whether the answer is whole, and the emulated model's."""
        events = [line[6:] for line in b"".join(self._parts).split(b"\n") if line.startswith(b"data: ")]
        if not events or events[-1].strip() != b"[DONE]":
            return False
        choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
        text = "".join(choice["text"] for choice in choices)
        return (
            text == decode(continuation(encode(self.prompt), self.tokens)) and choices[-1]["finish_reason"] == "length"
        )


async def hold(port: int, pid: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Open all streams, look at the router, and wait for their ends."""
    loop = asyncio.get_running_loop()
    before, before_bytes = tree(pid), resident_bytes(tree(pid))
    streams = [Stream(number, arguments.tokens) for number in range(arguments.streams)]
    began_s = time.monotonic()
    for number, stream in enumerate(streams):
        await asyncio.sleep(max(0.0, began_s + number / arguments.rate - time.monotonic()))
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    for stream in streams:
        await stream.began.wait()
    held, held_bytes = sum(not stream.ended.is_set() for stream in streams), resident_bytes(tree(pid))
    for stream in streams:
        await stream.ended.wait()
    return {
        "streams": len(streams),
        "held_at_once": held,
        "right": sum(stream.right for stream in streams),
        "router_mib": round(held_bytes / 2**20),
        "kib_per_stream": round((held_bytes - before_bytes) / 1024 / max(1, held), 1),
        "processes_lost": len(set(before) - set(tree(pid))),
        "seconds": round(time.monotonic() - began_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relays", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--streams", type=int, help="all slots, if left out")
    parser.add_argument("--tokens", type=int, default=24, help="of each stream")
    parser.add_argument("--step", type=float, default=6.0, help="seconds of a step of all ranks")
    parser.add_argument("--rate", type=float, default=120.0, help="streams that are opened per second")
    parser.add_argument("--log", type=Path, help="where the router's log goes, instead of nowhere")
    arguments = parser.parse_args()
    arguments.streams = arguments.streams or arguments.ranks * SLOTS
    allow_many_sockets()
    flags = ["--step-overhead", str(arguments.step), "--step-cost", "0", "--prefill-rate", "1000000"]
    with temporary_folder() as folder, emulated(2, arguments.ranks, SLOTS, flags, folder) as (config, _):
        (port,), log = free_ports(1), arguments.log or folder / "serve.log"
        serve = ["serve", "--config", str(config), "--port", str(port), "--relays", str(arguments.relays)]
        serve += ["--set", f"listen.run_folder={folder}/run", "--set", "limits.max_connections=20000"]
        with process(serve, log) as router:
            wait_ready(f"http://127.0.0.1:{port}/ready", router, log)
            found = uvloop.run(hold(port, router.pid, arguments))
    print(json.dumps({"relays": arguments.relays, **found}))
    if found["right"] != arguments.streams:
        raise SystemExit(f"{arguments.streams - found['right']} streams were not right")


if __name__ == "__main__":
    main()
