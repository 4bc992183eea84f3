"""Finished requests on disk, so that a restarted router predicts from its first request.

One SQLite file in WAL mode. The event loop only puts rows on a queue (`add`); one thread writes them in
batches, each batch one transaction, and prunes by age and count. What that buys:

- kill -9 at any moment loses at most the rows that were not yet written (one batch) and never the file: a
  transaction that was cut in half is rolled back by the next open;
- a loss of power may also lose the last batches that were committed (synchronous=NORMAL), never the file;
- nothing on the loop waits for a disk. When the disk can't keep up, rows beyond `MAX_PENDING` are dropped and
  counted.

A history is an optimisation, so nothing about it may stop the router. Opening never raises for what is in
the file: a damaged file is moved aside (`NAME.damaged-TIME`, for whoever wants to look) and a new one
begun; a file written by a newer version, one that isn't ours, or one that can't be opened stays
untouched, and this run keeps its history in memory only. Each is one log line. A file that is removed or moved
away while it is written (a rotation) is begun anew with the next batch.

The salt of the prompt keys lives in the file: keys of an earlier run match, while two deployments' keys
never do.
"""

import logging
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from balanceroute.bounded import check_regular
from balanceroute.errors import InputError

from .contract import FinishedRequest

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
APPLICATION_ID = 0x42524854  # "BRHT": distinguishes these files from other databases
MAX_PENDING = 50_000  # rows on the queue, about 10 MB: minutes of a stuck disk at 200 requests per second
BATCH_ROWS = 1_000
BATCH_S = 0.5  # at most this much is lost by kill -9
PRUNE_EVERY_ROWS = 10_000
CLOCK_ERROR_S = 86_400.0  # rows from further in the future, by a clock that was wrong, would make all others look old
LOCK_WAIT_S = 2.0  # for another process that has the file; more would hold up the start

SALT_BYTES = 16

