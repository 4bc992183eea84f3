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
from balanceroute.proxy.services import Services
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
    in_virtual_time,
    let_pass,
    script,
    stand_still,
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
        self._reaper = PoolReaper(services, lambda: None)

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


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_an_answer_whose_decode_worker_stood_still_until_the_kv_may_be_gone_is_made_anew_from_a_new_prefill(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM reads what is in the blocks by then, and answers 200: an engine that had stood still gave wrong texts."""

    async def served() -> None:
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

    in_virtual_time(served)
    assert [record.message for record in caplog.records if "anew" in record.message] == ["answer made anew"]


@pytest.mark.parametrize("late", [MAX_FRUITLESS - 1, MAX_FRUITLESS])
def test_an_answer_whose_kv_is_pulled_late_however_often_has_no_wrong_text_and_ends_with_an_error_at_last(
    late: int,
) -> None:
    async def served() -> None:
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

    in_virtual_time(served)


def test_what_a_decode_worker_may_have_cached_wrongly_serves_no_later_request() -> None:
    """It pulled what was in the blocks by then, and cached that under the first blocks of the prompt."""

    async def served() -> None:
        services, d0 = a_slow_decoder([32, 0, 0], Page(events(90, 91) + DONE), WHOLE)
        script(services, "p0", probed())
        async with dispatching(services):
            await a_leg(services).run()
            await a_leg(services, request_id="s", cache_salt="own").run()
        first, second, third = (body.get("cache_salt") for body in asked(d0))
        assert first is None and second and third == f"own{second}"

    in_virtual_time(served)


def test_what_was_sent_beside_a_request_whose_kv_was_pulled_late_is_made_anew_as_well() -> None:
    """Its own KV was there in time, but the first blocks of its prompt may be taken from those of the other one."""

    async def served() -> None:
        services, d0 = a_slow_decoder([32, 20, 0, 0], Page(events(90, 91) + DONE), Page(events(90) + DONE), WHOLE)
        clients = Client(), Client()
        script(services, "p0", probed())
        async with dispatching(services):
            first = services.loop.create_task(a_leg(services, clients[0]).run())
            await let_pass(12.5)
            await a_leg(services, clients[1], request_id="s").run()
            await first
        assert [client.text for client in clients] == [" 20 21"] * 2 and len(d0.asked) == 4

    in_virtual_time(served)


def test_kv_that_becomes_too_old_while_a_decode_worker_is_connected_to_is_not_sent() -> None:
    class Stopped(ScriptedUpstream):
        """The router is stopped for so long while it connects to it for the first time."""

        stop_s = 40.0

        async def request(self, *args: Any, **options: Any) -> Any:
            stand_still(self.stop_s)
            self.stop_s = 0.0
            return await super().request(*args, **options)

    async def served() -> None:
        services, client = a_router(a_config(1, 1, connector="nixl")), Client()
        d0 = services.fleet["d0"].upstream = Stopped(WHOLE)  # type: ignore[assignment]
        p0 = script(services, "p0", probed())
        async with dispatching(services):
            await a_leg(services, client).run()
        assert client.text == " 20 21" and len(asked(p0)) == 2 and idle(services)
        assert len(d0.asked) == 1 and services.metrics.recomputes.value("pulled_late") == 1

    in_virtual_time(served)


@pytest.mark.parametrize("client_stays", [True, False])
def test_kv_whose_prefiller_has_ended_since_is_sent_to_no_decode_worker(client_stays: bool) -> None:
    """It could only fail by it, or read what a prefiller of the same engine id has in those blocks by then."""

    async def served() -> None:
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

    in_virtual_time(served)


def test_an_answer_that_has_gone_on_since_it_was_made_anew_may_be_made_anew_again() -> None:
    async def served() -> None:
        of_others, broken = Page(events(90, 91) + DONE), Page(events(20, finish=None), breaks=LOST)
        services, d0 = a_slow_decoder([32, 0, 32, 0], of_others, broken, of_others, Page(events(21) + DONE))
        client, cut = Client(), probed(prompt=[*PROMPT_IDS, 20])
        script(services, "p0", probed(), probed(), cut, cut)
        async with dispatching(services):
            await a_leg(services, client).run()
        assert client.text == " 20 21" and client.ended
        assert [asked.path for asked in d0.asked].count("/v1/completions") == 4
        assert services.metrics.recomputes.value("pulled_late") == 2 and idle(services)

    in_virtual_time(served)


def test_a_worker_that_goes_on_before_anybody_has_looked_may_have_pulled_too_late_as_well() -> None:
    async def served() -> None:
        services, d0 = a_slow_decoder([30.1, 0], Page(events(90, 91) + DONE), WHOLE)
        client = Client()
        script(services, "p0", probed(), probed())
        async with dispatching(services):
            await a_leg(services, client).run()
        assert client.text == " 20 21" and len(d0.asked) == 2 and idle(services)

    in_virtual_time(served)


def test_an_answer_that_waited_long_at_a_decode_worker_that_was_at_work_is_not_made_anew() -> None:
    """NIXL's heartbeats have kept its KV alive."""

    async def served() -> None:
        services, d0 = a_slow_decoder([50], WHOLE, stands_still=False)
        client = Client()
        script(services, "p0", probed())
        async with dispatching(services):
            await a_leg(services, client).run()
        assert client.text == " 20 21" and len(d0.asked) == 1 and idle(services)

    in_virtual_time(served)


def test_one_that_waited_so_long_where_nothing_keeps_kv_alive_is_made_anew() -> None:
    """Mooncake's prefillers drop it, whatever the decode worker does that has not pulled yet."""

    async def served() -> None:
        delays_s, of_others = [61.0, 0.0], Page(events(90, 91) + DONE)
        mooncake = {"connector": "mooncake_v1", "prefill": {"kv_pin_s": 60}}
        services, d0 = a_slow_decoder(delays_s, of_others, WHOLE, stands_still=False, **mooncake)
        client = Client()
        script(services, "p0", probed())
        async with dispatching(services):
            await a_leg(services, client).run()
        assert client.text == " 20 21" and len(d0.asked) == 2 and idle(services)

    in_virtual_time(served)


def test_a_long_answer_in_one_piece_of_a_decode_worker_that_has_no_other_one_is_taken() -> None:
    async def served() -> None:
        services, d0 = a_slow_decoder([100], whole(20, 21))
        client = Client()
        script(services, "p0", probed())
        async with dispatching(services):
            await a_leg(services, client, stream=False, unknown=1).run()
        assert b" 20 21" in client.got and len(d0.asked) == 1 and idle(services)

    in_virtual_time(served)


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


def test_tokens_that_are_read_after_a_stop_of_the_router_do_not_show_that_their_worker_was_at_work() -> None:
    async def served() -> None:
        services, client = a_router(a_config(1, 1, connector="nixl")), Client()
        answers = Page(events(90, 91) + DONE), WHOLE
        d0 = services.fleet["d0"].upstream = StoppedTogether(services, [40, 0], answers, True)  # type: ignore[assignment]
        script(services, "p0", probed())
        async with dispatching(services):
            await a_leg(services, client).run()
        assert client.text == " 20 21" and len(d0.asked) == 2 and idle(services)

    in_virtual_time(served)


def test_kv_that_may_have_become_too_old_while_its_parameters_were_written_is_computed_anew() -> None:
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

    services: Services

    async def served() -> None:
        nonlocal services
        services, client = a_router(a_config(1, 1, connector="nixl")), Client()
        d0 = services.fleet["d0"].upstream = Stopped(Page(events(90, 91) + DONE), WHOLE)  # type: ignore[assignment]
        script(services, "p0", probed())
        async with dispatching(services):
            await a_leg(services, client).run()
        assert client.text == " 20 21" and len(d0.asked) == 2 and idle(services)

    in_virtual_time(served)


def test_the_rest_of_an_answer_whose_kv_was_pulled_late_is_made_anew_and_nothing_comes_twice() -> None:
    async def served() -> None:
        broken = Page(events(20, finish=None), breaks=LOST)
        services, d0 = a_slow_decoder([0, 32, 0], broken, Page(events(90, 91) + DONE), Page(events(21) + DONE))
        client, cut = Client(), probed(prompt=[*PROMPT_IDS, 20])
        script(services, "p0", probed(), cut, cut)
        async with dispatching(services):
            await a_leg(services, client).run()
        assert client.text == " 20 21" and client.ended
        assert [body["max_tokens"] for body in asked(d0)] == [10, 9, 9] and idle(services)

    in_virtual_time(served)
