"""Prefillers: prompts are computed, their KV stays pinned until a decoder has pulled it, or is pushed to one."""

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from balanceroute.emulator.clock import EmulatedClock
from balanceroute.emulator.connectors import (
    Connector,
    KvExchange,
    Pin,
    PinBook,
    PinState,
    reply_params,
)
from balanceroute.emulator.errors import ENGINE_DEAD
from balanceroute.emulator.faults import Fault, FaultKind
from balanceroute.emulator.replies import Call, Choice
from balanceroute.emulator.requests import GenerationRequest
from balanceroute.emulator.shape import ClusterShape
from balanceroute.emulator.worker import Worker, planned_length, sequence_numbers, stream_of
from balanceroute.engine import (
    KvBlocks,
    Prefiller,
    PrefillJob,
    PrefixCache,
    block_names,
)
from balanceroute.engine.tokens import EOS_ID, prompt_digest


@dataclass(slots=True, eq=False, kw_only=True)
class Prompt(PrefillJob):
    """A choice of a call on a prefiller."""

    call: Call
    choice: Choice
    output_tokens: int
    ends_with_eos: bool
    null_params: bool


class PrefillWorker(Worker):
    """A prefiller with its timer; also the side of the KV exchange that decoders pull from."""

    role = "prefill"

    def __init__(self, name: str, shape: ClusterShape, clock: EmulatedClock, exchange: KvExchange, port: int) -> None:
        super().__init__(name, shape, clock, exchange)
        self.host = "127.0.0.1"
        self.port = port
        self.pins = PinBook()
        self.prefiller: Prefiller[Prompt] = Prefiller(
            KvBlocks(shape.prefill_blocks, shape.block_size),
            tokens_per_s=shape.prefill_tokens_per_s,
            overhead_s=shape.prefill_overhead_s,
            lanes=shape.prefill_lanes,
            lease_s=shape.pin_lease_s,
            cache=PrefixCache(shape.prefill_blocks) if shape.prefix_caching else None,
        )
        self._wake = asyncio.Event()
        self._decoding: dict[str, Prompt] = {}  # jobs that were asked for more than one token
        exchange.register(self)

    @property
    def kv(self) -> KvBlocks:
        """The worker's KV memory."""
        return self.prefiller.kv

    @property
    def reachable(self) -> bool:
        """Whether its transfer engine answers."""
        return self.up and not self.dead

    def submit(self, call: Call, fault: Fault | None = None) -> None:
        """Queue one prompt per choice."""
        request = call.request
        self._check_probe(call)
        now = self.clock.now()
        self.counters["requests"] += 1
        for choice in call.choices:
            count, ends = planned_length(choice, request, self.shape)
            job = Prompt(
                f"{call.external_id(choice)}-{next(sequence_numbers):08x}",
                len(choice.prompt),
                pin=request.is_probe and self.shape.connector is not Connector.MOONCAKE_LAYERWISE,
                prefix=self._blocks_of(choice, request),
                call=call,
                choice=choice,
                output_tokens=count,
                ends_with_eos=ends,
                null_params=fault is not None and fault.kind is FaultKind.NULL_PARAMS,
            )
            self.prefiller.submit(job, now)
        self._wake.set()

    def _blocks_of(self, choice: Choice, request: GenerationRequest) -> list[int]:
        """Names of its blocks; none where it is computed whole: caching is off, or its logprobs are wanted."""
        if self.prefiller.cache is None or request.prompt_logprobs is not None:
            return []
        return block_names(choice.prompt, self.kv.block_size, request.cache_salt)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block."""
        if self.prefiller.cache is not None:
            self.prefiller.cache.clear()

    def abort(self, call: Call) -> None:
        """Drop what has not been prefilled; pinned KV stays, as on the real engine."""
        now = self.clock.now()
        jobs = [*self.prefiller.queued.values(), *self.prefiller.running.values(), *self._decoding.values()]
        for job in jobs:
            if job.call is call:
                self._decoding.pop(job.id, None)
                self.prefiller.abort(job.id, now)
                self.counters["aborted"] += 1
        self._wake.set()

    def queue_counts(self) -> tuple[int, int, int]:
        """Prompts being computed (or decoded here), waiting, and none that wait for KV."""
        return len(self.prefiller.running) + len(self._decoding), len(self.prefiller.queued), 0

    def pull(self, request_id: str) -> bool:
        """A decoder has read the pinned KV."""
        freed = self.prefiller.pull(request_id, self.clock.now())
        if freed:
            self.pins.mark(request_id, PinState.PULLED)
            self.counters["pulled"] += 1
        self._wake.set()
        return freed

    def remembers(self, request_id: str) -> bool:
        """See `KvSource`."""
        return self.reachable and self.pins.get(request_id) is not None

    def claim(self, request_id: str) -> None:
        """See `KvSource`."""
        self.pins.mark(request_id, PinState.CLAIMED)
        if self.shape.connector is Connector.NIXL:
            self.prefiller.set_expiry(request_id, math.inf)

    def give_back(self, request_id: str) -> None:
        """See `KvSource`; what has expired or was pulled stays so."""
        pin = self.pins.get(request_id)
        if pin is not None and pin.state is PinState.CLAIMED:
            pin.state = PinState.PINNED
            if self.shape.connector is Connector.NIXL:
                self.prefiller.set_expiry(request_id, self.clock.now() + self.shape.pin_lease_s)
                self._wake.set()

    def end_leases(self) -> None:
        """The lease of all pinned KV runs out now."""
        now = self.clock.now()
        for request_id in self.prefiller.pinned:
            self.prefiller.set_expiry(request_id, now)
        self._wake.set()

    def fail_all(self) -> None:
        """Lose queue, prompts and pins."""
        self.exchange.retire(self.engine_id)
        for request_id in self.prefiller.pinned:
            self.pins.mark(request_id, PinState.EXPIRED)
        lost = [*self.prefiller.fail(), *self._decoding.values()]
        self._decoding.clear()
        for job in lost:
            job.call.fail(ENGINE_DEAD)

    def come_back(self) -> None:
        """Start again under a new engine id."""
        super().come_back()
        self.pins = PinBook()
        for name in ("prompt_tokens", "prefix_hits"):
            self.counters[name] = 0
        self.prefiller.slowdown = 1.0
        self.exchange.register(self)

    def state(self) -> dict[str, Any]:
        """State with what is pinned."""
        return super().state() | {
            "pinned": len(self.prefiller.pinned),
            "pinned_blocks": self.prefiller.pinned_blocks,
            "expired": self.prefiller.expired,
        }

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._wake.clear()
            before = set(self.prefiller.pinned)
            finished = self.prefiller.advance(self.clock.now())
            for request_id in before - set(self.prefiller.pinned):
                self.pins.mark(request_id, PinState.EXPIRED)
            for job in finished:
                self._prefilled(job)
            await self.clock.wait(self._wake, self.prefiller.next_event_s())

    def _check_probe(self, call: Call) -> None:
        request = call.request
        if not request.is_probe:
            return
        self.counters["probes"] += 1
        shapes = {
            "probe_stream": request.stream,
            "probe_n": request.n > 1,
            "probe_batch": len(request.prompts) > 1,
            "probe_max_tokens": request.max_tokens != 1 and not request.echo_only,
        }
        for kind, wrong in shapes.items():
            if wrong:
                self.violate(kind, call.id)

    def _prefilled(self, job: Prompt) -> None:
        call, choice = job.call, job.choice
        self.counters["prompt_tokens"] += job.prompt_tokens
        self.counters["prefix_hits"] += job.cached_tokens
        if self.shape.prompt_tokens_details:
            call.cached_tokens = (call.cached_tokens or 0) + job.cached_tokens
        if job.output_tokens > 1:
            self._decoding[job.id] = job
            self.spawn(self._decode(job))
            return
        self._last_token(job, stream_of(choice).next(eos=job.ends_with_eos))

    async def _decode(self, job: Prompt) -> None:
        """Write the tokens of a request that is served here from prompt to end, as a plain server would."""
        call, choice = job.call, job.choice
        stream = stream_of(choice)
        for _ in range(job.output_tokens - 1):
            self.counters["generation_tokens"] += 1
            call.token(choice, stream.next(), None)
            if choice.finish_reason:  # a stop string or stop id
                self._decoding.pop(job.id)
                self._pin_or_free(job, EOS_ID)
                self.finished["stop"] += 1
                return
            await self.clock.sleep_until(self.clock.now() + self.shape.step_time.overhead_s)
            if job.id not in self._decoding:
                return
        self._decoding.pop(job.id)
        self._last_token(job, stream.next(eos=job.ends_with_eos))

    def _last_token(self, job: Prompt, token: int) -> None:
        call, choice = job.call, job.choice
        reason = "stop" if job.ends_with_eos else "length"
        self._pin_or_free(job, token)
        if call.request.is_probe and self.shape.connector is Connector.MOONCAKE_LAYERWISE:
            self._push(call, choice)
        self.counters["generation_tokens"] += 1
        self.finished[reason] += 1
        call.token(choice, token, reason)

    def _pin_or_free(self, job: Prompt, token: int) -> None:
        """Pin a probe's KV and put the params into the reply; Mooncake pins only what ended by its length."""
        call, choice = job.call, job.choice
        if job.id not in self.prefiller.pinned:
            return
        if job.null_params or (job.ends_with_eos and self.shape.connector is Connector.MOONCAKE_V1):
            self.prefiller.pull(job.id, self.clock.now())
            return
        pin = Pin(job.id, prompt_digest(choice.prompt), self.kv.held_by(job.id))
        self.pins.add(pin)
        if choice.index < call.request.n:  # of a batch only the first prompt's params are returned
            call.kv_transfer_params = reply_params(
                self.shape.connector, self, pin, job.prompt_tokens, self.shape.block_size, token
            )

    def _push(self, call: Call, choice: Choice) -> None:
        """Layerwise: the KV is at the decoder when the prompt is done; it is matched by the shared request id."""
        params = call.request.kv_transfer_params or {}
        sink = self.exchange.sink(params.get("remote_engine_id"))
        if sink is None or not sink(call.external_id(choice), prompt_digest(choice.prompt)):
            self.violate("layerwise_unmatched", call.id)
