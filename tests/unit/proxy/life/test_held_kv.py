"""KV that a prefiller may have dropped before its decode worker pulled it: no answer by it is used."""

import asyncio
from contextlib import nullcontext
from typing import Any

import orjson
import pytest

from balanceroute.core.types import Outcome, WorkerState
from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.life.pool_reaper import PERIOD_S, PoolReaper
from balanceroute.proxy.life.retries import MAX_FRUITLESS
from balanceroute.proxy.ops.services import Services
from tests.unit.proxy.life.legs import (
    DONE,
    LOST,
    PROMPT_IDS,
    WHOLE,
    Client,
    a_leg,
    asked,
    dispatching,
    events,
    idle,
    probed,
    whole,
)
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


class Slow(ScriptedUpstream):
    """A decode worker whose answers' first words take so many seconds each, a last part of it between two looks of the
    reaper; `stands_still`: it gives others no tokens meanwhile. `judged_down`: health checks have found that out.
    """

    judged_down = False

    def __init__(
        self, services: Services, delays_s: list[float], answers: tuple[Page, ...], stands_still: bool
    ) -> None:
        super().__init__(*answers)
        self._services, self._delays_s, self._stands_still = services, delays_s, stands_still
        self._reaper = PoolReaper(services, lambda most: ())

    async def before_body(self) -> None:
        delay_s, worker = self._delays_s.pop(0), self._services.fleet["d0"]
        for _ in range(int(delay_s / PERIOD_S)):
            await let_pass(PERIOD_S)
            if not self._stands_still:
                worker.progress_s = self._services.tickets.now()
            if self.judged_down:
                worker.state = WorkerState.DOWN
            self._reaper.look()
        worker.state = WorkerState.UP
        await let_pass(delay_s % PERIOD_S)


def a_slow_decoder(
    delays_s: list[float], *answers: Page, stands_still: bool = True, **sections: Any
) -> tuple[Services, Slow]:
    services = a_router(a_config(1, 1, **({"connector": "nixl"} | sections)))
    slow = services.fleet["d0"].upstream = Slow(services, delays_s, answers, stands_still)  # type: ignore[assignment]
    return services, slow


