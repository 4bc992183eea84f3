"""Requests sent ahead of their slots, live: a router in front of emulated engines whose transfers take long."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from balanceroute.emulator import ClusterShape, EmulatedCluster
from balanceroute.journal import rerun
from balanceroute.loadgen import LoadOptions, run_load
from balanceroute.proxy.admission.decider import Answer
from balanceroute.proxy.app import RouterApp, create_app
from balanceroute.traces import Trace, generate_trace
from tests.integration.router import configuration, patient, served

SLOTS = 3
SHAPE = ClusterShape(prefillers=2, decoders=2, max_num_seqs=SLOTS, time_scale=0.02, max_model_len=4096, transfer_s=20.0)


def a_trace() -> Trace:
    """Sixty requests at once, whose answers take far less time than the transfer of their KV."""
    return generate_trace("heavy_tailed", rows=60, seed=3).with_lengths(1 / 32, 1 / 128).at_rate(400.0)


async def serve(shape: ClusterShape, overlap: int | str, journal: Path) -> tuple[list[int], list[int]]:
    """Serve the trace: after each decision, what the router holds at each worker and what may be ahead there."""
    held: list[int] = []
    ahead: list[int] = []
    async with EmulatedCluster(patient(shape)) as cluster:
        config = configuration(cluster, routing={"policy": "level_fit"}, decode={"overlap_requests": overlap})
        app = create_app(config, journal=journal, strict=True)
        async with served(app) as url:
            watch(app, held, ahead)
            report = await run_load(a_trace(), LoadOptions(url))
        assert report.completed == report.requests, report.errors
        assert cluster.violations() == {}
        for worker in cluster.decode:
            worker.rank.check_invariants()
    return held, ahead


def watch(app: RouterApp, held: list[int], ahead: list[int]) -> None:
    """Take down the state after each decision that was told."""
    ledger = app.services.ledger
    on_answer = ledger.on_answer

    def watched(request_id: str, answer: Answer) -> None:
        held.extend(len(worker.active) for worker in ledger.scheduler.snapshot.workers)
        ahead.extend(worker.ahead for worker in ledger.scheduler.snapshot.workers)
        on_answer(request_id, answer)

    ledger.on_answer = watched


@pytest.mark.parametrize("beside_full", [False, True], ids=["as vLLM", "beside a full batch"])
def test_long_transfers_are_measured_and_requests_sent_ahead_and_the_journal_replays(
    beside_full: bool, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    shape = replace(SHAPE, transfers_beside_full=beside_full)
    held, ahead = asyncio.run(serve(shape, "auto", journal))
    assert max(ahead) > SLOTS  # as a transfer takes longer than an answer
    assert SLOTS < max(held) <= SLOTS + max(ahead)
    report = rerun(journal)
    assert report.difference is None
    assert report.admissions == len(a_trace())
    assert b'"call":"began"' in journal.read_bytes()


def test_without_an_overlap_no_worker_ever_gets_more_than_its_slots_and_nothing_is_measured(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    held, ahead = asyncio.run(serve(replace(SHAPE, transfer_s=1.0), 0, journal))
    assert (max(held), max(ahead)) == (SLOTS, 0)
    assert b'"call":"began"' not in journal.read_bytes()
    assert rerun(journal).difference is None
