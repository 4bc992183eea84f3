import logging
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from balanceroute.errors import InputError
from balanceroute.prediction import FinishedRequest, History
from balanceroute.prediction.history import SCHEMA_VERSION, read_rows
from tests.waiting import block_until

from .builders import a_finish, finishes

NOW = 1_000_000.0


@contextmanager
def opened(path: Path, **options: float) -> Iterator[History]:
    history = History(path, clock=lambda: NOW, **{"batch_s": 0.0, **options})  # type: ignore[arg-type]
    try:
        yield history
    finally:
        history.close()


def stored(path: Path, *rows: FinishedRequest) -> None:
    with opened(path) as history:
        for row in rows:
            history.add(row)


def loaded(path: Path, **options: float) -> list[FinishedRequest]:
    with opened(path, **options) as history:
        return history.load()


def written(history: History, rows: int, dropped: int = 0) -> None:
    """Wait until the writer's thread has so many rows in the file, and has given up so many."""
    block_until(lambda: (history.rows, history.dropped) == (rows, dropped))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite3"


def test_a_restart_finds_every_row_and_the_same_salt(path: Path) -> None:
    rows = [a_finish(5, key="k", at_s=1.0), a_finish(7, reason="cancelled", prompt_tokens=9, at_s=2.0)]
    with opened(path) as history:
        for row in rows:
            history.add(row)
        salt = history.salt

    with opened(path) as again:
        assert again.load() == rows
        assert again.salt == salt
        assert again.rows == 2


def test_the_newest_rows_of_a_long_history_can_be_read_alone(path: Path) -> None:
    rows = finishes(5, 6, 7, 8)
    stored(path, *rows)
    with opened(path) as history:
        assert history.load(most_rows=2) == rows[-2:]
        assert history.load(most_rows=9) == rows


def test_two_files_never_share_a_salt(path: Path) -> None:
    with opened(path) as one, opened(path.with_name("other")) as other:
        assert one.salt != other.salt


def test_rows_reach_the_disk_by_themselves_after_the_batch_time(path: Path) -> None:
    with opened(path, batch_s=0.01) as history:
        history.add(a_finish(5))
        block_until(lambda: len(read_rows(path)) == 1)


