"""The two kinds of worker: engine objects with a clock, and calls that wait for their tokens.

`PrefillWorker` runs a `Prefiller`, `DecodeGroupRunner` steps all `DecodeWorker`s of a group at one barrier.
Everything happens in one event loop; nothing awaits between reading the engine and acting on it.
"""

import asyncio
import itertools
import logging
import math
import uuid
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from balanceroute.emulator.clock import EmulatedClock
from balanceroute.emulator.connectors import (
    Connector,
    KvExchange,
    Pin,
    PinBook,
    PinState,
    PullPlan,
    Reaction,
    plan_pull,
    reply_params,
)
from balanceroute.emulator.errors import ENGINE_DEAD, INTERNAL
from balanceroute.emulator.faults import Fault, FaultBox, FaultKind
from balanceroute.emulator.remote import RemoteKv, RemotePins
from balanceroute.emulator.replies import Call, Choice
from balanceroute.emulator.requests import GenerationRequest
from balanceroute.emulator.shape import ClusterShape
from balanceroute.emulator.step_totals import StepTotals
from balanceroute.emulator.structure import PlannedStream
from balanceroute.engine import (
    DecodeGroup,
    DecodeRank,
    EngineRequest,
    KvBlocks,
    Place,
    Prefiller,
    PrefillJob,
    PrefixCache,
    TokenStream,
    block_names,
)
from balanceroute.engine.tokens import EOS_ID, plan_length, prompt_digest

logger = logging.getLogger(__name__)

CORRUPT = b"not this prompt's KV"
METASERVER_ATTEMPTS = 3  # vllm-ascend's connector retries transport errors so often and never looks at the status

_sequence_numbers = itertools.count()
PostJson = Callable[[str, dict[str, Any]], Coroutine[Any, Any, None]]


@dataclass(slots=True, eq=False)
class Generation(EngineRequest):
    """A choice of a call on a decode rank."""

    call: Call | None = None
    choice: Choice | None = None
    plan: PullPlan | None = None
    ends_with_eos: bool = False
    stream: TokenStream | PlannedStream | None = None
    recompute_after: int | None = None


@dataclass(slots=True, eq=False)
class Prompt(PrefillJob):
    """A choice of a call on a prefiller."""

    call: Call | None = None
    choice: Choice | None = None
    output_tokens: int = 1
    ends_with_eos: bool = False
    null_params: bool = False


def _length(choice: Choice, request: GenerationRequest, shape: ClusterShape) -> tuple[int, bool]:
    """(output tokens, whether the last one is the end of text); what a grammar forces ends by itself."""
    limit = request.limit_for(len(choice.prompt), shape.context_tokens)
    planned = choice.plan.length if choice.plan is not None else None
    if planned is not None:
        return plan_length(planned, limit, ignore_eos=False, min_tokens=0)
    natural = TokenStream(choice.prompt, shape.lengths).remaining
    return plan_length(natural, limit, ignore_eos=request.ignore_eos, min_tokens=request.min_tokens)


def _stream(choice: Choice, corruption: bytes = b"") -> TokenStream | PlannedStream:
    if choice.plan is not None:
        return choice.plan.stream(corruption)
    return TokenStream(choice.prompt, corruption=corruption)


