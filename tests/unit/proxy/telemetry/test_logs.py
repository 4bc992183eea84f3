"""Log records as lines."""

import errno
import io
import json
import logging
import os
import time
from pathlib import Path
from select import PIPE_BUF

import pytest

from balanceroute.proxy.telemetry import logs
from balanceroute.proxy.telemetry.logs import FLUSH_S, PATIENCE_S, SHARE, configure, log_request
from tests.descriptors import open_descriptors
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time


def lines(style: str) -> list[str]:
    out = io.StringIO()
    configure("info", style, out)
    logging.getLogger("a.b").info("request", extra={"worker": "d0", "tokens": 3})
    logging.getLogger("a.b").debug("not shown")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("a.b").exception("broken")
    return out.getvalue().splitlines()


def test_json_lines_hold_event_and_fields() -> None:
    first, second = map(json.loads, lines("json"))
    assert (first["event"], first["level"], first["worker"], first["tokens"]) == ("request", "info", "d0", 3)
    assert "ValueError: why" in second["exception"]


def test_plain_lines_are_text_and_auto_is_json_without_a_terminal() -> None:
    assert lines("plain")[0].endswith("request worker=d0 tokens=3")
    assert lines("auto")[0].startswith("{")


@pytest.mark.parametrize("odd", ["\n", "\r", "\x1b[2J", "\x9b31m", "\u2028", "\x00", "\x7f", "\u202e"])
def test_a_logged_value_cannot_start_a_line_or_control_a_terminal(odd: str) -> None:
    forged = f"/v1/models/a{odd}09:00:00.000 INFO admin call by=token"
    for style in ("json", "plain"):
        out = io.StringIO()
        configure("info", style, out)
        log_request({"path": forged})
        logging.getLogger("a").warning("refused %s", forged, extra={"path": forged, "asked": [forged]})
        assert len(out.getvalue().splitlines() if style == "plain" else out.getvalue().split("\n")[:-1]) == 2
        if style == "plain":
            assert odd not in out.getvalue().replace("\n", "") or odd == "\n"


def test_a_traceback_keeps_its_lines_and_cannot_control_a_terminal() -> None:
    out = io.StringIO()
    configure("info", "plain", out)
    try:
        raise ValueError("what a worker said: \x1b[2J")
    except ValueError:
        logging.getLogger("a").exception("broken")
    first, *traceback, last = out.getvalue().splitlines()
    assert first.endswith("broken") and traceback[0].startswith("Traceback")
    assert last == "ValueError: what a worker said: \\x1b[2J"


@pytest.mark.parametrize("style", ["json", "plain"])
def test_text_with_invalid_unicode_is_logged_in_one_line(style: str) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    configure("info", style, out)
    logging.getLogger("a").warning("reload refused", extra={"error": "/etc/\udc80.yaml"})
    (line,) = out.buffer.getvalue().decode().splitlines()
    assert "reload refused" in line and "udc80" in line


def test_a_fast_request_line_equals_that_of_the_logging_module() -> None:
    for style in ("json", "plain"):
        out = io.StringIO()
        configure("info", style, out)
        log_request({"request": "r1", "tokens": 3})
        logging.getLogger("balanceroute.requests").info("request", extra={"request": "r1", "tokens": 3})
        direct, by_record = out.getvalue().splitlines()
        if style == "json":
            direct, by_record = (json.dumps({**json.loads(line), "time": ""}) for line in (direct, by_record))
            assert direct == by_record
        else:
            assert direct[13:] == by_record[13:]  # after the time


def test_requests_are_logged_by_whatever_handles_the_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_request({"request": "r1"})
    assert [record.request for record in caplog.records] == ["r1"]  # type: ignore[attr-defined]


@with_virtual_time
async def test_request_lines_are_batched_but_never_behind_a_warning() -> None:
    out = io.StringIO()
    configure("info", "json", out)
    log = logging.getLogger("a.b")
    log.info("one")
    log_request({"request": "two"})
    assert out.getvalue() == ""
    log.warning("three")
    assert len(out.getvalue().splitlines()) == 3
    log.info("four")
    await let_pass(2 * FLUSH_S)
    assert len(out.getvalue().splitlines()) == 4
    log.info("five")
    logging.getLogger().handlers[0].flush()  # what `logging` does at the end of the process
    events = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    assert events == ["one", "request", "three", "four", "five"]


def test_a_closed_log_fails_no_request() -> None:
    out = io.StringIO()
    configure("info", "json", out)
    out.close()
    log_request({"request": "r1"})
    logging.getLogger("a.b").warning("lost")


