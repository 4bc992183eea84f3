"""Who leaves a silent worker, who stays, and what waits for workers that are all down."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.types import Outcome, Phase, RequestSpec
from balanceroute.core.view import ClusterView, view_cluster
from balanceroute.errors import DecodersLost, NoHealthyWorkers, UpstreamTimeout
from balanceroute.proxy.admission import ledger
from balanceroute.proxy.admission.decider import MOST_ENDED
from balanceroute.proxy.app import health_monitor
from balanceroute.proxy.life.errors import WorkerSilent
from balanceroute.proxy.life.layerwise import Layerwise
from balanceroute.proxy.life.leg import Event, Leg
from balanceroute.proxy.life.mover import Mover
from balanceroute.proxy.life.moves import LANES
from balanceroute.proxy.life.pool_reaper import PERIOD_S, PoolReaper
from balanceroute.proxy.life.scoring import Scoring
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.silence import ALL_WORKERS, LATE_LOOK_S, SETTLE_S, FrozenGroup
from tests.unit.proxy.life.legs import DONE, PROMPT_IDS, Client, a_leg, a_request, dispatching, events, probed, whole
from tests.unit.proxy.life.test_answer import PREFILLED, give
from tests.unit.proxy.virtual_time import (
    Page,
    ScriptedUpstream,
    a_config,
    a_router,
    let_pass,
    script,
    stand_still,
    with_virtual_time,
)
from tests.waiting import until

RESUME_S = 5.0
GROUP_WAIT_S = 60.0
SILENT_S = 1000.0
MUTE = Page(events(20, finish=None), ends=False)


def a_silent_router(together: bool = False, **sections: Any) -> Services:
    """Two prefillers and two decode workers; d0 gives one token to each request and falls silent."""
    config = a_config(
        2,
        2,
        decode={"shared_barrier": together},
        retry={"resume_after_silence_s": RESUME_S},
        limits={"idle_timeout_s": 30.0},
        health={"group_wait_s": GROUP_WAIT_S, "silence_window_s": 2.0},
        **sections,
    )
    services = a_router(config)
    for name in ("p0", "p1"):
        script(services, name, probed())
    return services


@asynccontextmanager
async def looking(services: Services) -> AsyncIterator[None]:
    """Dispatchers and reaper run, and the reaper has looked for a while."""
    async with dispatching(services):
        task = services.loop.create_task(PoolReaper(services, services.ledger.expire).run())
        await let_pass(2 * SETTLE_S)
        try:
            yield
        finally:
            task.cancel()


async def begun(services: Services, name: str, request_id: str) -> tuple[Leg, "asyncio.Task[None]"]:
    """A request that decodes on the worker of that name, the others being drained meanwhile."""
    others = [worker for worker in services.fleet if worker.id[0] == "d" and worker.id != name]
    for worker in others:
        services.fleet.drain(worker)
    leg = a_leg(services, request_id=request_id)
    task = services.loop.create_task(leg.run())
    await until(lambda: leg.streaming_from is not None or leg.reply is not None)
    for worker in others:
        services.fleet.undrain(worker)
    return leg, task


def silence(services: Services, *names: str) -> None:
    """What the health monitor finds after its threshold."""
    for name in names:
        services.fleet[name].stalled = True
        services.fleet.update(services.fleet[name])


@pytest.mark.parametrize("has_token", [False, True])
@with_virtual_time
async def test_a_request_leaves_a_silent_worker_soon_and_a_stream_after_a_while(has_token: bool) -> None:
    services = a_silent_router()
    script(services, "d0", MUTE if has_token else Page(b"", ends=False))
    script(services, "d1", Page(events(21) + DONE))
    async with looking(services):
        leg, task = await begun(services, "d0", "request-1")
        for name in ("p0", "p1"):
            script(services, name, probed(prompt=[*PROMPT_IDS, 20] if has_token else PROMPT_IDS))
        silent_s = services.ledger.now()
        silence(services, "d0")
        await until(lambda: leg.at_worker != "d0")
        left_after_s = services.ledger.now() - silent_s
        await task
    least_s = RESUME_S if has_token else SETTLE_S
    assert least_s <= left_after_s <= least_s + 1.0
    assert (leg.decoder_id, leg.outcome) == ("d1", Outcome.FINISHED)
    assert services.metrics.moves.value("decode") == 1


class Dies(ScriptedUpstream):
    """Of a worker whose engine dies of its next request: its /health tells that before its answer does."""

    def __init__(self, services: Services, worker_id: str) -> None:
        super().__init__(Page(b'{"error": {"message": "EngineCore encountered an issue."}}', status=500))
        self._services, self._worker_id = services, worker_id
        services.fleet[worker_id].upstream = self  # type: ignore[assignment]

    async def request(self, *args: Any, **options: Any) -> Any:
        self._services.fleet.set_healthy(self._services.fleet[self._worker_id], False)
        await let_pass(SETTLE_S / 2)
        return await super().request(*args, **options)


@with_virtual_time
async def test_errors_sent_by_a_dying_worker_count_so_a_killing_request_reaches_no_third_one() -> None:
    services = a_router(a_config(2, 3, decode={"shared_barrier": False}))
    for name in ("p0", "p1"):
        script(services, name, probed())
    decoders = [Dies(services, name) for name in ("d0", "d1", "d2")]
    async with looking(services):
        with pytest.raises(DecodersLost):
            await a_leg(services).run()
    assert sum(len(decoder.asked) for decoder in decoders) == 2
    assert services.metrics.moves.value("decode") == 0


@with_virtual_time
async def test_a_group_that_fell_silent_together_keeps_its_requests_until_they_are_late_beyond_its_grace() -> None:
    services = a_silent_router(together=True)
    for name in ("d0", "d1"):
        script(services, name, MUTE)
    async with looking(services):
        legs = [await begun(services, name, f"request-{name}") for name in ("d0", "d1")]
        await until(lambda: services.frozen)
        (group,) = services.frozen
        assert group.workers == ("d0", "d1") and services.degraded_by
        silence(services, *group.workers)
        await let_pass(services.config.limits.idle_timeout_s + GROUP_WAIT_S / 2)
        assert [leg.at_worker for leg, _ in legs] == ["d0", "d1"] and not services.metrics.moves.value("decode")
        await let_pass(GROUP_WAIT_S)
        assert [leg.at_worker for leg, _ in legs] == ["", ""], "it was too long after all"
        for _, task in legs:
            task.cancel()


@with_virtual_time
async def test_a_pause_of_the_router_does_not_count_as_worker_silence() -> None:
    """While the loop stood still nobody's tokens were read, and every deadline has passed."""
    services = a_silent_router()
    for name in ("d0", "d1"):
        script(services, name, MUTE)
    async with looking(services):
        leg, task = await begun(services, "d0", "request-1")
        stand_still(100.0 + LATE_LOOK_S)
        silence(services, "d0")
        await let_pass(2 * PERIOD_S)
        assert leg.at_worker == "d0" and not services.frozen, "nothing is judged before the sockets are read"
        await let_pass(SETTLE_S + RESUME_S)
        assert leg.at_worker != "d0", "from then on silence counts again"
        task.cancel()