def test_a_file_that_cannot_be_pruned_is_reported_and_still_written(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(path, max_rows=5) as history:
        with closing(sqlite3.connect(path)) as saboteur:
            saboteur.execute("CREATE TRIGGER keep BEFORE DELETE ON finished BEGIN SELECT RAISE(ABORT, 'kept'); END")
        for row in finishes(*range(1, 8)):
            history.add(row)
        written(history, rows=7)
        assert len(read_rows(path)) == 7

    assert "cannot be pruned: kept" in caplog.text


def test_rows_beyond_the_writers_capacity_are_dropped_and_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balanceroute.prediction.history.MAX_PENDING", 0)
    with opened(path) as history:
        history.add(a_finish(5))

        assert history.dropped == 1


def test_the_file_is_bounded_by_rows_and_keeps_the_newest(path: Path) -> None:
    with opened(path, max_rows=10) as history:
        for row in finishes(*range(1, 96)):
            history.add(row)

    assert [row.output_tokens for row in loaded(path)] == list(range(86, 96))


def test_the_file_is_bounded_by_age(path: Path) -> None:
    stored(path, a_finish(5, at_s=NOW - 61.0), a_finish(7, at_s=NOW - 59.0))

    assert [row.output_tokens for row in loaded(path, max_age_s=60.0)] == [7]
    assert [row.output_tokens for row in loaded(path)] == [7]


WRITER = """
import signal, sys
from balanceroute.prediction import FinishedRequest, History
history = History(sys.argv[1], batch_s=0.02)
before, n = history.rows, 0
while n < 40_000:  # twice as many fit into the file; who reads this may be late
    n += 1
    history.add(FinishedRequest("k", 1, n))
    while n > history.rows - before + 1000:
        pass  # no faster than the disk, or rows would be dropped
    if n % 200 == 0:
        print(history.rows - before, flush=True)
signal.pause()
"""


def test_kill_9_loses_at_most_what_was_not_written_and_never_the_file(path: Path) -> None:
    for _ in range(2):
        before = len(loaded(path)) if path.exists() else 0
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            stored_rows = next(rows for line in child.stdout if (rows := int(line)) >= 600)
            child.send_signal(signal.SIGKILL)
        rows = loaded(path)
        assert len(rows) >= before + stored_rows
        assert [row.output_tokens for row in rows[before:]] == list(range(1, len(rows) - before + 1))
    assert list(path.parent.glob("*damaged*")) == []


@pytest.mark.parametrize(
    ("kept", "then"),
    [(0, b"\0"), (10, b"\0"), (16, b"\xa5"), (512, b"\0"), (5000, b"\xa5")],
    ids=["zeros", "torn in the header", "header alone", "torn in the first page", "torn in the middle"],
)
def test_a_damaged_file_is_moved_aside_and_a_new_one_begun(
    path: Path, kept: int, then: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stored(path, *finishes(*range(1, 500)))
    content = path.read_bytes()
    damaged = content[:kept] + then * (len(content) - kept)
    path.write_bytes(damaged)

    with caplog.at_level(logging.WARNING):
        assert loaded(path) == []

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "damaged" in caplog.text
    (aside,) = path.parent.glob("*.damaged-*")
    assert aside.read_bytes() == damaged
    stored(path, a_finish(5))
    assert len(loaded(path)) == 1


def test_a_schema_that_is_no_text_any_more_is_damage_and_no_crash(path: Path) -> None:
    stored(path, a_finish(5))
    damaged = path.read_bytes().replace(b"CREATE TABLE finished", b"CREATE TABLE fin\xcc(hed")
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="not a readable prediction history"):
        read_rows(path)

    assert loaded(path) == []

    (aside,) = path.parent.glob("*.damaged-*")
    assert aside.read_bytes() == damaged


@pytest.mark.parametrize("salt", ["'a text'", "1000", "1.5", "x''", "x'00'"])
def test_an_invalid_salt_is_replaced_and_the_rows_stay(path: Path, salt: str) -> None:
    stored(path, a_finish(5))
    with sqlite3.connect(path) as file:
        file.execute(f"UPDATE secret SET salt = {salt}")
    file.close()

    salts = set()
    for _ in range(2):
        history = History(path)
        assert len(history.load()) == 1
        salts.add(history.salt)
        history.close()

    assert [len(salt) for salt in salts] == [16]


def test_a_row_with_damaged_text_loses_no_other_row(path: Path) -> None:
    stored(path, a_finish(5), a_finish(6))
    with sqlite3.connect(path) as file:
        file.execute("UPDATE finished SET prompt_key = CAST(x'ffff' AS TEXT) WHERE output_tokens = 5")
    file.close()

    assert [row.output_tokens for row in loaded(path)] == [5, 6]
    assert [row.output_tokens for row in read_rows(path)] == [5, 6]


def test_two_files_damaged_in_one_second_are_both_kept(path: Path) -> None:
    for content in (b"x", b"y"):
        path.write_bytes(b"SQLite format 3\0" + content * 5000)
        assert loaded(path) == []

    assert len(list(path.parent.glob("*.damaged-*"))) == 2


def run_without_it(path: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    with caplog.at_level(logging.WARNING), opened(path) as history:
        history.add(a_finish(5))
        assert history.load() == []
        assert history.path is None
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_a_file_of_a_newer_version_is_left_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(path, a_finish(5))
    with closing(sqlite3.connect(path)) as writer:
        writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    content = path.read_bytes()

    run_without_it(path, caplog, "newer version")

    assert path.read_bytes() == content


def test_a_database_of_another_program_is_left_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect(path)) as writer, writer:
        writer.execute("CREATE TABLE precious (x)")
    content = path.read_bytes()

    run_without_it(path, caplog, "another program")

    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"keys:\n- {name: a}\n" * 40, b"{}\n"], ids=["long", "short"])
def test_a_file_that_is_no_database_is_left_where_it_is(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)

    run_without_it(path, caplog, "the file is no database")

    assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]


def test_an_empty_file_becomes_the_history(path: Path) -> None:
    path.touch()

    stored(path, a_finish(5))

    assert len(loaded(path)) == 1


def test_a_path_that_cannot_be_opened_is_reported_in_one_line_without_a_crash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    run_without_it(tmp_path / "file" / "history", caplog, "not used, starting cold")


