"""Passes a decode worker's callback to the relay that holds its request (`life/layerwise.py`).

All relays accept on the same sockets, so a callback may arrive at any of them. Its token begins with the name of the
relay that made it (`wire/connectors.py`), and that relay listens on a socket in the run folder. The relay that was
called first asks it whether it expects the token, and only then reads the body, as a router in one process does. The
brain takes no part, so callbacks arrive also while there is none.

    relay that is called                       relay that the token names
      |-- Ask(token) -------------------------------->|
      |<-- "expected" or "refused" -------------------|
      |-- Ask(token, body), on another connection --->|
      |<-- the outcome -------------------------------|

A relay that is stopped answers late. The decode worker does not call again, so the body is sent nevertheless: the relay
finds it in its socket when it runs again.

Each message is four bytes of length, big-endian, and one msgpack value.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from balanceroute.proxy.link.files import is_still
from balanceroute.proxy.link.messages import HEAD_BYTES, MAX_FRAME_BYTES
from balanceroute.proxy.telemetry.clock import now_s
from balanceroute.proxy.telemetry.ticks import until_tick_s
from balanceroute.proxy.telemetry.troubles import Trouble
from balanceroute.proxy.wire.connectors import owner_of

log = logging.getLogger(__name__)

EXPECTED: Final = "expected"
REFUSED: Final = "refused"
LATE: Final = "late"
LOOK_S: Final = 0.25  # between two checks of the socket's file: a decode worker does not call again
LOOKS: Final = 8  # for a socket: the run folder may have to be made anew first
PATIENCE_S: Final = 5.0  # for an answer: a decode worker has few threads for its callbacks
_TOKEN: Final = re.compile(r"relay-[0-9]{1,9}(\.[0-9]{1,9})?\.[A-Za-z0-9_-]{1,64}")


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """The question whether a relay expects the token; with the body, the request to take the callback."""

    token: str
    body: bytes | None = None


_asks: Final = msgspec.msgpack.Decoder(Ask)
_answers: Final = msgspec.msgpack.Decoder(str)
_NO_FRAME: Final = (OSError, asyncio.IncompleteReadError, ValueError, TimeoutError)


class OtherRelays:
    """The other relays of one run folder, one of which may hold the request of a callback."""

    def __init__(self, name: str, socket_of: Callable[[str], Path]) -> None:
        """`name`: of this relay, which is not asked. `socket_of`: the path of a relay's socket, by its name."""
        self._name, self._socket_of = name, socket_of

    async def ask(self, token: str, body: bytes | None = None) -> str:
        """`EXPECTED`, or `REFUSED` if no relay expects the token; with a body, the outcome of the callback. `LATE`: the
        relay does not answer; if it is only stopped it will read the question, and its requests may go on.
        """
        if not _TOKEN.fullmatch(token) or (owner := owner_of(token)) == self._name:
            return REFUSED
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await self._connected(self._socket_of(owner))
                try:
                    _write(writer, Ask(token, body))
                    return _answers.decode(await _read(reader))
                finally:
                    writer.transport.abort()  # what the kernel has is read; larger bodies are not kept for a late one
        except TimeoutError:
            return LATE
        except _NO_FRAME:
            return REFUSED

    async def _connected(self, path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to that relay. Raises: OSError: there is none.

        A killed relay leaves its socket behind, which refuses. All else may be over soon: a socket that somebody has
        removed is made again, clients give descriptors back.
        """
        for _ in range(LOOKS):
            try:
                return await asyncio.open_unix_connection(path)
            except ConnectionRefusedError:
                raise
            except OSError:
                await asyncio.sleep(LOOK_S)
        return await asyncio.open_unix_connection(path)


class CallbackListener:
    """The socket at which other relays ask this one.

    `serve` listens, `watch` makes a removed socket anew, `close` ends.
    """

    def __init__(self, path: Path, answer: Callable[[str, bytes | None], str]) -> None:
        """`path`: of the socket. `answer`: what this relay says to the token and body of an `Ask`."""
        self._path, self._answer = path, answer
        self._server: asyncio.Server | None = None
        self._status: os.stat_result | None = None  # identifies the own socket
        self._trouble = Trouble(
            log,
            "callbacks that other relays receive do not reach this one",
            "callbacks that other relays receive reach this one again",
        )

    async def serve(self) -> None:
        """Listen, for our user alone; a socket that a dead relay of this name has left is replaced."""
        self._server = await asyncio.start_unix_server(self._answered, self._path)
        with suppress(FileNotFoundError):  # somebody has removed it already: `watch` listens anew
            os.chmod(self._path, 0o600)
            self._status = self._path.stat()

    @property
    def is_reached(self) -> bool:
        """Whether other relays can reach this one, as far as `watch` knows."""
        return not self._trouble.lasts

    async def watch(self) -> None:
        """Four times per second, listen anew if somebody has removed or replaced the socket; until cancelled."""
        while True:
            await asyncio.sleep(until_tick_s(now_s(), LOOK_S))
            try:
                if self._status is None or not is_still(self._path, self._status):
                    await self._serve_again()
                self._path.stat()  # fails in a folder that nobody can use any more
            except OSError as error:
                self._trouble.begin(socket=str(self._path), error=error.strerror)
            else:
                self._trouble.end(socket=str(self._path))

    async def _serve_again(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.serve()

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            with suppress(OSError):  # a folder that cannot be used must not keep the relay from ending as it should
                self._path.unlink()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(*_NO_FRAME):  # the other side takes no answer for a refusal
                async with asyncio.timeout(PATIENCE_S):
                    asked = _asks.decode(await _read(reader))
                    _write(writer, self._answer(asked.token, asked.body))
                    await writer.drain()
        finally:
            writer.close()


def _write(writer: asyncio.StreamWriter, value: Ask | str) -> None:
    body = msgspec.msgpack.encode(value)
    writer.write(len(body).to_bytes(HEAD_BYTES, "big") + body)


async def _read(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "big")
    if size > MAX_FRAME_BYTES:
        raise ValueError("larger than any frame")
    return await reader.readexactly(size)
