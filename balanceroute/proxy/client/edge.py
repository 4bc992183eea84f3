"""All client connections of a listener together: their handlers, limits and deadlines.

No connection has a timer. Each has its deadline as a number, and `Edge` checks all of them a few times per second, so
deadlines are kept to within `period_s`.

**Places.** Above `max_connections` the connection that has waited longest without a complete request is closed, so slow
or silent clients keep no other out. If all are busy, the new one gets 503, except for GET and HEAD, so that an operator
and a liveness probe still reach the router, and requests that always have room (`Request.has_room`). To send one takes
a moment, in which others may come; so those that came without a place are closed only where a process has more than
`RESERVE` of them. If all of these are busy, too, new connections are closed unread. Who has no place takes none from
others, however long it is silent, and gets a free one with its next request. Places and bytes are counted with those
of all other relays on this machine.

**Unread answers.** What a client has not read of an answer stays in memory. The limit on stalled clients does not bound
it: at 512 bytes/s an answer of 64 MB is read for a day and a half. So while all of it is above `max_held_bytes`, relays
with more than their part of that close the connections with most of it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Final, Protocol

from starlette.types import Receive, Scope, Send

from balanceroute.config import Config
from balanceroute.errors import BalanceRouteError, EdgeFull
from balanceroute.proxy.client.descriptors import most_clients, most_clients_here
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.relay_loads import CONNECTIONS, INCOMING_BYTES, SERVED_BYTES, UNREAD_BYTES, Load, alone
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.telemetry.ticks import Looks

log = logging.getLogger(__name__)

RESERVE: Final = 64


class Handler(Protocol):
    """Serves one request. `run` is called when its body is complete; of an ASGI application, with its head."""

    def check(self) -> None:
        """Judge the request by its head, before its body is read. Raises: BalanceRouteError: it is refused."""

    def refuse(self, error: BalanceRouteError) -> None:
        """Answer with an error, and count it: `check` has refused the request, or its body is invalid."""

    def abandoned(self) -> None:
        """The client has gone before its body was complete."""

    def run(self) -> Coroutine[Any, Any, None]:
        """Answer. A response that is not complete on return ends uncleanly."""


class Site(Protocol):
    """The routes of a listener.

    `hot` are the routes that are served without ASGI, by path, for POST. `gate` checks every request's head before its
    body is read.
    """

    @property
    def hot(self) -> Mapping[str, Callable[[Request, Response], Handler]]:
        """Makes the handler of one request."""

    @property
    def leaving(self) -> bool:
        """Whether connections end after their next request: the router drains, or another process is to serve their
        clients.
        """

    def gate(self, request: Request) -> None:
        """Raises: BalanceRouteError: the request is refused with it."""

    def refused(self, reason: str) -> None:
        """Count a refusal of the edge by its reason, one of a handful of words."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve any other route, as ASGI."""


