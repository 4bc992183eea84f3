"""Views of the snapshot for code outside the core: plain copies.

Code that shows, measures or watches the cluster gets these, never the snapshot itself. A view does not follow later
changes. Those of workers are not frozen: to make a frozen dataclass takes seven times as long, and the router makes
them of all workers several times per second.
"""

from dataclasses import dataclass

from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import DecodeInstanceState, PrefillerBudget
from balanceroute.core.types import WorkerState


@dataclass(slots=True)
class DecoderView:
    """A decode worker.

    Args: active, load_tokens: our own ledger. foreign_requests, foreign_tokens: what others run there. free_slots: 0
    unless it is up. mean_request_tokens: KV tokens of one of our requests there; of a mean prompt where there is none.
    engine_waiting: requests in the engine's own queue, by its last report. ahead: how many of ours may be
    there beyond its slots.
    """

    id: str
    state: WorkerState
    slots: int
    free_slots: int
    active: int
    load_tokens: int
    foreign_requests: int
    foreign_tokens: int
    mean_request_tokens: float
    engine_waiting: int
    ahead: int = 0


@dataclass(slots=True)
class PrefillerView:
    """A prefiller; `kv_usage` is a ratio, None where it does not tell.

    Args: inflight_s: expected seconds of the prefills under way. prompt_tokens, predicted_tokens, hit_tokens: of the
    prompts that it has prefilled for us since it joined, all, those that it was thought to have cached, and those that
    it had; None where it does not tell. missed_tokens: predicted since any were found last, where none are known to be.
    cache_tokens: what it is thought to have cached now. cache_known: its `capacity_tokens` and block size as reported.
    """

    id: str
    state: WorkerState
    kv_usage: float | None
    inflight: int
    pinned: int
    pinned_tokens: int
    inflight_s: float = 0.0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    hit_tokens: int | None = None
    missed_tokens: int = 0
    cache_tokens: int = 0
    cache_known: tuple[int | None, int] = (None, 0)

    @property
    def held(self) -> int:
        """Our requests whose prompts it computes, or whose KV it keeps."""
        return self.inflight + self.pinned


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All workers, and how many requests wait in which phase; `oldest_ready_s`: when the oldest in the pool came there,
    None where it is empty.
    """

    decoders: tuple[DecoderView, ...]
    prefillers: tuple[PrefillerView, ...]
    queued: int
    asking: int
    pooled: int
    pooled_tokens: int
    draining: bool
    oldest_ready_s: float | None = None

    @property
    def prefilling(self) -> int:
        """Probes under way on all prefillers."""
        return sum(prefiller.inflight for prefiller in self.prefillers)


def view_cluster(snapshot: ClusterSnapshot, draining: bool = False) -> ClusterView:
    """O(workers + requests in the pool)."""
    return ClusterView(
        decoders=tuple([view_decoder(snapshot, worker) for worker in snapshot.workers]),
        prefillers=tuple([view_prefiller(prefiller) for prefiller in snapshot.prefillers]),
        queued=len(snapshot.queued),
        asking=len(snapshot.asking),
        pooled=len(snapshot.pool),
        pooled_tokens=snapshot.pool.tokens,
        draining=draining,
        oldest_ready_s=min((tracker.ready_s for tracker in snapshot.pool), default=None),
    )


def view_decoder(snapshot: ClusterSnapshot, worker: DecodeInstanceState) -> DecoderView:
    """O(1)."""
    active = len(worker.active)
    return DecoderView(
        id=worker.spec.id,
        state=worker.state,
        slots=worker.spec.slots,
        free_slots=worker.free_slots,
        active=active,
        load_tokens=worker.load,
        foreign_requests=worker.foreign_requests,
        foreign_tokens=worker.foreign_tokens,
        mean_request_tokens=worker.load / active if active else snapshot.means.prompt_tokens,
        engine_waiting=int(worker.reported.get("num_requests_waiting", 0.0)),
        ahead=worker.ahead,
    )


def view_prefiller(prefiller: PrefillerBudget) -> PrefillerView:
    """O(1)."""
    return PrefillerView(
        id=prefiller.spec.id,
        state=prefiller.state,
        kv_usage=prefiller.kv_usage,
        inflight=prefiller.inflight,
        pinned=prefiller.pinned,
        pinned_tokens=prefiller.pinned_tokens,
        inflight_s=prefiller.inflight_s,
        prompt_tokens=prefiller.hits.prompt_tokens,
        predicted_tokens=prefiller.hits.predicted_tokens,
        hit_tokens=prefiller.hits.real_tokens,
        missed_tokens=prefiller.hits.missed_tokens,
        cache_tokens=prefiller.cache.tokens,
        cache_known=(prefiller.cache.capacity_tokens, prefiller.cache.engine_block_tokens),
    )
