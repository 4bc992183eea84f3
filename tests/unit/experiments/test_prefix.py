"""`reproduce prefix`: the prefill policies beside what other routers do."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from balanceroute.errors import InputError
from balanceroute.experiments import Scope, files_of, prefix, reproduce
from balanceroute.experiments.prefix import AGEINGS, RIVALS, WEIGHTS, QueueJob
from balanceroute.simulator import replay_prefill
from balanceroute.traces import generate_conversations, generate_trace, write_trace


def test_the_report_has_every_rival_on_every_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "talk.csv"
    write_trace(generate_conversations(30), trace)
    monkeypatch.setattr(prefix, "PREFILLERS", 2)
    scope = replace(Scope.of(quick=True, trace=str(trace)), rows=400)
    text = reproduce(["prefix"], scope, tmp_path / "out", n_processes=1)
    *caches, queue, weights = files_of(["prefix"], scope)[1:]
    assert len(caches) == 4
    for file in caches:
        rows = list(csv.DictReader((tmp_path / "out" / file).read_text().splitlines()))
        assert [row["policy"] for row in rows] == list(RIVALS)
        assert rows[0]["p50 saved %"] == "0"
    assert "### The trace talk.csv, caches of 512,000 tokens" in text
    assert "### Synthetic agents, caches of 512,000 tokens" in text
    rows = list(csv.DictReader((tmp_path / "out" / weights).read_text().splitlines()))
    assert [int(row["weight"]) for row in rows] == list(WEIGHTS)
    rows = list(csv.DictReader((tmp_path / "out" / queue).read_text().splitlines()))
    assert [float(row["ageing"]) for row in rows] == list(AGEINGS)


def test_a_trace_that_says_nothing_of_prefixes_is_refused_before_anything_runs(tmp_path: Path) -> None:
    trace = tmp_path / "plain.csv"
    write_trace(generate_trace("heavy_tailed", rows=20), trace)
    with pytest.raises(InputError, match="plain.csv: no column prefix_blocks"):
        reproduce(["prefix"], Scope.of(quick=True, trace=str(trace)), tmp_path / "out", n_processes=1)


def test_the_prefix_index_is_nearly_as_good_as_exact_knowledge_of_the_caches() -> None:
    trace = generate_conversations(800)
    ours, exact = (replay_prefill(trace, RIVALS[p], 4, 6000.0, 200_000) for p in ("prefix_affinity", "exact knowledge"))
    assert ours.computed_ratio < 1.03 * exact.computed_ratio


@pytest.mark.parametrize("policy", RIVALS)
def test_every_rival_sends_all_prompts(policy: str) -> None:
    trace = generate_conversations(40)
    assert 0 < replay_prefill(trace, RIVALS[policy], 3, 6000.0, 100_000).computed_ratio <= 1


def test_short_prompts_wait_less_behind_huge_ones_where_size_counts_in_the_queue() -> None:
    fifo, ours = QueueJob(0.0, 3000).run(), QueueJob(1.0, 3000).run()
    assert ours.short_p99_s < fifo.short_p99_s
    assert ours.mean_s < 0.6 * fifo.mean_s