class Connection(Protocol):
    """A client connection, as `Edge` uses it."""

    @property
    def unread_bytes(self) -> int:
        """The bytes of answers that its client has not read."""

    def look(self, now: float) -> None:
        """Check the deadlines; `now` is the loop's time."""

    def give_way(self) -> None:
        """Close, for another client."""

    def abort(self) -> None:
        """Close at once."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds on what one connection may take, in seconds and bytes; the settings of `limits` say what each is for.

    `max_connections`: of all relays. `max_connections_here`: of this process.
    """

    max_connections: int = 10_000
    max_connections_here: int = 10_000
    receive_timeout_s: float = 30.0
    min_rate_bytes_per_s: int = 512
    keep_alive_s: float = 75.0
    stall_timeout_s: float = 60.0
    max_body_bytes: int = 32 * 2**20
    max_incoming_bytes: int = 2**30
    max_held_bytes: int = 2 * 2**30

    @classmethod
    def of(cls, config: Config) -> "ClientLimits":
        """The limits of a configuration, reduced to what this process has descriptors for.

        A body that would never find room is too large: 503 would have its client try again for ever.
        """
        limits = config.limits
        return cls(
            max_connections=most_clients(config),
            max_connections_here=most_clients_here(config),
            receive_timeout_s=limits.client_header_timeout_s,
            min_rate_bytes_per_s=limits.client_min_rate_bytes_per_s,
            keep_alive_s=limits.client_keep_alive_s,
            stall_timeout_s=limits.client_stall_timeout_s,
            max_body_bytes=min(limits.max_body_bytes, limits.max_held_bytes // 2, limits.max_incoming_bytes),
            max_incoming_bytes=limits.max_incoming_bytes,
            max_held_bytes=limits.max_held_bytes,
        )

    def one_holder_bytes(self, relays: int, elsewhere_bytes: int) -> int:
        """The bytes that one client may hold at one of `relays` relays, when the others hold `elsewhere_bytes`.

        It may have half of all bytes. What the others hold may be its, too; but it has this relay's part of that half
        for certain, and at least one body, if that half has room for it.
        """
        half = self.max_held_bytes // 2
        return max(half // relays, half - elsewhere_bytes, min(self.max_body_bytes, half))


def limits_of(config: Callable[[], Config]) -> Callable[[], ClientLimits]:
    """A function that returns the limits of the present configuration, which a reload changes."""
    known: tuple[Config, ClientLimits] | None = None

    def limits() -> ClientLimits:
        nonlocal known
        now = config()
        if known is None or known[0] is not now:
            known = now, ClientLimits.of(now)
        return known[1]

    return limits


class Edge:
    """All connections, with their shared limits and counts.

    Attributes: `waiting`: connections without a complete request, longest wait first. `held`: bytes of large bodies by
    client. `date_line`: the Date field. `tasks` (of requests under way) and `connections`: the server's own sets.
    """

    def __init__(
        self,
        site: Site,
        limits: Callable[[], ClientLimits],
        loop: asyncio.AbstractEventLoop,
        connections: "set[Any]",
        tasks: "set[asyncio.Task[None]]",
        app_state: Mapping[str, Any],
        load: Load | None = None,
        on_bug: Callable[[str], None] = lambda where: None,
    ) -> None:
        """`limits`: returns the present limits. `load`: this relay's counts in shared memory; None: there are no other
        relays. `on_bug`: counts a bug.
        """
        self.load = alone() if load is None else load
        self.site, self._limits, self.loop, self._on_bug = site, limits, loop, on_bug
        self.connections: set[Connection] = connections
        self.tasks, self.app_state = tasks, app_state
        self.waiting: dict[Connection, None] = {}
        self._placeless: set[Connection] = set()  # there was no place when they came, or with their last request
        self._incoming_bytes = self._served_bytes = 0
        self.held: dict[str, int] = {}
        self.date_line = b""
        self._looking: asyncio.TimerHandle | None = None
        self.looks = Looks()

    @property
    def limits(self) -> ClientLimits:
        """The limits in force."""
        return self._limits()

    @property
    def period_s(self) -> float:
        """The time between two looks at all connections."""
        limits = self._limits()
        shortest_s = min(limits.receive_timeout_s, limits.keep_alive_s, limits.stall_timeout_s)
        return min(1.0, max(0.05, shortest_s / 4))

    @property
    def incoming_bytes(self) -> int:
        """Bytes of all bodies of this process that are not complete."""
        return self._incoming_bytes

    @incoming_bytes.setter
    def incoming_bytes(self, size: int) -> None:
        self._incoming_bytes = size
        self.load.put(INCOMING_BYTES, size)

    @property
    def served_bytes(self) -> int:
        """Bytes of all complete bodies whose answers are not complete."""
        return self._served_bytes

    @served_bytes.setter
    def served_bytes(self, size: int) -> None:
        self._served_bytes = size
        self.load.put(SERVED_BYTES, size)

    @property
    def full(self) -> bool:
        """Whether more connections have places than may have, of all relays or of this one."""
        here, limits = self._places_taken, self.limits
        everywhere = here + self.load.others(CONNECTIONS)
        return everywhere > limits.max_connections or here > limits.max_connections_here

    @property
    def _places_taken(self) -> int:
        return len(self.connections) - len(self._placeless)

    def check_place(self, connection: Connection, method: str) -> None:
        """Check that a request of this method has a place. Raises: EdgeFull: too many connections."""
        if connection in self._placeless and not self._take_place(connection) and method not in ("GET", "HEAD"):
            text = "The router has as many client connections as it may have; try again shortly."
            raise EdgeFull(text)

    def check_incoming_bytes(self, holder: str = "") -> None:
        """Check that there is room for more of an incomplete request, among these and among all (`check_held_bytes`).

        Raises: EdgeFull: too many bytes.
        """
        if self._incoming_bytes + self.load.others(INCOMING_BYTES) > self.limits.max_incoming_bytes:
            raise _no_room()
        self.check_held_bytes(holder)

    def check_held_bytes(self, holder: str = "", more_bytes: int = 0) -> None:
        """Check that there is room for `more_bytes` among those of all requests.

        One client may have half of the room (`ClientLimits.one_holder_bytes`).

        Args: holder: the client that a large body is counted for; "": there is none.

        Raises: EdgeFull: too many bytes.
        """
        limits, load = self.limits, self.load
        others = load.others(INCOMING_BYTES) + load.others(SERVED_BYTES)
        if self._incoming_bytes + self._served_bytes + more_bytes + others > limits.max_held_bytes:
            raise _no_room()
        if self.held.get(holder, 0) > limits.one_holder_bytes(load.relays, others):
            text = "This client's requests and answers hold as many bytes as one client's may; try again shortly."
            raise EdgeFull(text)

    def hold(self, holder: str, size: int) -> None:
        """Count `size` more bytes (or fewer, if negative) of a large body for the client `holder`."""
        held = self.held.pop(holder, 0) + size
        if held:
            self.held[holder] = held

    def join(self, connection: Connection) -> bool:
        """Add a new connection; False: there is no room even to refuse it."""
        self.connections.add(connection)
        if not self._take_place(connection):
            self._close_longest_waiting(with_place=True)
            if not self._take_place(connection) and len(self._placeless) > RESERVE:
                self._close_longest_waiting(with_place=False)
                if len(self._placeless) > RESERVE:
                    return False
        self.waiting[connection] = None
        if self._looking is None:
            self._look()
        return True

    def _take_place(self, connection: Connection) -> bool:
        """Give it a place; False: none is free."""
        self._placeless.discard(connection)
        self._share_load()  # before the look, so that two relays that take the last place at once see each other
        if not self.full:
            return True
        self._placeless.add(connection)
        self._share_load()
        return False

    def _close_longest_waiting(self, *, with_place: bool) -> None:
        longest = next((each for each in self.waiting if (each not in self._placeless) is with_place), None)
        if longest is not None:
            longest.give_way()
            self.leave(longest)  # its place is free now, before its socket has closed

    def leave(self, connection: Connection) -> None:
        """A connection is lost."""
        self.connections.discard(connection)
        self.waiting.pop(connection, None)
        self._placeless.discard(connection)
        self._share_load()

    def _share_load(self) -> None:
        self.load.put(CONNECTIONS, self._places_taken)

    def _look(self) -> None:
        now, period_s = self.loop.time(), self.period_s
        stood_still = self.looks.stood_still(now, 2 * period_s)
        self.date_line = f"date: {formatdate(usegmt=True)}\r\n".encode()
        if not (stood_still and self.connections):  # so that input that waits is not read first
            unread: dict[Connection, int] = {}
            for connection in list(self.connections):
                try:
                    connection.look(now)
                    if unread_bytes := connection.unread_bytes:
                        unread[connection] = unread_bytes
                except Exception:
                    self._on_bug("client connections")
                    log.exception("internal error", extra={"where": "client connections"})
                    connection.abort()
            self._bound_unread(unread)
        self._looking = self.loop.call_later(period_s, self._look) if self.connections else None

    def _bound_unread(self, unread: "dict[Connection, int]") -> None:
        """Close the connections with most unread bytes, if all of them are too many. A single one may have any number.

        This relay may have what others leave, and its part for certain.

        Args: unread: their numbers.
        """
        total, most, load = sum(unread.values()), self.limits.max_held_bytes, self.load
        room, left, closed = max(most // load.relays, most - load.others(UNREAD_BYTES)), total, 0
        if left > room:
            for connection in sorted(unread, key=unread.__getitem__, reverse=True)[:-1]:
                connection.abort()
                left -= unread[connection]
                closed += 1
                if left <= room:
                    break
        load.put(UNREAD_BYTES, left)
        if closed:
            fields = {"bytes": total, "closed": closed}
            log.warning("answers unread by clients fill limits.max_held_bytes", extra=fields)


def _no_room() -> EdgeFull:
    text = "The router holds as many bytes of requests and answers as it may; try again shortly."
    return EdgeFull(text)