@with_virtual_time
async def test_requests_that_wait_for_a_tier_that_is_down_are_refused_after_its_grace_like_new_ones() -> None:
    services = a_silent_router(queue={"no_worker_grace_s": 3.0}, prefill={"max_inflight": 1})
    for name in ("p0", "p1"):
        script(services, name, None)
    async with looking(services):
        loop = services.loop
        tasks = [loop.create_task(a_leg(services, request_id=f"request-{n}").run()) for n in range(3)]
        await until(lambda: services.ledger.view().queued == 1)
        for name in ("p0", "p1"):
            services.fleet.set_healthy(services.fleet[name], False)
        await let_pass(2.0)
        assert not any(task.done() for task in tasks)
        await let_pass(2.0)
        for task in tasks:
            assert isinstance(task.exception(), NoHealthyWorkers)


@with_virtual_time
async def test_no_prefill_begins_for_a_request_that_has_waited_while_all_decode_workers_are_down() -> None:
    """It was prefilled, refused then, and its KV stayed pinned: no decode worker was there to drain it."""
    services = a_router(a_config(1, 1, queue={"no_worker_grace_s": 3.0}, prefill={"max_inflight": 1}))
    p0 = script(services, "p0", None)
    async with looking(services):
        loop = services.loop
        first = loop.create_task(a_leg(services, request_id="first").run())
        await until(lambda: p0.under_way)
        scores = {"echo": True, "max_tokens": 0, "logprobs": 1, "stream": False}
        queued = loop.create_task(a_leg(services, request_id="queued").run())
        scored = loop.create_task(a_leg(services, strategy=Scoring, request_id="scored", **scores).run())
        await until(lambda: services.ledger.view().queued == 2)
        services.fleet.set_healthy(services.fleet["d0"], False)
        await let_pass(4.0)
        assert isinstance(queued.exception(), NoHealthyWorkers) and len(p0.asked) == 1
        assert not first.done() and not scored.done()
        for task in (first, scored):
            task.cancel()
        await asyncio.gather(first, scored, return_exceptions=True)