@pytest.mark.parametrize("message", ["SSL connection is closed", "socket.send() raised exception."])
def test_asyncio_warnings_of_writes_to_gone_clients_are_not_logged(message: str) -> None:
    """The loops say so of each write until the router hears of the end."""
    stream = io.StringIO()
    configure("info", "json", stream)
    logging.getLogger("asyncio").warning(message)
    logging.getLogger("asyncio").warning("something else")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["something else"]


def test_a_reload_sets_the_logs_up_again_without_leaving_anything_of_the_last_time() -> None:
    configure("info", "json", io.StringIO())
    before = len(logging.getLogger("uvicorn.error").filters)
    configure("info", "plain", io.StringIO())
    assert len(logging.getLogger("uvicorn.error").filters) == before == 2
    assert len(logging.getLogger().handlers) == 1


@pytest.mark.parametrize(("style", "expected"), [("json", '"process":"relay-1"'), ("plain", "[relay-1] request")])
def test_log_lines_of_several_processes_name_their_process(style: str, expected: str) -> None:
    out = io.StringIO()
    configure("info", style, out, process="relay-1")
    log_request({"request": "r1"})
    logging.getLogger("a.b").info("request")
    assert [expected in line for line in out.getvalue().splitlines()] == [True, True]


@with_virtual_time
async def test_log_writes_of_several_processes_are_atomic_in_a_pipe() -> None:
    written: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    configure("info", "json", Pipe(), process="relay-1")
    for number in range(200):
        log_request({"request": f"{number}", "text": "ä" * 50})
    await let_pass(2 * FLUSH_S)
    assert 5 < len(written) < 50 and all(len(text.encode()) <= PIPE_BUF and text.endswith("\n") for text in written)
    assert [json.loads(line)["request"] for text in written for line in text.splitlines()] == [*map(str, range(200))]


LONG = {
    "ascii": "/" + "a" * 9000,
    "of several bytes": "/" + "ä\U0001f600" * 3000,
    "escaped": '/"\\\n\x00' * 3000,
}


@pytest.mark.parametrize("style", ["json", "plain"])
@pytest.mark.parametrize("path", LONG.values(), ids=LONG.keys())
def test_a_log_line_of_several_processes_is_cut_to_an_atomic_pipe_write(style: str, path: str) -> None:
    out = io.StringIO()
    configure("info", style, out, process="relay-1")
    log_request({"request": "r1", "path": path, "status": 404})
    logging.getLogger("a.b").warning("not served", extra={"path": path, "status": 404})
    for line in out.getvalue().split("\n")[:-1]:
        assert PIPE_BUF - 16 < len(f"{line}\n".encode()) <= PIPE_BUF
        if style == "json":
            fields = json.loads(line)
            assert path.startswith(fields["path"]) and (fields["status"], fields["process"]) == (404, "relay-1")
            assert fields["cut"] == {"path": len(path)}
        else:
            assert f"cut={{'path': {len(path)}}}" in line and "status=404" in line


def test_client_chosen_fields_are_cut_before_error_fields() -> None:
    out = io.StringIO()
    configure("info", "json", out, process="relay-1")
    error = "why " * 500
    logging.getLogger("a.b").warning("refused", extra={"error": error, "path": "/" * 5000})
    fields = json.loads(out.getvalue())
    assert fields["error"] == error and fields["cut"] == {"path": 5000}


@pytest.mark.parametrize("style", ["json", "plain"])
def test_an_error_line_keeps_the_end_of_its_traceback_and_part_of_the_state(style: str) -> None:
    out = io.StringIO()
    configure("info", style, out, process="brain")
    state = {"workers": [{"id": f"w{number}", "load": number} for number in range(1000)]}
    try:
        raise ValueError("because " * 1000 + "of this")
    except ValueError:
        logging.getLogger("a.b").exception("internal error", extra={"where": "link", "state": state})
    assert len(out.getvalue().encode()) <= PIPE_BUF
    assert "of this" in out.getvalue() and "w0" in out.getvalue()
    if style == "json":
        fields = json.loads(out.getvalue())
        assert fields["where"] == "link" and set(fields["cut"]) == {"state", "exception"}


def test_many_long_fields_are_cut_to_nothing_sooner_than_a_line_is_torn() -> None:
    out = io.StringIO()
    configure("info", "json", out, process="relay-1")
    logging.getLogger("a.b").warning("x" * 5000, extra={f"field{number}": "y" * 300 for number in range(40)})
    assert len(out.getvalue().encode()) <= PIPE_BUF and json.loads(out.getvalue())["cut"]


