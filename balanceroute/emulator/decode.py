"""Decode ranks: KV is pulled or awaited, then a token comes with every step of the group (`decode_group.py`)."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from balanceroute.emulator.clock import EmulatedClock
from balanceroute.emulator.connectors import (
    KvExchange,
    PullPlan,
    Reaction,
    plan_pull,
)
from balanceroute.emulator.errors import ENGINE_DEAD, INTERNAL
from balanceroute.emulator.faults import Fault, FaultKind
from balanceroute.emulator.remote import RemoteKv, RemotePins
from balanceroute.emulator.replies import Call, Choice
from balanceroute.emulator.shape import ClusterShape
from balanceroute.emulator.structure import PlannedStream
from balanceroute.emulator.worker import Worker, planned_length, sequence_numbers, stream_of
from balanceroute.engine import (
    DecodeRank,
    EngineRequest,
    KvBlocks,
    Place,
    TokenStream,
)
from balanceroute.engine.tokens import prompt_digest

CORRUPT = b"not this prompt's KV"
METASERVER_ATTEMPTS = 3  # vllm-ascend's connector retries transport errors so often and never looks at the status
PostJson = Callable[[str, dict[str, Any]], Coroutine[Any, Any, None]]


@dataclass(slots=True, eq=False, kw_only=True)
class Generation(EngineRequest):
    """A choice of a call on a decode rank."""

    call: Call
    choice: Choice
    plan: PullPlan
    ends_with_eos: bool
    stream: TokenStream | PlannedStream | None = None
    recompute_after: int | None = None


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
            transfers_beside_full=shape.transfers_beside_full,
        )
        self._wake = wake
        self._post_json = post_json
        self._generations: dict[str, Generation] = {}  # everything on the rank, and what was just popped
        self._to_recompute: dict[str, Generation] = {}
        self._planning: dict[Call, asyncio.Task[None]] = {}  # calls that ask another process about their KV
        exchange.register_sink(self.engine_id, self.kv_pushed)

    @property
    def kv(self) -> KvBlocks:
        """The worker's KV memory."""
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
            self._planning[call] = self.spawn(self._submit_remote(call, self.exchange, fault))
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
            if plan.source:
                plan.source.pull(plan.request_id)

    def _submit(self, call: Call, plans: list[PullPlan], fault: Fault | None) -> None:
        for plan in plans:
            if plan.violation and not (plan.violation == "wrong_prompt" and self._is_drain(call)):
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
        count, ends = planned_length(choice, request, self.shape)
        generation = Generation(
            f"{call.external_id(choice)}-{next(sequence_numbers):08x}",
            tokens,
            count,
            transfer_s=self._transfer_s(plan, tokens),
            local=plan.reaction is Reaction.LOCAL,
            call=call,
            choice=choice,
            plan=plan,
            ends_with_eos=ends,
        )
        if fault is not None and fault.kind is FaultKind.RECOMPUTE:
            generation.recompute_after = fault.after_events
            self._to_recompute[generation.id] = generation
        if plan.source:
            plan.source.claim(plan.request_id)
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

    def fail_all(self) -> None:
        """Lose the batch, the queue and the memory; pins of what was not pulled stay on the prefillers."""
        lost = self.rank.fail()
        for generation in lost:
            plan = generation.plan
            if generation.stream is None and plan.source:
                plan.source.give_back(plan.request_id)
        self._generations.clear()
        self._to_recompute.clear()
        planning = list(self._planning)
        self._planning.clear()
        for call in planning:
            call.fail(ENGINE_DEAD)
        for generation in lost:
            generation.call.fail(ENGINE_DEAD)

    def come_back(self) -> None:
        """Start again under a new engine id."""
        self.exchange.retire_sink(self.engine_id)
        super().come_back()
        self.rank.stalled = False
        self.exchange.register_sink(self.engine_id, self.kv_pushed)

    def _is_drain(self, call: Call) -> bool:
        """Whether a router drains KV, cached apart, with a prompt of the same size: engines compare no more."""
        blocks = (call.request.kv_transfer_params or {})["remote_block_ids"]
        fits = [self.kv.blocks_for(len(choice.prompt)) for choice in call.choices] == [sum(map(len, blocks))]
        return fits and call.request.max_tokens == 1 and call.request.cache_salt is not None

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
        """Note that a request has its blocks; the layerwise connector now asks for the prefill."""
        if generation.preemptions:
            return
        if generation.plan.reaction is Reaction.PUSHED:
            self.spawn(self._call_metaserver(generation))
        elif isinstance(generation.plan.source, RemotePins):
            self.spawn(self._fetch(generation, generation.plan.source))

    async def _fetch(self, generation: Generation, source: RemotePins) -> None:
        """Read the KV from the prefiller's process; the request starts when it has been transferred."""
        await source.fetch()
        if generation.id in self.rank.transferring:
            self.rank.kv_arrived(generation.id, self.clock.now() + self.shape.transfer_for(generation.prompt_tokens))
            self._wake.set()

    def started(self, generation: Generation) -> None:
        """Note that a request's KV has come: read it, right or wrong, and let the prefiller free it."""
        if generation.stream is not None:  # back after a local preemption
            return
        plan, choice, call = generation.plan, generation.choice, generation.call
        wrong = plan.reaction is Reaction.WRONG_TOKENS
        if plan.source and not plan.source.remembers(plan.request_id):
            self._transfer_failed(generation)  # the prefiller died meanwhile
            return
        if plan.source and not plan.source.pull(plan.request_id):
            self.violate("params_expired", call.id)
            wrong = True
        self.counters["prompt_tokens"] += generation.prompt_tokens
        if self.shape.prompt_tokens_details:  # vLLM counts what it has pulled as cached
            pulled = 0 if plan.reaction is Reaction.LOCAL else generation.prompt_tokens - 1
            call.cached_tokens = (call.cached_tokens or 0) + pulled
        generation.stream = stream_of(choice, CORRUPT if wrong else b"")

    def _transfer_failed(self, generation: Generation) -> None:
        self._forget(generation)
        if generation.place is not Place.GONE:  # it may have been popped within the same step
            self.rank.remove(generation.id)
        self.finished["error"] += 1
        generation.call.fail(INTERNAL)

    def kv_pushed(self, external_id: str, digest: int) -> bool:
        """Layerwise: a prefiller has pushed the KV of the request with that id."""
        for generation in self.rank.transferring.values():
            call, choice = generation.call, generation.choice
            if math.isinf(generation.ready_s) and call.external_id(choice) == external_id:
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
        assert stream is not None, "it has started"
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
        generation.call.recomputed(generation.choice)

    def knows(self, generation: Generation) -> bool:
        """Whether its client still waits."""
        return generation.id in self._generations

    def _forget(self, generation: Generation) -> None:
        self._generations.pop(generation.id, None)
        self._to_recompute.pop(generation.id, None)

    def _let_go(self, generation: Generation) -> None:
        plan = generation.plan
        if generation.stream is None and plan.source:
            plan.source.pull(plan.request_id)

    async def _call_metaserver(self, generation: Generation) -> None:
        call, choice = generation.call, generation.choice
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
