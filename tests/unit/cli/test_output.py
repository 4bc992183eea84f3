"""What becomes of the output where it cannot be written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from balanceroute.cli.output import ProgressLines, print_table

BALANCEROUTE = f"exec {sys.executable} -m balanceroute"
FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", ["--version", "--help"])
def test_a_full_standard_output_is_reported_in_one_line_with_exit_code_1(arguments: str, unbuffered: str) -> None:
    command = f"PYTHONUNBUFFERED={unbuffered} {BALANCEROUTE} {arguments} > {FULL}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    message = "balanceroute: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_a_closed_standard_output_is_reported_in_one_line_with_exit_code_1() -> None:
    done = subprocess.run(["sh", "-c", f"{BALANCEROUTE} --version >&-"], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "balanceroute: the output cannot be written: not writable\n")


def plain(text: str) -> str:
    """Without colours."""
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def test_names_in_tables_are_not_cut_in_a_pipe_or_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "decode-worker-with-a-long-name.cluster.local:9100[bold]"
    table = Table("worker", "state", "free slots")
    table.add_row(name, "up", "4")
    print_table(table)
    assert f"│ {name} │" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "40")
    print_table(table)
    printed = plain(capsys.readouterr().out)
    _, _, body = printed.partition("─\n")
    assert "".join(line.split()[0] for line in body.splitlines() if line.strip()) == name


def test_a_table_that_is_a_little_too_wide_stacks_its_heads_and_breaks_no_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    table = Table("policy", "the load spread in tokens", "the longest wait in seconds", "why no more")
    table.add_row("join_shortest_queue", "169,770", "43.7", "no slot is left free")
    table.add_row("level_fit", "19,988", "154.1", "nothing is left waiting")
    print_table(table)
    lines = plain(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 60
    assert any("join_shortest_queue" in line and "169,770" in line for line in lines)
    assert any("level_fit" in line and "154.1" in line for line in lines)


@pytest.mark.parametrize("of_a_terminal", [False, True])
def test_texts_and_tables_are_printed_where_the_environment_says_zero_columns(
    of_a_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    if of_a_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    table = Table("worker", "state")
    table.add_row("d0", "up")
    print_table("policy br_0", table, "1 admitted")
    lines = plain(capsys.readouterr().out).splitlines()
    assert (lines[0], lines[-1]) == ("policy br_0", "1 admitted")
    assert any("d0" in line and "up" in line for line in lines)


def test_progress_in_a_log_is_an_occasional_line(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    tell = ProgressLines("answers", lambda: now[0])
    for second in range(61):
        now[0] = float(second)
        tell(second, 60)
    assert capsys.readouterr().err.splitlines() == [f"answers: {n} of 60" for n in (15, 30, 45, 60)]
