"""What relays ask each other about callbacks, where one of them says what can't be read."""

import asyncio
import errno
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from balanceroute.proxy.link.callbacks import EXPECTED, REFUSED, CallbackListener, OtherRelays
from tests.waiting import PATIENCE_S

NO_UTF_8 = b"\xa1\xff"  # in msgpack, a text of one byte


def on(test: Callable[[Path], Awaitable[None]]) -> list[dict[str, Any]]:
    """Run a test with a folder for sockets; returns what nobody has caught."""
    uncaught: list[dict[str, Any]] = []

    async def run(folder: Path) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: uncaught.append(context))
        async with asyncio.timeout(PATIENCE_S):
            await test(folder)

    folder = tempfile.mkdtemp(prefix="link")  # a socket's path may have 107 characters
    try:
        asyncio.run(run(Path(folder)))
    finally:
        shutil.rmtree(folder)
    return uncaught


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def test_a_caller_that_sends_no_utf_8_only_loses_its_connection() -> None:
    async def test(folder: Path) -> None:
        listener = CallbackListener(folder / "sock", lambda token, body: token)
        await listener.serve()
        reader, writer = await asyncio.open_unix_connection(folder / "sock")
        writer.write(framed(b"\x91" + NO_UTF_8))
        assert await reader.read() == b""
        writer.close()
        listener.close()

    assert on(test) == []


def test_a_socket_that_is_removed_while_its_relay_starts_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    chmod = os.chmod

    def removed(path: Path, mode: int) -> None:
        monkeypatch.setattr(os, "chmod", chmod)
        path.unlink()
        chmod(path, mode)

    monkeypatch.setattr(os, "chmod", removed)

    async def test(folder: Path) -> None:
        listener = CallbackListener(folder / "relay-1", lambda token, body: EXPECTED)
        await listener.serve()
        watch = asyncio.get_running_loop().create_task(listener.watch())
        relays = OtherRelays("relay-0", lambda relay: folder / relay)
        assert await relays.ask("relay-1.token") == EXPECTED
        watch.cancel()
        listener.close()

    assert on(test) == []


def test_a_relay_whose_folder_cannot_be_used_ends_without_an_error() -> None:
    """The rest of its end was left out: its record of pinned KV was not closed."""

    async def test(folder: Path) -> None:
        listener = CallbackListener(folder / "below" / "relay-1", lambda token, body: EXPECTED)
        (folder / "below").mkdir()
        await listener.serve()
        (folder / "below").rename(folder / "aside")
        (folder / "below").touch()
        listener.close()

    assert on(test) == []


def test_a_relay_without_a_free_descriptor_asks_the_other_one_as_soon_as_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It refused the callback, which does not come again: the request waited for its prefill until it had timed out."""
    connect = asyncio.open_unix_connection

    async def lacks(path: Path) -> Any:
        monkeypatch.setattr(asyncio, "open_unix_connection", connect)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def test(folder: Path) -> None:
        listener = CallbackListener(folder / "relay-1", lambda token, body: EXPECTED)
        await listener.serve()
        monkeypatch.setattr(asyncio, "open_unix_connection", lacks)
        assert await OtherRelays("relay-0", lambda relay: folder / relay).ask("relay-1.token") == EXPECTED
        listener.close()

    assert on(test) == []


def test_an_answer_of_a_relay_in_invalid_utf_8_is_a_refusal() -> None:
    async def test(folder: Path) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(framed(NO_UTF_8))
            await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(answer, folder / "relay-1")
        relays = OtherRelays("relay-0", lambda relay: folder / relay)
        assert await relays.ask("relay-1.token") == REFUSED
        server.close()

    assert on(test) == []
