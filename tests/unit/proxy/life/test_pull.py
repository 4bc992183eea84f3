"""Prefill first: what follows a prefill."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import pytest

from balanceroute.core.types import UP, Outcome
from balanceroute.errors import ConnectFailed, QueueTimeout
from balanceroute.proxy.life.errors import PromptsDiffer
from balanceroute.proxy.life.pool_reaper import PERIOD_S, PoolReaper
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.workers.circuit import MAX_REST_S, CircuitState
from balanceroute.proxy.workers.pins import PinRecord
from tests.unit.proxy.life.legs import (
    DONE,
    PROMPT_IDS,
    WHOLE,
    Client,
    a_leg,
    asked,
    dispatching,
    events,
    idle,
    probed,
    streaming,
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


@with_virtual_time
async def test_a_decode_worker_gets_the_prefillers_parameters_unchanged_in_one_request() -> None:
    services, client = a_router(a_config(1, 1)), Client()
    params = {"remote_engine_id": "e", "remote_block_ids": [3, 1], "unknown": {"kept": True}}
    p0, d0 = script(services, "p0", probed(params)), script(services, "d0", WHOLE)
    async with dispatching(services):
        leg = a_leg(services, client)
        await leg.run()
    assert (leg.outcome, leg.decoder_id, leg.prefiller_id, leg.recomputes) == (Outcome.FINISHED, "d0", "p0", 0)
    assert client.text == " 20 21" and client.got.endswith(DONE) and client.ended
    (probe,), (decode,) = asked(p0), asked(d0)
    assert probe["max_tokens"] == 1 and not probe["stream"] and probe["kv_transfer_params"]["do_remote_decode"]
    assert decode["kv_transfer_params"] == params and decode["prompt"] == "a b c"
    assert idle(services)


@with_virtual_time
async def test_a_failing_prefiller_is_replaced_before_any_decode_worker_is_used() -> None:
    services = a_router(a_config(2, 1))
    refused = ConnectFailed("refused", worker="p", tier="prefill")
    scripts = [script(services, name, refused, probed()) for name in ("p0", "p1")]
    d0 = script(services, "d0", WHOLE)
    async with dispatching(services):
        leg = a_leg(services)
        await leg.run()
    assert leg.outcome is Outcome.FINISHED and len(d0.asked) == 1
    assert [len(one.asked) for one in scripts] != [2, 0], "the retry goes to the other one while the first rests"
    assert services.metrics.retries.value("prefill") == len(scripts[0].asked) + len(scripts[1].asked) - 1 >= 1
    assert idle(services)


@with_virtual_time
async def test_kv_that_waited_too_long_for_a_slot_is_computed_anew() -> None:
    services = a_router(a_config(1, 1, decode={"max_num_seqs": 1}))
    assert services.drainer.pin_s is not None
    p0, d0 = script(services, "p0", probed()), script(services, "d0", Page(events(1, finish=None), ends=False))
    async with dispatching(services):
        holds, first = await streaming(services)
        waits = a_leg(services, request_id="s")
        second = services.loop.create_task(waits.run())
        await until(lambda: waits.kv.params is not None)
        d0.answers = [Page(events(20) + DONE)]
        services.loop.call_later(services.drainer.pin_s, holds.abandon)
        await second
        assert waits.outcome is Outcome.FINISHED and len(p0.asked) == 3
        assert first.cancelled()


class Unread(ScriptedUpstream):
    """A prefiller whose first answer is read so late, after a look of the reaper; `stopped`: the only one meanwhile."""

    def __init__(self, services: Services, unread_s: float, stopped: bool) -> None:
        super().__init__(probed())
        self._services, self._unread_s, self._stopped = services, unread_s, stopped
        self._reaper = PoolReaper(services, lambda most: ())

    async def request(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        unread_s, self._unread_s = self._unread_s, 0.0
        until_s = self._services.tickets.now() + unread_s
        while (left_s := until_s - self._services.tickets.now()) > 0:
            self._reaper.look()
            await let_pass(left_s if self._stopped else min(left_s, PERIOD_S))
        self._reaper.look()
        return await super().request(method, path, *args, **options)


@pytest.mark.parametrize("stopped", [True, False])
@with_virtual_time
async def test_a_probe_reply_read_after_a_stop_of_the_router_counts_its_kv_as_old(stopped: bool) -> None:
    """A machine is suspended for longer than prefillers keep KV: decoders read what is in the blocks by then."""
    services = a_router(a_config(1, 1))
    assert services.drainer.pin_s is not None
    p0, d0 = Unread(services, services.drainer.pin_s + 1, stopped), script(services, "d0", WHOLE)
    services.fleet["p0"].upstream = p0  # type: ignore[assignment]
    async with dispatching(services):
        leg = a_leg(services)
        await leg.run()
    assert leg.outcome is Outcome.FINISHED and len(asked(d0)) == 1
    assert len(asked(p0)) == 1 + stopped


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("read", [len(PROMPT_IDS) - 1, len(PROMPT_IDS), len(PROMPT_IDS) + 1])
@with_virtual_time
async def test_an_answer_to_another_prompt_than_the_one_whose_kv_was_computed_is_not_relayed(
    read: int, stream: bool
) -> None:
    """Prefiller and decode worker render a chat each: with different templates the KV is none of what is decoded."""
    services, client = a_router(a_config(1, 1)), Client()
    script(services, "p0", probed())
    fields = {"prompt_token_ids": [7] * read}
    script(services, "d0", Page(events(20, **fields) + DONE) if stream else whole(20, **fields))
    async with dispatching(services):
        leg = a_leg(services, client, stream=stream)
        with nullcontext() if read == len(PROMPT_IDS) else pytest.raises(PromptsDiffer, match="templates"):
            await leg.run()
    assert bool(client.got) is client.ended is (read == len(PROMPT_IDS)) and idle(services)
    assert services.fleet["d0"].circuit.state is CircuitState.CLOSED


@pytest.mark.parametrize("stream", [True, False])
@with_virtual_time
async def test_a_worker_with_another_chat_template_than_all_others_does_not_swallow_their_requests(
    stream: bool,
) -> None:
    def answers(tokens: int) -> Page:
        fields = {"prompt_token_ids": [7] * tokens}
        return Page(events(20, **fields) + DONE) if stream else whole(20, **fields)

    services, differs = a_router(a_config(1, 3)), answers(len(PROMPT_IDS) + 1)
    script(services, "p0", probed())
    others = [script(services, name, answers(len(PROMPT_IDS))) for name in ("d1", "d2")]
    sick = script(services, "d0", differs)
    async with dispatching(services):
        for number in range(10):
            client = Client()
            leg = a_leg(services, client, request_id=str(number), stream=stream)
            await leg.run()
            assert leg.outcome is Outcome.FINISHED and leg.answer.scanner.tokens == 1
            assert client.text == " 20" if stream else orjson.loads(client.got)["choices"][0]["text"] == " 20"
        assert len(sick.asked) == 1 and services.fleet["d0"].circuit.state is CircuitState.RESTING
        for other in others:
            other.answers = [differs]
        with pytest.raises(PromptsDiffer):  # now it is the prefiller whose template is another
            await a_leg(services, request_id="later", stream=stream).run()
        await let_pass(MAX_REST_S)
        with pytest.raises(PromptsDiffer):
            await a_leg(services, request_id="last", stream=stream).run()
        assert len(sick.asked) + sum(len(other.asked) for other in others) == 1 + 10 + 2 + 1
    assert all(worker.state is UP for worker in services.fleet) and idle(services)


@with_virtual_time
async def test_each_worker_s_own_prompt_is_checked_also_after_one_that_gave_the_request_back() -> None:
    services, client = a_router(a_config(1, 1)), Client()
    script(services, "p0", probed())
    marker = {"text": "", "token_ids": [], "stop_reason": "recomputed", "prompt_token_ids": PROMPT_IDS}
    differs = events(20, prompt_token_ids=[*PROMPT_IDS, 8]) + DONE
    d0 = script(services, "d0", Page(events(20, finish="stop", **marker) + DONE), Page(differs))
    async with dispatching(services):
        with pytest.raises(PromptsDiffer):
            await a_leg(services, client).run()
    assert len(d0.asked) == 2 and not client.got and idle(services)


@with_virtual_time
async def test_a_prefiller_with_another_chat_template_than_all_others_does_not_swallow_their_requests() -> None:
    services = a_router(a_config(2, 2))
    sick = script(services, "p0", probed(prompt=[*PROMPT_IDS, 8]))
    script(services, "p1", probed())
    for name in ("d0", "d1"):
        script(services, name, Page(events(20, prompt_token_ids=PROMPT_IDS) + DONE))
    async with dispatching(services):
        for number in range(10):
            leg = a_leg(services, request_id=str(number))
            await leg.run()
            assert leg.outcome is Outcome.FINISHED
        assert len(sick.asked) == 2 and services.fleet["p0"].circuit.state is CircuitState.RESTING
        services.fleet.drain(services.fleet["p1"])
        await let_pass(MAX_REST_S)
        with pytest.raises(PromptsDiffer):  # there is no other prefiller
            await a_leg(services, request_id="last").run()
    assert all(worker.state is UP for worker in services.fleet if not worker.drained) and idle(services)


@with_virtual_time
async def test_kv_of_another_prompt_serves_no_request_from_the_cache_of_the_worker_that_has_pulled_it() -> None:
    services = a_router(a_config(2, 1))
    script(services, "p0", probed(params={"remote_engine_id": "p0"}, prompt=[*PROMPT_IDS, 8]))
    script(services, "p1", probed(params={"remote_engine_id": "p1"}))
    d0 = script(services, "d0", Page(events(20, prompt_token_ids=PROMPT_IDS) + DONE))
    salts: dict[str, list[str | None]] = {"p0": [], "p1": []}
    async with dispatching(services):
        for number, others in enumerate(("p1", "p0", "p1", "p0")):
            services.fleet.drain(services.fleet[others])
            with nullcontext() if others == "p0" else pytest.raises(PromptsDiffer):
                await a_leg(services, request_id=str(number)).run()
            services.fleet.undrain(services.fleet[others])
            await let_pass(MAX_REST_S)
    for body in asked(d0):
        salts[body["kv_transfer_params"]["remote_engine_id"]].append(body.get("cache_salt"))
    assert salts["p0"][0] is None and len(salts["p0"]) == 2
    assert salts["p1"][0] and salts["p1"] == [salts["p1"][0]] * 2, "what is cached of right prompts remains of use"
    assert salts["p0"][1] not in (None, salts["p1"][0])
    assert idle(services)


# -- what is counted


@with_virtual_time
async def test_tokens_are_counted_as_they_arrive() -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    script(services, "d0", Page(events(20, 21, finish=None), ends=False))
    async with dispatching(services):
        leg, task = await streaming(services)
        page = services.metrics.exposition().decode().splitlines()
        assert "balanceroute_generated_tokens_total 2.0" in page
        leg.abandon()
        await asyncio.wait({task})
    assert services.metrics.tokens.value() == 2


@pytest.mark.parametrize(("tier", "worker"), [("prefill", "p0"), ("decode", "d0")])
@with_virtual_time
async def test_a_failed_last_try_does_not_count_as_a_retry(tier: str, worker: str) -> None:
    services = a_router(a_config(1, 1, queue={"deadline_s": 3.0}))
    script(services, "p0", probed())
    scripted = script(services, worker, 503)
    async with dispatching(services):
        with pytest.raises(QueueTimeout):
            await a_leg(services).run()
    tries = [body for body in asked(scripted) if tier == "prefill" or body["stream"]]  # others are drains
    assert services.metrics.retries.value(tier) == len(tries) - 1


@with_virtual_time
async def test_a_request_that_has_waited_long_for_a_slot_is_tried_again_after_a_refusal() -> None:
    """It got 503 at once: the time for its next try was counted from its arrival."""
    services = a_router(a_config(1, 1, queue={"deadline_s": 3.0}))
    script(services, "p0", probed(), probed())
    script(services, "d0", 503, Page(events(20, finish="stop") + DONE))
    services.fleet.drain(services.fleet["d0"])
    async with dispatching(services):
        client = Client()
        task = services.loop.create_task(a_leg(services, client).run())
        await let_pass(5.0)
        services.fleet.undrain(services.fleet["d0"])
        await task
    assert client.ended


# -- the record of what is pinned


def recorded(services: Services, path: Path) -> PinRecord:
    services.pins = PinRecord(path)
    return services.pins


@with_virtual_time
async def test_pinned_kv_is_on_record_until_its_parameters_are_sent(tmp_path: Path) -> None:
    services = a_router(a_config(1, 1, decode={"max_num_seqs": 1}))
    record = recorded(services, tmp_path / "pins")
    script(services, "p0", probed({"remote_engine_id": "e"}))
    d0 = script(services, "d0", Page(events(1, finish=None), ends=False))
    async with dispatching(services):
        holds, first = await streaming(services)
        waits = a_leg(services, request_id="s")
        assert len(record) == 0
        second = services.loop.create_task(waits.run())
        await until(lambda: waits.kv.params is not None)
        records = [orjson.loads(line) for line in (tmp_path / "pins").read_bytes().splitlines() if line[:1] == b"{"]
        assert records[-1]["request"] == "s" and records[-1]["params"] == {"remote_engine_id": "e"}
        assert (records[-1]["prefiller"], records[-1]["prompt_tokens"], records[-1]["model"]) == (
            services.fleet["p0"].spec.url,
            len(PROMPT_IDS),
            "m",
        )
        assert b"a b c" not in (tmp_path / "pins").read_bytes()
        assert len(record) == 1
        d0.answers = [Page(events(20) + DONE)]
        holds.abandon()
        await second
    assert first.cancelled() and len(record) == 0


@pytest.mark.parametrize("refusal", [503, "unsent"])
@with_virtual_time
async def test_a_refusing_decode_worker_leaves_the_pinned_kv_recorded(tmp_path: Path, refusal: int | str) -> None:
    services = a_router(a_config(1, 1))
    record = recorded(services, tmp_path / "pins")
    unsent = ConnectFailed("nobody listens", worker="d0", tier="decode")
    unsent.sent = False
    d0 = script(services, "d0", unsent if refusal == "unsent" else 503)
    script(services, "p0", probed())
    async with dispatching(services):
        task = services.loop.create_task(a_leg(services).run())
        await until(lambda: bool(d0.asked) and len(record) > 0)
        d0.answers = [WHOLE]
        await task
        await until(lambda: not services.drainer.pending)
    assert len(record) == 0


@with_virtual_time
async def test_a_client_that_leaves_has_its_kv_drained_and_off_the_record(tmp_path: Path) -> None:
    services = a_router(a_config(1, 1, decode={"max_num_seqs": 1}))
    record = recorded(services, tmp_path / "pins")
    script(services, "p0", probed())
    d0 = script(services, "d0", Page(events(1, finish=None), ends=False))
    async with dispatching(services):
        holds, first = await streaming(services)
        waits = a_leg(services, request_id="s")
        second = services.loop.create_task(waits.run())
        await until(lambda: len(record) == 1)
        d0.answers = [Page()]
        waits.abandon()
        await until(lambda: not services.drainer.pending and waits not in services.legs)
        assert len(record) == 0 and services.metrics.drains.value("drained") == 1
        holds.abandon()
        await asyncio.wait([first, second])