@with_virtual_time
async def test_decode_first_no_decode_worker_gets_a_request_that_has_waited_while_all_prefillers_are_down() -> None:
    """It held a slot there until it asked for the prefill, and was refused then."""
    config = a_config(1, 1, queue={"no_worker_grace_s": 3.0})
    layerwise = {"connector": "mooncake_layerwise", "layerwise": {"callback_url": "http://router"}}
    services = a_router(config.model_validate(config.model_dump() | layerwise))
    d0 = script(services, "d0", None)
    services.fleet.drain(services.fleet["d0"])
    async with looking(services):
        task = services.loop.create_task(a_leg(services, strategy=Layerwise).run())
        await until(lambda: services.ledger.view().pooled)
        services.fleet.set_healthy(services.fleet["p0"], False)
        await let_pass(4.0)
        assert isinstance(task.exception(), NoHealthyWorkers) and not d0.asked


class Waits:
    """A leg that waits for a prefiller, or whose deadline is over; it notes each interruption in `ended`."""

    deadline_s, expects_tokens, last_tried, prefiller_id = -1.0, False, ("", ""), "p9"
    ticket = SimpleNamespace(phase=Phase.QUEUED)
    kv = SimpleNamespace(watch_pull=lambda: None)

    def __init__(self, ended: "list[Waits]") -> None:
        self.ended = ended

    def interrupt(self, error: Exception) -> None:
        self.ended.append(self)

    def note_progress(self) -> None:
        pass

    def wants_look(self, now: float, most_tokens: int) -> bool:
        return True


async def ends_bit_by_bit(ended: list[Waits], count: int) -> None:
    """Check that `count` legs end, no more than `MOST_ENDED` in a turn of the loop, once each."""
    assert len(ended) == MOST_ENDED
    while len(ended) < count:
        before = len(ended)
        await asyncio.sleep(0)
        assert before < len(ended) <= before + MOST_ENDED
    await asyncio.sleep(0)
    assert len(set(ended)) == len(ended) == count


@with_virtual_time
async def test_thousands_that_wait_for_a_tier_are_refused_over_several_turns_and_with_one_view_of_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = a_silent_router(queue={"no_worker_grace_s": 0.0})
    ended: list[Waits] = []
    services.legs.update(Waits(ended) for _ in range(3 * MOST_ENDED))
    for name in ("p0", "p1"):
        services.fleet.set_healthy(services.fleet[name], False)
    views: list[ClusterView] = []

    def counted(snapshot: ClusterSnapshot, draining: bool) -> ClusterView:
        views.append(view_cluster(snapshot, draining))
        return views[-1]

    monkeypatch.setattr(ledger, "view_cluster", counted)
    Mover(services, judges=True).look(services.ledger.now(), PERIOD_S)
    await ends_bit_by_bit(ended, len(services.legs))
    assert len(views) <= 2, "one of them is for requests that could move"