def test_without_a_thread_for_the_writer_the_file_is_read_and_rows_are_counted_as_dropped(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened(path) as before:
        before.add(a_finish(5, key="a"))
    monkeypatch.setattr(threading.Thread, "start", start)
    history = History(path)
    history.add(a_finish(7, key="b"))
    assert history.load() == [a_finish(5, key="a")] and history.dropped == 1
    history.close()
    assert [record.message for record in caplog.records] == ["prediction history not added to: can't start new thread"]


def test_a_damaged_file_that_cannot_be_moved_is_reported_in_one_line_without_a_crash(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"SQLite format 3\0" + b"x" * 5000
    path.write_bytes(content)

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(13, "read-only folder")

    monkeypatch.setattr(Path, "rename", refuse)

    run_without_it(path, caplog, "read-only folder")
    assert path.read_bytes() == content


def test_a_file_with_other_columns_starts_cold_and_counts_what_it_cannot_keep(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(path, a_finish(5))
    with closing(sqlite3.connect(path)) as saboteur:
        saboteur.execute("ALTER TABLE finished RENAME COLUMN prompt_key TO other")

    with caplog.at_level(logging.WARNING), opened(path) as history:
        assert history.load() == []
        history.add(a_finish(5))
        written(history, rows=1, dropped=1)
    assert "cannot be read, starting cold" in caplog.text


def test_a_file_that_another_process_locks_is_not_taken_for_damaged(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(path, a_finish(5))
    monkeypatch.setattr("balanceroute.prediction.history.LOCK_WAIT_S", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        run_without_it(path, caplog, "locked")
        other.execute("ROLLBACK")

    assert len(loaded(path)) == 1


def test_rows_that_cannot_be_written_are_counted_and_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), opened(path) as history:
        with closing(sqlite3.connect(path)) as saboteur:
            saboteur.execute("ALTER TABLE finished RENAME TO elsewhere")
        for dropped in (1, 2):
            history.add(a_finish(5))
            written(history, rows=0, dropped=dropped)
        with closing(sqlite3.connect(path)) as saboteur:
            saboteur.execute("ALTER TABLE elsewhere RENAME TO finished")
        history.add(a_finish(5))
        written(history, rows=1, dropped=2)

    assert ["cannot be written" in r.getMessage() for r in caplog.records] == [True, False]


@pytest.mark.parametrize("moved", [False, True], ids=["removed", "moved"])
def test_a_removed_file_is_recreated_with_the_same_salt(
    path: Path, moved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), opened(path) as history:
        history.add(a_finish(5, at_s=NOW))
        written(history, rows=1)
        salt = history.salt
        if moved:
            path.rename(path.with_name("old"))
        else:
            for file in path.parent.iterdir():
                file.unlink()
        for row in (a_finish(6, at_s=NOW), a_finish(7, at_s=NOW)):
            history.add(row)
        written(history, rows=2)
        assert history.salt == salt

    assert [row.output_tokens for row in loaded(path)] == [6, 7]
    assert not moved or [row.output_tokens for row in loaded(path.with_name("old"))] == [5]
    assert ["begun anew" in record.getMessage() for record in caplog.records] == [True]
    with opened(path) as again:
        assert again.salt == salt


def test_a_removed_folder_is_logged_once_and_its_rows_are_counted_as_dropped(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = path.parent / "folder"
    folder.mkdir()
    with caplog.at_level(logging.WARNING), opened(folder / "history") as history:
        folder.rename(path.parent / "elsewhere")
        for dropped in (1, 2):
            history.add(a_finish(5))
            written(history, rows=0, dropped=dropped)
        (path.parent / "elsewhere").rename(folder)
        history.add(a_finish(6))
        written(history, rows=1, dropped=2)

    assert ["cannot be written" in record.getMessage() for record in caplog.records] == [True, False]


def test_a_history_can_be_read_while_a_router_writes_it(path: Path) -> None:
    with opened(path, max_age_s=1.0) as history:
        history.add(a_finish(5, key="k", at_s=1.0))
        written(history, rows=1)

        assert read_rows(path) == [a_finish(5, key="k", at_s=1.0)]


@pytest.mark.parametrize("content", [None, b"not a database"], ids=["missing", "damaged"])
def test_reading_a_file_that_is_not_a_history_is_one_error_and_changes_nothing(
    path: Path, content: bytes | None
) -> None:
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InputError, match="not a readable prediction history"):
        read_rows(path)
    assert (path.read_bytes() if path.exists() else None) == content


def test_without_a_path_nothing_is_kept() -> None:
    history = History(None)
    history.add(a_finish(5))
    history.close()

    assert history.load() == []
    assert history.path is None


def test_what_is_added_after_closing_is_counted_as_dropped(path: Path) -> None:
    history = History(path)
    history.close()
    history.close()

    history.add(a_finish(5))

    assert history.dropped == 1


def test_invalid_rows_are_left_out_with_one_line(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    history = History(path, clock=lambda: now)
    history.add(a_finish(5, at_s=now))
    history.close()
    file = sqlite3.connect(path)
    for row in (("words", 7, now), (5, "words", now), (5, -7, now), (5, 2**62, now), (5, 7, "late")):
        file.execute("INSERT INTO finished VALUES (NULL, ?, 'k', ?, ?, 'stop')", (row[2], row[0], row[1]))
    file.execute("INSERT INTO finished VALUES (NULL, 9e17, 'k', 5, 7, 'stop')")  # by a clock that was wrong
    file.commit()
    file.close()

    again = History(path, clock=lambda: now)
    rows = again.load()
    again.close()

    assert [row.output_tokens for row in rows] == [5]
    assert [record.getMessage() for record in caplog.records] == [
        "prediction history: left out 5 rows that make no sense"
    ]
