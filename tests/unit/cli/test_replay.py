"""`balanceroute replay` from the outside."""

import gzip
import json
from pathlib import Path

import pytest

from balanceroute.core.policies import POLICIES
from balanceroute.experiments.figures import stem_of
from tests.commands import exit_code

KEYS = """load_spread_mean excess_mean imbalance_mean step_time_mean_s tpot_p50_s tpot_p95_s throughput_tok_s
wait_p50_s wait_p99_s wait_max_s makespan_s balance steps admitted decision_p50_us decision_p99_us""".split()
SMALL = ["--trace", "capped", "--max-requests", "24", "--workers", "2", "--slots", "4", "--pool", "8"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return exit_code(monkeypatch, "replay", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "br_0", "--param", "s_greedy=0"],
        ["--policy", "br_h", "--predictor", "survival", "--train", "capped"],
        ["--policy", "least_kv", "--prefillers", "1", "--transfer-steps", "2", "--telemetry-lag", "1"],
        ["--policy", "pool_fifo", "--kv-capacity", "60000", "--slowdowns", "1,1.2", "--fail", "1@50-100"],
    ],
    ids=["params", "predictor", "prefill tier, transfer, lag", "capacity, slowdowns, failure"],
)
def test_the_json_has_every_figure_of_the_contract(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *SMALL, *arguments, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(KEYS) <= set(figures)
    assert figures["admitted"] == 24


def test_compare_lists_every_policy_in_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *SMALL, "--policy", "br_0", "--compare", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["br_0", *sorted(set(POLICIES) - {"br_0"})]
    assert all(figures["admitted"] == 24 for figures in found.values())
    assert run(monkeypatch, *SMALL, "--policy", "br_0", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    timed = ("decision_p50_us", "decision_p99_us")
    assert {k: v for k, v in alone.items() if k not in timed} == {
        k: v for k, v in found["br_0"].items() if k not in timed
    }
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, *SMALL, "--compare") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in POLICIES)
    assert "makespan s" in printed, "tokens/s of a window favour who lets large prompts wait beyond it"


def test_a_comparison_says_where_slots_stayed_empty_and_policies_hardly_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ["--trace", "capped", "--workers", "2", "--slots", "4", "--compare", "--max-requests", "200"]
    for load, stated in (("0.3", True), ("1.2", False)):
        assert run(monkeypatch, *cluster, "--load", load) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert (last.startswith("balance is 0.3") and "a higher --load" in last) == stated


@pytest.mark.parametrize("more", [[], ["--compare"]], ids=["alone", "compared"])
def test_a_failure_after_the_end_of_the_run_is_named_and_one_within_it_is_not(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *SMALL, "--fail", "1@5-9", "--fail", "0@100000", "--json", *more) == 0
    printed = capsys.readouterr()
    (note,) = printed.err.splitlines()
    names = ", ".join(json.loads(printed.out)) if more else "level_fit"
    assert note.startswith(f"--fail 0@100000: changed nothing with {names}; the last step began at ")


def test_an_access_log_alone_is_compared_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "router.log"
    log.write_text(
        "".join(
            json.dumps(
                {
                    "time": f"2026-01-01T00:00:{number // 2:02d}.{500 * (number % 2):03d}+00:00",
                    "event": "request",
                    "duration_s": 0.25,
                    "prompt_tokens": 500 + 37 * number,
                    "tokens": 5 + number % 7,
                }
            )
            + "\n"
            for number in range(40)
        )
    )
    arguments = ["--trace", str(log), "--workers", "2", "--slots", "4", "--compare"]
    assert run(monkeypatch, *arguments, "--figure", str(tmp_path / "load1.05.svg"), "--json") == 0
    printed = capsys.readouterr()
    assert {figures["admitted"] for figures in json.loads(printed.out).values()} == {40}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load1.05.png", "load1.05.svg", "router.log"]
    assert (tmp_path / "load1.05.png").read_bytes().startswith(b"\x89PNG") and "load1.05.png" in printed.err
    assert run(monkeypatch, "--trace", str(log), "--figure", str(tmp_path / "mine.png")) == 2


def test_br_h_alone_has_the_predictor_that_it_has_in_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "--seed", "1", "--json"]
    found = []
    for more in (["--compare"], ["--policy", "br_h"], ["--policy", "br_h", "--compare"]):
        assert run(monkeypatch, *arguments, *more) == 0
        printed = json.loads(capsys.readouterr().out)
        found.append(printed.get("br_h", printed)["load_spread_mean"])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("name", "stem"), [("cmp.v2", "cmp.v2"), ("a.png", "a"), ("b.PNG", "b")])
def test_a_figure_s_name_keeps_its_dots(name: str, stem: str) -> None:
    assert stem_of(Path(name)).name == stem