@with_virtual_time
async def test_requests_that_wait_no_longer_when_it_is_their_turn_are_not_refused() -> None:
    services = a_silent_router(queue={"no_worker_grace_s": 0.0})
    ended: list[Waits] = []
    legs = [Waits(ended) for _ in range(2 * MOST_ENDED)]
    services.legs.update(legs)
    for name in ("p0", "p1"):
        services.fleet.set_healthy(services.fleet[name], False)
    Mover(services, judges=True).look(services.ledger.now(), PERIOD_S)
    for leg in legs:
        leg.ticket = SimpleNamespace(phase=Phase.PREFILLING, asking=False)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(ended) == MOST_ENDED


@with_virtual_time
async def test_thousands_whose_time_is_over_end_over_several_turns() -> None:
    services = a_silent_router()
    ended: list[Waits] = []
    services.legs.update(Waits(ended) for _ in range(3 * MOST_ENDED))
    PoolReaper(services, services.ledger.expire).look()
    await ends_bit_by_bit(ended, len(services.legs))


@with_virtual_time
async def test_thousands_that_have_waited_too_long_expire_over_several_turns() -> None:
    services = a_silent_router(queue={"deadline_s": 5.0})
    for prefiller in ("p0", "p1"):
        services.ledger.report_prefiller(prefiller, 1.0)
    for number in range(3 * MOST_ENDED):
        services.tickets.submit(RequestSpec(f"r{number}", 5))
    stand_still(6.0)
    left = 3 * MOST_ENDED
    PoolReaper(services, services.ledger.expire).look()
    while left:
        left -= MOST_ENDED
        assert len(services.tickets.by_id) == left
        await asyncio.sleep(0)


# -- whether it can go on elsewhere decides

MOVABLE: dict[str, Any] = {}
NOT_MOVABLE: dict[str, Any] = {"response_format": {"type": "json_object"}}  # a grammar would begin anew


class Streams:
    """A strategy whose one request has given a token at d0, and gives no other."""

    first = Phase.QUEUED
    follows = {Phase.QUEUED: {Event.COMPLETE: Phase.GONE}}

    def __init__(self, leg: Leg, begun: asyncio.Event) -> None:
        self.leg, self.begun = leg, begun

    async def queued(self) -> Event:
        leg = self.leg
        worker = leg.streaming_from = leg.services.fleet["d0"]
        leg.enter(worker, math.inf, 0.0)
        leg.answer.begin(PREFILLED)
        give(leg.answer, 20)
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            leg.streaming_from = None
            leg.leave(worker)
        return Event.COMPLETE


async def at_a_silent_worker(fields: dict[str, Any]) -> tuple[Leg, asyncio.Task[None], asyncio.Task[None]]:
    """A leg in the middle of its answer at d0, which health checks have just judged down; and the reaper."""
    services = a_router(a_config(retry={"resume_after_silence_s": RESUME_S}))
    begun = asyncio.Event()
    leg = Leg(services, "r", a_request(**fields), Client(), [], lambda leg: Streams(leg, begun))
    loop = asyncio.get_running_loop()
    task = loop.create_task(leg.run())
    await begun.wait()
    services.fleet["d0"].healthy = False
    return leg, task, loop.create_task(PoolReaper(services, services.ledger.expire).run())


@with_virtual_time
async def test_a_resumable_request_leaves_a_silent_worker_after_resume_s() -> None:
    leg, task, reaper = await at_a_silent_worker(MOVABLE)
    await let_pass(RESUME_S - 1)
    assert not task.done()
    await let_pass(2)
    with pytest.raises(WorkerSilent):
        await task
    assert leg.services.metrics.moves.value("decode") == 1
    reaper.cancel()


@with_virtual_time
async def test_a_request_that_cannot_move_stays_on_a_silent_worker() -> None:
    leg, task, reaper = await at_a_silent_worker(NOT_MOVABLE)
    await let_pass(100 * RESUME_S)
    assert not task.done() and leg.services.metrics.moves.value("decode") == 0
    reaper.cancel()
    task.cancel()