def test_a_single_process_cuts_no_log_line() -> None:
    out = io.StringIO()
    configure("info", "json", out)
    log_request({"path": "/" * 9000})
    assert json.loads(out.getvalue())["path"] == "/" * 9000


@pytest.mark.parametrize("process", ["", "relay-0"], ids=["one process", "several"])
def test_a_blocked_log_reader_delays_no_process_and_gets_the_number_of_lost_lines(process: str) -> None:
    reads, writes = os.pipe()
    began = time.monotonic()
    with os.fdopen(reads, "rb") as reader, os.fdopen(writes, "w") as stream:
        configure("info", "json", stream, process)
        for number in range(2000):
            logging.getLogger("a").warning("said", extra={"number": number, "more": "x" * 100})
        assert time.monotonic() - began < 200 * PATIENCE_S  # a tenth of the time of a wait per line
        os.set_blocking(reads, False)
        lines = reader.read().splitlines()
        logging.getLogger("a").warning("again")
        missed, last = map(json.loads, reader.read().splitlines())
    assert (last["event"], missed["lines"], missed["level"]) == ("again", 2000 - len(lines), "warning")
    assert [json.loads(line)["number"] for line in lines] == list(range(len(lines)))


def test_a_line_longer_than_the_pipes_free_space_delays_no_process_and_splits_no_other() -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as reader, os.fdopen(writes, "w") as stream:
        os.set_blocking(reads, False)
        configure("info", "json", stream)
        logging.getLogger("a").warning("x" * 50_000)
        logging.getLogger("a").warning("y" * 50_000)  # once this blocked until somebody read
        first, torn = reader.read().splitlines()
        logging.getLogger("a").warning("z")
        _, lost, last = reader.read().split(b"\n")[:-1]
    assert json.loads(first)["event"] == "x" * 50_000 and torn.endswith(b"yyy")
    assert json.loads(lost)["lines"] == 1 and json.loads(last)["event"] == "z"


def test_lines_lost_on_a_full_disk_are_counted_and_split_no_later_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, write = 1000, os.write

    def written(file: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, data[:room])
        room -= done
        return done

    with (tmp_path / "log").open("w") as stream:
        configure("info", "json", stream, "relay-0")
        with monkeypatch.context() as full:
            full.setattr(logs.os, "write", written)
            for number in range(20):
                logging.getLogger("a").warning("x" * 100, extra={"number": number})
        logging.getLogger("a").warning("again")
    *whole, torn, lost, last = (tmp_path / "log").read_text().splitlines()
    assert [json.loads(line)["number"] for line in whole] == list(range(len(whole))) and "}" not in torn
    assert json.loads(lost)["lines"] == 20 - len(whole) and json.loads(last)["event"] == "again"


def test_a_slow_log_reader_costs_the_router_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = waited_s = 0.0

    class Slow:
        """Takes a piece every 0.2 s."""

        def register(self, file: int, events: int) -> None: ...

        def unregister(self, file: int) -> None: ...

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            nonlocal now_s, waited_s
            takes = timeout_ms >= 200
            waits_s = min(timeout_ms / 1000, 0.2)
            now_s, waited_s = now_s + waits_s, waited_s + waits_s
            return [(0, 0)] * takes

    monkeypatch.setattr(logs, "poll", Slow)
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s)
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb"), os.fdopen(writes, "w") as stream:
        configure("info", "json", stream, "relay-0")
        for _ in range(10_000):  # a hundred seconds of them
            now_s += 0.01
            logging.getLogger("a").warning("said")
    assert now_s > 100.0 and waited_s < 2 * PATIENCE_S + SHARE * now_s


def test_a_process_does_not_wait_when_another_fills_the_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb"), os.fdopen(writes, "w") as stream:
        configure("info", "json", stream, "relay-0")
        monkeypatch.setattr(logs._Reader, "_has_room", lambda reader: True)  # as it was when we looked
        for _ in range(100):
            logging.getLogger("a").warning("x" * 3000)
        assert os.get_blocking(writes)  # for others who hold it, as a shell, nothing has changed


def test_a_reload_does_not_reopen_the_log_stream() -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb"), os.fdopen(writes, "w") as stream:
        configure("info", "json", stream)
        before = open_descriptors()
        configure("info", "json", stream)
        assert open_descriptors() <= before
