"""The connections to one worker: HTTP/1.1 with keep-alive, made for thousands of long streams.

    Upstream --request()--> Connection (one transport, one parser) --> Reply (status, headers, then bytes)
       ^                                                                 |
       '---- idle stack <---- reply complete and keep-alive allowed -----'

The idle connections are a stack: taking and returning is O(1) however many streams run. The most recently used
connection, which the worker is least likely to close at this moment, is taken first. One that has been idle for
`keepalive_s` is not used again, and closed when another one becomes idle: uvicorn (so vLLM) closes after 5 s, and
nobody knows what becomes of a request that crosses that close.

**The request in doubt.** A reused connection that ends before one byte of the reply came is retried once on
a fresh connection. The server had closed it while idle, so it has not seen the request; that is the rule of
RFC 9110 section 9.2.2 for a close "prior to any response", and what Envoy calls reset-before-request. It
cannot be told from a server that took the request and died. For a prefill probe that means: in the worst
case a probe runs twice and its KV stays pinned until the connector's timeout. `retry_stale=False` turns it
off, and takes a connection only if it has been idle for at most `FRESH_S`. A server that has stalled may close a
connection although a request on it came in time: it closes at 5 s, so one that was idle for 4 s is lost to a stall of a
second, one that was idle for 1 s only to a stall of 4 s.

**Large requests.** A request that may be sent again is kept until its reply comes, for as long as a prefill takes. One
of more than `LARGE_BYTES` goes over a fresh connection, and is forgotten as it is written.

Errors of the network leave this module, `connection.py` and `reply.py` as `ConnectFailed`, `UpstreamTimeout` or
`BadUpstreamReply`. The environment (`http_proxy`) is not consulted; `accept-encoding` is `identity` and a body is
passed on as it is.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar
from urllib.parse import urlsplit

from mypy_extensions import mypyc_attr

from balanceroute.errors import CannotConnect, ConnectFailed, UpstreamError, UpstreamTimeout
from balanceroute.proxy.wire.responses import Headers, header_lines
from balanceroute.proxy.workers.addresses import Addresses
from balanceroute.proxy.workers.connection import Connection
from balanceroute.proxy.workers.fair_timeout import FairTimeout
from balanceroute.proxy.workers.reply import Reply

KEEPALIVE_S: Final = 4.0  # below the 5 s after which uvicorn closes an idle connection
FRESH_S: Final = 1.0  # a request that can't be repeated uses only connections idle for less
HIGH_WATER_BYTES: Final = 256 * 1024
MAX_READ_BYTES: Final = 512 * 2**20  # of all answers that are being read; the longest one may have half of that
LARGE_BYTES: Final = 256 * 1024  # of a request; to read it costs its worker more than to accept a connection
MAX_IDLE: Final = 4096  # connections to one worker that wait for a request
CONNECT_TIMEOUT_S: Final = 5.0
_SHORTAGES_HERE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OTHER_NAME: Final = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
_MAX_STARTS: Final = 16  # request lines kept ready: the router asks a worker for a handful of paths
_BODILESS: Final = frozenset(("GET", "HEAD", "DELETE"))
_Error = TypeVar("_Error", bound=UpstreamError)


class Connections(Protocol):
    """The interface of an `Upstream` for callers; compiled code accepts any object with these methods."""

    high_water_bytes: int

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Headers | bytes = (),
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        first_byte_timeout_s: float | None = None,
        retry_stale: bool = True,
        about_to_send: Callable[[], None] | None = None,
    ) -> Reply:
        """As `Upstream.request`."""

    def prepare(self) -> None:
        """As `Upstream.prepare`."""

    def drop_idle(self) -> None:
        """As `Upstream.drop_idle`."""

    def retire(self) -> None:
        """As `Upstream.retire`."""

    def close(self) -> None:
        """As `Upstream.close`."""


@mypyc_attr(native_class=False)
class Upstream:
    """One worker's connections; `worker` and `tier` name it in errors."""

    def __init__(
        self,
        url: str,
        *,
        worker: str = "",
        tier: str = "decode",
        ssl_context: Callable[[], ssl.SSLContext] | None = None,
        keepalive_s: float = KEEPALIVE_S,
        high_water_bytes: int = HIGH_WATER_BYTES,
        socket_path: str | None = None,
        fresh_s: float = FRESH_S,
    ) -> None:
        """`url` is http(s)://host[:port][/prefix]; IPv6 hosts in brackets. Nothing is connected yet.

        `ssl_context` is called for each new connection if the URL is https; None: the system's CAs. `socket_path`: of a
        unix socket that is connected to instead of the URL's host.

        Raises: ValueError: the URL is not of that form.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http or https URL with a host")
        self.worker = worker or url
        self.tier = tier
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._addresses = Addresses(self.host)
        self.high_water_bytes = high_water_bytes
        self.read_bytes, self.max_read_bytes = 0, MAX_READ_BYTES
        self._prefix = parts.path.rstrip("/")
        self._ssl: Callable[[], ssl.SSLContext] | None = None
        if parts.scheme == "https":
            self._ssl = ssl_context or ssl.create_default_context
        self._host_header = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
        self._socket_path = socket_path
        self._starts: dict[tuple[str, str], bytes] = {}
        self._keepalive_s = keepalive_s
        self._fresh_s = fresh_s
        self._idle: deque[Connection] = deque()  # longest idle first
        self._busy: set[Connection] = set()
        self._closed = False

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    @property
    def busy_connections(self) -> int:
        """Connections with a request under way."""
        return len(self._busy)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Headers | bytes = (),
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        first_byte_timeout_s: float | None = None,
        retry_stale: bool = True,
        about_to_send: Callable[[], None] | None = None,
    ) -> Reply:
        """Send one request; returns when the reply's head is here.

        The caller must read the reply to its end or `abort()` it. Cancelling this call closes the connection.
        `headers` are sent as they are, beside host and content-length; they must not frame the message. A caller that
        sends the same headers often calls `checked_lines` once, and passes its bytes. `about_to_send` is called when
        there is a connection, right before the request is written to it; what it raises prevents that.

        Raises: ConnectFailed, UpstreamTimeout, BadUpstreamReply.
        """
        message, body = self._message(method, path, body, headers), b""
        while True:
            connection = None
            if len(message) <= LARGE_BYTES:
                connection = self._reused(self._keepalive_s if retry_stale else min(self._fresh_s, self._keepalive_s))
            elif self._idle:
                self._idle.popleft().abort()  # the new one takes its place: else each request would add one
            reused = connection is not None
            if connection is None:
                connection = await self._connected(connect_timeout_s)
            if about_to_send is not None:
                try:
                    about_to_send()
                except BaseException:
                    connection.abort()
                    raise
            self._busy.add(connection)
            reply = connection.send(message)
            if not (reused and retry_stale):
                message = b""  # which is not sent again
            try:
                await self._head(reply, first_byte_timeout_s)
            except ConnectFailed:
                if not (reused and retry_stale) or connection.reply_begun:
                    raise
                retry_stale = False
            else:
                return reply

    async def _head(self, reply: Reply, timeout_s: float | None) -> None:
        """Wait for the reply's head; abort the reply if it does not come. Raises: UpstreamError."""
        delivered = False
        try:
            if timeout_s is None:
                await reply.head
            else:
                async with asyncio.timeout(timeout_s):
                    await reply.head
            delivered = True
        except TimeoutError as exc:
            raise self.failure(UpstreamTimeout, f"no answer within {timeout_s:g} s") from exc
        finally:
            if not delivered:  # also if the head comes at the moment of a cancellation
                reply.abort()

    def prepare(self) -> None:
        """Begin to look the worker's name up, before the first request."""
        self._addresses.prepare()

    def drop_idle(self) -> None:
        """Close idle connections: an answer to another request may be about to come on one of them."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def retire(self) -> None:
        """Take no more requests; connections with a reply under way are closed at its end."""
        self._closed = True
        self.drop_idle()

    def close(self) -> None:
        """Close every connection; replies under way end with `ConnectFailed` or `BadUpstreamReply`."""
        self.retire()
        for connection in list(self._busy):
            connection.abort()

    # ------------------------------------------------------------------------------------ pool

    def _reused(self, idle_s: float) -> Connection | None:
        """A connection that has been idle for `idle_s` at most; None: there is none."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.loop.time() - connection.idle_since > idle_s:
                connection.abort()  # those below it in the stack have been idle for longer still
                while idle:
                    idle.pop().abort()
            elif connection.usable:
                return connection
        return None

    async def _connected(self, connect_timeout_s: float) -> Connection:
        """A new connection."""
        self._check_not_closed()
        loop = asyncio.get_running_loop()
        limit = FairTimeout(connect_timeout_s)
        try:
            async with limit:
                connection = await self._connect(loop, connect_timeout_s)
        except TimeoutError as exc:
            self._addresses.doubt()
            kind = CannotConnect if limit.ours else ConnectFailed
            raise self._unsent(kind, f"no connection within {connect_timeout_s:g} s") from exc
        except (OSError, ssl.SSLError, UnicodeError) as exc:
            kind = CannotConnect if self._is_shortage_here(exc) else ConnectFailed
            raise self._unsent(kind, f"cannot connect: {reason_of(exc)}") from exc
        try:
            self._check_not_closed()  # meanwhile: after `close` nothing must be sent
        except ConnectFailed:
            connection.abort()
            raise
        return connection

    def _check_not_closed(self) -> None:
        if self._closed:
            raise self._unsent(ConnectFailed, "the worker has been removed")

    def _is_shortage_here(self, error: Exception) -> bool:
        """Whether this machine lacks something for a connection.

        EADDRNOTAVAIL: it has no free port for this worker, or no address of the worker's family. If other connections
        to the worker are open, it has such an address.
        """
        if not isinstance(error, OSError):
            return False
        no_port = error.errno == errno.EADDRNOTAVAIL and bool(self._busy or self._idle)
        return no_port or error.errno in _SHORTAGES_HERE

    async def _connect(self, loop: asyncio.AbstractEventLoop, connect_timeout_s: float) -> Connection:
        """A connection to the first address that answers; silent ones before the last take at most half of the time.

        Raises: OSError.
        """
        if self._socket_path is not None:
            _, connection = await loop.create_unix_connection(partial(Connection, self, loop), self._socket_path)
            return connection
        error: OSError | None = None
        addresses = list(await self._addresses.get())
        patience_s = connect_timeout_s / 2 / len(addresses)  # a health check waits half of its own time (`health.py`)
        for left in range(len(addresses), 0, -1):
            address = addresses[-left]
            try:
                async with asyncio.timeout(patience_s if left > 1 else None):
                    connection = await self._connect_to(address, loop)
                if error is not None:
                    self._addresses.prefer(address)
                return connection
            except ssl.SSLError:
                raise
            except OSError as exc:
                if exc.errno in _SHORTAGES_HERE:
                    raise
                error = exc
        self._addresses.doubt()
        assert error is not None, "a name that was found has an address"
        raise error

    async def _connect_to(self, address: str, loop: asyncio.AbstractEventLoop) -> Connection:
        context = None if self._ssl is None else self._ssl()
        name = None if context is None else self.host
        _, connection = await loop.create_connection(
            partial(Connection, self, loop), address, self.port, ssl=context, server_hostname=name
        )
        return connection

    def failure(self, kind: type[_Error], text: str) -> _Error:
        """An error that names the worker."""
        return kind(text, worker=self.worker, tier=self.tier)

    def _unsent(self, kind: type[ConnectFailed], text: str) -> ConnectFailed:
        """An error before the worker can have seen any of the request."""
        error = self.failure(kind, text)
        error.sent = False
        return error

    def _message(self, method: str, path: str, body: bytes, headers: Headers | bytes) -> bytes:
        """Head and body as one write."""
        start = self._starts.get((method, path))
        if start is None:
            line = f"{method} {self._prefix}{path} HTTP/1.1\r\nhost: ".encode("ascii")
            start = line + self._host_header + b"\r\naccept-encoding: identity\r\n"
            if len(self._starts) < _MAX_STARTS:
                self._starts[method, path] = start
        lines = headers if isinstance(headers, bytes) else checked_lines(headers)
        if body or method not in _BODILESS:
            return b"".join((start, lines, b"content-length: %d\r\n\r\n" % len(body), body))
        return b"%s%s\r\n" % (start, lines)

    def release(self, connection: Connection, *, reusable: bool) -> None:
        """A connection's request is over; called once per request."""
        self._busy.discard(connection)
        idle = self._idle
        while idle and connection.idle_since - idle[0].idle_since > self._keepalive_s:
            idle.popleft().abort()  # after a burst it is at the bottom of the stack, and would never be used
        if reusable and not connection.unsent_bytes and not self._closed and len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.abort()


def checked_lines(headers: Headers) -> bytes:
    """Headers as bytes of HTTP/1.1. Raises: ValueError: one contains a line break."""
    lines = header_lines(headers)
    if not lines.count(b"\n") == lines.count(b"\r") == len(headers):
        raise ValueError(f"one of the headers {[name for name, _ in headers]!r} holds a line break")
    return lines


def reason_of(error: BaseException) -> str:
    """Why there is no connection, in words that may go to clients: they name no host."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAME:
            return "its certificate is another host's"
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "its URL is https, and it does not speak TLS"
    if isinstance(error, socket.gaierror):
        return error.strerror or "its name is not known"
    code = error.errno if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else None
    if code is not None and code > 0:
        return os.strerror(code)  # asyncio's own text has the address
    return str(error) or "it closed the connection"