def test_a_load_scales_the_arrivals_to_the_capacity_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The makespan of an idle cluster is that of the arrivals: half at twice the load."""
    spans = []
    for load in ("0.05", "0.1"):
        arguments = ["--trace", "capped", "--max-requests", "200", "--workers", "2", "--load", load]
        assert run(monkeypatch, *arguments, "--policy", "least_kv", "--json") == 0
        spans.append(json.loads(capsys.readouterr().out)["makespan_s"])
    assert spans[0] == pytest.approx(2 * spans[1], rel=0.1)


@pytest.mark.parametrize("name", ["series.csv", "series.csv.gz"])
def test_the_series_has_one_row_per_step_and_one_column_per_worker(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert run(monkeypatch, *SMALL, "--policy", "br_0", "--series", str(path), "--json") == 0
    data = path.read_bytes()
    lines = (gzip.decompress(data) if name.endswith(".gz") else data).decode().splitlines()
    assert lines[0] == "step,start_s,d0,d1"
    assert len(lines) == 1 + json.loads(capsys.readouterr().out)["steps"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--trace", "heavy_tail"], "heavy_tail: no such file, nor one of capped, heavy_tailed"),
        (["--policy", "br_h", "--train", "."], ".: cannot be read: Is a directory"),
        (["--policy", "br_h", "--train", ""], "no such file, nor one of capped, heavy_tailed"),
        (["--slowdowns", ""], "--slowdowns : numbers separated by commas"),
        (["--policy", "magic"], "magic"),
        (["--compare", "--series", "loads.csv"], "leave it out with --compare"),
        (["--series", ""], ".: cannot be written: it is a folder"),
        (["--series", "nowhere/loads.csv"], "nowhere/loads.csv: cannot be written: there is no folder nowhere"),
        (["--compare", "--figure", ""], "'.': names no file"),
        (["--compare", "--figure", "/"], "'/': names no file"),
        (["--compare", "--figure", ".."], "'..': names no file"),
        (["--compare", "--figure", "nowhere/a"], "nowhere/a.png: cannot be written: there is no folder nowhere"),
        (["--load", "0"], "load 0.0: accepted is"),
        (["--load", "nan"], "load nan: accepted is"),
        (["--load", "1", "--max-requests", "1"], "arrive at one time"),
        (["--policy", "br_h", "--predictor", "learned"], "train: predictor learned needs a trace of the past"),
        (["--param", "bta=1"], "--param bta=1"),
        (["--slowdowns", "1,x"], "--slowdowns 1,x"),
        (["--fail", "soon"], "--fail soon"),
        (["--workers", "0"], "workers 0: accepted is a number from 1"),
        (["--workers", "99999999999"], "workers 99999999999: accepted is a number from 1"),
        (["--step-cost", "nan"], "step cost nan: accepted is a number"),
        (["--param", "horizon_steps=-1"], "--param horizon_steps=-1: accepted is a whole number from 0"),
        (["--seed", "5", "--param", "seed=6"], "--param seed=6: the seed has an option of its own, --seed"),
        (["--seed", "-1"], "'--seed'"),
        (["--predictor", "survival"], "predictor survival: changes nothing; level_fit does not look ahead, br_h does"),
        (["--policy", "br_0", "--train", "capped"], "train: changes nothing; predictor none is not fitted here"),
        (["--prefill-rate", "9"], "--prefill-rate: changes nothing here; it is read with --prefillers"),
        (["--prefill-policy", "round_robin"], "--prefill-policy: changes nothing here; it is read with --prefillers"),
        (["--prefix-cache", "9"], "prefix cache 9: changes nothing without prefillers"),
        (["--prefix-cache", "-9", "--prefillers", "2"], "prefix cache -9: accepted is a number from 0"),
        (
            ["--prefix-cache", "90000", "--prefillers", "2"],
            "prefix cache 90000: changes nothing; the trace does not say which prompts begin alike (prefix_blocks)",
        ),
        (["--transfers-by-size"], "--transfers-by-size: changes nothing here; it is read with --transfer-steps"),
        (
            ["--transfers-beside-full"],
            "--transfers-beside-full: changes nothing here; it is read with --transfer-steps",
        ),
        (["--no-cost-aware"], "--cost-aware: changes nothing here; it is read with --slowdowns or --request-tokens"),
        (
            ["--policy", "random", "--overlap-requests", "2"],
            "overlap requests: changes nothing; random assigns at once",
        ),
        (["--overlap-requests", "9" * 5000], "accepted is a whole number from 0 to 65536, or auto"),
        (["--trace", "two\nlines"], "two\\nlines: no such file"),
    ],
)
def test_bad_input_is_reported_in_one_line_with_exit_code_2(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    assert reason in message
    assert message.count("\n") == 1


def test_a_trace_in_another_format_is_replayed_and_left_out_rows_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "azure.csv"
    rows = "".join(f"2024-05-10 00:00:{second:02},10,{second % 3}\n" for second in range(30))
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert run(monkeypatch, "--trace", str(source), "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["admitted"] == 20
    assert shown.err == "left out 10 requests that generated nothing\n"
