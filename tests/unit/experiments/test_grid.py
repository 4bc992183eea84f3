"""The grid and the bound: cells, regrets, and going on where a run was stopped."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from balanceroute.errors import InputError
from balanceroute.experiments import Scope, bound, drawn, files_of, grid, methods, reproduce
from balanceroute.experiments.cells import (
    FACTORS,
    LATER_FACTORS,
    Cell,
    CellJob,
    in_bursts,
    random_cells,
    requests_of,
    trace_digest,
)
from balanceroute.experiments.jobs import run_jobs
from balanceroute.experiments.methods import Method
from balanceroute.traces import generate_trace, write_trace

TINY = replace(Scope.of(quick=True, trace=None), seeds=(0,), rows=60)
CELLS = [Cell("capped", n_workers=2, rows=30), Cell("short", load=0.8, n_workers=2, factor="transfer 5", rows=30)]


@pytest.mark.parametrize("factor", [*FACTORS, *LATER_FACTORS, "engine balancer"])
def test_every_cell_can_be_run(factor: str) -> None:
    figures = CellJob(Cell("capped", n_workers=2, factor=factor, rows=150), methods.LEVEL_FIT).run()
    assert figures["admitted"] == 150


def test_the_cells_change_one_factor_at_a_time_around_their_bases() -> None:
    cells = grid.cells(Scope.of(quick=False, trace=None))
    shapes = (*grid.BASES, "bursts")
    drawn = set(random_cells(shapes))
    for cell in set(cells) - drawn:
        base = Cell(cell.shape)
        changed = [name for name in ("load", "n_workers", "factor") if getattr(cell, name) != getattr(base, name)]
        assert len(changed) <= 1, cell.name
    assert len(drawn) >= 68, "75 draws, of which some may fall on one cell"
    assert all(cell.rows >= 20 * 64 * cell.n_workers for cell in cells), "at least 20 rows per slot"


@pytest.mark.parametrize("factor", ["none", "draft 3", "two groups"])
def test_slots_in_use_are_a_share_of_all_whatever_a_step_yields(factor: str) -> None:
    cell = Cell("capped", load=1.2, n_workers=2, factor=factor, rows=300)
    run = CellJob(cell, methods.LEVEL_FIT).run()
    results = {job: run for method in grid.POLICIES for job in grid.jobs_of(TINY, cell, method)}
    assert all(0.8 < result.utilisation < 1.05 for result in grid.cell_results(TINY, results, cell))


@pytest.mark.parametrize(("seeds", "worse"), [(1, 0.0), (4, 0.04)])
def test_the_noise_of_means_falls_with_the_number_of_seeds(seeds: int, worse: float) -> None:
    def of(method: methods.Method, tokens_s: float) -> grid.CellResult:
        return grid.CellResult(Cell("capped"), method, tokens_s, 22.0, 0.1, 1.0, 1.0, 1.0, 1.0, 1.0, seeds=seeds)

    row = [of(methods.JSQ, 1000.0), of(methods.LEVEL_FIT, 960.0)]
    assert grid.worse_than_baselines(row) == pytest.approx(worse)


def test_bursts_bring_the_same_requests_in_part_of_each_minute() -> None:
    trace = requests_of("bursts", 0, 2000)
    burst = in_bursts(trace)
    assert (np.diff(burst.arrival_s) >= 0).all()
    assert (burst.arrival_s % 60.0 <= 24.0 + 1e-6).all()
    assert (burst.arrival_s // 60.0 == trace.arrival_s // 60.0).all()


def test_a_stopped_run_continues_where_it_stopped(tmp_path: Path) -> None:
    jobs = [CellJob(cell, methods.LEVEL_FIT) for cell in CELLS]
    first = run_jobs(jobs[:1], 1, store=grid.Store(tmp_path / grid.STORE))
    ran: list[tuple[int, int]] = []
    again = run_jobs(jobs, 1, lambda *done: ran.append(done), grid.Store(tmp_path / grid.STORE))
    assert again[jobs[0]] == first[jobs[0]]
    assert ran == [(2, 2)], "only the second was left to run"
    assert run_jobs(jobs, 1, lambda *_: pytest.fail("nothing is left"), grid.Store(tmp_path / grid.STORE)) == again


def test_results_of_other_code_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = CellJob(CELLS[0], methods.LEVEL_FIT)
    run_jobs([job], 1, store=grid.Store(tmp_path / grid.STORE))
    assert job.key in grid.Store(tmp_path / grid.STORE).known
    monkeypatch.setattr(grid, "code_digest", lambda: "other")
    assert grid.Store(tmp_path / grid.STORE).known == {}


def test_an_invalid_store_is_named(tmp_path: Path) -> None:
    (tmp_path / grid.STORE).write_text('{"key": 1}\n')
    with pytest.raises(InputError, match="line 1: no finished run"):
        grid.Store(tmp_path / grid.STORE)


def test_a_half_written_last_line_loses_only_its_own_run(tmp_path: Path) -> None:
    jobs = [CellJob(cell, methods.LEVEL_FIT) for cell in CELLS]
    path = tmp_path / grid.STORE
    first = run_jobs(jobs, 1, store=grid.Store(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    ran: list[tuple[int, int]] = []
    assert run_jobs(jobs, 1, lambda *done: ran.append(done), grid.Store(path)).keys() == first.keys()
    assert len(ran) == 1, "only the run of the half line"
    assert len(path.read_bytes().splitlines()) == 2
    assert len(grid.Store(path).known) == 2


def test_two_runs_that_continue_after_a_half_written_line_lose_no_result(tmp_path: Path) -> None:
    jobs = [CellJob(cell, methods.LEVEL_FIT) for cell in CELLS]
    path = tmp_path / grid.STORE
    path.write_bytes(b'{"half": ')
    one, other = grid.Store(path), grid.Store(path)
    one.keep(jobs[0], {"makespan_s": 1.0})
    other.keep(jobs[1], {"makespan_s": 2.0})
    one.keep(jobs[1], {"makespan_s": 2.0})
    assert grid.Store(path).known == {jobs[0].key: {"makespan_s": 1.0}, jobs[1].key: {"makespan_s": 2.0}}


def test_results_of_a_trace_are_not_those_of_another_one_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    keys = set()
    for rows in (20, 30):
        write_trace(generate_trace("capped", rows=rows), path)
        trace_digest.cache_clear()  # each run of the command is a process of its own
        keys.add(CellJob(Cell(str(path)), methods.LEVEL_FIT).key)
    assert len(keys) == 2


@pytest.mark.parametrize(("name", "reason"), [("gone.csv", "no such file"), ("", "cannot be read: Is a directory")])
def test_a_trace_that_has_vanished_is_named(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{reason}$"):
        print(CellJob(Cell(str(tmp_path / name)), methods.LEVEL_FIT).key)


def test_a_store_that_cannot_be_written_any_more_is_named(tmp_path: Path) -> None:
    store = grid.Store(tmp_path / "gone" / grid.STORE)
    with pytest.raises(InputError, match=r"grid\.jsonl: cannot be written: No such file or directory"):
        store.keep(CellJob(CELLS[0], methods.LEVEL_FIT), {"makespan_s": 1.0})


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"\0\0\n", b"\n"], ids=["bytes", "nesting", "zeros", "nothing"]
)
def test_a_damaged_line_of_the_store_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / grid.STORE
    run_jobs([CellJob(CELLS[0], methods.LEVEL_FIT)], 1, store=grid.Store(path))
    path.write_bytes(path.read_bytes() + damage)
    with pytest.raises(InputError, match="line 2: no finished run; delete the line"):
        grid.Store(path)


def made_up(method: Method, tokens_s: float, tpot_s: float, wait_s: float) -> dict[str, float]:
    names = ("load_spread_mean", "balance", "wait_max_s", "step_time_mean_s")
    return {
        **dict.fromkeys(names, 0.05),
        "throughput_tok_s": tokens_s,
        "tpot_p95_s": tpot_s,
        "wait_p99_s": wait_s,
        "method": hash(method.key),
    }


def test_regret_is_relative_to_the_best_and_waits_compare_only_policies_with_equal_throughput() -> None:
    cell = CELLS[0]
    results = {}
    for index, method in enumerate(grid.POLICIES):
        (job,) = grid.jobs_of(TINY, cell, method)
        results[job] = made_up(method, 1000.0 - 100 * index, 0.060 + 0.003 * index, 30.0 - 4 * index)
    (near,) = grid.jobs_of(TINY, cell, grid.POLICIES[1])
    results[near] = made_up(grid.POLICIES[1], 995.0, 0.063, 20.0)
    (idle,) = grid.jobs_of(TINY, cell, grid.POLICIES[2])
    results[idle] = made_up(grid.POLICIES[2], 800.0, 0.050, 20.0)
    best, second, third, *_ = grid.cell_results(TINY, results, cell)
    assert (best.lost_tokens, third.lost_tpot) == (0.0, 0.0)
    assert second.lost_tokens == pytest.approx(0.005)
    assert second.lost_tpot == pytest.approx(0.063 / 0.050 - 1)
    assert (best.lost_tpot_near, third.lost_tpot_near) == (0.0, None), "slots that stay empty make the others fast"
    assert second.lost_tpot_near == pytest.approx(0.05)
    assert best.lost_wait == pytest.approx(30.0 / 20.0 - 1)
    assert third.lost_wait is None, "it serves 20 % less, so its short wait says nothing"


@pytest.mark.parametrize(
    ("wait_s", "least_s", "lost"), [(31.0, 30.0, 0.0), (33.0, 30.0, 0.1), (1.4, 0.5, 0.0), (2.0, 0.0, 1.0)]
)
def test_a_wait_of_up_to_a_second_more_is_no_regret(wait_s: float, least_s: float, lost: float) -> None:
    assert grid._lost_wait(wait_s, least_s) == pytest.approx(lost)


def test_regrets_are_unknown_and_not_zero_where_no_cell_is_busy() -> None:
    assert all(row[1:3] == [None, None] and row[4:6] == [None, None] for row in grid.regret_table([]).rows)


def test_the_grid_is_reported_with_every_policy_in_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(grid, "cells", lambda scope: CELLS)
    text = reproduce(["grid"], TINY, tmp_path, n_processes=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["REPORT.md", *grid.files(TINY)])
    for cell in CELLS:
        for method in grid.POLICIES:
            assert f"| {cell.name} | {method.label} |" in text


def test_a_trace_too_short_to_fill_the_slots_is_named_as_that_in_place_of_empty_regrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "short.csv"
    write_trace(generate_trace("capped", rows=60), path)
    monkeypatch.setattr(grid, "cells", lambda scope: [Cell(str(path), n_workers=2)])
    scope = replace(TINY, trace=str(path))
    run = grid.plan(scope)[0].run()
    text = grid.report(scope, dict.fromkeys(grid.plan(scope), run), tmp_path).markdown()
    assert "No cell is busy: at most " in text and "10,240 for 8 workers of 64; the trace has 60." in text
    assert "| – |" not in text.partition("| cell |")[0], "no row of dashes"


def test_the_bound_report_compares_every_policy_with_hindsight_and_perfect_balance(tmp_path: Path) -> None:
    text = reproduce(["bound"], replace(TINY, rows=20), tmp_path, n_processes=1)
    assert "| Perfect balance | 0 | 0.00 | 1.000 |" in text
    for method in (*bound.ROUTERS, *bound.HINDSIGHT):
        assert f"| {method.label} |" in text


def test_the_spread_without_foresight_is_that_of_the_extremes_of_exponentials() -> None:
    draws = np.random.default_rng(3).exponential(500.0, size=(200_000, 8))
    assert bound.without_foresight(500.0, 8) == pytest.approx(float(np.ptp(draws, axis=1).mean()), rel=0.01)
    assert math.isclose(bound.without_foresight(500.0, 1), 0.0)


def test_the_verdict_names_every_cell_in_which_a_bar_does_not_hold() -> None:
    results = {}
    for cell, default_rate in ((CELLS[0], 1000.0), (CELLS[1], 900.0)):
        for method in grid.POLICIES:
            (job,) = grid.jobs_of(TINY, cell, method)
            rate = default_rate if method is methods.LEVEL_FIT else 999.0
            results[job] = made_up(method, rate, 0.06, 20.0)
    rows = [grid.cell_results(TINY, results, cell) for cell in CELLS[:2]]
    tokens, tpot, near_tpot, wait, baselines = grid.verdict_table(rows, rows).rows
    lost = f"{CELLS[1].name} (9.9%)"
    assert tokens[1:] == ["no", 1, 2, lost]
    assert tpot[1:] == ["yes", 2, 2, "-"]
    assert near_tpot[1:] == ["yes", 1, 1, "-"]
    assert wait[1:] == ["yes", 1, 1, "-"], "who serves less is not judged by waits"
    assert baselines[1:] == ["no", 1, 2, lost]


def test_drawn_workloads_are_reported_with_every_policy_and_with_makespans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    few = [replace(cell, n_workers=2, rows=40) for cell in drawn.cells(TINY)[:2]]
    monkeypatch.setattr(drawn, "cells", lambda scope: few)
    text = reproduce(["drawn"], TINY, tmp_path, n_processes=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["REPORT.md", *drawn.files(TINY)])
    assert [line for line in text.splitlines() if line.startswith("| drawn 1,") and "prompts" in line]
    for cell in few:
        for method in grid.POLICIES:
            assert f"| {cell.name} | {method.label} |" in text


def test_the_makespan_of_each_policy_is_held_against_the_shortest_on_the_same_workload() -> None:
    results = {}
    for cell in CELLS:
        for index, method in enumerate(grid.POLICIES):
            (job,) = grid.jobs_of(TINY, cell, method)
            results[job] = {
                **made_up(method, 1000.0, 0.06, 20.0),
                "makespan_s": 100.0 + 0.8 * index * (cell is CELLS[0]),
            }
    rows = [grid.cell_results(TINY, results, cell) for cell in CELLS]
    table = drawn.makespan_table(TINY, results, rows)
    for row, expected in zip(table.rows, ([0.0, 0.0, 2], [0.4, 0.8, 2], [0.8, 1.6, 1]), strict=False):
        assert row[1:] == pytest.approx(expected)


def test_the_store_that_grid_and_drawn_share_is_named_once() -> None:
    names = files_of(["grid", "drawn"], TINY)
    assert sorted(set(names)) == names
    assert {*grid.files(TINY), *drawn.files(TINY)} < set(names)


def test_every_drawn_workload_is_one_cell_that_is_always_the_same() -> None:
    cells = drawn.cells(Scope.of(quick=False, trace=None))
    assert cells == drawn.cells(Scope.of(quick=False, trace=None))
    assert len({cell.shape for cell in cells}) == 120
    assert {cell.factor for cell in cells} == set(FACTORS)
    assert all(cell.rows >= 20 * 64 * cell.n_workers for cell in cells), "at least 20 rows per slot"