@with_virtual_time
async def test_a_late_request_waits_for_its_move_and_ends_at_once_without_one() -> None:
    for fields, ended in ((MOVABLE, False), (NOT_MOVABLE, True)):
        leg, task, reaper = await at_a_silent_worker(fields)
        leg.try_deadline_s = leg.services.ledger.now() + 1
        await let_pass(3)  # before it may move
        assert task.done() is ended
        if ended:
            with pytest.raises(UpstreamTimeout):
                await task
        reaper.cancel()
        task.cancel()


class Standing:
    """A leg as the mover sees it: where it is, and what has come of it."""

    def __init__(self, services: Services, number: int, phase: Phase = Phase.DECODING, decoder: str = "d0") -> None:
        self.id = f"r{number}"
        self.at_worker, self.streaming_from, self.prefiller_id = decoder, None, ""
        self.ticket = SimpleNamespace(order=number, phase=phase, decoder=decoder, pushing=False, asking=False)
        self.answer = SimpleNamespace(may_move=True)
        self.blocked_by_client, self.last_token_s = False, 0.0
        self.moved = 0
        self.late_s = 0.0
        services.legs.add(self)  # type: ignore[arg-type]
        services.tickets.by_id[self.id] = self.ticket  # type: ignore[assignment]

    def late(self, now: float) -> bool:
        return now > self.late_s

    def move(self, worker: Worker) -> None:
        self.moved += 1
        self.at_worker = ""


def a_mover(services: Services) -> Mover:
    """It has found d0 silent at `SILENT_S`."""
    mover = Mover(services, judges=False)
    silence(services, "d0")
    mover.look(SILENT_S, SETTLE_S)
    return mover


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({}, True),
        ({"blocked_by_client": True}, False),
        ({"answer": SimpleNamespace(may_move=False)}, False),
        ({"last_token_s": SILENT_S}, True),
        ({"last_token_s": SILENT_S + 0.1}, False),
    ],
)
@with_virtual_time
async def test_a_request_stays_when_it_cannot_move_or_progressed_or_its_client_does_not_read(
    change: dict[str, Any], moves: bool
) -> None:
    services = a_silent_router()
    mover, leg = a_mover(services), Standing(services, 0)
    for name, value in change.items():
        setattr(leg, name, value)
    mover.look(SILENT_S + SETTLE_S - 0.001, SETTLE_S)
    assert not leg.moved, "too soon"
    mover.look(SILENT_S + SETTLE_S, SETTLE_S)
    assert leg.moved == moves


@pytest.mark.parametrize(
    ("connector", "phase", "decoder", "is_moving"),
    [
        ("mooncake_v1", Phase.DECODING, "d0", True),  # it has not let go yet
        ("mooncake_v1", Phase.QUEUED, "", True),
        ("mooncake_v1", Phase.PREFILLING, "", True),
        ("mooncake_v1", Phase.POOLED, "", False),
        ("mooncake_v1", Phase.DECODING, "d1", False),
        ("mooncake_v1", None, "", False),  # it has ended
        ("mooncake_layerwise", Phase.POOLED, "", True),  # its prefill comes when it is bound
        ("mooncake_layerwise", Phase.DECODING, "d1", False),
    ],
)
@with_virtual_time
async def test_a_moved_request_occupies_a_prefill_place_until_it_is_prefilled_again(
    connector: str, phase: Phase | None, decoder: str, is_moving: bool
) -> None:
    """Two prefillers have so many places that one of those at d0 finds none until another has been prefilled."""
    called_back = {"layerwise": {"callback_url": "http://127.0.0.1:1"}} if "layerwise" in connector else {}
    services = a_silent_router(connector=connector, **called_back)
    mover = a_mover(services)
    legs = [Standing(services, number) for number in range(2 * LANES + 1)]
    mover.look(SILENT_S + SETTLE_S, SETTLE_S)
    assert [leg.moved for leg in legs] == [1] * (2 * LANES) + [0], "as many as two prefillers keep busy with"
    first, last = legs[0], legs[-1]
    if phase is None:
        services.legs.remove(first)  # type: ignore[arg-type]
        del services.tickets.by_id[first.id]
    else:
        first.ticket.phase, first.ticket.decoder = phase, decoder
    mover.look(SILENT_S + SETTLE_S + PERIOD_S, PERIOD_S)
    assert last.moved == (not is_moving)


