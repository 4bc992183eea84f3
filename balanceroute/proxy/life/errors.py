"""How a leg ends or a try fails, as far as nobody below it knows."""

from balanceroute.errors import BadUpstreamReply, BalanceRouteError, UpstreamTimeout


class NothingPinned(BadUpstreamReply):
    """The prefiller answered without kv_transfer_params: sent on, a decoder would prefill by itself."""


class PromptsDiffer(BadUpstreamReply):
    """Prefiller and decode worker have made another prompt each of one request: the KV is none of what is decoded."""


class WorkerSilent(UpstreamTimeout):
    """The worker has fallen silent, and the request leaves it (`mover.py`)."""


class DeadlineExceeded(UpstreamTimeout):
    """The request as a whole took too long."""

    retryable = False


class KvTooOld(Exception):
    """A prefiller may have dropped the KV before the decode worker had pulled it: it would read what is there then."""


class KvLost(KvTooOld):
    """The prefiller's process has ended since, and its KV with it."""


class ClientGone(Exception):
    """The client disconnected: nobody is there to be answered."""


class ClientStalled(BalanceRouteError):
    """The client has stopped reading."""
