"""Runs a command of `balanceroute` in this process, as a user would on a command line."""

import sys

import pytest

from balanceroute.cli import main


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of `balanceroute ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["balanceroute", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def run_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Exit code of `balanceroute ARGUMENTS`, what it printed, and what it said on standard error."""
    code = exit_code(monkeypatch, *arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err