class Worker(ABC):
    """What both kinds share: a name, faults, violations, counters, and whether the engine lives."""

    role: str

    def __init__(self, name: str, shape: ClusterShape, clock: EmulatedClock, exchange: KvExchange) -> None:
        self.name = name
        self.shape = shape
        self.clock = clock
        self.exchange = exchange
        self.engine_id = str(uuid.uuid4())
        self.faults = FaultBox()
        self.dead = False  # the engine behind the API server
        self.up = True  # the API server itself
        self.counters: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()  # by finished_reason
        self.violations: Counter[str] = Counter()
        self.violation_log: deque[str] = deque(maxlen=100)

    def violate(self, kind: str, request_id: str) -> None:
        """Count something that a router must never do."""
        self.violations[kind] += 1
        self.violation_log.append(f"{kind}: {request_id}")
        logger.debug("violation", extra={"worker": self.name, "kind": kind, "request_id": request_id})

    def serves(self) -> bool:
        """Whether the engine lives."""
        return not self.dead

    @property
    @abstractmethod
    def kv(self) -> KvBlocks:
        """Its KV memory."""

    @abstractmethod
    def submit(self, call: Call, fault: Fault | None = None) -> None:
        """Take a call in."""

    @abstractmethod
    def abort(self, call: Call) -> None:
        """The client has gone: free what the call holds."""

    @abstractmethod
    def queue_counts(self) -> tuple[int, int, int]:
        """Requests running, waiting for capacity, waiting for KV."""

    @abstractmethod
    def fail_all(self, message: str) -> None:
        """Lose everything; every call gets the error."""

    def kill_engine(self) -> None:
        """The engine core dies: error events, then nothing but errors and an unhealthy /health."""
        self.dead = True
        self.fail_all(ENGINE_DEAD)

    def go_down(self) -> None:
        """The process is killed: nobody is told anything (the caller cuts the connections)."""
        self.up = False
        self.fail_all(ENGINE_DEAD)

    def come_back(self) -> None:
        """The process is started again, empty, with an engine id of its own."""
        self.up, self.dead = True, False
        self.engine_id = str(uuid.uuid4())
        self.faults.clear()

    def state(self) -> dict[str, Any]:
        """What `GET /_emulator/state` says of it."""
        running, waiting, deferred = self.queue_counts()
        return {
            "name": self.name,
            "role": self.role,
            "up": self.up,
            "dead": self.dead,
            "running": running,
            "waiting": waiting,
            "transferring": deferred,
            "blocks_used": self.kv.used,
            "blocks_total": self.kv.num_blocks,
            "kv_usage_ratio": self.kv.usage_ratio,
            "violations": dict(self.violations),
            "violation_log": list(self.violation_log),
            "counters": dict(self.counters),
            "finished": dict(self.finished),
            "faults": self.faults.to_json(),
        }


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._decoding: dict[str, Prompt] = {}  # jobs that were asked for more than one token
        exchange.register(self)

    @property
    def kv(self) -> KvBlocks:
        """Its KV memory."""
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
            count, ends = _length(choice, request, self.shape)
            job = Prompt(
                f"{call.external_id(choice)}-{next(_sequence_numbers):08x}",
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
        """None where a prompt is computed whole: caching is off, or its logprobs are wanted."""
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

    def hold(self, request_id: str) -> None:
        """A decoder's heartbeats begin: the lease does not run out."""
        self.prefiller.set_expiry(request_id, math.inf)

    def unhold(self, request_id: str) -> None:
        """The heartbeats stop without a pull: a last lease begins."""
        self.prefiller.set_expiry(request_id, self.clock.now() + self.shape.pin_lease_s)
        self._wake.set()

    def end_leases(self) -> None:
        """The lease of all pinned KV runs out now."""
        now = self.clock.now()
        for request_id in self.prefiller.pinned:
            self.prefiller.set_expiry(request_id, now)
        self._wake.set()

    def fail_all(self, message: str) -> None:
        """Lose queue, prompts and pins."""
        self.exchange.retire(self.engine_id)
        for request_id in self.prefiller.pinned:
            self.pins.mark(request_id, PinState.EXPIRED)
        lost = [*self.prefiller.fail(), *self._decoding.values()]
        self._decoding.clear()
        for job in lost:
            if job.call:
                job.call.fail(message)

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
        assert call is not None and choice is not None
        self.counters["prompt_tokens"] += job.prompt_tokens
        self.counters["prefix_hits"] += job.cached_tokens
        if self.shape.prompt_tokens_details:
            call.cached_tokens = (call.cached_tokens or 0) + job.cached_tokens
        if job.output_tokens > 1:
            self._decoding[job.id] = job
            task = asyncio.get_running_loop().create_task(self._decode(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        stream = _stream(choice)
        self._last_token(job, stream.next(eos=job.ends_with_eos))

    async def _decode(self, job: Prompt) -> None:
        """Write the tokens of a request that is served here from prompt to end, as a plain server would."""
        call, choice = job.call, job.choice
        assert call is not None and choice is not None
        stream = _stream(choice)
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
        assert call is not None and choice is not None
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
        assert call is not None and choice is not None
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
        """Layerwise: the KV is at the decoder when the prompt is done; it is matched by the shared request
        id.
        """
        params = call.request.kv_transfer_params or {}
        sink = self.exchange.sink(params.get("remote_engine_id"))
        if sink is None or not sink(call.external_id(choice), prompt_digest(choice.prompt)):
            self.violate("layerwise_unmatched", call.id)


class DecodeWorker(Worker):
    """One decode rank and the calls on it; its group's runner makes it step."""

    role = "decode"

    def __init__(
        self,
        name: str,
        shape: ClusterShape,
        clock: EmulatedClock,
        exchange: KvExchange,
        wake: asyncio.Event,
        post_json: PostJson,
    ) -> None:
        super().__init__(name, shape, clock, exchange)
        self.rank: DecodeRank[Generation] = DecodeRank(
            shape.max_num_seqs,
            KvBlocks(shape.decode_blocks, shape.block_size),
            preemption=shape.preemption,
            recompute_s_per_token=1.0 / shape.prefill_tokens_per_s,
        )
        self._wake = wake
        self._post_json = post_json
        self._tasks: set[asyncio.Task[None]] = set()
        self._generations: dict[str, Generation] = {}  # everything on the rank, and what was just popped
        self._to_recompute: dict[str, Generation] = {}
        self._planning: dict[Call, asyncio.Task[None]] = {}  # whose KV another process is asked about
        exchange.register_sink(self.engine_id, self.kv_pushed)

    @property
    def kv(self) -> KvBlocks:
        """Its KV memory."""
        assert self.rank.kv is not None
        return self.rank.kv

    def submit(self, call: Call, fault: Fault | None = None) -> None:
        """Plan where each choice's KV comes from and queue it."""
        request = call.request
        self.counters["requests"] += 1
        if request.kills_decoder or request.prompt_logprobs is not None:  # its KV comes from elsewhere: no logits
            self.counters["killed_by_request"] += 1
            call.fail(ENGINE_DEAD)
            self.kill_engine()
            return
        if isinstance(self.exchange, RemoteKv):
            self._planning[call] = self._spawn(self._submit_remote(call, self.exchange, fault))
            return
        plans = [
            plan_pull(request.kv_transfer_params, choice.prompt, self.shape.connector, self.exchange)
            for choice in call.choices
        ]
        self._submit(call, plans, fault)

    async def _submit_remote(self, call: Call, exchange: RemoteKv, fault: Fault | None) -> None:
        """Ask the prefillers' processes; a call that has gone meanwhile lets go of what was claimed for it."""
        params = call.request.kv_transfer_params
        plans = [await exchange.plan(params, choice.prompt, self.shape.connector) for choice in call.choices]
        if self._planning.pop(call, None) is not None:
            self._submit(call, plans, fault)
            return
        for plan in plans:
            if plan.source and plan.pin:
                plan.source.pull(plan.pin.request_id)

    def _submit(self, call: Call, plans: list[PullPlan], fault: Fault | None) -> None:
        for plan in plans:
            if plan.violation:
                self.violate(plan.violation, call.id)
        if any(plan.reaction is Reaction.ENGINE_DIES for plan in plans):
            call.fail(ENGINE_DEAD)
            self.kill_engine()
            return
        if any(plan.reaction is Reaction.ERROR for plan in plans):
            self.finished["error"] += 1
            call.fail(INTERNAL)
            return
        for choice, plan in zip(call.choices, plans, strict=True):
            self._enqueue(call, choice, plan, fault)
        self._wake.set()

    def _enqueue(self, call: Call, choice: Choice, plan: PullPlan, fault: Fault | None) -> None:
        request = call.request
        tokens = len(choice.prompt)
        count, ends = _length(choice, request, self.shape)
        generation = Generation(
            f"{call.external_id(choice)}-{next(_sequence_numbers):08x}",
            tokens,
            count,
            transfer_s=self._transfer_s(plan, tokens),
            call=call,
            choice=choice,
            plan=plan,
            ends_with_eos=ends,
        )
        if fault is not None and fault.kind is FaultKind.RECOMPUTE:
            generation.recompute_after = fault.after_events
            self._to_recompute[generation.id] = generation
        if plan.pin and plan.source:
            plan.pin.state = PinState.CLAIMED
            if self.shape.connector is Connector.NIXL:
                plan.source.hold(plan.pin.request_id)
        self._generations[generation.id] = generation
        self.rank.submit(generation)

    def _transfer_s(self, plan: PullPlan, tokens: int) -> float:
        if plan.reaction in (Reaction.HANG, Reaction.PUSHED) or isinstance(plan.source, RemotePins):
            return math.inf
        if plan.reaction is Reaction.LOCAL:
            return tokens / self.shape.prefill_tokens_per_s
        return self.shape.transfer_for(tokens)

    def abort(self, call: Call) -> None:
        """Free what the call holds here, and its KV on the prefiller if that was not pulled yet."""
        self._planning.pop(call, None)
        for generation in [g for g in self._generations.values() if g.call is call]:
            self._forget(generation)
            self._let_go(generation)
            if generation.place is not Place.GONE:
                self.rank.remove(generation.id)
            self.counters["aborted"] += 1

    def queue_counts(self) -> tuple[int, int, int]:
        """Requests in the batch, waiting for a slot, waiting for KV."""
        rank = self.rank
        return len(rank.running), len(rank.waiting), len(rank.transferring)

    def fail_all(self, message: str) -> None:
        """Lose the batch, the queue and the memory; pins of what was not pulled stay on the prefillers."""
        lost = self.rank.fail()
        for generation in lost:
            plan = generation.plan
            if generation.stream is None and plan and plan.source and plan.pin:
                plan.pin.state = PinState.PINNED
                if self.shape.connector is Connector.NIXL:
                    plan.source.unhold(plan.pin.request_id)
        self._generations.clear()
        self._to_recompute.clear()
        planning = list(self._planning)
        self._planning.clear()
        for call in planning:
            call.fail(message)
        for generation in lost:
            if generation.call:
                generation.call.fail(message)

    def come_back(self) -> None:
        """Start again under a new engine id."""
        self.exchange.retire_sink(self.engine_id)
        super().come_back()
        self.rank.stalled = False
        self.exchange.register_sink(self.engine_id, self.kv_pushed)

    def state(self) -> dict[str, Any]:
        """State with the load that the barrier sees."""
        return super().state() | {
            "load_tokens": self.rank.load,
            "slots": self.rank.slots,
            "preemptions": self.rank.preemptions,
            "stalled": self.rank.stalled,
        }

    def pop_due(self) -> None:
        """Pop the requests whose injected recompute is due."""
        for generation in list(self._to_recompute.values()):
            after = generation.recompute_after or 0
            if generation.place is Place.RUNNING and generation.generated >= after:
                del self._to_recompute[generation.id]
                self.rank.pop(generation.id)

    def pop_last(self) -> None:
        """Pop the last running request, as if memory had run out."""
        if self.rank.running:
            self.rank.pop(next(reversed(self.rank.running)))
            self._wake.set()

    def admitted(self, generation: Generation) -> None:
        """It has its slot and blocks; the layerwise connector now asks for the prefill."""
        if generation.plan and generation.plan.reaction is Reaction.PUSHED and not generation.preemptions:
            self._spawn(self._call_metaserver(generation))
        elif generation.plan and isinstance(generation.plan.source, RemotePins) and not generation.preemptions:
            self._spawn(self._fetch(generation, generation.plan.source))

    async def _fetch(self, generation: Generation, source: RemotePins) -> None:
        """Read the KV from the prefiller's process; the request starts when it has been transferred."""
        await source.fetch()
        if generation.id in self.rank.transferring:
            self.rank.kv_arrived(generation.id, self.clock.now() + self.shape.transfer_for(generation.prompt_tokens))
            self._wake.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def started(self, generation: Generation) -> None:
        """Its KV is here: read it, whatever it is, and let the prefiller free it."""
        if generation.stream is not None:  # back after a local preemption
            return
        plan, choice, call = generation.plan, generation.choice, generation.call
        assert plan is not None and choice is not None and call is not None
        wrong = plan.reaction is Reaction.WRONG_TOKENS
        if (
            plan.source
            and plan.pin
            and (not plan.source.reachable or plan.source.pins.get(plan.pin.request_id) is None)
        ):
            self._transfer_failed(generation)  # the prefiller died meanwhile: nobody's fault but its own
            return
        if plan.source and plan.pin and not plan.source.pull(plan.pin.request_id):
            self.violate("params_expired", call.id)
            wrong = True
        self.counters["prompt_tokens"] += generation.prompt_tokens
        generation.stream = _stream(choice, CORRUPT if wrong else b"")

    def _transfer_failed(self, generation: Generation) -> None:
        assert generation.call is not None
        self._forget(generation)
        if generation.place is not Place.GONE:  # it may have been popped within the same step
            self.rank.remove(generation.id)
        self.finished["error"] += 1
        generation.call.fail(INTERNAL)

    def kv_pushed(self, external_id: str, digest: int) -> bool:
        """Layerwise: a prefiller has pushed the KV of the request with that id."""
        for generation in self.rank.transferring.values():
            call, choice = generation.call, generation.choice
            if call and choice and math.isinf(generation.ready_s) and call.external_id(choice) == external_id:
                if prompt_digest(choice.prompt) != digest:
                    self.violate("wrong_prompt", call.id)
                    generation.plan = PullPlan(Reaction.WRONG_TOKENS)
                delay = self.shape.transfer_for(generation.prompt_tokens)
                self.rank.kv_arrived(generation.id, self.clock.now() + delay)
                self._wake.set()
                return True
        return False

    def give_token(self, generation: Generation) -> None:
        """One step's token of one request, from the engine to the wire."""
        call, choice, stream = generation.call, generation.choice, generation.stream
        assert call is not None and choice is not None and stream is not None
        ends = None
        if generation.finished:
            ends = "stop" if generation.ends_with_eos else "length"
            self._forget(generation)
        call.token(choice, stream.next(eos=ends == "stop"), ends)
        if choice.finish_reason is None:
            return
        self.finished[choice.finish_reason] += 1
        if ends is None:  # a stop string or stop id ended it before the engine did
            self._forget(generation)
            self.rank.remove(generation.id)

    def give_up(self, generation: Generation) -> None:
        """Tell a popped request's client."""
        self._forget(generation)
        self.counters["recomputed"] += 1
        self.finished["stop"] += 1
        assert generation.call is not None and generation.choice is not None
        generation.call.recomputed(generation.choice)

    def knows(self, generation: Generation) -> bool:
        """Whether its client still waits."""
        return generation.id in self._generations

    def _forget(self, generation: Generation) -> None:
        self._generations.pop(generation.id, None)
        self._to_recompute.pop(generation.id, None)

    def _let_go(self, generation: Generation) -> None:
        plan = generation.plan
        if generation.stream is None and plan and plan.source and plan.pin and plan.reaction is Reaction.PULL:
            plan.source.pull(plan.pin.request_id)

    async def _call_metaserver(self, generation: Generation) -> None:
        call, choice = generation.call, generation.choice
        assert call is not None and choice is not None
        url = str((call.request.kv_transfer_params or {})["metaserver"])
        body = {
            "token_ids": [],
            "request_id": call.external_id(choice),
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [list(self.kv.held_by(generation.id))],
            "remote_block_size": [self.shape.block_size],
            "remote_engine_id": self.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": 0,
            "remote_tp_size": 1,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
        }
        for _ in range(METASERVER_ATTEMPTS):
            try:
                await self._post_json(url, body)
            except OSError:
                self.counters["metaserver_failures"] += 1
                await self.clock.sleep_until(self.clock.now() + 0.1)
            else:
                return


class DecodeGroupRunner:
    """Steps all decode ranks of a cluster at one barrier in real time."""

    def __init__(self, shape: ClusterShape, clock: EmulatedClock, wake: asyncio.Event) -> None:
        self._shape = shape
        self._clock = clock
        self._wake = wake
        self._workers: list[DecodeWorker] = []
        self.group: DecodeGroup[Generation] | None = None
        self.stopped = False
        self.late_s = 0.0  # modelled seconds by which steps ended later than they should have, in sum
        self.totals = StepTotals()

    def attach(self, workers: list[DecodeWorker]) -> None:
        """Set the members of the group."""
        self._workers = workers
        self.group = DecodeGroup([worker.rank for worker in workers], self._shape.step_time)

    def wake(self) -> None:
        """Something changed that a resting group must look at."""
        self._wake.set()

    def resume(self) -> None:
        """The barrier works again."""
        self.stopped = False
        self._wake.set()

    async def run(self) -> None:
        """Step until cancelled; rests while nothing runs."""
        group = self.group
        assert group is not None
        deadline = self._clock.now()
        while True:
            self._wake.clear()
            if self.stopped or not group.busy:
                await self._wake.wait()
                deadline = self._clock.now()
                continue
            now = self._clock.now()
            plan = group.begin_step(now)
            self._note(plan.admitted, plan.started)
            for worker in self._workers:
                worker.pop_due()
            if not group.running:
                await self._clock.wait(self._wake, group.next_ready_s())
                deadline = self._clock.now()
                continue
            # a step that was late shortens the next one, so that the pace holds on a busy machine
            deadline = max(deadline, now - plan.duration_s) + plan.duration_s
            await self._clock.sleep_until(deadline)
            self.late_s += max(0.0, self._clock.now() - deadline)
            if not self.stopped:
                loads = [rank.load for rank in group.ranks]
                self.totals.add(loads, sum(len(rank.running) for rank in group.ranks), plan.duration_s)
                self._end_step(group)

    def _note(self, admitted: list[Generation], started: list[Generation]) -> None:
        for worker in self._workers:
            for generation in admitted:
                if worker.knows(generation):
                    worker.admitted(generation)
            for generation in started:
                if worker.knows(generation):
                    worker.started(generation)

    def _end_step(self, group: DecodeGroup[Generation]) -> None:
        for worker, outcome in zip(self._workers, group.end_step(), strict=True):
            for generation in outcome.recomputed:
                if worker.knows(generation):
                    worker.give_up(generation)
            worker.counters["generation_tokens"] += len(outcome.stepped)
            for generation in outcome.stepped:
                worker.give_token(generation)