@with_virtual_time
async def test_a_late_request_leaves_a_frozen_group_after_the_groups_grace() -> None:
    services = a_silent_router(together=True)
    services.frozen.append(FrozenGroup(ALL_WORKERS, ("d0", "d1"), SILENT_S))
    mover, leg = a_mover(services), Standing(services, 0)
    leg.late_s = SILENT_S + 30.0
    mover.look(leg.late_s + GROUP_WAIT_S, 2 * GROUP_WAIT_S)
    assert not leg.moved
    mover.look(leg.late_s + GROUP_WAIT_S + 0.1, PERIOD_S)
    assert leg.moved


class Hanging(ScriptedUpstream):
    """A worker whose /health is well, and which answers nothing else."""

    async def request(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        self.answers = [200 if path == "/health" else None]
        return await super().request(method, path, *args, **options)


@with_virtual_time
async def test_a_short_unstreamed_answer_is_not_left_to_a_worker_that_hangs_though_its_health_is_well() -> None:
    services = a_silent_router()
    services.fleet["d0"].upstream = Hanging()  # type: ignore[assignment]
    for name in ("d0", "d1"):
        services.fleet[name].seen_healthy = True
    services.fleet.drain(services.fleet["d1"])
    script(services, "d1", whole(20))
    leg = a_leg(services, stream=False, max_tokens=8)
    async with looking(services):
        checks = services.loop.create_task(health_monitor(services).run())
        task = services.loop.create_task(leg.run())
        await until(lambda: leg.at_worker == "d0")
        services.fleet.undrain(services.fleet["d1"])
        began_s = services.ledger.now()
        await task
        checks.cancel()
    assert (leg.outcome, leg.decoder_id) == (Outcome.FINISHED, "d1")
    config = services.config.health
    assert services.ledger.now() - began_s <= config.stall_after_s + config.interval_s + 2 * SETTLE_S


class SlowlyBegun(ScriptedUpstream):
    """A worker whose /health is well, and whose answers after the first begin late."""

    async def request(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        answers = ScriptedUpstream(200) if path == "/health" else super()
        return await answers.request(method, path, *args, **options)

    async def before_body(self) -> None:
        await let_pass(5.0 if len(self.asked) > 1 else 0.0)


@with_virtual_time
async def test_a_client_that_does_not_read_has_no_worker_taken_for_one_that_hangs() -> None:
    services = a_silent_router()
    worker = services.fleet["d0"]
    worker.upstream = SlowlyBegun(MUTE, Page(events(20, 21) + DONE))  # type: ignore[assignment]
    async with looking(services):
        checks = services.loop.create_task(health_monitor(services).run())
        stalls, task = await begun(services, "d0", "stalls")
        assert stalls.reply is not None
        stalls.reply.paused = True
        await let_pass(services.config.health.stall_after_s + 10.0)
        assert stalls.at_worker == "d0"
        services.fleet.drain(services.fleet["d1"])
        leg = a_leg(services, request_id="next")
        other = services.loop.create_task(leg.run())
        while not other.done():
            assert not worker.stalled
            await let_pass(0.5)
        for one in (checks, task):
            one.cancel()
    assert leg.outcome is Outcome.FINISHED


@with_virtual_time
async def test_a_token_is_not_awaited_for_the_time_in_which_its_client_did_not_read() -> None:
    """Else a worker would be taken for one that hangs before it has been read again."""
    services = a_silent_router()
    script(services, "d0", MUTE)
    async with looking(services):
        leg, task = await begun(services, "d0", "stalls")
        assert leg.reply is not None
        leg.reply.paused = True
        await let_pass(services.config.health.stall_after_s + 10.0)
        assert services.awaited() == {}
        leg.reply.paused = False
        assert services.loop.time() - services.awaited()["d0"] <= PERIOD_S
        task.cancel()
