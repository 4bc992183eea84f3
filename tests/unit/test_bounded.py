"""Files without an end: one line for the user, and no command that reads for ever."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from balanceroute import bounded
from balanceroute.cli.explain import explained
from balanceroute.errors import InputError
from balanceroute.instrumentation.reading import read
from balanceroute.journal import rerun
from balanceroute.prediction import load_model
from balanceroute.prediction.history import read_rows
from balanceroute.traces import convert_trace, read_trace
from balanceroute.traces.source import Source

ZERO = Path("/dev/zero")


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (partial(explained, policy=None), "larger than 1 MiB"),
        (rerun, "a line of it is longer than 1 MiB"),
        (load_model, "it is a pipe or a device"),
        (read_rows, "it is a pipe or a device"),
        (read, "line 1: expected the columns"),
    ],
)
def test_an_endless_device_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, reads: Callable[[Path], Any], reason: str
) -> None:
    monkeypatch.setattr(bounded, "MOST_BYTES", 2**20)
    monkeypatch.setattr(bounded, "MOST_IN_LINE", 2**20)
    with pytest.raises(InputError, match=f"/dev/zero.*{reason}"):
        reads(ZERO)


@pytest.mark.parametrize("reads", [read_trace, convert_trace, rerun])
def test_a_too_long_line_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reads: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(bounded, "MOST_IN_LINE", 1000)
    path = tmp_path / "long"
    path.write_bytes(b"x" * 1001)
    with pytest.raises(InputError, match="a line of it is longer than 0 MiB"):
        reads(path)


@pytest.mark.parametrize("reads", [load_model, read_rows])
def test_a_pipe_is_refused_where_a_file_is_needed(tmp_path: Path, reads: Callable[[Path], Any]) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InputError, match="it is a pipe or a device; accepted is a file"):
        reads(path)


def test_a_line_as_long_as_it_may_be_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bounded, "MOST_IN_LINE", 5)
    path = tmp_path / "short"
    path.write_bytes(b"abcd\nab\nabcde")
    with path.open("rb") as file:
        assert list(bounded.lines(file)) == [b"abcd\n", b"ab\n", b"abcde"]
    with Source(path).open() as text:
        assert list(bounded.lines(text)) == ["abcd\n", "ab\n", "abcde"]
