"""What a failed try means for the request and for its worker."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from balanceroute.core.types import RequestSpec, Role
from balanceroute.errors import (
    BadUpstreamReply,
    CannotConnect,
    ConnectFailed,
    ConnectionLost,
    DecodersLost,
    NoHealthyWorkers,
    QueueTimeout,
    ReplyTooLarge,
    UpstreamError,
    UpstreamStatus,
    UpstreamTimeout,
)
from balanceroute.proxy.life.errors import DeadlineExceeded, NothingPinned
from balanceroute.proxy.life.retries import MAX_FRUITLESS, RECENT_S, Retries, event_error, pushes_back
from balanceroute.proxy.life.suspicion import MAX_LOSSES, Choices
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.wire.bounds import MAX_ERROR_BYTES
from balanceroute.proxy.wire.responses import body_of
from balanceroute.proxy.workers.fleet import why_not_up
from tests.unit.proxy.virtual_time import a_config, a_router, let_pass, script, with_virtual_time

RETRY = {"max_attempts": 3, "base_delay_s": 1.0, "max_delay_s": 4.0}


def a_status(status: int, retry_after_s: float = 0.0, tier: str = "decode") -> UpstreamStatus:
    error = UpstreamStatus(f"status {status}", worker="d0", tier=tier, status=status, body=b"")
    error.retry_after_s = retry_after_s
    return error


def lost() -> UpstreamError:
    return ConnectionLost("reset", worker="d0", tier="decode")


def dead() -> UpstreamStatus:
    return UpstreamStatus("dead", worker="d0", tier="decode", status=500, body=b"EngineDeadError")


def some_retries(choices: Choices | None = None, **settings: int) -> tuple[Services, Retries]:
    services = a_router(a_config(retry={**RETRY, **settings}))
    return services, Retries(services, "r", choices)


@pytest.mark.parametrize(
    ("status", "tier", "settings"),
    [
        (400, "decode", {}),
        (422, "decode", {}),
        (401, "decode", {}),
        (404, "prefill", {}),
        (401, "prefill", {"auth": {"worker_api_key": "key"}}),
        (404, "decode", {"connector": "mooncake_layerwise", "layerwise": {"callback_url": "http://r:1"}}),
    ],
)
@with_virtual_time
async def test_a_clients_error_is_raised_and_not_held_against_the_worker(
    status: int, tier: str, settings: dict[str, object]
) -> None:
    services = a_router(a_config(retry=RETRY, **settings))
    worker = services.fleet["d0" if tier == "decode" else "p0"]
    with pytest.raises(UpstreamStatus):
        Retries(services, "r", None).judge(a_status(status, tier=tier), worker, begun=False)
    assert not worker.circuit.doubtful


@pytest.mark.parametrize(
    ("status", "auth"), [(404, {}), (401, {"worker_api_key": "key"}), (403, {"worker_api_key": "key"})]
)
@with_virtual_time
async def test_a_decode_worker_with_another_model_or_key_than_the_prefiller_is_held_to_fail(
    status: int, auth: dict[str, str]
) -> None:
    services = a_router(a_config(decoders=2, retry=RETRY, auth=auth))
    first, second = services.fleet["d0"], services.fleet["d1"]
    retries = Retries(services, "r", None)
    retries.judge(a_status(status), first, begun=False)
    assert first.circuit.doubtful
    retries.judge(a_status(status), second, begun=False)
    with pytest.raises(UpstreamStatus):
        retries.judge(a_status(status), second, begun=False)
    assert not first.circuit.doubtful, "no decode worker knows it, so the fault may be the request's"


@pytest.mark.parametrize(
    ("message", "held"),
    [
        ("data_parallel_rank 2 is out of range [0, 2).", True),
        ("data_parallel_rank 3 is out of range [0, 2).", False),
        ("no such tool: data_parallel_rank 2 is out of range", False),
    ],
    ids=["its rank", "another rank", "a client's words"],
)
@with_virtual_time
async def test_a_rank_that_its_engine_does_not_have_is_held_to_fail(message: str, held: bool) -> None:
    workers = [{"url": "http://d:1", "dp_rank": rank, "id": f"d{rank}"} for rank in range(3)]
    services = a_router(a_config(decode={"workers": workers}, retry=RETRY))
    worker, retries = services.fleet["d2"], Retries(services, "r", None)
    body = b'{"error":{"message":"%s","type":"BadRequestError","param":null,"code":400}}' % message.encode()
    error = UpstreamStatus("status 400", worker="d2", tier="decode", status=400, body=body)
    with nullcontext() if held else pytest.raises(UpstreamStatus):
        retries.judge(error, worker, begun=False)
    assert worker.circuit.doubtful is held


LAYERWISE = {"connector": "mooncake_layerwise", "layerwise": {"callback_url": "http://r:1"}}


@pytest.mark.parametrize(
    ("status", "tier", "settings"),
    [
        (404, "prefill", {}),
        (401, "prefill", {"auth": {"worker_api_key": "key"}}),
        (404, "prefill", LAYERWISE),
        (404, "decode", LAYERWISE),
    ],
)
@with_virtual_time
async def test_a_worker_with_another_model_or_key_than_one_that_serves_the_model_is_held_to_fail(
    status: int, tier: str, settings: dict[str, object]
) -> None:
    services = a_router(a_config(prefillers=2, decoders=2, retry=RETRY, **settings))
    known, other = services.fleet.of(Role(tier))
    for worker in (known, other):  # the other one may have been started anew with another model
        worker.has_served("m")
    error = a_status(status, tier=tier)
    with pytest.raises(UpstreamStatus):
        Retries(services, "r", None, "typo").judge(error, other, begun=False)
    assert not other.circuit.doubtful, "nobody has served that model"
    Retries(services, "r", None, "m").judge(error, other, begun=False)
    assert other.circuit.doubtful and not known.circuit.doubtful
    with pytest.raises(UpstreamStatus):
        Retries(services, "r", None, "m").judge(error, known, begun=False)
    assert not known.circuit.doubtful, "no other worker serves the model"


@pytest.mark.parametrize(("tier", "settings"), [("prefill", {}), ("decode", {}), ("decode", LAYERWISE)])
@with_virtual_time
async def test_a_request_that_meets_another_models_worker_often_waits_for_one_that_serves_it(
    tier: str, settings: dict[str, object]
) -> None:
    services = a_router(a_config(prefillers=2, decoders=2, retry=RETRY, **settings))
    known, other = services.fleet.of(Role(tier))
    known.has_served("m")
    retries = Retries(services, "r", None, "m")
    for _ in range(2 * RETRY["max_attempts"]):  # it is the only one with a free slot: the other one is full
        retries.judge(a_status(404, tier=tier), other, begun=False)
    ticket = services.tickets.submit(RequestSpec("r", 10))
    with pytest.raises(QueueTimeout, match="answered 404"):
        await retries.wait_for_worker(ticket, services.loop.create_future())
    known.circuit.open(services.tickets.now(), "status 500")
    with pytest.raises((NoHealthyWorkers, UpstreamStatus)):
        for _ in range(RETRY["max_attempts"]):
            retries.judge(a_status(404, tier=tier), other, begun=False)


@with_virtual_time
async def test_a_worker_that_serves_no_more_is_no_witness_against_another() -> None:
    services = a_router(a_config(prefillers=2, retry=RETRY))
    known, other = services.fleet["p0"], services.fleet["p1"]
    known.has_served("m")
    known.circuit.open(services.tickets.now(), "status 500")
    with pytest.raises(NoHealthyWorkers, match="that serves this model"):  # "not found" would be final
        Retries(services, "r", None, "m").judge(a_status(404, tier="prefill"), other, begun=False)
    assert not other.circuit.doubtful
    with pytest.raises(UpstreamStatus):
        Retries(services, "r", None, "typo").judge(a_status(404, tier="prefill"), other, begun=False)


@pytest.mark.parametrize("tier", ["prefill", "decode"])
@with_virtual_time
async def test_an_answer_that_is_too_large_ends_the_request_that_may_have_asked_for_it(tier: str) -> None:
    services, retries = some_retries()
    worker = services.fleet["p0" if tier == "prefill" else "d0"]
    with pytest.raises(ReplyTooLarge):
        retries.judge(ReplyTooLarge("too large", worker=worker.id, tier=tier), worker, begun=False)
    assert not worker.circuit.doubtful


@with_virtual_time
async def test_a_lack_of_descriptors_is_a_failed_try_but_not_held_against_the_worker() -> None:
    services, retries = some_retries()
    worker = services.fleet["d0"]
    error = CannotConnect("cannot connect: Too many open files", worker="d0", tier="decode")
    for _ in range(2):
        retries.judge(error, worker, begun=False)
    with pytest.raises(CannotConnect):
        retries.judge(error, worker, begun=False)
    assert not worker.out and not worker.circuit.doubtful
    assert services.metrics.upstream_errors.value("d0", "decode", "connect") == 0


@pytest.mark.parametrize("body", [b"{}", b"EngineDeadError"], ids=["lives", "dead"])
@pytest.mark.parametrize("status", [500, 501, 502])
@pytest.mark.parametrize("left", ["none", "down", "drained", "up"])
@with_virtual_time
async def test_an_error_that_all_workers_give_is_held_against_none(left: str, status: int, body: bytes) -> None:
    services = a_router(a_config(decoders=2, retry=RETRY))
    retries = Retries(services, "r", None)
    fleet = services.fleet
    erring, other = fleet["d0"], fleet["d1"]
    if left == "down":
        other.circuit.open(services.tickets.now(), "status 500")
    elif left == "drained":
        fleet.drain(other)
    error = UpstreamStatus("its own", worker="d0", tier="decode", status=status, body=body)
    retries.judge(error, erring, begun=False)
    assert erring.circuit.doubtful
    retries.judge(error, other if left == "none" else erring, begun=False)
    own = status < 502 and body == b"{}"
    with nullcontext() if left == "up" and body == b"{}" else pytest.raises(UpstreamStatus):
        retries.judge(error, erring, begun=False)
    clear = left != "up" and own
    assert erring.circuit.doubtful is not clear
    assert other.circuit.doubtful is (left == "down" or (left == "none" and not clear))


@pytest.mark.parametrize(
    ("status", "blamed"), [(500, [True, True, False, True]), (502, [True] * 4)], ids=["its own", "of what is before it"]
)
@with_virtual_time
async def test_many_requests_that_engines_answer_with_500_leave_half_of_the_tier_in_use(
    status: int, blamed: list[bool]
) -> None:
    services = a_router(a_config(decoders=4, retry=RETRY))
    workers = services.fleet.of(Role.DECODE)
    await let_pass(2 * RECENT_S)
    for worker in workers[:3]:
        worker.has_begun(services.tickets.now())
    for worker in workers:
        Retries(services, "r", None).judge(a_status(status), worker, begun=False)
    assert [worker.circuit.doubtful for worker in workers] == blamed, "the last one serves no other request"


@pytest.mark.parametrize(
    "error",
    [a_status(500), a_status(502), BadUpstreamReply("no stream", worker="d0", tier="decode")],
    ids=["500", "502", "no stream"],
)
@with_virtual_time
async def test_a_worker_that_fails_all_requests_uses_up_one_try_of_each_while_others_are_full(
    error: UpstreamError,
) -> None:
    """It was the only one with a free slot, got the same request three times, and the client its error."""
    services = a_router(a_config(decoders=2, retry=RETRY))
    broken, full = services.fleet.of(Role.DECODE)
    retries = Retries(services, "r", None)
    for _ in range(2 * RETRY["max_attempts"]):
        retries.judge(error, broken, begun=False)
    assert broken.circuit.doubtful
    retries.judge(error, full, begun=False)
    with pytest.raises(UpstreamError):
        retries.judge(error, broken, begun=False)
    is_own = isinstance(error, UpstreamStatus) and error.status == 500
    assert broken.circuit.doubtful is not is_own, "a 500 of all may be the request's fault"


@pytest.mark.parametrize(("tier", "settings"), [("decode", {}), ("prefill", LAYERWISE)], ids=["begun", "a push"])
@with_virtual_time
async def test_tries_at_a_broken_worker_end_where_no_queue_deadline_ends_them(
    tier: str, settings: dict[str, object]
) -> None:
    """They went on for as long as the others were full, each with a prefill, up to limits.request_timeout_s."""
    services = a_router(a_config(prefillers=2, decoders=2, retry=RETRY, **settings))
    broken, tries = services.fleet.of(Role(tier))[0], 0
    retries = Retries(services, "r", None)
    with pytest.raises(UpstreamStatus):
        while tries < 100:
            tries += 1
            retries.judge(a_status(502, tier=tier), broken, begun=tier == "decode")
            broken.circuit.success()  # it serves others
    assert tries == RETRY["max_attempts"] + MAX_FRUITLESS


@with_virtual_time
async def test_a_request_that_a_broken_worker_gets_again_and_again_names_its_last_failure_at_the_queue_deadline() -> (
    None
):
    services, retries = some_retries()
    error = BadUpstreamReply("no stream (of the client's words)", worker="d0", tier="decode")
    for _ in range(2):
        retries.judge(error, services.fleet["d0"], begun=False)
    ticket = services.tickets.submit(RequestSpec("r", 10))
    with pytest.raises(QueueTimeout, match=r"for decode, failed \(no stream\)\.$"):
        await retries.wait_for_worker(ticket, services.loop.create_future())


@with_virtual_time
async def test_requests_that_two_of_three_engines_answer_with_500_are_held_against_each_once() -> None:
    """Where such requests came once a second they kept workers of a tier of three or four resting, or took one out."""
    services = a_router(a_config(decoders=3, retry=RETRY))
    workers = services.fleet.of(Role.DECODE)[:2]
    await let_pass(2 * RECENT_S)
    for worker in (*workers, *workers):
        worker.has_begun(services.tickets.now())
        Retries(services, "r", None).judge(a_status(500), worker, begun=False)
    assert not any(worker.circuit.doubtful for worker in workers)


@with_virtual_time
async def test_one_of_two_workers_that_begins_to_answer_500_to_all_is_out_of_service_at_once() -> None:
    services = a_router(a_config(decoders=2, retry=RETRY))
    broken, other = services.fleet.of(Role.DECODE)
    await let_pass(2 * RECENT_S)
    broken.has_begun(services.tickets.now())
    for _ in range(services.config.health.failure_threshold):
        Retries(services, "r", None).judge(a_status(500), broken, begun=False)
    assert why_not_up(broken) == "requests to it fail (status 500)" and not other.circuit.doubtful


@with_virtual_time
async def test_a_worker_that_serves_none_but_its_old_requests_is_blamed_whatever_others_do() -> None:
    services = a_router(a_config(decoders=2, retry=RETRY))
    first, second = services.fleet.of(Role.DECODE)
    second.has_begun(services.tickets.now())
    await let_pass(2 * RECENT_S)
    for worker in (first, second):
        Retries(services, "r", None).judge(a_status(500), worker, begun=False)
    assert second.circuit.doubtful


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectFailed("cannot connect: Connection refused", worker="d0", tier="decode"), "cannot connect: Conne"),
        (BadUpstreamReply("no completion (index is 'prompt')", worker="d0", tier="decode"), "no completion"),
    ],
    ids=["refused", "quotes the answer"],
)
@with_virtual_time
async def test_a_worker_that_fails_requests_is_down_with_the_last_failure_and_no_word_of_an_answer(
    error: UpstreamError, expected: str
) -> None:
    services = a_router(a_config(decoders=2, retry=RETRY))
    worker = services.fleet["d0"]
    for _ in range(services.config.health.failure_threshold):
        Retries(services, "r", None).judge(error, worker, begun=False)
    assert f"({expected}" in why_not_up(worker) and "prompt" not in why_not_up(worker)


@with_virtual_time
async def test_an_error_before_the_first_token_does_not_clear_a_worker_that_fails_later() -> None:
    services = a_router(a_config(decoders=2, retry=RETRY))
    retries, worker = Retries(services, "r", None), services.fleet["d1"]
    retries.judge(a_status(500), services.fleet["d0"], begun=False)
    retries.grown()
    for _ in range(3):
        retries.judge(a_status(500), worker, begun=True)
    assert worker.circuit.doubtful


@pytest.mark.parametrize("status", [429, 503])
@with_virtual_time
async def test_back_pressure_uses_up_no_try(status: int) -> None:
    services, retries = some_retries()
    waits = [
        retries.judge(a_status(status), services.fleet["d0"], begun=True)
        for _ in range(2000)  # in the hour that an answer which has begun may wait
    ]
    assert all(0.0 <= wait_s <= RETRY["max_delay_s"] for wait_s in waits)
    assert pushes_back(a_status(status))


@pytest.mark.parametrize(
    "error",
    [lost(), a_status(408), a_status(500), UpstreamTimeout("late", worker="d0", tier="decode")],
    ids=["lost", "408", "500", "late"],
)
@with_virtual_time
async def test_a_failure_is_retried_until_the_last_one_is_raised(error: UpstreamError) -> None:
    services, retries = some_retries()
    worker = services.fleet["d0"]
    for other in services.fleet.of(Role.DECODE)[1:]:
        other.circuit.open(services.tickets.now(), "status 500")
    for _ in range(2):
        assert 0.0 <= retries.judge(error, worker, begun=False) <= RETRY["max_delay_s"]
    with pytest.raises(type(error)):
        retries.judge(error, worker, begun=False)


@with_virtual_time
async def test_failures_count_per_tier_and_lasting_tokens_reset_those_of_decode() -> None:
    services, retries = some_retries()
    prefiller, decoder = services.fleet["p0"], services.fleet["d0"]
    for _ in range(2):
        retries.judge(lost(), prefiller, begun=False)
        retries.judge(lost(), decoder, begun=False)
    retries.grown()
    retries.judge(lost(), decoder, begun=True)
    with pytest.raises(ConnectionLost):
        retries.judge(lost(), prefiller, begun=True)


@with_virtual_time
async def test_an_answered_probe_forgets_the_failures_of_prefill() -> None:
    services, retries = some_retries()
    for _ in range(2):
        retries.judge(lost(), services.fleet["p0"], begun=False)
    retries.prefilled()
    retries.judge(lost(), services.fleet["p0"], begun=False)


NOTHING_PINNED = NothingPinned("none", worker="p0", tier="prefill")


@pytest.mark.parametrize("before", [[], [lost()]], ids=["first", "after another failure"])
@pytest.mark.parametrize("between", [[], [lost()]], ids=["in a row", "with another failure between"])
@with_virtual_time
async def test_a_prefiller_that_pins_nothing_is_retried_once(
    before: list[UpstreamError], between: list[UpstreamError]
) -> None:
    services, retries = some_retries(max_attempts=9)
    for error in (*before, NOTHING_PINNED, *between):
        retries.judge(error, services.fleet["p0"], begun=False)
    with pytest.raises(NothingPinned):
        retries.judge(NOTHING_PINNED, services.fleet["p0"], begun=False)


@with_virtual_time
async def test_a_prefiller_that_pins_nothing_after_another_prefill_is_retried_once_more() -> None:
    services, retries = some_retries()
    for _ in range(3):
        retries.judge(NOTHING_PINNED, services.fleet["p0"], begun=False)
        retries.prefilled()


@with_virtual_time
async def test_a_request_past_its_deadline_is_not_held_against_its_worker() -> None:
    services, retries = some_retries()
    with pytest.raises(DeadlineExceeded):
        retries.judge(DeadlineExceeded("late", worker="d0", tier=""), services.fleet["d0"], begun=True)
    assert not services.fleet["d0"].out


@with_virtual_time
async def test_a_request_that_is_recomputed_repeatedly_without_a_token_ends() -> None:
    services, retries = some_retries()
    for _ in range(MAX_FRUITLESS - 1):
        retries.count_without_token(services.fleet["d0"])
    with pytest.raises(BadUpstreamReply):
        retries.count_without_token(services.fleet["d0"])


@with_virtual_time
async def test_a_refused_request_waits_until_the_queue_deadline_and_names_the_refusal() -> None:
    services, retries = some_retries()
    ticket = services.tickets.submit(RequestSpec("r", 10))
    await ticket.prefiller()
    await let_pass(2 * services.config.queue.deadline_s)  # in the pool, for example
    refused_s = services.ledger.now()
    retries.judge(a_status(429), services.fleet["d0"], begun=False)
    await let_pass(1.0)
    retries.judge(a_status(503, 7.0), services.fleet["d0"], begun=False)
    with pytest.raises(QueueTimeout, match="answered 503") as refused:
        await retries.wait_for_worker(ticket, ticket.admission())
    assert refused.value.retry_after_s == 7.0
    assert services.ledger.now() == refused_s + services.config.queue.deadline_s


@with_virtual_time
async def test_a_request_that_prefillers_refuse_waits_as_long_as_the_queue_lets_it_since_its_requeue() -> None:
    services, retries = some_retries()
    ticket = services.tickets.submit(RequestSpec("r", 10))
    await ticket.prefiller()
    ticket.prefilled(10)
    services.ledger.admit()
    await let_pass(2 * services.config.queue.deadline_s)
    ticket.requeue()
    requeued_s = services.ledger.now()
    await let_pass(1.0)
    retries.judge(a_status(429, tier="prefill"), services.fleet["p0"], begun=False)
    services.fleet.set_healthy(services.fleet["p0"], False)
    with pytest.raises(QueueTimeout, match="for prefill, answered 429"):
        await retries.wait_for_worker(ticket, services.loop.create_future())
    assert services.ledger.now() == requeued_s + services.config.queue.deadline_s


@with_virtual_time
async def test_decode_first_a_refusal_by_a_prefiller_does_not_count_once_the_request_waits_for_another_slot() -> None:
    """The decode worker was lost while it waited for the KV: the request got 503 at once if it had come long before."""
    services = a_router(a_config(**LAYERWISE))
    retries = Retries(services, "r", None)
    ticket = services.tickets.submit(RequestSpec("r", 10))
    await let_pass(2 * services.config.queue.deadline_s)  # for its first slot
    services.ledger.admit()
    await ticket.admission()
    retries.judge(a_status(429, tier="prefill"), services.fleet["p0"], begun=False)
    ticket.requeue()

    async def freed() -> str:
        await let_pass(2 * services.config.queue.deadline_s)
        return "d1"

    assert await retries.wait_for_worker(ticket, freed()) == "d1"


@with_virtual_time
async def test_a_refusal_by_a_prefiller_is_forgotten_once_another_one_has_computed_the_prompt() -> None:
    """Its wait for a slot ended after `queue.deadline_s`, and that of others after `pool.ttl_s`."""
    services, retries = some_retries()
    ticket = services.tickets.submit(RequestSpec("r", 10))
    retries.judge(a_status(429, tier="prefill"), services.fleet["p0"], begun=False)
    retries.prefilled()

    async def freed() -> str:
        await let_pass(2 * services.config.queue.deadline_s)
        return "d1"

    assert await retries.wait_for_worker(ticket, freed()) == "d1"


@with_virtual_time
async def test_an_answer_that_has_begun_may_wait_beyond_the_queue_deadline() -> None:
    services, retries = some_retries()
    ticket = services.tickets.submit(RequestSpec("r", 10))
    retries.judge(a_status(503), services.fleet["d0"], begun=True)

    async def freed() -> str:
        await let_pass(2 * services.config.queue.deadline_s)
        return "d1"

    assert await retries.wait_for_worker(ticket, freed()) == "d1"


@with_virtual_time
async def test_a_loss_caused_by_another_request_does_not_count_as_a_failed_try() -> None:
    services, retries = some_retries()
    cause = Retries(services, "other", None)
    for each in (retries, cause):
        await each.suspect_loss(dead(), services.fleet["d0"], midway=False)
    retries.judge(dead(), services.fleet["d0"], begun=False)
    with pytest.raises(DecodersLost):
        for n in range(1, MAX_LOSSES):
            await cause.suspect_loss(dead(), services.fleet[f"d{n}"], midway=False)
    for _ in range(2):  # of three tries, two are left
        retries.judge(lost(), services.fleet["d2"], begun=False)
    with pytest.raises(ConnectionLost):
        retries.judge(lost(), services.fleet["d2"], begun=False)


@with_virtual_time
async def test_a_request_goes_to_no_further_worker_after_max_losses() -> None:
    services, retries = some_retries()
    for n in range(MAX_LOSSES - 1):
        await retries.suspect_loss(dead(), services.fleet[f"d{n}"], midway=False)
    assert retries.has_losses
    with pytest.raises(DecodersLost):
        await retries.suspect_loss(dead(), services.fleet["d2"], midway=False)
    assert services.fleet["d2"].circuit.doubtful


@with_virtual_time
async def test_a_connection_that_could_not_be_opened_does_not_count_as_a_death() -> None:
    """It never carried the request, whether or not the worker is alive: that is not asked."""
    services, retries = some_retries()
    health = script(services, "d0", 500)
    refused = ConnectFailed("no", worker="d0", tier="decode")
    refused.sent = False
    await retries.suspect_loss(refused, services.fleet["d0"], midway=False)
    assert not retries.has_losses and not health.asked


@with_virtual_time
async def test_losses_of_one_choice_count_against_all_until_one_has_a_token() -> None:
    choices = Choices()
    services, one = some_retries(choices)
    other = Retries(services, "r-1", choices)
    await one.suspect_loss(dead(), services.fleet["d0"], midway=False)
    assert other.has_losses
    choices.clear()
    await other.turn(services.fleet["d1"])
    assert not other.has_losses


@pytest.mark.parametrize("leaves", [Retries.left_worker, Retries.note_waiting, Retries.close])
@with_virtual_time
async def test_a_suspect_that_leaves_its_worker_lets_the_next_one_go_there_at_once(
    leaves: Callable[[Retries], None],
) -> None:
    services, first = some_retries()
    second = Retries(services, "other", None)
    for each in (first, second):
        await each.suspect_loss(dead(), services.fleet["d0"], midway=False)
    await first.turn(services.fleet["d1"])
    turn = asyncio.ensure_future(second.turn(services.fleet["d1"]))
    await let_pass(1.0)
    assert not turn.done()
    leaves(first)
    await let_pass(0.0)
    assert turn.done()


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        (b'{"error":{"code":400}}', 400),
        (b'{"error":{"code":503}}', 503),
        (b'{"object":"error","message":"too long","code":400}', 400),
        (b'{"error":{"code":"x"}}', 502),
        (b'{"error":{"code":200}}', 502),
        (b"[]", 502),
        (b"no json", 502),
    ],
)
@with_virtual_time
async def test_an_error_event_equals_the_same_error_as_a_status(payload: bytes, status: int) -> None:
    services, _ = some_retries()
    assert event_error(payload, services.fleet["d0"]).status == status


@with_virtual_time
async def test_a_huge_error_event_keeps_its_status_and_reaches_no_client_whole() -> None:
    services, _ = some_retries()
    error = event_error(b'{"error":{"message":"%b","code":400}}' % (b"x" * 2**21), services.fleet["d0"])
    assert error.status == 400 and len(error.body) == MAX_ERROR_BYTES
    assert len(body_of(error)) < 1000
