"""Client keys at run time: who a key belongs to, and what it has used of its limits. No clock: times are arguments.

Relays on one machine share what they have used (`key_table.py`); those of other machines tell it, and so do those of
two routers of which one takes over.

Rates are token buckets that hold one minute's allowance, so a key that was idle may use its minute at once and then
goes on at its pace. A request's tokens are known only at its end; they are charged then, and while that has left the
bucket below zero, new requests wait outside.
"""

import math
from collections.abc import Iterable, Iterator
from hmac import compare_digest

from balanceroute.config import KeyEntry, digest_of
from balanceroute.errors import AccessDenied, KeyLimit
from balanceroute.proxy.perimeter.key_table import (
    FAR,
    IN_FLIGHT,
    LOST,
    PER_MINUTE,
    REQUESTS,
    TOKENS,
    USED,
    Row,
    Seat,
    row_alone,
)
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.wire.responses import Headers

_BUSY_RETRY_S = 1.0  # of a key with too many requests in flight; when one ends is unknown


class Bucket:
    """An allowance per minute, of all rows of a key together.

        level = rate * now - lost - used

    `lost` is what time has given to a bucket that was full. It only grows, as `used` does: whichever relay looks, and
    in whatever order they do, all find the same level, and so does the next life of one that died. `level` may be below
    zero after a charge that could not be known before.
    """

    __slots__ = ("_per_minute", "_rate", "_row", "_which")

    def __init__(self, row: Row, which: int, per_minute: int) -> None:
        """`which`: the first field of this rate."""
        self._row, self._which = row, which
        self._per_minute, self._rate = float(per_minute), per_minute / 60.0  # per second

    def level(self, now: float, charged: float = 0.0) -> float:
        """What is there after a use of `charged` that is counted already; `lost` is as it was before."""
        row, which, per_minute = self._row, self._which, self._per_minute
        self.come_to_limit(now, charged)
        used, lost = self._look(per_minute)
        given = self._rate * now
        lost = max(lost, given - per_minute - (used - charged))
        if lost != row.own(which + LOST):
            row.put(which + LOST, lost)
        return given - lost - used

    def come_to_limit(self, now: float, charged: float = 0.0) -> None:
        """Have this relay's row be about this limit."""
        if self._row.own(self._which + PER_MINUTE) != self._per_minute:
            self._begin(now, charged)

    def wait_s(self, now: float, charged: float = 0.0) -> float:
        """Seconds until the level reaches zero; 0 where it is not below."""
        return max(0.0, -self.level(now, charged) / self._rate)

    def _look(self, per_minute: float) -> tuple[float, float]:
        """What all have used, and the most that was lost as those know it who have this limit."""
        row, which, relays = self._row, self._which, self._row.relays
        while True:
            cells = row.rate(which)
            limits, losses = cells[2 * relays : 3 * relays], cells[3 * relays :]
            if limits.count(per_minute) + limits.count(0.0) == relays:
                lost = max(losses)
            else:
                mine = [each for each, limit in zip(losses, limits, strict=True) if limit == per_minute]
                lost = max(mine, default=-math.inf)
            if lost == row.own(which + LOST) or row.all(which + PER_MINUTE) == limits:  # else one changes just now
                return sum(cells[:relays]) + max(cells[relays : 2 * relays]), lost

    def _begin(self, now: float, charged: float) -> None:
        """Come to this limit; the first relay that does takes along what was missing under the one before."""
        row, which, before = self._row, self._which, self._row.own(self._which + PER_MINUTE)
        used, lost = self._look(self._per_minute)
        if before > 0 and lost == -math.inf:
            used -= charged
            level = min(before, before / 60.0 * now - self._look(before)[1] - used)
            # what is missing is no debt where there was none: a smaller bucket is empty at worst
            level = max(self._per_minute - (before - level), min(level, 0.0))
            lost = self._rate * now - used - level
        _limit(row, which, self._per_minute, lost)


