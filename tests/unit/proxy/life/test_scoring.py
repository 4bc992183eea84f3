"""Requests for a prompt's scores alone: who is asked, and that nothing is left behind."""

import orjson
import pytest

from balanceroute.core.types import Outcome
from balanceroute.errors import NoHealthyWorkers
from balanceroute.proxy.life.scoring import Scoring
from tests.unit.proxy.life.legs import PROMPT_IDS, Client, a_leg, dispatching, idle, probed
from tests.unit.proxy.virtual_time import Page, a_config, a_router, let_pass, script, with_virtual_time
from tests.waiting import until

LAYERWISE = {"connector": "mooncake_layerwise", "layerwise": {"callback_url": "http://router"}}
LOGPROBS = {"tokens": ["a", " b", " c"], "token_logprobs": [None, -1.0, -2.0], "top_logprobs": None, "text_offset": []}


def scored() -> Page:
    """What an engine says of a prompt that is echoed: it generates one token all the same."""
    return probed(params=None, text="a b c", logprobs=LOGPROBS, prompt_logprobs=[None] * len(PROMPT_IDS))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("decode_first", [False, True])
@with_virtual_time
async def test_a_prefiller_alone_answers_a_scoring_request(decode_first: bool, stream: bool) -> None:
    config = a_config(1, 1)
    if decode_first:
        config = config.model_validate(config.model_dump() | LAYERWISE)
    services, client = a_router(config), Client()
    p0, d0 = script(services, "p0", scored()), script(services, "d0")
    async with dispatching(services):
        wishes = {} if stream else {"logprobs": 1}
        leg = a_leg(services, client, Scoring, echo=True, max_tokens=0, stream=stream, **wishes)
        await leg.run()
    assert leg.outcome is Outcome.FINISHED and client.ended and not d0.asked
    assert b"kv_transfer_params" not in p0.asked[0].body
    if not stream:
        assert orjson.loads(client.got)["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert idle(services)


@pytest.mark.parametrize("decode_first", [False, True])
@with_virtual_time
async def test_a_scoring_request_is_answered_while_all_decode_workers_are_down(decode_first: bool) -> None:
    config = a_config(1, 1)
    if decode_first:
        config = config.model_validate(config.model_dump() | LAYERWISE)
    services, client = a_router(config), Client()
    script(services, "p0", scored())
    services.fleet.set_healthy(services.fleet["d0"], False)
    async with dispatching(services):
        await a_leg(services, client, Scoring, echo=True, max_tokens=0, logprobs=1, stream=False).run()
    assert client.ended and idle(services)


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("decode_first", [False, True])
@with_virtual_time
async def test_a_failed_scoring_try_is_repeated(decode_first: bool, status: int) -> None:
    config = a_config(1, 1)
    if decode_first:
        config = config.model_validate(config.model_dump() | LAYERWISE)
    services, client = a_router(config), Client()
    p0 = script(services, "p0", status, scored())
    async with dispatching(services):
        await a_leg(services, client, Scoring, echo=True, max_tokens=0, logprobs=1, stream=False).run()
    assert len(p0.asked) == 2 and client.ended and idle(services)


@with_virtual_time
async def test_a_client_that_leaves_ends_a_scoring_request_at_once_without_orphaned_kv() -> None:
    services = a_router(a_config(1, 1))
    p0 = script(services, "p0", None)
    async with dispatching(services):
        leg = a_leg(services, strategy=Scoring, echo=True, max_tokens=0, logprobs=1, stream=False)
        task = services.loop.create_task(leg.run())
        await until(lambda: p0.under_way)
        leg.abandon()
        await let_pass(0.1)
        assert task.cancelled() and leg.outcome is Outcome.CANCELLED
    assert services.metrics.orphaned_kv == 0 and idle(services)


@with_virtual_time
async def test_a_decode_first_scoring_request_holds_no_decode_slot_and_is_a_503_without_prefillers() -> None:
    config = a_config(1, 1)
    services = a_router(config.model_validate(config.model_dump() | LAYERWISE))
    p0 = script(services, "p0", None)
    options = {"echo": True, "max_tokens": 0, "logprobs": 1, "stream": False}
    async with dispatching(services):
        leg = a_leg(services, strategy=Scoring, **options)
        task = services.loop.create_task(leg.run())
        await until(lambda: p0.under_way)
        await let_pass(1.0)
        view = services.tickets.view()
        assert [decoder.active for decoder in view.decoders] == [0] and not view.pooled
        leg.abandon()
        await let_pass(0.1)
        services.fleet.set_healthy(services.fleet["p0"], False)
        with pytest.raises(NoHealthyWorkers):
            await a_leg(services, strategy=Scoring, request_id="s", **options).run()
    assert task.cancelled() and idle(services)
