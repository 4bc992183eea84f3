"""What workers say of themselves, and what is made of those that don't."""

import logging

import orjson
import pytest

from balanceroute.core.types import Phase, RequestSpec, Role, Standing
from balanceroute.errors import BadUpstreamReply, ConnectFailed
from balanceroute.proxy.app import metrics_poller
from balanceroute.proxy.link.messages import Seen, frame
from balanceroute.proxy.ops.admin import state
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.telemetry.conditions import METRICS, PREFIX_CACHE, SLOTS
from balanceroute.proxy.telemetry.divergence import WINDOW
from balanceroute.proxy.workers.metrics_poller import FULL
from tests.unit.proxy.virtual_time import (
    Answer,
    Page,
    a_config,
    a_router,
    leaving,
    script,
    stand_still,
    with_virtual_time,
)


@with_virtual_time
async def test_a_decode_worker_s_tokens_per_step_reach_the_scheduler_and_end_with_its_drafts() -> None:
    drafts = (
        b'vllm:num_requests_running{engine="0"} 1.0\n'
        b'vllm:spec_decode_num_drafts_total{engine="0"} 10.0\n'
        b'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 7.0\n'
    )
    services = a_router(a_config())
    script(services, "d1", Page(drafts), Page(b'vllm:num_requests_running{engine="0"} 1.0\n'))
    for known in (1.7, 1.0):
        await polled(services)
        workers = services.ledger.scheduler.snapshot.workers
        assert [worker.tokens_per_step for worker in workers] == [1.0, known, 1.0]


@with_virtual_time
async def test_a_rank_that_leaves_while_its_server_s_metrics_are_read_leaves_the_other_ranks_known() -> None:
    ranks = [{"url": "http://p:1", "id": f"p{n}", "dp_rank": n} for n in range(2)]
    services = a_router(a_config(prefill={"workers": ranks}))
    asked = leaving(services, "p0")
    script(services, "p1", Page(b'vllm:kv_cache_usage_perc{engine="1"} 0.25\n'))
    await polled(services)
    assert asked.asked and usage_of(services, "p1") == 0.25
    assert not any("p1" in reason for reason in services.metrics.conditions.reasons)


SIZE = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
GAUGE = b'vllm:kv_cache_usage_perc{engine="0"} %s\n'
REFUSED = ConnectFailed("refused", worker="p0", tier="prefill")


async def polled(services: Services, times: int = 1) -> None:
    poller = metrics_poller(services)
    for _ in range(times):
        await poller.polling.once()


def usage_of(services: Services, name: str = "p0") -> float | None:
    return services.ledger.prefiller(name).kv_usage


@pytest.mark.parametrize(
    ("answer", "usage", "is_failure"),
    [
        (Page(GAUGE % b"0.25"), 0.25, False),
        (Page(GAUGE % b"7"), None, True),
        (Page(GAUGE % b"NaN"), None, True),
        (Page(b"python_info 1.0\n"), None, True),
        (404, None, True),
        (500, None, True),
        (Page(b"", breaks=BadUpstreamReply("cut", worker="p0", tier="prefill")), None, True),
        (REFUSED, FULL, True),
        (None, FULL, True),
    ],
    ids=["told", "no ratio", "NaN", "no gauge", "404", "500", "broken off", "refused", "silent"],
)
@with_virtual_time
async def test_an_unreachable_prefiller_counts_as_full_and_one_without_usage_as_unknown(
    answer: Answer, usage: float | None, is_failure: bool
) -> None:
    services = a_router(a_config(prefillers=2))
    script(services, "p0", answer)
    script(services, "p1", Page(GAUGE % b"0.5"))
    services.fleet["p0"].seen_healthy = True
    await polled(services)
    assert (usage_of(services), usage_of(services, "p1")) == (usage, 0.5)
    assert services.metrics.conditions.count(METRICS) == (1 if is_failure else 0) + len(services.fleet.of(Role.DECODE))
    assert services.metrics.scrapes_failed.value("p0") == is_failure


@with_virtual_time
async def test_a_worker_that_has_not_started_yet_is_down_and_not_degraded() -> None:
    """Its health checks say so, a moment later."""
    services = a_router(a_config(prefillers=1))
    script(services, "p0", REFUSED)
    await polled(services)
    assert usage_of(services) == FULL
    assert not any("p0" in reason for reason in services.metrics.conditions.reasons)


@with_virtual_time
async def test_a_metrics_page_read_late_by_a_stalled_loop_changes_nothing() -> None:
    services = a_router(a_config(prefillers=1))
    script(services, "p0", Page(GAUGE % b"0.25"))
    await polled(services)
    script(services, "p0", None)
    services.loop.call_later(1.0, stand_still, 30.0)  # as if a callback had run for so long
    before = services.metrics.conditions.count(METRICS)
    await polled(services)
    assert (usage_of(services), services.metrics.conditions.count(METRICS)) == (0.25, before)
    await polled(services)
    assert usage_of(services) == FULL