class ClientKey:
    """One key: its entry in the file, and its use.

    `in_flight` are requests here, `elsewhere` those that other processes tell of; relays on this machine write theirs
    to the key's `row` in memory that they share.
    """

    __slots__ = (
        "_elsewhere",
        "_requests",
        "_tokens",
        "_untold_requests",
        "_untold_tokens",
        "digest",
        "elsewhere",
        "entry",
        "in_flight",
        "row",
    )

    def __init__(self, entry: KeyEntry, row: Row | None = None) -> None:
        self.in_flight = self.elsewhere = 0
        self.row = row_alone() if row is None else row
        self._elsewhere: dict[str, int] = {}  # by process
        self._untold_requests = self._untold_tokens = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.change(entry)

    @property
    def name(self) -> str:
        """As in the file; for the log and `/state`."""
        return self.entry.name

    @property
    def holder(self) -> str:
        """The name under which the edge counts the memory that bodies of its requests take."""
        return f"key {self.entry.name}"

    def change(self, entry: KeyEntry) -> None:
        """Use a new entry of the same name; what was used stays used."""
        self.entry, self.digest = entry, bytes.fromhex(entry.sha256)
        self._requests = _bucket(self.row, REQUESTS, entry.requests_per_minute)
        self._tokens = _bucket(self.row, TOKENS, entry.tokens_per_minute)

    def buckets(self) -> list[Bucket]:
        """The buckets of the rates that have a limit."""
        return [bucket for bucket in (self._requests, self._tokens) if bucket is not None]

    def enter(self, now: float) -> None:
        """A request begins; `leave` ends it. Raises: KeyLimit: the key has no room for it."""
        self.row.add(IN_FLIGHT, 1.0)  # before the check: so of two relays that begin at once each sees the other
        try:
            self._check(now)
        except KeyLimit:
            self.row.add(IN_FLIGHT, -1.0)
            raise
        self.in_flight += 1
        self._untold_requests += 1

    def _check(self, now: float) -> None:
        """Charge a request that is counted as in flight. Raises: KeyLimit: it uses nothing."""
        entry, row = self.entry, self.row
        if entry.max_in_flight is not None and sum(row.all(IN_FLIGHT)) + self.elsewhere > entry.max_in_flight:
            text = f"This key may have {entry.max_in_flight} requests in flight, and has them."
            raise KeyLimit(text, key=self.name, retry_after_s=_BUSY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now)) > 0:
            text = f"This key may use {entry.tokens_per_minute} tokens per minute, and has used them."
            raise KeyLimit(text, key=self.name, retry_after_s=wait_s)
        row.add(REQUESTS + USED, 1.0)
        if self._requests is not None and (wait_s := self._requests.wait_s(now, 1.0)) > 0:
            row.add(REQUESTS + USED, -1.0)
            text = f"This key may send {entry.requests_per_minute} requests per minute, and has sent them."
            raise KeyLimit(text, key=self.name, retry_after_s=wait_s)

    def leave(self, now: float, tokens: int = 0) -> None:
        """A request that entered is over; `tokens`: of its prompt and of its answer."""
        self.in_flight -= 1
        self.row.add(IN_FLIGHT, -1.0)
        self._untold_tokens += tokens
        self._charge(self._tokens, TOKENS + USED, tokens, now)

    def use(self) -> KeyUse | None:
        """The use that other processes have to be told; None: nothing has changed since the last call."""
        told = KeyUse(self.name, self.in_flight, self._untold_requests, self._untold_tokens)
        self._untold_requests = self._untold_tokens = 0
        return told if told.in_flight or told.requests or told.tokens else None

    def used_elsewhere(self, process: str, use: KeyUse | None, now: float) -> None:
        """Another process says what it has used of this key; None: nothing any more."""
        if use is None:
            self._elsewhere.pop(process, None)
        else:
            self._elsewhere[process] = use.in_flight
            self._charge(self._requests, REQUESTS + FAR, use.requests, now)
            self._charge(self._tokens, TOKENS + FAR, use.tokens, now)
        self.elsewhere = sum(self._elsewhere.values())

    def forget_elsewhere(self) -> None:
        """Forget what other processes have in flight."""
        self._elsewhere, self.elsewhere = {}, 0

    def _charge(self, bucket: Bucket | None, field: int, amount: int, now: float) -> None:
        if bucket is not None and amount:
            bucket.level(now)  # full until now, where it was
        self.row.add(field, amount)


