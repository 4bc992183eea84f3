"""What `balanceroute load` prints of a run that was cut short, or of which nothing came to an end."""

from dataclasses import asdict

import pytest

from balanceroute.cli.load import print_report
from balanceroute.loadgen.run import RequestResult, summarise
from tests.commands import run_command

SENT = RequestResult(sent_s=0.1, late_s=0.002, error="cut_off")


@pytest.mark.parametrize("results", [[], [SENT]], ids=["nothing sent", "no answer"])
@pytest.mark.parametrize(("interrupted", "told"), [(True, "no answer yet"), (False, "no complete answer")])
def test_a_run_without_an_answer_says_so_and_shows_no_times(
    results: list[RequestResult], interrupted: bool, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(asdict(summarise(results)), interrupted=interrupted)
    shown = capsys.readouterr().out
    assert told in shown and "nan" not in shown
    assert "ttft" not in shown and ("late" in shown) == bool(results)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"])
def test_an_endpoint_with_v1_is_refused_with_what_to_leave_out(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run_command(capsys, monkeypatch, "load", url, "--trace", "capped", "--max-requests", "1")
    assert (code, err) == (2, f"balanceroute: {url!r}: leave out /v1, it is added\n")


def test_what_was_measured_is_shown_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    done = RequestResult(0.1, 0.002, None, ttft_s=0.25, latency_s=0.25, output_tokens=1)
    print_report(asdict(summarise([SENT, done])), interrupted=True)
    shown = capsys.readouterr().out
    assert "no answer" not in shown and "nan" not in shown
    assert "  ttft                       250.0" in shown
    assert "tpot" not in shown, "one token has no time between tokens"