_HEADER = b"SQLite format 3\0"
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # of a damaged schema SQLite may return no text
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS finished (
    id INTEGER PRIMARY KEY,
    finished_s REAL NOT NULL,
    prompt_key TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    finish_reason TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS finished_by_time ON finished (finished_s);
CREATE TABLE IF NOT EXISTS secret (salt BLOB NOT NULL);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""

# SQLite keeps whatever was put into a column, and a page may be damaged without being malformed
_SENSIBLE = (
    "typeof(prompt_key) = 'text' AND typeof(finish_reason) = 'text' AND typeof(finished_s) = 'real' "
    "AND typeof(prompt_tokens) = 'integer' AND prompt_tokens BETWEEN 0 AND 4294967296 "
    "AND typeof(output_tokens) = 'integer' AND output_tokens BETWEEN 0 AND 4294967296"
)
_INSERT = (
    "INSERT INTO finished (prompt_key, prompt_tokens, output_tokens, finish_reason, finished_s) VALUES (?, ?, ?, ?, ?)"
)


class _Unusable(Exception):
    """The file must not be written; the text says why."""


class History:
    """A bounded store of finished requests with its own writer thread; `path` None: nothing is kept.

    `rows`: how many the file has. `dropped`: how many could not be recorded.

    Args: max_rows and max_age_s bound the file; the age counts back from `clock` (Unix seconds) and so do
    the rows' `finished_s`.
    """

    def __init__(
        self,
        path: Path | str | None,
        *,
        max_rows: int = 100_000,
        max_age_s: float | None = None,
        batch_s: float = BATCH_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_rows = max_rows
        self._max_age_s = max_age_s
        self._batch_s = batch_s
        self._clock = clock
        self._queue: queue.SimpleQueue[FinishedRequest | None] = queue.SimpleQueue()  # None: the end
        self.rows = 0
        self.dropped = 0
        self._failing = False
        self._closed = False
        self.salt = secrets.token_bytes(SALT_BYTES)
        self._file: tuple[int, int] | None = None  # which one is written
        self.path = self._open(Path(path)) if path is not None else None
        self._writer = None if self.path is None else self._started_writer(self.path)

    def add(self, finished: FinishedRequest) -> None:
        """Queue one row for the writer; never waits. Nothing is kept without a file."""
        if self.path is None:
            return
        if self._writer is None or self._closed or self._queue.qsize() >= MAX_PENDING:
            self.dropped += 1
            return
        self._queue.put(finished)

    def load(self, most_rows: int | None = None) -> list[FinishedRequest]:
        """Read what the bounds allow, oldest first: what a predictor learns from at start. Reads the disk.

        `most_rows`: of them, the newest; None: all.
        """
        limit = self._max_rows if most_rows is None else min(most_rows, self._max_rows)
        if self.path is None:
            return []
        try:
            connection = sqlite3.connect(self.path)
            try:
                connection.text_factory = _text
                rows = _read(connection, self._oldest_s(), self._clock() + CLOCK_ERROR_S, limit)
                left_out = connection.execute(f"SELECT count(*) FROM finished WHERE NOT ({_SENSIBLE})").fetchone()[0]
            finally:
                connection.close()
        except _ERRORS as error:
            log.warning("prediction history cannot be read, starting cold: %s", error, extra={"path": str(self.path)})
            return []
        if left_out:
            log.warning("prediction history: left out %d rows that make no sense", left_out)
        return rows

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and end the thread; may be called twice."""
        if self._writer is None or self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._writer.join(timeout_s)

    def _started_writer(self, path: Path) -> threading.Thread | None:
        """Start the writer thread; None: none can be started, and decisions do without the file."""
        writer = threading.Thread(target=self._write, args=(path,), name="prediction-history", daemon=True)
        try:
            writer.start()
        except RuntimeError as error:
            log.warning("prediction history not added to: %s", error, extra={"path": str(path)})
            return None
        return writer

    def _open(self, path: Path) -> Path | None:
        """Return the path when it can be used, else None; a damaged file is moved aside once."""
        try:
            try:
                self.salt = self._prepare(path)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if not _is_damage(error):
                    raise
                _check_database(path)
                aside = _move_aside(path, self._clock())
                log.warning(
                    "prediction history is damaged (%s), moved to %s, starting cold",
                    error,
                    aside.name,
                    extra={"path": str(path)},
                )
                self.salt = self._prepare(path)
        except (_Unusable, *_ERRORS, OSError) as error:
            log.warning("prediction history not used, starting cold: %s", error, extra={"path": str(path)})
            return None
        return path

    def _prepare(self, path: Path) -> bytes:
        """Check the file, bring it to our schema, read row count, prune; returns its salt.

        Raises: _Unusable, sqlite3.DatabaseError, UnicodeDecodeError, OSError.
        """
        connection = sqlite3.connect(path, timeout=LOCK_WAIT_S)
        try:
            _check_ours(connection)
            _check_whole(connection)
            connection.executescript(_SCHEMA)
            salt = _salt(connection, self.salt)
            self._prune(connection)
            self._file = _file_at(path)
            return salt
        finally:
            connection.close()

    def _write(self, path: Path) -> None:
        connection: sqlite3.Connection | None = None
        since_prune = 0
        ending = False
        while not ending:
            rows, ending = self._next_batch()
            if rows:
                connection = self._store(path, connection, rows)
                since_prune += len(rows)
            if connection is not None and (since_prune >= min(PRUNE_EVERY_ROWS, self._max_rows) or ending):
                since_prune = 0
                self._try_prune(connection)
        if connection is not None:
            connection.close()

    def _next_batch(self) -> tuple[list[FinishedRequest], bool]:
        """Wait for a first row, and collect until the batch is full or its time is over; whether it is the last one."""
        rows: list[FinishedRequest] = []
        deadline: float | None = None
        while len(rows) < BATCH_ROWS:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                item = self._queue.get(timeout=wait_s)
            except queue.Empty:
                break
            if item is None:
                return rows, True
            rows.append(item)
            deadline = deadline if deadline is not None else time.monotonic() + self._batch_s
        return rows, False

    def _store(
        self, path: Path, connection: sqlite3.Connection | None, rows: list[FinishedRequest]
    ) -> sqlite3.Connection | None:
        """Write one batch; on an error count the rows as dropped, say so once, and try again with the next batch."""
        try:
            if _file_at(path) != self._file:  # SQLite would go on with a removed file
                if connection is not None:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # so a moved file needs no journal
                    connection.close()
                    connection = None
                self._prepare(path)  # keys go on under the salt that they have
                log.warning("prediction history was removed or moved away, begun anew", extra={"path": str(path)})
            if connection is None:
                connection = sqlite3.connect(path, timeout=5.0)
                connection.execute("PRAGMA synchronous = NORMAL")
            with connection:
                connection.executemany(
                    _INSERT,
                    [(r.prompt_key, r.prompt_tokens, r.output_tokens, r.finish_reason, r.finished_s) for r in rows],
                )
        except (_Unusable, *_ERRORS, OSError) as error:
            self.dropped += len(rows)
            if not self._failing:
                self._failing = True
                log.warning("prediction history cannot be written: %s", error, extra={"path": str(path)})
            if connection is not None:
                connection.close()
            return None
        if self._failing:
            self._failing = False
            log.warning("prediction history is written again", extra={"path": str(path)})
        self.rows += len(rows)
        return connection

    def _try_prune(self, connection: sqlite3.Connection) -> None:
        try:
            self._prune(connection)
        except _ERRORS as error:  # the next batch tries again, so the file is only late in shrinking
            log.warning("prediction history cannot be pruned: %s", error, extra={"path": str(self.path)})

    def _prune(self, connection: sqlite3.Connection) -> None:
        with connection:
            connection.execute("DELETE FROM finished WHERE finished_s < ?", (self._oldest_s(),))
            connection.execute(
                "DELETE FROM finished WHERE id <= (SELECT id FROM finished ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (self._max_rows,),
            )
        self.rows = connection.execute("SELECT count(*) FROM finished").fetchone()[0]

    def _oldest_s(self) -> float:
        return self._clock() - self._max_age_s if self._max_age_s is not None else float("-inf")


def read_rows(path: Path) -> list[FinishedRequest]:
    """Read every sensible row of a history file, oldest first, changing nothing; a router may be writing it meanwhile.

    Raises: InputError when there is no file, or none of ours.
    """
    try:
        check_regular(path)
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_WAIT_S)
        try:
            connection.text_factory = _text
            _check_ours(connection)
            return _read(connection, float("-inf"), time.time() + CLOCK_ERROR_S, -1)
        finally:
            connection.close()
    except (_Unusable, *_ERRORS, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: not a readable prediction history: {reason}") from error


def _read(connection: sqlite3.Connection, oldest_s: float, newest_s: float, limit: int) -> list[FinishedRequest]:
    rows = connection.execute(
        "SELECT prompt_key, prompt_tokens, output_tokens, finish_reason, finished_s FROM finished "
        f"WHERE finished_s BETWEEN ? AND ? AND {_SENSIBLE} ORDER BY finished_s DESC, id DESC LIMIT ?",
        (oldest_s, newest_s, limit),
    ).fetchall()
    return [FinishedRequest(*row) for row in reversed(rows)]


def _text(raw: bytes) -> str:
    """A text of the file, readable also where a byte of it is damaged: one such row is no reason to lose the others."""
    return raw.decode(errors="replace")


def _is_damage(error: sqlite3.DatabaseError | UnicodeDecodeError) -> bool:
    return isinstance(error, UnicodeDecodeError) or error.sqlite_errorcode & 0xFF in _DAMAGED


def _check_database(path: Path) -> None:
    """Refuse a file that was never a database, whose name may be there by mistake: its owner needs it where it is.

    Of one whose first page was not written before a loss of power, zeros are left, or a part of the header.
    """
    with path.open("rb") as file:
        begin = file.read(len(_HEADER))
    if not _HEADER.startswith(begin.rstrip(b"\0")):
        raise _Unusable("the file is no database")


def _check_ours(connection: sqlite3.Connection) -> None:
    """Refuse, before anything is written, a file of a newer version or of another program."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and application != APPLICATION_ID:
        raise _Unusable("the file is a database of another program")
    if version > SCHEMA_VERSION:
        raise _Unusable(f"it was written by a newer version (schema {version}, known up to {SCHEMA_VERSION})")


def _check_whole(connection: sqlite3.Connection) -> None:
    """Raise the error that SQLite itself raises for a damaged page; about 0.1 s for 100,000 rows."""
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        error = sqlite3.DatabaseError(verdict.splitlines()[-1])
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _salt(connection: sqlite3.Connection, fresh: bytes) -> bytes:
    """Return the file's salt, which becomes `fresh` when it has none yet, or one that is none."""
    with connection:
        found = connection.execute("SELECT salt FROM secret").fetchone()
        if found is not None and isinstance(found[0], bytes) and len(found[0]) >= SALT_BYTES:
            return found[0]
        connection.execute("DELETE FROM secret")
        connection.execute("INSERT INTO secret (salt) VALUES (?)", (fresh,))
    return fresh


def _file_at(path: Path) -> tuple[int, int] | None:
    """Device and inode; None where there is no file. Raises: OSError: that can't be told."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _move_aside(path: Path, now_s: float) -> Path:
    """Rename the file and its journal files out of the way; nothing is deleted."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now_s))}")
    number = 0
    while aside.exists():
        number += 1
        aside = aside.with_name(f"{aside.name}.{number}")
    for suffix in ("-wal", "-shm"):
        journal = path.with_name(path.name + suffix)
        if journal.exists():
            journal.rename(aside.with_name(aside.name + suffix))
    path.rename(aside)
    return aside
