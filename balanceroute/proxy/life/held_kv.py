"""The KV that a request has at a prefiller: from its pinning to the first word of the decode worker that pulls it.

A prefiller keeps KV for a time and then drops it, unseen by anybody. A decode worker that pulls later gets what is in
those blocks by then, another prompt's KV most likely, and caches it as this prompt's. The same may happen where the
prefiller was started anew meanwhile, under the same engine id. Two looks prevent that such an answer is used:

*Before.* Right before the parameters are written to a decode worker they are looked at once more (`spend`): they must
not be written once the prefiller may soon drop the KV, as after a pause of our whole process, or has lost it.

*After.* When the first word comes, or our own pause shows, the KV may have been gone when it was pulled (`watch_pull`).
Then everything that this worker was sent by now is made anew, and it gets a salt for its prefix cache, under which it
finds none of what it has cached so far (`doubt`).

Parameters are used once: `params` are there until a decode worker may have seen them.
"""

from balanceroute.core.types import UP
from balanceroute.proxy.life.errors import KvLost, KvTooOld
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.pins import Pin


class HeldKv:
    """One request's KV, one after the other where it is prefilled again.

    Attributes: `params`, the kv_transfer_params that no decode worker has seen; `pinned_s`, since when their KV has
    been pinned at most; `pin`, the record of it, for as long as `params` are there; `cache_salt`, that of the decode
    worker when it was asked.
    """

    __slots__ = (
        "_ended_at",
        "_prefiller",
        "_pulls_at",
        "_sent_s",
        "_services",
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
        self._prefiller: Worker | None = None  # that has pinned it
        self._ended_at = 0.0  # when that had ended last by then
        self._pulls_at: Worker | None = None  # the decode worker that has the parameters, and has said nothing yet
        self._sent_s = 0.0  # since when

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

    def spend(self, worker: Worker) -> None:
        """The parameters are about to be written to this decode worker. Raises: KvTooOld: they must not be."""
        if self._lost:
            raise KvLost
        if self._services.drainer.too_old(self.pinned_s):
            raise KvTooOld
        self.params = None
        self._pulls_at, self._sent_s = worker, self._services.tickets.now()
        if self.pin is not None:
            self.pin.release()

    def refused(self, params: bytes) -> None:
        """The decode worker's engine has surely not seen the parameters that it was sent: their KV is still pinned."""
        self.params = params
        if self.pin is not None:
            self.pin.hold()

    def written(self, worker: Worker) -> None:
        """The head of a stream is here: if the KV is too old by now, we may have been stopped before the writing."""
        if self._services.drainer.too_old(self.pinned_s):
            self.doubt(worker)

    def watch_pull(self, *, streams: bool) -> None:
        """See whether the KV may have been dropped before the decode worker, which owes its first word, pulled it.

        With NIXL a worker keeps KV alive while it is at work, as its tokens show: those that came before our last look,
        for what is read after a pause of ours may be of any time. One that answers as a whole (not `streams`) may be
        busy with that answer, as long as nothing is known against it.
        """
        worker, looked_s = self._pulls_at, self._services.last_look_s
        if worker is None or self.cache_salt != worker.cache_salt:
            return
        alive_s = self._sent_s
        if not streams and worker.state is UP:
            alive_s = looked_s
        elif self._services.config.connector == "nixl":
            alive_s = min(worker.progress_s, looked_s)
        if self._services.drainer.outlived(self.pinned_s, max(alive_s, self._sent_s)):
            self.doubt(worker)

    def doubt(self, worker: Worker) -> None:
        """The decode worker may have pulled, and cached, what is not its KV: what it was sent by now is made anew."""
        if self.cache_salt == worker.cache_salt:
            self._services.fleet.doubt_cache(worker)

    def check_first_word(self, worker: Worker, *, streams: bool) -> None:
        """The first word of the decode worker is here. Raises: KvTooOld: it may have read another request's KV."""
        self.watch_pull(streams=streams)
        self.answered()
        if self.cache_salt != worker.cache_salt:
            raise KvTooOld

    def answered(self) -> None:
        """No first word is waited for any more."""
        self._pulls_at = None
