"""Results in files: whole, or as they were."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from balanceroute.errors import InputError
from balanceroute.whole_file import write_whole


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """No file of this process may become larger, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("before", [None, b"as it was"], ids=["nothing there", "a file there"])
def test_a_full_disk_keeps_the_old_file(before: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "result.csv"
    if before is not None:
        file.write_bytes(before)
    with room_for(1000), pytest.raises(InputError, match=r"result\.csv: cannot be written: File too large"):
        write_whole(file, b"x" * 10_000)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if before is None else [before])


def test_the_last_of_two_concurrent_writers_replaces_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, replace = tmp_path / "result.csv", Path.replace

    def after_another(partial: Path, target: Path) -> Path:
        monkeypatch.undo()
        write_whole(file, b"another's")  # begun and ended while ours was about to be renamed
        return replace(partial, target)

    monkeypatch.setattr(Path, "replace", after_another)
    write_whole(file, b"ours")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"ours"]


def test_a_file_name_of_the_maximum_length_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / ("\N{GREEK SMALL LETTER ALPHA}" * 127)
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"


def test_the_permissions_of_a_file_and_a_link_to_it_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "secret.csv", tmp_path / "link.csv"
    file.touch(mode=0o600)
    link.symlink_to(file)
    write_whole(link, b"new")
    assert (file.read_bytes(), file.stat().st_mode & 0o777, link.is_symlink()) == (b"new", 0o600, True)


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"through it")
        assert os.read(reader, 100) == b"through it" and pipe.is_fifo()
    finally:
        os.close(reader)