async def served(services: Services, *probes: Page, **fields: Any) -> Client:
    """What a client has got once its request is over; `probes`: what the prefiller answers."""
    client = Client()
    script(services, "p0", *probes or [probed()])
    async with dispatching(services):
        await a_leg(services, client, **fields).run()
    assert idle(services)
    return client


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@with_virtual_time
async def test_an_answer_is_restarted_when_its_decode_worker_was_frozen_until_the_kv_may_be_gone(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM reads what is in the blocks by then, and answers 200: an engine that had stood still gave wrong texts."""
    of_others, right = (Page(events(90, 91) + DONE), WHOLE) if stream else (whole(90, 91), whole(20, 21))
    services, d0 = a_slow_decoder([32, 1], of_others, right)
    d0.judged_down = not stream  # one that answers as a whole may be busy with that
    client, params = Client(), {"remote_engine_id": "second"}
    script(services, "p0", probed(), probed(params))
    async with dispatching(services):
        leg = a_leg(services, client, stream=stream)
        await leg.run()
    text = client.text if stream else orjson.loads(client.got)["choices"][0]["text"]
    assert text == " 20 21" and client.ended and leg.outcome is Outcome.FINISHED
    assert asked(d0)[1]["kv_transfer_params"] == params
    first, second = (body.get("cache_salt") for body in asked(d0))
    assert first is None and second  # the decode worker has cached the wrong KV under the prompt
    assert services.metrics.recomputes.value("pulled_late") == 1 and idle(services)
    assert [record.message for record in caplog.records if "anew" in record.message] == ["answer made anew"]


@pytest.mark.parametrize("late", [MAX_FRUITLESS - 1, MAX_FRUITLESS])
@with_virtual_time
async def test_an_answer_whose_kv_is_always_pulled_late_ends_with_an_error_and_no_wrong_text(
    late: int,
) -> None:
    of_others = [Page(events(90, 91) + DONE)] * late
    services, d0 = a_slow_decoder([32] * late + [0], *of_others, WHOLE)
    client = Client()
    script(services, "p0", probed())
    async with dispatching(services):
        with pytest.raises(BadUpstreamReply) if late == MAX_FRUITLESS else nullcontext():
            await a_leg(services, client).run()
    assert client.text == ("" if late == MAX_FRUITLESS else " 20 21") and idle(services)
    salts = [body.get("cache_salt") for body in asked(d0)]
    assert len(set(salts)) == len(salts) == min(late + 1, MAX_FRUITLESS)


@with_virtual_time
async def test_a_prefix_cache_filled_by_a_late_pull_serves_no_later_request() -> None:
    """It pulled what was in the blocks by then, and cached that under the first blocks of the prompt."""
    services, d0 = a_slow_decoder([32, 0, 0], Page(events(90, 91) + DONE), WHOLE)
    script(services, "p0", probed())
    async with dispatching(services):
        await a_leg(services).run()
        await a_leg(services, request_id="s", cache_salt="own").run()
    first, second, third = (body.get("cache_salt") for body in asked(d0))
    assert first is None and second and third not in (None, "own", second)


@with_virtual_time
async def test_requests_sent_beside_a_late_pull_are_restarted_as_well() -> None:
    """Its own KV was there in time, but the first blocks of its prompt may be taken from those of the other one."""
    services, d0 = a_slow_decoder([32, 20, 0, 0], Page(events(90, 91) + DONE), Page(events(90) + DONE), WHOLE)
    clients = Client(), Client()
    script(services, "p0", probed())
    async with dispatching(services):
        first = services.loop.create_task(a_leg(services, clients[0]).run())
        await let_pass(12.5)
        await a_leg(services, clients[1], request_id="s").run()
        await first
    assert [client.text for client in clients] == [" 20 21"] * 2 and len(d0.asked) == 4


@with_virtual_time
async def test_kv_that_expires_while_connecting_to_a_decode_worker_is_not_sent() -> None:
    class Stopped(ScriptedUpstream):
        """The router is stopped for so long while it connects to it for the first time."""

        stop_s = 40.0

        async def request(self, *args: Any, **options: Any) -> Any:
            stand_still(self.stop_s)
            self.stop_s = 0.0
            return await super().request(*args, **options)

    services, client = a_router(a_config(1, 1, connector="nixl")), Client()
    d0 = services.fleet["d0"].upstream = Stopped(WHOLE)  # type: ignore[assignment]
    p0 = script(services, "p0", probed())
    async with dispatching(services):
        await a_leg(services, client).run()
    assert client.text == " 20 21" and len(asked(p0)) == 2 and idle(services)
    assert len(d0.asked) == 1 and services.metrics.recomputes.value("pulled_late") == 1


@pytest.mark.parametrize("client_stays", [True, False])
@with_virtual_time
async def test_kv_of_a_prefiller_that_has_since_ended_is_not_sent(client_stays: bool) -> None:
    """It could only fail by it, or read what a prefiller of the same engine id has in those blocks by then."""
    services = a_router(a_config(1, 1, decode={"max_num_seqs": 1}))
    p0, d0 = script(services, "p0", probed()), script(services, "d0", Page(events(1, finish=None), ends=False))
    async with dispatching(services):
        holds, waits = a_leg(services), a_leg(services, request_id="s")
        tasks = [services.loop.create_task(leg.run()) for leg in (holds, waits)]
        await until(lambda: waits.kv.params is not None)
        services.fleet["p0"].ended_at += 1.0
        d0.answers = [WHOLE]
        if not client_stays:
            waits.abandon()
            await let_pass(1.0)
        holds.abandon()
        await asyncio.wait(tasks)
    assert waits.outcome is (Outcome.FINISHED if client_stays else Outcome.CANCELLED)
    assert len(p0.asked) == 2 + client_stays and len(asked(d0)) == 1 + client_stays
    assert services.metrics.recomputes.value("worker_lost") == client_stays
    assert services.metrics.orphaned_kv == 0 and idle(services)


@with_virtual_time
async def test_an_answer_that_progressed_after_a_restart_may_be_restarted_again() -> None:
    of_others, broken = Page(events(90, 91) + DONE), Page(events(20, finish=None), breaks=LOST)
    services, d0 = a_slow_decoder([32, 0, 32, 0], of_others, broken, of_others, Page(events(21) + DONE))
    cut = probed(prompt=[*PROMPT_IDS, 20])
    client = await served(services, probed(), probed(), cut, cut)
    assert client.text == " 20 21" and client.ended
    assert [asked.path for asked in d0.asked].count("/v1/completions") == 4
    assert services.metrics.recomputes.value("pulled_late") == 2


@with_virtual_time
async def test_a_worker_that_resumes_before_a_check_may_also_have_pulled_too_late() -> None:
    services, d0 = a_slow_decoder([30.1, 0], Page(events(90, 91) + DONE), WHOLE)
    client = await served(services)
    assert client.text == " 20 21" and len(d0.asked) == 2


@with_virtual_time
async def test_an_answer_that_waited_long_at_a_working_decode_worker_is_kept() -> None:
    """NIXL's heartbeats have kept its KV alive."""
    services, d0 = a_slow_decoder([50], WHOLE, stands_still=False)
    client = await served(services)
    assert client.text == " 20 21" and len(d0.asked) == 1


@with_virtual_time
async def test_an_answer_that_waited_long_without_kv_heartbeats_is_restarted() -> None:
    """Mooncake's prefillers drop it, whatever the decode worker does that has not pulled yet."""
    delays_s, of_others = [61.0, 0.0], Page(events(90, 91) + DONE)
    mooncake = {"connector": "mooncake_v1", "prefill": {"kv_pin_s": 60}}
    services, d0 = a_slow_decoder(delays_s, of_others, WHOLE, stands_still=False, **mooncake)
    client = await served(services)
    assert client.text == " 20 21" and len(d0.asked) == 2


@with_virtual_time
async def test_a_long_unstreamed_answer_of_an_otherwise_idle_decode_worker_is_kept() -> None:
    services, d0 = a_slow_decoder([100], whole(20, 21))
    client = await served(services, stream=False, unknown=1)
    assert b" 20 21" in client.got and len(d0.asked) == 1


class StoppedTogether(Slow):
    """A decode worker that is stopped with the router; then both go on, and its older tokens for others are read."""

    async def before_body(self) -> None:
        stop_s = self._delays_s.pop(0)
        for _ in range(8):
            await let_pass(PERIOD_S)
            self._reaper.look()
        stand_still(stop_s)
        self._services.fleet["d0"].progress_s = self._services.tickets.now()
        self._reaper.look()


@with_virtual_time
async def test_tokens_read_after_a_stop_of_the_router_do_not_prove_worker_progress() -> None:
    services = a_router(a_config(1, 1, connector="nixl"))
    answers = Page(events(90, 91) + DONE), WHOLE
    d0 = services.fleet["d0"].upstream = StoppedTogether(services, [40, 0], answers, True)  # type: ignore[assignment]
    client = await served(services)
    assert client.text == " 20 21" and len(d0.asked) == 2


@with_virtual_time
async def test_kv_that_may_have_expired_while_its_parameters_were_written_is_computed_again() -> None:
    class Stopped(ScriptedUpstream):
        """The router is stopped for so long as it writes to it for the first time."""

        stop_s = 40.0

        async def request(self, *args: Any, **options: Any) -> Any:
            reply = await super().request(*args, **options)
            stand_still(self.stop_s)
            services.fleet["d0"].progress_s = services.tickets.now()
            services.last_look_s = services.tickets.now()
            self.stop_s = 0.0
            return reply

    services = a_router(a_config(1, 1, connector="nixl"))
    d0 = services.fleet["d0"].upstream = Stopped(Page(events(90, 91) + DONE), WHOLE)  # type: ignore[assignment]
    client = await served(services)
    assert client.text == " 20 21" and len(d0.asked) == 2


@with_virtual_time
async def test_a_resumed_part_whose_kv_was_pulled_late_is_restarted_without_repeated_text() -> None:
    broken = Page(events(20, finish=None), breaks=LOST)
    services, d0 = a_slow_decoder([0, 32, 0], broken, Page(events(90, 91) + DONE), Page(events(21) + DONE))
    cut = probed(prompt=[*PROMPT_IDS, 20])
    client = await served(services, probed(), cut, cut)
    assert client.text == " 20 21" and client.ended
    assert [body["max_tokens"] for body in asked(d0)] == [10, 9, 9]
