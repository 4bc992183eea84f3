"""`balanceroute trace ...` from the outside."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.commands import exit_code


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return exit_code(monkeypatch, *arguments)


def test_a_generated_trace_is_described_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "t.csv.gz")
    assert run(monkeypatch, "trace", "generate", "capped", "--rows", "50", "--out", out) == 0
    capsys.readouterr()
    assert run(monkeypatch, "trace", "describe", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 50


def test_converting_writes_the_table_and_reports_left_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "azure.csv"
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,10,5\n2024-05-10 00:00:01,10,0\n")
    out = tmp_path / "t.csv"
    assert run(monkeypatch, "trace", "convert", str(source), "--out", str(out)) == 0
    assert "left out 1 requests" in capsys.readouterr().err
    assert out.read_text() == "arrival_s,prompt_tokens,output_tokens,prompt_key\n0.000000,10,5,\n"


def test_a_file_that_convert_reads_is_described_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "azure.csv"
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,10,5\n2024-05-10 00:00:01,10,0\n")
    assert run(monkeypatch, "trace", "describe", str(source), "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"] == 1 and "left out 1 requests" in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", "nowhere.csv"),
        ("generate", "nothing", "--out", "x.csv"),
        ("convert", "nowhere", "--out", "x"),
        ("generate", "capped", "--rows", "1000000000000", "--out", "x.csv"),
    ],
    ids=["missing file", "unknown preset", "missing source", "more rows than fit in memory"],
)
def test_bad_input_is_reported_in_one_line_with_exit_code_2(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "trace", *arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--step-cost", "0", "--step-overhead", "0"),
        ("--step-cost", "inf"),
        ("--step-overhead", "-5"),
        ("--load", "nan"),
        ("--seed", "-1"),
    ],
    ids=" ".join,
)
def test_bad_options_leave_the_output_file_as_it_is(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.csv"
    out.write_text("yesterday's")
    assert run(monkeypatch, "trace", "generate", "capped", "--rows", "20", "--out", str(out), *options) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert out.read_text() == "yesterday's"


@pytest.mark.parametrize(
    "command",
    [("trace", "convert", "{file}", "--out", "{link}"), ("replay", "--trace", "{file}", "--series", "{file}")],
    ids=["convert", "replay"],
)
def test_the_input_file_is_not_overwritten_by_the_output(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,10,5\n"
    source, link = tmp_path / "azure.csv", tmp_path / "link"
    source.write_text(text)
    link.symlink_to(source)
    assert run(monkeypatch, *(part.format(file=source, link=link) for part in command)) == 2
    assert "cannot be written: it is the file that is read" in capsys.readouterr().err
    assert source.read_text() == text


@pytest.mark.parametrize("group", [(), ("trace",), ("predictor",)], ids=["balanceroute", "trace", "predictor"])
def test_a_group_without_a_command_prints_its_help_and_no_empty_error(
    group: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *group) == 2
    printed = capsys.readouterr()
    assert "Usage:" in printed.out + printed.err
    assert "balanceroute: \n" not in printed.err


def test_a_name_that_the_output_encoding_cannot_represent_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / os.fsdecode(b"\xff.csv")
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,9,9\n")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="utf-8"))
    assert run(monkeypatch, "trace", "describe", str(file)) == 0
    sys.stdout.flush()
    assert b"\\udcff.csv\n" in shown.getvalue()


def test_a_dash_is_refused_as_an_output_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "trace", "generate", "capped", "--rows", "9", "--out", "-") == 2
    assert "-: cannot be written: what is printed goes to standard output" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
