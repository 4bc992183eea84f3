"""Client keys at run time: recognises them, and keeps their limits. No clock: times are arguments.

Relays on a machine share their use in memory (`key_table.py`). Relays of other machines report it to each other, and so
do a router and its successor.

Rates are token buckets that hold one minute's allowance: an idle key may use that at once, and then continues at its
rate. A request's tokens are known only at its end; they are charged then, and while the bucket is below zero, new
requests are refused.
"""

import math
from collections.abc import Iterable, Iterator

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
    RelayRows,
    Row,
    row_alone,
)
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.wire.responses import Headers

_BUSY_RETRY_S = 1.0  # Retry-After with too many requests in flight: the end of one is unknown


class Bucket:
    """An allowance per minute, of all rows of a key together.

        level = rate * now - lost - used

    `lost`: refills while the bucket was full. `lost` and `used` only grow, so all relays, also restarted ones, compute
    the same level in any order. `level` may be below zero after a charge that was not known before.
    """

    __slots__ = ("_per_minute", "_rate", "_row", "_which")

    def __init__(self, row: Row, which: int, per_minute: int) -> None:
        """`which`: the first field of this rate."""
        self._row, self._which = row, which
        self._per_minute, self._rate = float(per_minute), per_minute / 60.0  # per second

    def level(self, now: float, charged: float = 0.0) -> float:
        """The level after a use of `charged` that is counted already, with `lost` from before it."""
        row, which, per_minute = self._row, self._which, self._per_minute
        self.apply_limit(now, charged)
        used, lost = self._look(per_minute)
        given = self._rate * now
        lost = max(lost, given - per_minute - (used - charged))
        if lost != row.own(which + LOST):
            row.put(which + LOST, lost)
        return given - lost - used

    def apply_limit(self, now: float, charged: float = 0.0) -> None:
        """Set this relay's row to this limit."""
        if self._row.own(self._which + PER_MINUTE) != self._per_minute:
            self._begin(now, charged)

    def wait_s(self, now: float, charged: float = 0.0) -> float:
        """Seconds until the level reaches zero; 0: it is not below."""
        return max(0.0, -self.level(now, charged) / self._rate)

    def _look(self, per_minute: float) -> tuple[float, float]:
        """The use of all relays, and the largest `lost` of those with this limit."""
        row, which, relays = self._row, self._which, self._row.relays
        while True:
            cells = row.rate(which)
            limits, losses = cells[2 * relays : 3 * relays], cells[3 * relays :]
            if limits.count(per_minute) + limits.count(0.0) == relays:
                lost = max(losses)
            else:
                mine = [each for each, limit in zip(losses, limits, strict=True) if limit == per_minute]
                lost = max(mine, default=-math.inf)
            if lost == row.own(which + LOST) or row.all(which + PER_MINUTE) == limits:  # else a row just changes
                return sum(cells[:relays]) + max(cells[relays : 2 * relays]), lost

    def _begin(self, now: float, charged: float) -> None:
        """Change to this limit; the first relay that does so carries over what the bucket lacked under the former
        limit.
        """
        row, which, before = self._row, self._which, self._row.own(self._which + PER_MINUTE)
        used, lost = self._look(self._per_minute)
        if before > 0 and lost == -math.inf:
            used -= charged
            level = min(before, before / 60.0 * now - self._look(before)[1] - used)
            # without a debt before, a smaller bucket is empty at worst
            level = max(self._per_minute - (before - level), min(level, 0.0))
            lost = self._rate * now - used - level
        _limit(row, which, self._per_minute, lost)


class ClientKey:
    """One key: its entry in the file, and its use.

    `in_flight`: requests of this process. `elsewhere`: requests that other processes report; relays on this machine
    write theirs to the key's shared `row`. `used`: the keys with a use to report, of all keys of the file.
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
        "used",
    )

    def __init__(self, entry: KeyEntry, row: Row | None, used: "dict[ClientKey, None]") -> None:
        self.used = used
        self.in_flight = self.elsewhere = 0
        self.row = row_alone() if row is None else row
        self._elsewhere: dict[str, int] = {}  # by process
        self._untold_requests = self._untold_tokens = 0
        self.change(entry)

    @property
    def name(self) -> str:
        """As in the file; for the log and `/state`."""
        return self.entry.name

    @property
    def holder(self) -> str:
        """The client's name for the edge's count of memory for bodies."""
        return f"key {self.entry.name}"

    def change(self, entry: KeyEntry) -> None:
        """Use a new entry of the same name; its past use still counts."""
        self.entry, self.digest = entry, bytes.fromhex(entry.sha256)
        self._requests = _bucket(self.row, REQUESTS, entry.requests_per_minute)
        self._tokens = _bucket(self.row, TOKENS, entry.tokens_per_minute)

    def buckets(self) -> list[Bucket]:
        """The buckets of the rates that have a limit."""
        return [bucket for bucket in (self._requests, self._tokens) if bucket is not None]

    def enter(self, now: float) -> None:
        """A request begins; `leave` ends it. Raises: KeyLimit: the key has no room for it."""
        self.row.add(IN_FLIGHT, 1.0)  # before the check, so that two relays that begin at once see each other
        try:
            self._check(now)
        except KeyLimit:
            self.row.add(IN_FLIGHT, -1.0)
            raise
        self.in_flight += 1
        self._untold_requests += 1
        self.used[self] = None

    def _check(self, now: float) -> None:
        """Charge a request that is counted as in flight. Raises: KeyLimit: it uses nothing."""
        entry, row = self.entry, self.row
        if entry.max_in_flight is not None and sum(row.all(IN_FLIGHT)) + self.elsewhere > entry.max_in_flight:
            text = f"This key may have {_some(entry.max_in_flight, 'request')} in flight at once, and has so many."
            raise KeyLimit(text, key=self.name, retry_after_s=_BUSY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now)) > 0:
            text = f"This key may use {_some(entry.tokens_per_minute, 'token')} per minute, and has used so many."
            raise KeyLimit(text, key=self.name, retry_after_s=wait_s)
        row.add(REQUESTS + USED, 1.0)
        if self._requests is not None and (wait_s := self._requests.wait_s(now, 1.0)) > 0:
            row.add(REQUESTS + USED, -1.0)
            text = f"This key may send {_some(entry.requests_per_minute, 'request')} per minute, and has sent so many."
            raise KeyLimit(text, key=self.name, retry_after_s=wait_s)

    def leave(self, now: float, tokens: int = 0) -> None:
        """A request that entered is over; `tokens`: of its prompt and of its answer."""
        self.in_flight -= 1
        self.row.add(IN_FLIGHT, -1.0)
        self._untold_tokens += tokens
        self._charge(self._tokens, TOKENS + USED, tokens, now)

    def use(self) -> KeyUse | None:
        """The use to report to other processes; None: unchanged since the last call."""
        use = KeyUse(self.name, self.in_flight, self._untold_requests, self._untold_tokens)
        self._untold_requests = self._untold_tokens = 0
        return use if use.in_flight or use.requests or use.tokens else None

    def used_elsewhere(self, process: str, use: KeyUse | None, now: float) -> None:
        """Take another process's use of this key; None: it has no requests in flight any more."""
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
            bucket.level(now)  # full until now, if it was full
        self.row.add(field, amount)