@with_virtual_time
async def test_when_no_prefillers_page_is_readable_they_no_longer_count_as_full() -> None:
    """The router cannot reach their pages, and /health is all that is left to go by."""
    config = a_config(prefillers=2, health={"failure_threshold": 2})
    services = a_router(config)
    poller = metrics_poller(services)
    for name in ("p0", "p1"):
        script(services, name, REFUSED)
    found = []
    for _ in range(4):
        await poller.polling.once()
        found.append([usage_of(services, name) for name in ("p0", "p1")])
    assert found[0] == [FULL, FULL] and found[-1] == [None, None]


@with_virtual_time
async def test_an_unreadable_page_of_a_down_worker_raises_no_condition_and_ends_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    services = a_router(a_config(1, 1))
    conditions = services.metrics.conditions
    services.fleet["p0"].seen_healthy = True
    script(services, "p0", REFUSED)
    script(services, "d0", Page(GAUGE % b"0.1"))
    await polled(services)
    conditions.hold(PREFIX_CACHE, "p0", "prefix caching is off in the engine")
    assert conditions.count(METRICS) == 1
    services.fleet.set_healthy(services.fleet["p0"], False)
    await polled(services)
    assert conditions.reasons == [] and "no longer degraded" not in caplog.messages


@with_virtual_time
async def test_a_workers_divergence_ends_when_it_goes_down() -> None:
    services = a_router(a_config(1, 1))
    divergence = services.metrics.divergence
    script(services, "d0", Page(b'vllm:num_requests_running{engine="0"} 3.0\n'))
    await polled(services, WINDOW)
    assert divergence.lasting("d0") == 3.0
    script(services, "d0", REFUSED)
    services.fleet.set_healthy(services.fleet["d0"], False)
    await polled(services)
    assert divergence.lasting("d0") == 0.0


@pytest.mark.parametrize(("drains", "orphans", "lasting"), [(0, 0, 0.25), (1, 0, 0.0), (0, 1, 0.0)])
@with_virtual_time
async def test_pinned_kv_of_relays_explains_a_prefiller_s_usage(drains: int, orphans: int, lasting: float) -> None:
    services = a_router(a_config(1, 1))
    services.drainer.elsewhere, services.metrics.orphaned_elsewhere = drains, orphans
    script(services, "p0", Page(GAUGE % b"0.25"))
    await polled(services, WINDOW)
    assert services.metrics.divergence.lasting("p0") == lasting


@pytest.mark.parametrize("policy", ["prefix_affinity", "least_tokens"])
@with_virtual_time
async def test_a_prefiller_without_a_cache_is_reported_under_prefix_affinity(policy: str) -> None:
    services = a_router(a_config(1, 1, prefill={"policy": policy}))
    off = b'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",engine="0"} 1.0\n'
    script(services, "p0", Page(GAUGE % b"0.1" + off))
    await polled(services)
    assert services.metrics.conditions.count(PREFIX_CACHE) == (policy == "prefix_affinity")
    script(services, "p0", Page(GAUGE % b"0.1" + off.replace(b"False", b"True")))
    await polled(services)
    assert services.metrics.conditions.count(PREFIX_CACHE) == 0


@with_virtual_time
async def test_foreign_requests_on_a_decode_worker_take_slots_after_two_reports() -> None:
    services = a_router(a_config(1, 1, decode={"max_num_seqs": 8}))
    running = b'vllm:num_requests_running{engine="0"} 3.0\n'
    script(services, "d0", Page(running))
    free = []
    for _ in range(3):
        await polled(services)
        known = services.ledger.decoder("d0")
        free.append((known.foreign_requests, known.free_slots))
    assert free[0] == (0, 8) and free[-1] == (3, 5)


@with_virtual_time
async def test_others_do_not_shut_this_router_out_of_fast_workers_while_it_leaves_slots_of_a_slower_one_free() -> None:
    """It waited for ever: there were free slots, if none that it used, so it left all others to them."""
    workers = [{"url": f"http://d{n}:1", "id": f"d{n}", "slowdown": 2.0 if n == 3 else 1.0} for n in range(4)]
    decode = {"workers": workers, "max_num_seqs": 8}
    services = a_router(a_config(decode=decode, routing={"policy": "level_fit", "hold_s": 0.0}))
    ledger = services.ledger
    ledger.on_answer = lambda request_id, answer: None
    for name, running in (("d0", 8), ("d1", 8), ("d2", 8), ("d3", 4)):
        script(services, name, Page(b'vllm:num_requests_running{engine="0"} %d\n' % running))
    ledger.scheduler.snapshot.means.see_prompt(100_000)
    await polled(services, 2)
    ledger.submit(RequestSpec("next", 100_000))
    ledger.prefilled("next", 100_000)
    ledger.admit()
    assert ledger.decoder("d3").free_slots and ledger.view().pooled, "it waits beside free slots of the slower one"
    await polled(services)
    ledger.admit()
    assert [ledger.decoder(f"d{n}").active for n in range(4)] == [1, 0, 0, 0]


