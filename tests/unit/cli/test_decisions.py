"""`balanceroute decisions`: what it prints, and how it ends where there is no router."""

import json
import signal
import socket
import sys
from typing import Any

import pytest

from balanceroute.cli.decisions import is_complete, show_decisions, watched
from tests.commands import exit_code
from tests.unit.cli.answering import answering

ROW: dict[str, Any] = {
    "number": 7,
    "at": 1.0,
    "age_s": 2.0,
    "policy": "level_fit",
    "request": "cmpl-with-a-long-name-0123456789abcdef",
    "worker": "a-host-with-a-long-name.example:9100",
    "stage": 2,
    "score": -1234.5,
    "runner_up": "cmpl-another-long-name-0123456789abcdef to another-host-with-a-long-name.example:9101",
    "runner_up_score": -99.0,
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return exit_code(monkeypatch, "decisions", *arguments)


def test_names_are_not_cut_when_piped_and_an_unknown_runner_up_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    show_decisions({"count": 1234, "decisions": [ROW, {**ROW, "runner_up": None, "runner_up_score": None}]})
    first, second = [line for line in capsys.readouterr().out.splitlines() if ROW["request"] in line]
    assert ROW["worker"] in first and ROW["runner_up"] in first and "scarce" in first
    assert "-1,234.5" in first and "-99.0" in first
    assert "not worked out" in second and ROW["runner_up"] not in second


def test_the_policy_is_a_column_only_where_it_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    show_decisions({"count": 2, "decisions": [ROW, {**ROW, "policy": "br_0"}]})
    output = capsys.readouterr().out
    assert "┃ policy" in output and output.endswith("2 admissions so far, 2 shown, by br_0, level_fit\n")
    show_decisions({"count": 2, "decisions": [ROW]})
    assert "┃ policy" not in capsys.readouterr().out


def test_a_router_that_has_decided_nothing_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    show_decisions({"count": 0, "decisions": []})
    assert capsys.readouterr().out == "0 admissions so far, 0 shown\n"


def test_runners_up_that_are_worked_out_within_the_next_second_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At ten admissions per second all of `--last 10` were too new to have one."""

    def reply(head: bytes) -> tuple[int, bytes]:
        runner_up = ROW["runner_up"] if b"last=100 " in head else None
        return 200, json.dumps({"count": 1, "decisions": [{**ROW, "runner_up": runner_up}]}).encode()

    monkeypatch.setattr(sys.modules[watched.__module__], "WORKED_OUT_S", 0)
    with answering(reply) as url:
        assert run(monkeypatch, url, "--watch", "0.001", "--last", "10") == 0
        assert ROW["runner_up"] in capsys.readouterr().out
        assert run(monkeypatch, url, "--watch", "0", "--last", "10") == 0
        assert "not worked out" in capsys.readouterr().out


def test_an_unreachable_router_is_reported_in_one_line_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # not listening
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert run(monkeypatch, url) == 2
    error_text = capsys.readouterr().err
    assert error_text == f"balanceroute: {url}: no answer: Connection refused\n"
    assert run(monkeypatch, url, "--admin-token", "\u00e9") == 2
    assert "--admin-token: accepted are printable ASCII characters" in capsys.readouterr().err
    for url in ("nonsense", "http://no..name"):
        assert run(monkeypatch, url) == 2
        assert "is not a URL such as http://127.0.0.1:8000" in capsys.readouterr().err


def test_the_routers_refusal_is_shown_and_the_token_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(head: bytes) -> tuple[int, bytes]:
        if b"authorization: bearer right" in head.lower():
            return 200, b'{"count": 3, "decisions": []}'
        return 401, b'{"error": {"message": "needs the token."}}'

    with answering(reply) as url:
        monkeypatch.delenv("BALANCEROUTE_AUTH__ADMIN_TOKEN", raising=False)
        assert run(monkeypatch, url, "--watch", "0") == 2
        refused = f"{url}/decisions: status 401: needs the token; give it with --admin-token"
        assert capsys.readouterr().err == f"balanceroute: {refused}\n"
        assert run(monkeypatch, url, "--watch", "0", "--admin-token", "right", "--json") == 0
        assert '"count": 3' in capsys.readouterr().out
        monkeypatch.setenv("BALANCEROUTE_AUTH__ADMIN_TOKEN", "right")
        assert run(monkeypatch, url, "--watch", "0") == 0


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, "<html>"),
        (404, '{"detail": "Not Found"}'),
        (200, '{"decisions": 5, "count": 5}'),
        (200, '{"decisions": [5], "count": 1}'),
        (200, '{"decisions": []}'),
        (200, json.dumps({"count": 1, "decisions": [{**ROW, "at": 1e300}]})),
        (200, json.dumps({"count": 1, "decisions": [{**ROW, "score": "high"}]})),
        (200, '{"decisions": ' + "[" * 100_000),
    ],
    ids=["HTML", "404", "a number", "of numbers", "no count", "no date", "a score of letters", "nested deeply"],
)
def test_a_server_that_is_not_a_router_is_refused(
    status: int, body: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(lambda head: (status, body.encode())) as url:
        assert run(monkeypatch, url, "--watch", "0") == 2
    error_text = capsys.readouterr().err
    assert (
        f"status {status}: " in error_text
        and "is this a balanceroute router" in error_text
        and error_text.count("\n") == 1
    )


def test_ctrl_c_ends_the_watching_also_while_the_router_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([{"count": 7, "decisions": []}])

    def asked(*_: object) -> dict[str, Any]:
        for answer in answers:
            return answer
        raise KeyboardInterrupt  # as in the middle of a read

    module = sys.modules[show_decisions.__module__]  # its name in the package is the function's
    monkeypatch.setattr(module, "asked", asked)
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run(monkeypatch, "http://127.0.0.1:1", "--watch", "600") == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "7 admissions so far" in capsys.readouterr().out


def test_a_score_that_json_cannot_hold_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"count": 1, "decisions": [{**ROW, "score": None}]}
    assert is_complete(found)
    show_decisions(found)
    assert ROW["request"] in capsys.readouterr().out