class ClientKeys:
    """The keys of the file, which contains only their hashes.

    Relays report several times per second, and there may be 100,000 keys: that takes no look at keys that nobody uses.
    """

    def __init__(self, entries: Iterable[KeyEntry], relay_rows: RelayRows | None = None) -> None:
        """`relay_rows`: of the key table of this machine's relays; None: there are no other relays."""
        entries = tuple(entries)
        rows = {} if relay_rows is None else relay_rows.rows([entry.name for entry in entries])
        self._used: dict[ClientKey, None] = {}
        keys = [ClientKey(entry, rows.get(entry.name), self._used) for entry in entries]
        self._by_digest = {key.digest: key for key in keys}
        self._by_name = {key.name: key for key in keys}
        self._used_elsewhere: dict[str, list[ClientKey]] = {}  # by process: what it has told last

    def __iter__(self) -> Iterator[ClientKey]:
        return iter(self._by_digest.values())

    def inherit(self, before: "ClientKeys") -> None:
        """Take over the use of the former keys of the same names."""
        self._used_elsewhere = before._used_elsewhere
        for digest, key in self._by_digest.items():
            known = before._by_name.get(key.name)
            if known is None:
                continue
            known.change(key.entry)
            if known in known.used:
                self._used[known] = None
            known.used = self._used
            self._by_digest[digest] = self._by_name[key.name] = known
        before._used.clear()  # it and keys that were removed refer to each other

    def apply_limits(self, now: float) -> None:
        """Change all rows to the limits of the file now.

        A relay that did so only at its next request might find an old level of that limit, if all had another limit
        meanwhile.
        """
        for key in self:
            for bucket in key.buckets():
                bucket.apply_limit(now)

    def uses(self) -> tuple[KeyUse, ...]:
        """The use of all keys to report to other processes."""
        told = []
        for key in list(self._used):
            use = key.use()
            if use is None:
                del self._used[key]
            else:
                told.append(use)
        return tuple(told)

    def used_elsewhere(self, process: str, uses: Iterable[KeyUse], now: float) -> None:
        """Take another process's use of all keys."""
        told = {use.name: use for use in uses if use.name in self._by_name}
        for key in self._used_elsewhere.pop(process, ()):
            if key.name not in told:
                key.used_elsewhere(process, None, now)
        for name, use in told.items():
            self._by_name[name].used_elsewhere(process, use, now)
        if told:
            self._used_elsewhere[process] = [self._by_name[name] for name in told]

    def forget_elsewhere(self) -> None:
        """Forget the requests in flight of other processes: each reports them again."""
        for keys in self._used_elsewhere.values():
            for key in keys:
                key.forget_elsewhere()
        self._used_elsewhere.clear()

    def of(self, headers: Headers) -> ClientKey:
        """The key in the headers, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

        It is looked up by its hash, so the time taken reveals nothing about a key. Raises: AccessDenied: 401.
        """
        given = credential(headers)
        if given is None:
            raise AccessDenied(
                "No API key was given. Send it in an Authorization header: Authorization: Bearer YOUR_KEY.",
                status=401,
                reason="no_key",
            )
        key = self._by_digest.get(digest_of(given))
        if key is None:
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
    """The bearer token, or else the x-api-key; None: there is neither. Empty, which is no key: there are several."""
    given = bearer(headers)
    if given is not None:
        return given
    keys = [value for name, value in headers if name == b"x-api-key"]
    if len(keys) > 1:
        return b""
    return keys[0].strip() if keys else None


def _some(count: int | None, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _bucket(row: Row, which: int, per_minute: int | None) -> Bucket | None:
    if per_minute is not None:
        return Bucket(row, which, per_minute)
    _limit(row, which, 0.0, -math.inf)  # if the process returns it begins anew
    return None


def _limit(row: Row, which: int, per_minute: float, lost: float) -> None:
    """Change a relay's row to another limit, so that `lost` of one limit is never used with another."""
    row.put(which + PER_MINUTE, -1.0)
    row.put(which + LOST, lost)
    row.put(which + PER_MINUTE, per_minute)
