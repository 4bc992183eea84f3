"""What `balanceroute load` prints of a run that was cut short, or of which nothing came to an end."""

from dataclasses import asdict

import pytest

from balanceroute.cli.load import print_report
from balanceroute.loadgen.run import RequestResult, summarise

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


def test_what_was_measured_is_shown_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    done = RequestResult(0.1, 0.002, None, ttft_s=0.25, latency_s=0.25, output_tokens=1)
    print_report(asdict(summarise([SENT, done])), interrupted=True)
    shown = capsys.readouterr().out
    assert "no answer" not in shown and "nan" not in shown
    assert "  ttft                       250.0" in shown
    assert "tpot" not in shown, "one token has no time between tokens"
