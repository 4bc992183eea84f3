"""Every exception that balanceroute raises on purpose.

    BalanceRouteError            .status_hint
    ├── ConfigError              key path, value, what would be accepted; the CLI exits 2
    ├── InputError               a file the user gave is wrong (trace, snapshot, journal); the CLI exits 2
    ├── InvalidRequest           400, or 413 for a body over the limit
    │   ├── NotJson              400: a body that cannot be read as JSON
    │   └── AccessDenied         401 without a valid credential, 403 where none would help, 415
    ├── Rejected                 no worker was used, safe to retry
    │   ├── QueueFull            429
    │   ├── KeyLimit             429
    │   ├── QueueTimeout         503
    │   ├── NoHealthyWorkers     503
    │   ├── EdgeFull             503
    │   └── Draining             503
    ├── UpstreamError            .worker .tier .retryable
    │   ├── ConnectFailed        502
    │   │   └── CannotConnect    503: for want of descriptors or ports, not of a worker
    │   ├── UpstreamTimeout      504
    │   ├── BadUpstreamReply     502; ForeignReply where it answers another request
    │   │   ├── ConnectionLost   the connection ended inside the reply
    │   │   ├── NoCompletion     a prefiller's 200 that can't be read
    │   │   └── ReplyTooLarge    it is larger than the router reads
    │   ├── DecodersLost         502, not to be tried again
    │   ├── NotResumable         502
    │   └── UpstreamStatus       the worker's own status and body
    └── InvariantError           our bug: counted, logged with a snapshot, fatal in tests and simulation

Foreign exceptions are translated where they enter (`proxy/workers/upstream.py` for the network); nothing else is caught
wholesale. Of this list the core raises `ConfigError` and `InputError` where it reads settings and snapshots. Deciding
raises nothing but `InvariantError`: it refuses with a `Reject` action.
"""

from typing import ClassVar, Final

RETRY_AFTER_S: Final = 1.0  # when a client may try again, where nothing says another time


class BalanceRouteError(Exception):
    """Root of the tree; `status_hint` is the HTTP status a client should see."""

    status_hint: ClassVar[int] = 500


class ConfigError(BalanceRouteError):
    """A configuration value is unknown, malformed or contradicts another; the text names the key path.

    `problems` are all that are wrong, one line each; the error's own text is the first, and how many more there are.
    """

    def __init__(self, *problems: str) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__("".join(problems[:1]) + more)
        self.problems = problems


class InputError(BalanceRouteError):
    """A file that the user gave cannot be used; the text names the file and, where known, the line."""


class InvalidRequest(BalanceRouteError):
    """The client's request is wrong: 400, or `status` where another one says it better (413)."""

    status_hint = 400

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class NotJson(InvalidRequest):
    """A body that is no JSON at all."""


class AccessDenied(InvalidRequest):
    """The caller may not use this route. `code`: OpenAI's; `reason`: for metrics and the log."""

    def __init__(self, message: str, *, status: int, reason: str, code: str | None = None) -> None:
        super().__init__(message, status=status)
        self.reason = reason
        self.code = code


class Rejected(BalanceRouteError):
    """Refused before any worker was used, so the client may retry."""

    status_hint = 503

    def __init__(self, message: str, *, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Rejected):
    """The arrival queue is at its bound: capacity exists but is busy."""

    status_hint = 429


class KeyLimit(Rejected):
    """A client key has used up what it may have; `key` is its name, `reason` as for `AccessDenied`."""

    status_hint = 429
    reason = "key_limit"

    def __init__(self, message: str, *, key: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.key = key


class QueueTimeout(Rejected):
    """The request waited longer than its queue deadline."""


class NoHealthyWorkers(Rejected):
    """No worker of a needed role can serve."""


class EdgeFull(Rejected):
    """The router has as many client connections, or holds as many bytes of requests and answers, as it may."""


class Draining(Rejected):
    """The proxy is shutting down."""


class UpstreamError(BalanceRouteError):
    """A worker failed; `worker` is its id, `tier` is prefill or decode, `kind` the label of metrics."""

    status_hint = 502
    retryable: ClassVar[bool] = True  # on another worker
    kind = "other"

    def __init__(self, message: str, *, worker: str, tier: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.tier = tier


class ConnectFailed(UpstreamError):
    """No connection, or it broke before the reply began; `sent` says whether the worker may have seen the request."""

    kind = "connect"
    sent = True


class CannotConnect(ConnectFailed):
    """This process had no descriptor, port or memory for a connection, or stood still: nothing of the worker."""

    status_hint = 503
    retry_after_s = RETRY_AFTER_S
    sent = False


class UpstreamTimeout(UpstreamError):
    """The worker did not answer in time."""

    status_hint = 504
    kind = "timeout"


class BadUpstreamReply(UpstreamError):
    """The worker answered something that the contract does not allow."""

    kind = "bad_reply"


class ConnectionLost(BadUpstreamReply):
    """The connection ended inside the reply: the worker has died, or what is between us and it."""


class NoCompletion(BadUpstreamReply):
    """A prefiller's answer with status 200 can't be read."""


class ReplyTooLarge(BadUpstreamReply):
    """The worker's answer is larger than the router reads; the request may have asked for as much."""

    retryable = False


class DecodersLost(UpstreamError):
    """Decode workers died under this request again and again before its first token: it is likely to be the cause."""

    retryable = False


class NotResumable(UpstreamError):
    """An answer that has begun was cut off, and what its engine knew of it beside tokens is gone."""

    retryable = False


class ForeignReply(BadUpstreamReply):
    """The worker answered with another request's answer."""

    kind = "foreign_reply"


class UpstreamStatus(UpstreamError):
    """The worker answered with an error status; the client sees this status and body.

    `retry_after_s` is the pause that it asked for, 0 for none.
    """

    retry_after_s = 0.0

    def __init__(self, message: str, *, worker: str, tier: str, status: int, body: bytes) -> None:
        super().__init__(message, worker=worker, tier=tier)
        self.status = status
        self.kind = f"status_{status // 100}xx"
        self.body = body


class InvariantError(BalanceRouteError):
    """The snapshot contradicts itself: a bug of balanceroute, never of a client or a worker."""
