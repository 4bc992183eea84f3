"""Every exception that balanceroute raises on purpose.

    BalanceRouteError            .status_hint, .retryable
    ├── ConfigError              key path, value, what would be accepted; the CLI exits 2
    ├── InputError               a file the user gave is wrong (trace, snapshot, journal); the CLI exits 2
    ├── InvalidRequest           400, or 413 for a body over the limit
    ├── Rejected                 no worker was used, safe to retry
    │   ├── QueueFull            429
    │   ├── QueueTimeout         503
    │   ├── NoHealthyWorkers     503
    │   └── Draining             503
    ├── UpstreamError            .worker .stage
    │   ├── ConnectFailed        502
    │   ├── UpstreamTimeout      504
    │   ├── BadUpstreamReply     502
    │   └── UpstreamStatus       the worker's own status and body
    └── InvariantError           our bug: counted, logged with a snapshot, fatal in tests and simulation

Foreign exceptions are translated where they enter (`proxy/upstream.py` for the network); nothing else is caught
wholesale. The core never raises anything of this list but `InvariantError`: it refuses with a `Reject` action.
"""

from typing import ClassVar


class BalanceRouteError(Exception):
    """Root of the tree; `status_hint` is the HTTP status a client should see."""

    status_hint: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


class ConfigError(BalanceRouteError):
    """A configuration value is unknown, malformed or contradicts another; the text names the key path."""


class InputError(BalanceRouteError):
    """A file that the user gave cannot be used; the text names the file and, where known, the line."""


class InvalidRequest(BalanceRouteError):
    """The client's request is wrong: 400, or `status` where another one says it better (413)."""

    status_hint = 400

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Rejected(BalanceRouteError):
    """Refused before any worker was used, so the client may retry."""

    status_hint = 503
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Rejected):
    """The arrival queue is at its bound: capacity exists but is busy."""

    status_hint = 429


class QueueTimeout(Rejected):
    """The request waited longer than its queue deadline."""


class NoHealthyWorkers(Rejected):
    """No worker of a needed role can serve."""


class Draining(Rejected):
    """The proxy is shutting down."""


class UpstreamError(BalanceRouteError):
    """A worker failed; `worker` is its id, `stage` is prefill or decode."""

    status_hint = 502
    retryable = True

    def __init__(self, message: str, *, worker: str, stage: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.stage = stage


class ConnectFailed(UpstreamError):
    """No connection, or it broke before the reply began; `sent` says whether the worker may have seen the request."""

    sent = True


class UpstreamTimeout(UpstreamError):
    """The worker did not answer in time."""

    status_hint = 504


class BadUpstreamReply(UpstreamError):
    """The worker answered something that the contract does not allow."""


class UpstreamStatus(UpstreamError):
    """The worker answered with an error status; the client sees this status and body.

    `retry_after_s` is the pause that it asked for, 0 for none.
    """

    retry_after_s = 0.0

    def __init__(self, message: str, *, worker: str, stage: str, status: int, body: bytes) -> None:
        super().__init__(message, worker=worker, stage=stage)
        self.status = status
        self.body = body


class InvariantError(BalanceRouteError):
    """The snapshot contradicts itself: a bug of ours, never of a client or a worker."""
