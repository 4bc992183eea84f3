"""Errors that end a leg or a try, and that no lower layer raises."""

from typing import Final

from balanceroute.errors import BadUpstreamReply, BalanceRouteError, UpstreamTimeout

TOO_LONG: Final = "The request took longer than its X-Request-Timeout, or limits.request_timeout_s of the router"


class NothingPinned(BadUpstreamReply):
    """The prefiller answered without kv_transfer_params; without them a decoder would prefill itself."""


class PromptsDiffer(BadUpstreamReply):
    """Prefiller and decode worker have made different prompts of one request, so the KV is wrong.

    `elsewhere`: another decode worker may make the same one as the prefiller, or another prefiller the same one as the
    decode workers. `prefiller`: the id of this one, then, which is to blame; "": the decode worker is.
    """

    elsewhere = False
    prefiller = ""


class WorkerSilent(UpstreamTimeout):
    """The worker has fallen silent, and the request leaves it (`mover.py`)."""


class DeadlineExceeded(UpstreamTimeout):
    """The request as a whole took too long."""

    retryable = False


class KvTooOld(Exception):
    """The prefiller may have dropped the KV before the decode worker pulled it; the blocks may hold other data."""


class KvLost(KvTooOld):
    """The prefiller's process has ended since, and its KV with it."""


class ClientGone(Exception):
    """The client has disconnected."""


class ClientStalled(BalanceRouteError):
    """The client has stopped reading."""