class ClientKeys:
    """The keys of the file, of which only hashes are known."""

    def __init__(self, entries: Iterable[KeyEntry], seat: Seat | None = None) -> None:
        """`seat`: at the table of what all relays on this machine use; None: there are no others."""
        entries = tuple(entries)
        rows = {} if seat is None else seat.rows([entry.name for entry in entries])
        keys = [ClientKey(entry, rows.get(entry.name)) for entry in entries]
        self._by_digest = {key.digest: key for key in keys}

    def __iter__(self) -> Iterator[ClientKey]:
        return iter(self._by_digest.values())

    def inherit(self, before: "ClientKeys") -> None:
        """Take the use of the keys before over to the keys of the same names."""
        known = {key.name: key for key in before}
        for digest, key in self._by_digest.items():
            if key.name in known:
                known[key.name].change(key.entry)
                self._by_digest[digest] = known[key.name]

    def come_to_limits(self, now: float) -> None:
        """Go by the limits of the file, at once: a relay that comes to one by its next request alone may find that
        limit's level of long ago, where all have had another one meanwhile.
        """
        for key in self:
            for bucket in key.buckets():
                bucket.come_to_limit(now)

    def uses(self) -> tuple[KeyUse, ...]:
        """The use of all keys that other processes have to be told."""
        return tuple(use for key in self if (use := key.use()) is not None)

    def used_elsewhere(self, process: str, uses: Iterable[KeyUse], now: float) -> None:
        """Another process says what it has used of all keys."""
        by_name = {use.name: use for use in uses}
        for key in self:
            key.used_elsewhere(process, by_name.get(key.name), now)

    def forget_elsewhere(self) -> None:
        """Nothing is known of other processes any more: each tells anew what it has in flight."""
        for key in self:
            key.forget_elsewhere()

    def of(self, headers: Headers) -> ClientKey:
        """The key in the headers, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

        What is compared are hashes, so the time that it takes tells nothing about any key. Raises: AccessDenied: 401.
        """
        given = credential(headers)
        if given is None:
            raise AccessDenied(
                "No API key was given. Send it in an Authorization header: Authorization: Bearer YOUR_KEY.",
                status=401,
                reason="no_key",
            )
        digest = digest_of(given)
        key = self._by_digest.get(digest)
        if key is None or not compare_digest(key.digest, digest):
            raise AccessDenied("Incorrect API key provided.", status=401, reason="wrong_key", code="invalid_api_key")
        return key


def bearer(headers: Headers) -> bytes | None:
    """The one bearer token of a request; empty when there is another Authorization, or more than one; None: none."""
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        return None
    scheme, _, token = given[0].partition(b" ")
    return token.strip() if len(given) == 1 and scheme.lower() == b"bearer" else b""


def credential(headers: Headers) -> bytes | None:
    """The bearer token, or else the one x-api-key."""
    given = bearer(headers)
    if given is not None:
        return given
    keys = [value for name, value in headers if name == b"x-api-key"]
    return None if not keys else keys[0].strip() if len(keys) == 1 else b""


def _bucket(row: Row, which: int, per_minute: int | None) -> Bucket | None:
    if per_minute is not None:
        return Bucket(row, which, per_minute)
    _limit(row, which, 0.0, -math.inf)  # one that comes later begins anew
    return None


def _limit(row: Row, which: int, per_minute: float, lost: float) -> None:
    """Have a relay come to another limit; nobody takes what is lost under the one for the other's."""
    row.put(which + PER_MINUTE, -1.0)
    row.put(which + LOST, lost)
    row.put(which + PER_MINUTE, per_minute)
