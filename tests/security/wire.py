"""A client that says exactly what it is told to, byte for byte, and reads answers strictly."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from tests.waiting import PATIENCE_S, block_pace, block_until

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends RST
_READ = 65536


class Ended(Exception):
    """The connection ended before an answer was complete; what had come of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes
    informational: list[int] = field(default_factory=list)

    @property
    def closes(self) -> bool:
        """Whether it says that it is the connection's last."""
        return self.headers.get("connection", "").lower() == "close"

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def error(self) -> str:
        """The message of the error that the body must be, in OpenAI's form or, of its routes, in Anthropic's."""
        assert self.headers["content-type"].startswith("application/json"), self
        whole = self.json()
        error = whole["error"]
        if whole.get("type") == "error":
            assert self.status >= 400 and isinstance(error["type"], str), self
            return str(error["message"])
        assert error["code"] == self.status, self
        assert isinstance(error["type"], str) and "param" in error
        return str(error["message"])


class Connection:
    """One TCP connection. Everything that waits fails after `PATIENCE_S`."""

    def __init__(self, port: int, *, source: str = "127.0.0.1", receive_buffer_bytes: int | None = None) -> None:
        self._socket = socket.socket()
        if receive_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(PATIENCE_S)
        self._socket.bind((source, 0))
        self._socket.connect(("127.0.0.1", port))
        self._received = b""
        self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what the client says

    def send(self, data: bytes) -> bool:
        """Send all of it; whether the other side took it. One that has hung up already is no failure."""
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def send_bytewise(self, data: bytes) -> bool:
        """The same, one byte per segment."""
        return all(self.send(data[at : at + 1]) for at in range(len(data)))

    def send_until_answered(self, data: bytes, every_s: float) -> bool:
        """Send byte by byte, one per `every_s`, until there is an answer or an end; whether that came first."""
        self._socket.settimeout(every_s)
        try:
            for at in range(len(data)):
                if not self.send(data[at : at + 1]):
                    return True
                try:
                    if self._receive():
                        return True
                except TimeoutError:
                    continue
            return False
        finally:
            self._socket.settimeout(PATIENCE_S)

    def send_until_stuck(self, data: bytes, most_bytes: int) -> int:
        """Send `data` over and over, reading nothing, until nobody takes any for a second; how many bytes went."""
        sent = 0
        self._socket.settimeout(1.0)
        try:
            while sent < most_bytes:
                sent += self._socket.send(data[sent % len(data) :])
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass
        finally:
            self._socket.settimeout(PATIENCE_S)
        return sent

    def half_close(self) -> None:
        """Say that nothing more will come."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def reset(self) -> None:
        """Leave with a RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._socket.close()

    # -- what the client hears

    def answer(self, method: str = "GET") -> Answer:
        """The next answer, to a request of this method. Raises: Ended."""
        informational = []
        while True:
            head = self._until(b"\r\n\r\n").decode("latin-1")
            status_line, *lines = head[:-4].split("\r\n")
            version, code, _ = status_line.split(" ", 2)
            assert version == "HTTP/1.1", status_line
            headers: dict[str, str] = {}
            for line in lines:
                name, _, value = line.partition(":")
                name = name.lower()
                assert name and name == name.strip() and name not in headers, head
                headers[name] = value.strip()
            status = int(code)
            if status >= 200:
                return Answer(status, headers, self._body(method, status, headers), informational)
            informational.append(status)

    def answers(self, count: int) -> list[Answer]:
        """The next `count` answers to GETs."""
        return [self.answer() for _ in range(count)]

    def events(self) -> Iterator[bytes]:
        """The chunks of a chunked answer whose head has been read with `head`."""
        while chunk := self._chunk():
            yield chunk

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of an answer whose body is not read."""
        lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        return int(lines[0].split(" ")[1]), dict(line.lower().split(": ", 1) for line in lines[1:] if line)

    def rest(self) -> bytes:
        """All that still comes, until the end."""
        while self._receive():
            pass
        rest, self._received = self._received, b""
        return rest

    def has_ended(self) -> bool:
        """Wait for the end of the connection; whether it came without another byte."""
        return self.rest() == b""

    def hears_something(self) -> bool:
        """Whether there is an answer or an end already."""
        self._socket.setblocking(False)
        try:
            self._receive()
        except BlockingIOError:
            pass
        finally:
            self._socket.settimeout(PATIENCE_S)
        return bool(self._received) or self._over

    def hears_end(self) -> bool:
        """Whether the connection has ended already."""
        self.hears_something()
        return self._over

    def reads_a_byte(self, after_s: float) -> bool:
        """Read one byte after some time; True, whether there was one or the end."""
        block_pace(after_s)
        with suppress(ConnectionResetError):
            self._socket.recv(1)
        return True

    def _body(self, method: str, status: int, headers: dict[str, str]) -> bytes:
        if method == "HEAD" or status in (204, 304):
            return b""
        if "content-length" in headers:
            assert "transfer-encoding" not in headers, headers
            return self._exactly(int(headers["content-length"]))
        if "transfer-encoding" in headers:
            assert headers["transfer-encoding"] == "chunked", headers
            return b"".join(self.events())
        assert headers.get("connection") == "close", headers
        return self.rest()

    def _chunk(self) -> bytes:
        size = int(self._until(b"\r\n"), 16)
        data = self._exactly(size + 2)
        assert data.endswith(b"\r\n"), data
        return data[:-2]

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._received:
            if not self._receive():
                raise Ended(self._received)
        found, _, self._received = self._received.partition(mark)
        return found + mark

    def _exactly(self, size: int) -> bytes:
        while len(self._received) < size:
            if not self._receive():
                raise Ended(self._received)
        data, self._received = self._received[:size], self._received[size:]
        return data

    def _receive(self) -> bool:
        """More bytes, or False at the end."""
        if self._over:
            return False
        try:
            data = self._socket.recv(_READ)
        except ConnectionResetError:
            data = b""
        self._over = not data
        self._received += data
        return bool(data)


def first_heard(*connections: Connection) -> list[Connection]:
    """Wait for the first that hears something; if this process has stood still, others may have heard it since."""
    block_until(lambda: any(connection.hears_something() for connection in connections))
    return [connection for connection in connections if connection.hears_something()]


def request(method: str, target: str, *headers: str, body: bytes | None = None) -> bytes:
    """A correct request; a body brings its length and type."""
    lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


def body(prompt: str = "hello", **fields: Any) -> bytes:
    """The body of a completion of two tokens."""
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": 2, **fields}).encode()


def completion(prompt: str = "hello", *headers: str, **fields: Any) -> bytes:
    """A correct request for a completion."""
    return request("POST", "/v1/completions", *headers, body=body(prompt, **fields))


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    """A chunked body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailers + b"\r\n"
