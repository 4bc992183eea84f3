"""What `balanceroute load` prints of a run that was cut short, or of which nothing came to an end."""

from dataclasses import asdict
from pathlib import Path

import pytest

from balanceroute.cli.load import print_report
from balanceroute.loadgen.run import RequestResult, summarise
from tests.commands import run_command

SENT = RequestResult(sent_s=0.1, late_s=0.002, error="cut_off")


@pytest.mark.parametrize("results", [[], [SENT]], ids=["nothing sent", "no answer"])
@pytest.mark.parametrize(("interrupted", "expected"), [(True, "no answer yet"), (False, "no complete answer")])
def test_a_run_without_an_answer_says_so_and_shows_no_times(
    results: list[RequestResult], interrupted: bool, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(asdict(summarise(results)), interrupted=interrupted)
    shown = capsys.readouterr().out
    assert expected in shown and "nan" not in shown
    assert "ttft" not in shown and ("late" in shown) == bool(results)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"])
def test_an_endpoint_with_v1_is_refused_with_what_to_leave_out(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run_command(capsys, monkeypatch, "load", url, "--trace", "capped", "--max-requests", "1")
    assert (code, err) == (2, f"balanceroute: {url!r}: leave out /v1, it is added\n")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--timeout", "nan"], "timeout nan: accepted is a number of seconds above 0"),
        (["--timeout", "0"], "timeout 0: accepted is a number of seconds above 0"),
        (["--time-scale", "inf"], "time scale inf: accepted is a number above 0 and at most 1e+06"),
        (["--prompt-scale", "1e300"], "prompt tokens times 1e+300: the largest is more than 2147483647"),
        (["--output-scale", "inf"], "output tokens times inf: the largest is more than 2147483647"),
        (["--output-scale", "nan"], "--output-scale must be above 0"),
        (["--prompt-scale", "1e308"], "prompt tokens times 1e+308: the largest is more than 2147483647"),
        (["--prompt-scale", "70000"], "tokens: at most 10,000,000 are sent"),
        (["--rate", "1e-300"], "the last request would be sent more than 366 days after the first"),
        (["--rate", "5e-324"], "the last request would be sent more than 366 days after the first"),
        (["--seed", "-1"], "'--seed'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_numbers_that_describe_no_run_are_refused_in_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ["load", "http://127.0.0.1:9", "--trace", "capped", "--max-requests", "2"]
    code, _, err = run_command(capsys, monkeypatch, *here, *arguments)
    assert code == 2 and reason in err and err.count("\n") == 1


def test_a_rate_is_refused_where_all_requests_arrive_at_one_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,9,9\n" * 3)
    here = ["load", "http://127.0.0.1:9", "--trace", str(tmp_path / "t.csv"), "--rate", "5"]
    code, _, err = run_command(capsys, monkeypatch, *here)
    assert (code, err) == (2, "balanceroute: rate 5: all requests of the trace arrive at one time, so it has none\n")


def test_only_measured_figures_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    done = RequestResult(0.1, 0.002, None, ttft_s=0.25, latency_s=0.25, output_tokens=1)
    print_report(asdict(summarise([SENT, done])), interrupted=True)
    shown = capsys.readouterr().out
    assert "no answer" not in shown and "nan" not in shown
    assert "  ttft                       250.0" in shown
    assert "tpot" not in shown, "one token has no time between tokens"


def test_a_long_error_stays_on_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    refused = RequestResult(0.1, 0.002, "status 400", message="too long, " * 20)
    print_report(asdict(summarise([refused])), interrupted=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == [f"  1 failed: status 400: {refused.message}"]
