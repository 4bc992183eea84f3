"""A decode that ended early, prefill first: what its worker gets for it, and how the answer goes on."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from balanceroute.core.types import Outcome
from balanceroute.errors import ConnectionLost, UpstreamError
from balanceroute.proxy.life.errors import ClientGone
from balanceroute.proxy.life.retries import MANY_BACK
from balanceroute.proxy.workers.circuit import CircuitState
from tests.unit.proxy.life.legs import (
    DONE,
    LOST,
    PROMPT_IDS,
    WHOLE,
    Client,
    a_leg,
    an_assembled_leg,
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
    with_virtual_time,
)
from tests.waiting import until

EMPTY = events(0, finish=None).replace(b'" 0"', b'""').replace(b"[0]", b"[]")  # an event that brings no token


@pytest.mark.parametrize("resumes", [True, False])
@with_virtual_time
async def test_a_cut_answer_resumes_after_its_last_token_where_that_is_allowed(resumes: bool) -> None:
    services = a_router(a_config(1, 1, retry={"resume_on_worker_loss": resumes}))
    client = Client()
    p0 = script(services, "p0", probed(), probed(prompt=[*PROMPT_IDS, 20, 21]))
    d0 = script(services, "d0", Page(events(20, 21, finish=None), breaks=LOST), Page(events(22) + DONE))
    async with dispatching(services):
        leg = a_leg(services, client)
        if not resumes:
            with pytest.raises(UpstreamError):
                await leg.run()
            assert client.text == " 20 21" and not client.ended
        else:
            await leg.run()
            assert client.text == " 20 21 22" and client.ended
            assert asked(p0)[1]["prompt"] == [*PROMPT_IDS, 20, 21]
            assert asked(d0)[1]["max_tokens"] == 8
            assert leg.recomputes == 1
    assert services.metrics.recomputes.value("worker_lost") == resumes, "counted where it is sent back, else not"
    assert idle(services)


@pytest.mark.parametrize("tokens", [(20, 21), ()], ids=["with tokens", "before the first one"])
@with_virtual_time
async def test_an_answer_aborted_by_a_stopping_engine_resumes_on_another(tokens: tuple[int, ...]) -> None:
    services, client = a_router(a_config(1, 2)), Client()
    script(services, "p0", probed(), probed(prompt=[*PROMPT_IDS, *tokens]))
    first = events(*tokens, finish="abort") if tokens else events(20, finish="abort", text="", token_ids=[])
    stopped = script(services, "d0", Page(first + DONE))
    other = script(services, "d1", Page(events(*(22,) if tokens else (20, 21, 22)) + DONE))
    async with dispatching(services):
        await a_leg(services, client).run()
    assert client.text == " 20 21 22" and client.ended and b"abort" not in client.got
    assert len(stopped.asked) == len(other.asked) == 1
    assert services.metrics.recomputes.value("worker_lost") == 1
    assert services.fleet["d0"].circuit.state is CircuitState.RESTING
    assert idle(services)


@with_virtual_time
async def test_an_unstreamed_answer_that_an_engine_aborts_is_requested_again() -> None:
    services, client = a_router(a_config(1, 2)), Client()
    script(services, "p0", probed())
    aborted = Page(whole(20).body.replace(b'"length"', b'"abort"'))
    script(services, "d0", aborted)
    script(services, "d1", whole(20, 21))
    async with dispatching(services):
        await a_leg(services, client, stream=False, max_tokens=2).run()
    assert b" 20 21" in client.got and b"abort" not in client.got
    assert idle(services)


@pytest.mark.parametrize("counted_by", ["events", "usage"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "assembled"])
@with_virtual_time
async def test_no_text_is_sent_twice_when_an_engine_without_token_ids_is_lost(stream: bool, counted_by: str) -> None:
    services, client = a_router(a_config(1, 1)), Client()
    script(services, "p0", probed())
    halves = [events(20, finish=None, token_ids=None), events(20, 21, token_ids=None)]
    if counted_by == "usage":  # in each event, as of a chat whose engine hides its reasoning
        usage = b'"usage":{"prompt_tokens":3,"completion_tokens":5},"choices"'
        halves = [half.replace(b'"choices"', usage) for half in halves]
    d0 = script(services, "d0", Page(halves[0], breaks=LOST), Page(halves[1] + DONE))
    async with dispatching(services):
        if stream:
            with pytest.raises(ConnectionLost):
                await a_leg(services, client).run()
            assert client.text == " 20" and not client.ended and len(d0.asked) == 2  # with its /health
        else:
            leg, answer = an_assembled_leg(services, max_tokens=100, guided_json={"type": "object"})
            await leg.run()
            assert answer()["choices"][0]["text"] == " 20 21"
    assert idle(services)


@with_virtual_time
async def test_a_request_that_is_recomputed_before_its_first_token_is_prefilled_again() -> None:
    services, client = a_router(a_config(1, 1)), Client()
    p0 = script(services, "p0", probed())
    script(services, "d0", Page(DONE), WHOLE)
    async with dispatching(services):
        leg = a_leg(services, client)
        await leg.run()
    assert (client.text, leg.recomputes, len(p0.asked)) == (" 20 21", 1, 2)
    assert services.metrics.recomputes.value("recomputed") == 1
    assert idle(services)


@pytest.mark.parametrize("given_back", [DONE, EMPTY + DONE], ids=["[DONE]", "an event, [DONE]"])
@with_virtual_time
async def test_a_worker_that_gives_every_request_back_does_not_swallow_them(given_back: bytes) -> None:
    services = a_router(a_config(1, 3))
    script(services, "p0", probed())
    sick = script(services, "d0", Page(given_back))
    for name in ("d1", "d2"):
        script(services, name, WHOLE)
    async with dispatching(services):
        for number in range(10):
            leg = a_leg(services, request_id=str(number))
            await leg.run()
            assert leg.outcome is Outcome.FINISHED
    assert len(sick.asked) == MANY_BACK and services.fleet["d0"].circuit.state is CircuitState.RESTING
    assert idle(services)


@pytest.mark.parametrize("given_back", ["[DONE]", "an event, [DONE]", "aborted", "in one piece"])
@with_virtual_time
async def test_a_worker_that_gives_every_request_back_rests_ever_longer(given_back: str) -> None:
    services, stream = a_router(a_config(1, 2, retry={"max_attempts": 10})), given_back != "in one piece"
    script(services, "p0", probed())
    pages = {
        "[DONE]": Page(DONE),
        "an event, [DONE]": Page(EMPTY + DONE),
        "aborted": Page(EMPTY.replace(b'"finish_reason":null', b'"finish_reason":"abort"')),
        "in one piece": whole(stop_reason="recomputed"),
    }
    sick = script(services, "d0", pages[given_back])
    script(services, "d1", WHOLE if stream else whole(20))
    async with dispatching(services):
        for number in range(60):
            await a_leg(services, request_id=str(number), stream=stream).run()
            await let_pass(1.0)
    assert len(sick.asked) <= 16


@pytest.mark.parametrize("stream", [True, False])
@with_virtual_time
async def test_a_worker_that_serves_others_does_not_rest_for_requests_that_it_gives_back(stream: bool) -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    one_back = [Page(DONE), WHOLE] if stream else [whole(stop_reason="recomputed"), whole(20)]
    script(services, "d0", *one_back * (2 * MANY_BACK))
    async with dispatching(services):
        for number in range(2 * MANY_BACK):
            leg = a_leg(services, request_id=str(number), stream=stream)
            await leg.run()
            assert leg.recomputes == 1 and not services.fleet["d0"].circuit.doubtful


@with_virtual_time
async def test_a_worker_that_pushed_back_is_tried_by_one_request_at_a_time() -> None:
    services, requests = a_router(a_config(1, 1, decode={"max_num_seqs": 8})), 40
    script(services, "p0", probed())
    d0 = script(services, "d0", 503)
    async with dispatching(services):
        tasks = [services.loop.create_task(a_leg(services, request_id=f"r{n}").run()) for n in range(requests)]
        await let_pass(2.0)  # its rests begin at once, after 0.5 s and after 1.5 s
        assert services.metrics.upstream_errors.value("d0", "decode", "status_5xx") == 3
        d0.answers = [WHOLE]
        await asyncio.gather(*tasks)
    assert idle(services)


@with_virtual_time
async def test_a_broken_trial_whose_client_leaves_is_repeated_by_another_request() -> None:
    services = a_router(a_config(1, 1))
    worker = services.fleet["d0"]
    worker.circuit.open(services.tickets.now(), "status 500")
    worker.circuit.reachable()
    script(services, "p0", probed())
    d0 = script(services, "d0", LOST, None)
    async with dispatching(services):
        leg = a_leg(services)
        task = services.loop.create_task(leg.run())
        await until(lambda: any(one.path != "/v1/completions" for one in d0.asked))
        assert worker.circuit.state is CircuitState.TRIAL
        leg.abandon()
        await asyncio.wait({task})
    assert worker.circuit.state is CircuitState.HALF_OPEN
    assert idle(services)


@with_virtual_time
async def test_back_pressure_of_a_decode_worker_does_not_count_as_a_recompute() -> None:
    services, client = a_router(a_config(1, 2)), Client()
    script(services, "p0", probed())
    for name in ("d0", "d1"):
        script(services, name, 503, WHOLE)
    async with dispatching(services):
        leg = a_leg(services, client)
        await leg.run()
    assert client.text == " 20 21" and leg.recomputes >= 1
    assert services.metrics.recomputes.value("worker_lost") == services.metrics.recomputes.value("recomputed") == 0
    assert idle(services)


@with_virtual_time
async def test_a_restarted_answer_is_counted_and_timed_as_the_client_receives_it() -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    stuck = Page(events(20, 21, finish=None), ends=False)
    script(services, "d0", stuck, Page(events(*range(30, 40)) + DONE))
    async with dispatching(services):
        leg, answer = an_assembled_leg(services, max_tokens=100, guided_json={"type": "object"})
        task = services.loop.create_task(leg.run())
        await until(lambda: leg.first_token_s > 0)
        began_s = leg.first_token_s
        services.metrics.catch_up()
        assert services.metrics.tokens.value() == 2
        leg.interrupt(LOST)
        await task
    assert answer()["usage"]["completion_tokens"] == services.metrics.tokens.value() == 10
    assert leg.first_token_s > began_s
    assert services.metrics.resumes.value("restarted") == 1


FATES: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "it goes on": ({}, [probed(prompt=[*PROMPT_IDS, 20, 21])], "adjusted"),
    "it ends without another token": ({}, [probed(prompt=[*PROMPT_IDS, 20, 21])], "adjusted"),
    "it may not go on": ({"resume_on_worker_loss": False}, [500], "ended"),
    "the worker was its last try": ({"max_attempts": 1}, [500], "ended"),
    "nobody computes what is to go on": ({}, [Page(status=400)], "ended"),
}


@pytest.mark.parametrize("fate", FATES)
@with_virtual_time
async def test_a_cut_answer_is_counted_once_by_its_outcome(fate: str) -> None:
    retry, prefills, fidelity = FATES[fate]
    services = a_router(a_config(1, 1, retry=retry))
    script(services, "p0", probed(), *prefills)
    last = events(22).replace(b"[22]", b"[]").replace(b" 22", b"") if "without" in fate else events(22)
    script(services, "d0", Page(events(20, 21, finish=None), breaks=LOST), Page(last + DONE))
    async with dispatching(services):
        with suppress(UpstreamError):
            await a_leg(services).run()
    kinds = ("exact", "adjusted", "approximate", "restarted", "ended")
    counted = {kind: services.metrics.resumes.value(kind) for kind in kinds}
    assert {kind: count for kind, count in counted.items() if count} == {fidelity: 1}


@pytest.mark.parametrize("answer", [400, LOST], ids=["refused", "broken"])
@with_virtual_time
async def test_an_answer_without_a_token_does_not_count_as_cut(answer: Any) -> None:
    services = a_router(a_config(1, 1, retry={"max_attempts": 1}))
    script(services, "p0", probed())
    script(services, "d0", answer)
    async with dispatching(services):
        with pytest.raises(UpstreamError):
            await a_leg(services).run()
    assert services.metrics.resumes.value("ended") == 0


class Slow(ScriptedUpstream):
    """Answers a second after it has been asked."""

    async def request(self, *args: Any, **options: Any) -> Any:
        reply = await super().request(*args, **options)
        await let_pass(1.0)
        return reply


@with_virtual_time
async def test_a_request_that_is_given_back_when_its_client_has_left_is_not_prefilled_again() -> None:
    """Its decode worker had not shown that it has pulled the KV, so it was not hung up on at once."""
    services = a_router(a_config(1, 1))
    p0 = script(services, "p0", probed())
    services.fleet["d0"].upstream = Slow(whole(20, stop_reason="recomputed"))  # type: ignore[assignment]
    async with dispatching(services):
        leg = a_leg(services, stream=False, max_tokens=2)
        task = services.loop.create_task(leg.run())
        await until(lambda: leg.at_worker == "d0")
        leg.abandon()
        with pytest.raises(ClientGone):
            await task
    assert len(asked(p0)) == 1 and leg.outcome is Outcome.CANCELLED and idle(services)
