"""Hostile clients, in a process of their own: what each attack does to a router.

    python -m scripts.chaos_run.besiegers NAME --port N --seconds S --size N [--core N]

Every attack ends by itself after its seconds; who is cut off comes again. They come from several loopback addresses.
Prints one line of JSON: what was done. No task per byte: one per connection.
"""

import argparse
import asyncio
import itertools
import json
import os
import resource
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import uvloop

HOST: Final = "127.0.0.1"
SOURCES: Final = tuple(f"127.0.0.{last}" for last in range(2, 10))
DRIP_S: Final = 0.5
PAUSE_S: Final = 0.05  # after a connection was cut off or refused
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends RST
_HEALTH: Final = b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n"
_HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
_LONG: Final = b'{"model": "emulated", "prompt": "a", "max_tokens": 4000, "ignore_eos": true, "stream": true}'


@dataclass(slots=True)
class Siege:
    """One attack: whom, until when, by how many; `done` counts what happened."""

    port: int
    until_s: float
    size: int
    done: Counter[str] = field(default_factory=Counter)
    _sources: "itertools.cycle[str]" = field(default_factory=lambda: itertools.cycle(SOURCES))

    @property
    def over(self) -> bool:
        """Whether its time is up."""
        return asyncio.get_running_loop().time() >= self.until_s

    async def connect(self, receive_buffer_bytes: int | None = None) -> socket.socket:
        """A connection from the next of the addresses. Raises: OSError."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        try:
            sock.bind((next(self._sources), 0))
            await asyncio.get_running_loop().sock_connect(sock, (HOST, self.port))
        except BaseException:
            sock.close()
            raise
        self.done["connections"] += 1
        return sock

    async def again_and_again(self, one: Callable[[socket.socket], Awaitable[None]], **options: int) -> None:
        """Let one attacker connect and act, until the time is up."""
        while not self.over:
            try:
                sock = await self.connect(**options)
            except OSError:
                self.done["refused"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                async with asyncio.timeout_at(self.until_s):
                    await one(sock)
            except TimeoutError:
                return
            except OSError:
                self.done["cut off"] += 1
            finally:
                sock.close()
            await asyncio.sleep(PAUSE_S)

    async def by_many(self, one: Callable[[socket.socket], Awaitable[None]], **options: int) -> None:
        """The same, `size` times side by side."""
        await asyncio.gather(*(self.again_and_again(one, **options) for _ in range(self.size)))

    async def drip(self, sock: socket.socket, data: bytes) -> None:
        """Send byte by byte until cut off."""
        loop = asyncio.get_running_loop()
        for byte in itertools.cycle(data):
            await loop.sock_sendall(sock, bytes([byte]))
            self.done["bytes"] += 1
            try:
                async with asyncio.timeout(DRIP_S):
                    if await loop.sock_recv(sock, 4096):
                        self.done["answers"] += 1
                    raise ConnectionResetError
            except TimeoutError:
                continue

    async def pour(self, sock: socket.socket, data: bytes) -> None:
        """Send over and over, as fast as it is taken, until cut off."""
        loop = asyncio.get_running_loop()
        while True:
            await loop.sock_sendall(sock, data)
            self.done["bytes"] += len(data)


async def slow_heads(siege: Siege) -> None:
    """Heads of which a byte comes now and then."""

    async def one(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, b"GET /health HTTP/1.1\r\nHost: router\r\nX-A: ")
        await siege.drip(sock, b"a")

    await siege.by_many(one)


async def slow_bodies(siege: Siege) -> None:
    """Whole heads, and bodies of which a byte comes now and then."""

    async def one(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, _HEAD + b"Content-Length: 1000000\r\n\r\n")
        await siege.drip(sock, b" ")

    await siege.by_many(one)


async def pipelines(siege: Siege) -> None:
    """Requests without end whose answers nobody reads."""

    async def one(sock: socket.socket) -> None:
        await siege.pour(sock, _HEALTH * 1000)

    await siege.by_many(one, receive_buffer_bytes=4096)


async def trailers(siege: Siege) -> None:
    """Chunked bodies whose trailers have no end."""

    async def one(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(
            sock, _HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        )
        await siege.pour(sock, b"x-trailer: y\r\n" * 1000)

    await siege.by_many(one)


async def never_readers(siege: Siege) -> None:
    """Long streams of which nothing is read."""

    async def one(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, _HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(_LONG), _LONG))
        while not siege.over:  # only the end is looked for, and that rarely
            await asyncio.sleep(1.0)
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _peer_has_closed(sock):
                raise ConnectionResetError

    await siege.by_many(one, receive_buffer_bytes=4096)


def _peer_has_closed(sock: socket.socket) -> bool:
    """Whether the kernel says that the other side has closed, with bytes unread before that or not."""
    established = 1  # TCP_ESTABLISHED, the first byte of struct tcp_info
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != established


async def connections(siege: Siege) -> None:
    """As many connections as it takes, which say nothing."""

    async def one(sock: socket.socket) -> None:
        if await asyncio.get_running_loop().sock_recv(sock, 1) == b"":
            raise ConnectionResetError

    await siege.by_many(one)


async def churn(siege: Siege) -> None:
    """`size` clients that come, say something and go, in every way, 64 at a time."""
    numbers = iter(range(siege.size))
    loop = asyncio.get_running_loop()
    beginnings = (
        b"",
        b"G",
        _HEALTH[:20],
        _HEALTH,
        _HEAD,
        _HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(_LONG), _LONG),
    )

    async def come_and_go() -> None:
        for number in numbers:
            if siege.over:
                return
            try:
                sock = await siege.connect()
            except OSError:
                siege.done["refused"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                await loop.sock_sendall(sock, beginnings[number % len(beginnings)])
                if number % 7 == 0:
                    sock.shutdown(socket.SHUT_WR)
                if number % 2:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            except OSError:
                siege.done["cut off"] += 1
            finally:
                sock.close()

    await asyncio.gather(*(come_and_go() for _ in range(64)))


ATTACKS: Final[dict[str, Callable[[Siege], Awaitable[None]]]] = {
    "slow-heads": slow_heads,
    "slow-bodies": slow_bodies,
    "pipelines": pipelines,
    "trailers": trailers,
    "never-readers": never_readers,
    "connections": connections,
    "churn": churn,
}


async def attack(name: str, port: int, seconds: float, size: int) -> dict[str, int]:
    """One attack; what was done."""
    siege = Siege(port, asyncio.get_running_loop().time() + seconds, size)
    await ATTACKS[name](siege)
    return dict(siege.done)


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(ATTACKS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--core", type=int)
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    json.dump(uvloop.run(attack(arguments.name, arguments.port, arguments.seconds, arguments.size)), sys.stdout)


if __name__ == "__main__":
    main()
