"""A request's KV at a prefiller: from its pinning to the first event of the decode worker that pulls it.

A prefiller drops pinned KV after a time, without notice. A decode worker that pulls later gets the blocks' new
contents, most likely another prompt's KV, and caches them as this prompt's. The same may happen if the prefiller was
restarted meanwhile, under the same engine id. Two checks prevent that such an answer is used:

*Before.* Right before the parameters are sent to a decode worker, `spend` checks them: they must not be sent if the
prefiller may soon drop the KV, as after a pause of this process, or has lost it.

*After.* When the first event comes, or a pause of this process is noticed, `watch_pull` checks whether the KV may have
been gone when it was pulled. If so, all requests sent to this worker so far are made anew, and later ones get a cache
salt, with which they match nothing that it has cached (`doubt`).

Parameters are used once: `params` is set until a decode worker may have seen them.
"""

from balanceroute.core.types import UP
from balanceroute.proxy.life.errors import KvLost, KvTooOld
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.pins import Pin


class HeldKv:
    """The KV of one request; that of another prefill takes its place.

    Attributes: `params`: kv_transfer_params that no decode worker has seen. `pinned_s`: the earliest time at which
    their KV was pinned. `pin`: its record, while `params` is set. `cache_salt`: the decode worker's, when the request
    was sent.
    """

    __slots__ = (
        "_ended_at",
        "_prefiller",
        "_pulls_at",
        "_sent_s",
        "_services",
        "_streams",
        "cache_salt",
        "params",
        "pin",
        "pinned_s",
    )

    def __init__(self, services: LifeServices) -> None:
        self._services = services
        self.params: bytes | None = None
        self.pinned_s = 0.0
        self.pin: Pin | None = None
        self.cache_salt = ""
        self._prefiller: Worker | None = None  # which has pinned the KV
        self._ended_at = 0.0  # when its process had last ended by then
        self._pulls_at: Worker | None = None  # the decode worker that has the parameters, and has sent nothing yet
        self._sent_s, self._streams = 0.0, False  # since when, and whether it streams its answer

    def pinned(self, prefiller: Worker, params: bytes | None, pinned_s: float) -> None:
        """A prefiller has answered with these parameters, if any, and has pinned the KV at `pinned_s` or later."""
        self.params, self.pinned_s = params, pinned_s
        self._prefiller, self._ended_at = prefiller, prefiller.ended_at

    @property
    def _lost(self) -> bool:
        """Whether the prefiller's process has ended since."""
        return self._prefiller is not None and self._prefiller.ended_at != self._ended_at

    def leave(self) -> bytes | None:
        """The request goes without its KV: the parameters by which that can be freed, if it is there still."""
        params, self.params = self.params, None
        if params is not None and self._lost:
            if self.pin is not None:
                self.pin.release()
            return None
        return params

    def spend(self, worker: Worker, streams: bool) -> None:
        """Give up the parameters, which are about to be sent to this decode worker. Raises: KvTooOld: they must not be
        sent.

        `streams`: whether it is asked for a stream.
        """
        if self._lost:
            raise KvLost
        if self._services.drainer.too_old(self.pinned_s):
            raise KvTooOld
        self.params = None
        self._pulls_at, self._sent_s, self._streams = worker, self._services.tickets.now(), streams
        if self.pin is not None:
            self.pin.release()

    def refused(self, params: bytes) -> None:
        """Take the parameters back: the decode worker's engine certainly has not seen them, so their KV is still
        pinned.
        """
        self.params = params
        if self.pin is not None:
            self.pin.hold()

    def written(self, worker: Worker) -> None:
        """Check at a stream's head: if the KV is too old by now, this process may have been stopped before it sent the
        request.
        """
        if self._services.drainer.too_old(self.pinned_s):
            self.doubt(worker)

    def watch_pull(self) -> None:
        """Check whether the KV may have been dropped before the decode worker, which has sent nothing yet, pulled it.

        With NIXL a working engine keeps KV alive. Its tokens show that it works, but only those read before the last
        look: after a pause of this process bytes may be old. A worker that answers unstreamed counts as working while
        it is up.
        """
        worker, looked_s = self._pulls_at, self._services.last_look_s
        if worker is None or self.cache_salt != worker.cache_salt:
            return
        alive_s = self._sent_s
        if not self._streams and worker.state is UP:
            alive_s = looked_s
        elif self._services.config.connector == "nixl":
            alive_s = min(worker.progress_s, looked_s)
        if self._services.drainer.may_be_gone(self.pinned_s, max(alive_s, self._sent_s)):
            self.doubt(worker)

    def doubt(self, worker: Worker) -> None:
        """Note that the decode worker may have pulled and cached wrong KV: requests sent to it so far are made anew."""
        if self.cache_salt == worker.cache_salt:
            self._services.fleet.doubt_cache(worker)

    def check_first_event(self, worker: Worker) -> None:
        """Check at the decode worker's first event. Raises: KvTooOld: it may have read another request's KV."""
        self.watch_pull()
        self.answered()
        if self.cache_salt != worker.cache_salt:
            raise KvTooOld

    def answered(self) -> None:
        """Stop waiting for the first event."""
        self._pulls_at = None
