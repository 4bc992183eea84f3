"""Client keys at run time: who a key belongs to, and what it has used of its limits. No clock: times are arguments.

Rates are token buckets that hold one minute's allowance, so a key that was idle may use its minute at once and then
goes on at its pace. A request's tokens are known only at its end; they are charged then, and while that has left the
bucket below zero, new requests wait outside.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hmac import compare_digest

from balanceroute.config import KeyEntry, digest_of
from balanceroute.errors import AccessDenied, KeyLimit
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.wire.responses import Headers

_BUSY_RETRY_S = 1.0  # when one of a key's requests ends can't be known


@dataclass(slots=True)
class Bucket:
    """An allowance per minute; `level` may be below zero after a charge that could not be known before."""

    per_minute: int
    level: float
    at_s: float = math.inf  # of the last look

    def wait_s(self, now: float, amount: float) -> float:
        """How long until `amount` is there; 0 when it is."""
        rate = self.per_minute / 60.0  # per second
        self.level = min(self.per_minute, self.level + max(0.0, now - self.at_s) * rate)
        self.at_s = now
        return max(0.0, (amount - self.level) / rate)

    def resized(self, per_minute: int) -> "Bucket":
        """The same use under another limit."""
        return Bucket(per_minute, self.level - self.per_minute + per_minute, self.at_s)


class ClientKey:
    """One key: its entry in the file, and its use. `elsewhere` are requests in flight at other processes."""

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
    )

    def __init__(self, entry: KeyEntry) -> None:
        self.in_flight = self.elsewhere = 0
        self._elsewhere: dict[str, int] = {}  # by process
        self._untold_requests = self._untold_tokens = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.change(entry)

    @property
    def name(self) -> str:
        """As in the file; for the log and `/state`."""
        return self.entry.name

    def change(self, entry: KeyEntry) -> None:
        """Go on under a new entry of the same name; what has been used stays used."""
        self.entry, self.digest = entry, bytes.fromhex(entry.sha256)
        self._requests = _bucket(entry.requests_per_minute, self._requests)
        self._tokens = _bucket(entry.tokens_per_minute, self._tokens)

    def enter(self, now: float) -> None:
        """A request begins; `leave` ends it. Raises: KeyLimit: the key has no room for it."""
        entry = self.entry
        if entry.max_in_flight is not None and self.in_flight + self.elsewhere >= entry.max_in_flight:
            text = f"This key may have {entry.max_in_flight} requests in flight, and has them."
            raise KeyLimit(text, retry_after_s=_BUSY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now, 0.0)) > 0:
            text = f"This key may use {entry.tokens_per_minute} tokens per minute, and has used them."
            raise KeyLimit(text, retry_after_s=wait_s)
        if self._requests is not None:
            if (wait_s := self._requests.wait_s(now, 1.0)) > 0:
                text = f"This key may send {entry.requests_per_minute} requests per minute, and has sent them."
                raise KeyLimit(text, retry_after_s=wait_s)
            self._requests.level -= 1.0
        self.in_flight += 1
        self._untold_requests += 1

    def leave(self, now: float, tokens: int = 0) -> None:
        """A request that had entered is over; `tokens` are those of its prompt and of its answer."""
        self.in_flight -= 1
        self._untold_tokens += tokens
        if self._tokens is not None and tokens:
            self._tokens.wait_s(now, 0.0)
            self._tokens.level -= tokens

    def use(self) -> KeyUse | None:
        """What others have to know, to tell them; None: nothing since the last call."""
        told = KeyUse(self.name, self.in_flight, self._untold_requests, self._untold_tokens)
        self._untold_requests = self._untold_tokens = 0
        return told if told.in_flight or told.requests or told.tokens else None

    def used_elsewhere(self, process: str, use: KeyUse | None, now: float) -> None:
        """What another process has of this key by now; None: nothing."""
        if use is None:
            self._elsewhere.pop(process, None)
        else:
            self._elsewhere[process] = use.in_flight
            for bucket, amount in ((self._requests, use.requests), (self._tokens, use.tokens)):
                if bucket is not None and amount:
                    bucket.wait_s(now, 0.0)
                    bucket.level -= amount
        self.elsewhere = sum(self._elsewhere.values())

    def forget_elsewhere(self) -> None:
        """No other process has any of it in flight, as far as is known."""
        self._elsewhere, self.elsewhere = {}, 0


class ClientKeys:
    """All keys of the file. None of them is known here, only their hashes."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._by_digest = {key.digest: key for key in map(ClientKey, entries)}

    def __iter__(self) -> Iterator[ClientKey]:
        return iter(self._by_digest.values())

    def inherit(self, before: "ClientKeys") -> None:
        """Take the place of other keys, whose use goes on under the same names."""
        known = {key.name: key for key in before}
        for digest, key in self._by_digest.items():
            if key.name in known:
                known[key.name].change(key.entry)
                self._by_digest[digest] = known[key.name]

    def uses(self) -> tuple[KeyUse, ...]:
        """What other processes have to know of all keys."""
        return tuple(use for key in self if (use := key.use()) is not None)

    def used_elsewhere(self, process: str, uses: Iterable[KeyUse], now: float) -> None:
        """What another process has of all keys by now."""
        by_name = {use.name: use for use in uses}
        for key in self:
            key.used_elsewhere(process, by_name.get(key.name), now)

    def forget_elsewhere(self) -> None:
        """Nothing is known of other processes any more: each tells anew what it has in flight."""
        for key in self:
            key.forget_elsewhere()

    def of(self, headers: Headers) -> ClientKey:
        """Whose key the headers hold, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

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


def _bucket(per_minute: int | None, before: Bucket | None) -> Bucket | None:
    if per_minute is None:
        return None
    return Bucket(per_minute, per_minute) if before is None else before.resized(per_minute)