@with_virtual_time
async def test_requests_whose_relay_has_yet_to_report_its_use_of_their_worker_are_not_foreign() -> None:
    services = a_router(a_config(1, 1, decode={"max_num_seqs": 8}))
    ledger = services.ledger
    ledger.on_answer = lambda request_id, answer: None
    for requests in (2, 4, 6):
        for number in range(requests - 2, requests):
            ledger.submit(RequestSpec(f"r{number}", 10))
            ledger.prefilled(f"r{number}", 10)
        ledger.admit()
        script(services, "d0", Page(b'vllm:num_requests_running{engine="0"} %d\n' % requests))
        await polled(services)
        known = ledger.decoder("d0")
        assert (known.active, known.foreign_requests) == (requests, 0)


@with_virtual_time
async def test_nothing_is_foreign_before_relays_have_said_which_requests_are_theirs() -> None:
    services = a_router(a_config(1, 1, decode={"max_num_seqs": 8}))
    ledger = services.ledger
    script(services, "d0", Page(b'vllm:num_requests_running{engine="0"} 8.0\n' + SIZE))
    ledger.adopts = True
    await polled(services, 3)
    for number in range(8):
        standing = Standing(RequestSpec(f"r{number}", 10), Phase.DECODING, 10, decoder="d0", tokens=1)
        assert ledger.adopt(standing)
    ledger.adopts = False
    for _ in range(3):
        (worker,) = ledger.scheduler.snapshot.workers
        assert (worker.foreign_requests, worker.own_slots, worker.kv_capacity_tokens) == (0, 8, 1_600)
        await polled(services)


@with_virtual_time
async def test_the_kv_memory_of_a_decode_worker_is_known_after_one_report_and_kept_when_one_fails() -> None:
    services = a_router(a_config(1, 1))
    script(services, "d0", Page(SIZE))
    await polled(services)
    assert services.ledger.scheduler.snapshot.workers[0].kv_capacity_tokens == 1_600
    script(services, "d0", 500)
    await polled(services)
    assert services.ledger.scheduler.snapshot.workers[0].kv_capacity_tokens == 1_600


@with_virtual_time
async def test_an_impossible_kv_memory_size_counts_as_unknown() -> None:
    """A number of more than 64 bits can be written neither to the link, with all that is said then, nor as JSON."""
    services = a_router(a_config(1, 1))
    absurd = b'vllm:cache_config_info{block_size="999999999999",engine="0",num_gpu_blocks="999999999999"} 1.0\n'
    running = b'vllm:num_requests_running{engine="0"} 3.0\n'
    for worker in ("p0", "d0"):
        script(services, worker, Page(GAUGE % b"0.5" + running + absurd))
    for _ in range(3):
        await polled(services)
    assert frame([Seen(services.ledger.view(), 1)])
    assert orjson.loads(orjson.dumps(state(services)))["workers"]
    assert services.ledger.scheduler.snapshot.workers[0].kv_capacity_tokens == 0


@pytest.mark.parametrize(("engines", "held"), [(b"0", True), (b"01", False)], ids=["one engine", "two behind one URL"])
@with_virtual_time
async def test_a_decode_worker_with_fewer_slots_than_configured_is_degraded_until_it_is_down(
    engines: bytes, held: bool
) -> None:
    """Two engines behind one URL without ranks each have their own slots, of which only the largest number is known."""
    services = a_router(a_config(1, 1, decode={"max_num_seqs": 64}))
    poller = metrics_poller(services)
    for poll in range(WINDOW):
        page = b"".join(
            b'vllm:num_requests_running{engine="%(n)c"} 8.0\nvllm:kv_cache_usage_perc{engine="%(n)c"} 0.1%(poll)d\n'
            b'vllm:num_requests_waiting_by_reason{engine="%(n)c",reason="capacity"} 2.0\n'
            % {b"n": engine, b"poll": poll}
            for engine in engines
        )
        script(services, "d0", Page(page))
        await poller.polling.once()
    reason = (
        "d0: it runs 8 requests at most, and the others queue in the engine, but max_num_seqs is 64 here; "
        "set it to the engine's own --max-num-seqs"
    )
    conditions = services.metrics.conditions
    assert [said for said in conditions.reasons if said.startswith("d0")] == [reason] * held
    services.fleet["d0"].healthy = False
    await poller.polling.once()
    assert conditions.count(SLOTS) == 0
