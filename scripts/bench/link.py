"""What the link between relays and the brain costs: ZeroMQ beside asyncio's own sockets, with the same messages.

    .venv/bin/python -m scripts.bench.link            # needs pyzmq beside balanceroute's own dependencies

Two processes, each with an event loop of uvloop. *Tokens*: the sender writes a frame every 5 ms that tells one token of
each of 375 streams (75,000 tokens/s; a relay of two that carry 144 x 64 streams), and the receiver decodes it. CPU of
both processes per frame, without what the same loops cost when nothing is sent. *Calls*: a request's arrival is sent
when the last answer has come; the time of a round trip. Rounds are interleaved; medians.

Not measured: what the scheduler does with either.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, Final

import uvloop

try:
    import zmq
    import zmq.asyncio
except ModuleNotFoundError:
    raise SystemExit("this compares with ZeroMQ: install pyzmq first") from None

from balanceroute.core.types import RequestSpec
from balanceroute.proxy.link.messages import Chosen, Progress, Submit, frame, read_from_brain, read_from_relay
from scripts.proc import cpu_s

PERIOD_S: Final = 0.005
STREAMS: Final = 375
FRAMES: Final = 400
CALLS: Final = 400
ROUNDS: Final = 5

PROGRESS: Final = Progress(tuple(range(100_000, 100_000 + STREAMS)), (1,) * STREAMS)
SUBMIT: Final = Submit(7, RequestSpec("cmpl-3f2a91c07b5e4d1e9a6c", 900, max_new_tokens=1024))


def answer_to(body: bytes | memoryview) -> bytes | None:
    """What the receiver does with a frame."""
    (message,) = read_from_relay(body)
    return frame([Chosen(message.ticket, 1, "10.0.0.1:8100")]) if isinstance(message, Submit) else None


class Frames(asyncio.Protocol):
    """Frames on a stream socket."""

    def __init__(self, on_frame: Callable[["Frames", memoryview], None]) -> None:
        self._on_frame, self._rest = on_frame, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        view, at = memoryview(data), 0
        while len(data) - at >= 4:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > len(data):
                break
            self._on_frame(self, view[at + 4 : end])
            at = end
        self._rest = data[at:]


def _answer(connection: Frames, body: memoryview) -> None:
    answer = answer_to(body)
    if answer is not None:
        connection.transport.write(answer)


async def sockets_receiver(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(lambda: Frames(_answer), path)
    await server.serve_forever()


async def zmq_receiver(path: str) -> None:
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")
    while True:
        sender, message = await socket.recv_multipart()
        answer = answer_to(memoryview(message)[4:])
        if answer is not None:
            await socket.send_multipart([sender, answer])


async def sockets_sender() -> tuple[Callable[[str], Awaitable[None]], Callable[[bytes], Awaitable[None]], Any]:
    came = asyncio.Event()
    found: list[Frames] = []

    def on_frame(connection: Frames, body: memoryview) -> None:
        read_from_brain(body)
        came.set()

    async def connect(path: str) -> None:
        _, protocol = await asyncio.get_running_loop().create_unix_connection(lambda: Frames(on_frame), path)
        found.append(protocol)

    async def send(message: bytes) -> None:
        found[0].transport.write(message)

    async def answered() -> None:
        await came.wait()
        came.clear()

    return connect, send, answered


async def zmq_sender() -> tuple[Callable[[str], Awaitable[None]], Callable[[bytes], Awaitable[None]], Any]:
    socket = zmq.asyncio.Context().socket(zmq.DEALER)

    async def connect(path: str) -> None:
        socket.connect(f"ipc://{path}")

    async def send(message: bytes) -> None:
        await socket.send(message)

    async def answered() -> None:
        read_from_brain(memoryview(await socket.recv())[4:])

    return connect, send, answered


RECEIVERS: Final = {"sockets": sockets_receiver, "zmq": zmq_receiver}
SENDERS: Final = {"sockets": sockets_sender, "zmq": zmq_sender}


def receive(kind: str, path: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(RECEIVERS[kind](path))


def send(kind: str, path: str, receiver: int, results: Connection) -> None:
    async def run() -> None:
        connect, send, answered = await SENDERS[kind]()
        await connect(path)
        await send(frame([SUBMIT]))
        await answered()
        costs = []
        for busy in (False, True):
            before = time.process_time(), cpu_s([receiver])
            for _ in range(FRAMES):
                if busy:
                    await send(frame([PROGRESS]))
                await asyncio.sleep(PERIOD_S)
            costs.append((time.process_time() - before[0], cpu_s([receiver]) - before[1]))
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            await send(frame([SUBMIT]))
            await answered()
            times.append(time.perf_counter() - began)
        per_frame = [1e6 * (costs[1][side] - costs[0][side]) / FRAMES for side in (0, 1)]
        results.send((*per_frame, 1e6 * statistics.median(times)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows: dict[str, list[tuple[float, float, float]]] = {"sockets": [], "zmq": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            for kind, found in rows.items():
                path = f"{folder}/{kind}{number}"
                receiver = multiprocessing.Process(target=receive, args=(kind, path), daemon=True)
                receiver.start()
                while not os.path.exists(path):
                    time.sleep(0.01)
                ours, theirs = multiprocessing.Pipe()
                sender = multiprocessing.Process(target=send, args=(kind, path, receiver.pid, theirs), daemon=True)
                sender.start()
                found.append(ours.recv())
                sender.join()
                receiver.terminate()
                receiver.join()
    print(f"{len(frame([PROGRESS]))} bytes per frame of {STREAMS} tokens; {ROUNDS} rounds, medians, us")
    print(f"{'':10}{'sender CPU/frame':>18}{'receiver CPU/frame':>20}{'round trip':>12}")
    for kind, found in rows.items():
        sent, received, trip = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{kind:10}{sent:18.0f}{received:20.0f}{trip:12.0f}")


if __name__ == "__main__":
    main()
