"""What is written of pinned KV, what a later router makes of it, and whose file it is."""

import asyncio
import errno
import math
import os
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.workers import pins as module
from balanceroute.proxy.workers.pins import DRAWN_TOKENS, HEAD, Pin, PinRecord, stand_in
from tests.descriptors import open_files
from tests.waiting import until

pytestmark = pytest.mark.anyio

PARAMS = b'{"remote_block_ids":[[4,2]],"remote_request_id":"r-1"}'


def a_pin(record: PinRecord, request_id: str = "r", prompt_tokens: int = 300, model: str | None = "m") -> Pin:
    return record.pin(request_id, "http://p0:1", PARAMS, prompt_tokens, model, 2.0)


def left_in(path: Path) -> list[str]:
    """Whose pins the next router finds."""
    record = PinRecord(path)
    record.close()
    return [pin.request_id for pin in record.left]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pins"


def killed(record: PinRecord) -> None:
    """As its end by SIGKILL: nothing more is written, and the system drops the lock."""
    record.close()


def test_the_next_router_finds_unreleased_pins(path: Path) -> None:
    record, before = PinRecord(path), time.time()
    assert record.left == ()
    taken, kept = a_pin(record, "taken"), a_pin(record, "kept", prompt_tokens=77)
    taken.release()
    killed(record)
    (found,) = PinRecord(path).left
    assert (found.request_id, found.prefiller_url, found.prompt_tokens) == ("kept", "http://p0:1", 77)
    assert found.model == "m"
    assert found.kv_transfer_params == PARAMS
    assert before - 2.1 < found.at == round(kept.at, 3) < time.time() - 1.9


def test_unreleased_pins_are_kept_over_any_number_of_routers(path: Path) -> None:
    first = PinRecord(path)
    a_pin(first, "a"), a_pin(first, "b")
    killed(first)
    second = PinRecord(path)
    second.left[0].release()
    a_pin(second, "c")
    killed(second)
    third = PinRecord(path)
    assert [pin.request_id for pin in third.left] == ["b", "c"]
    for pin in third.left:
        pin.release()
    killed(third)
    assert left_in(path) == []


def test_kv_that_a_worker_has_refused_is_pinned_again(path: Path) -> None:
    record = PinRecord(path)
    pin = a_pin(record)
    pin.release()
    pin.release()
    pin.hold()
    assert len(record) == 1
    killed(record)
    assert left_in(path) == ["r"]


def test_every_line_is_written_at_once_without_an_event_loop(path: Path) -> None:
    record = PinRecord(path)
    pin = a_pin(record)
    held = path.read_bytes()
    assert held.startswith(HEAD) and held.endswith(pin.line) and b"r-1" in held
    pin.release()
    assert path.read_bytes() == held + b"-1\n"
    record.close()


def written(path: Path) -> bytes:
    return path.read_bytes()


def removed(path: Path) -> None:
    path.unlink()


@asynccontextmanager
async def watched(record: PinRecord) -> AsyncIterator[None]:
    """As in a router that runs."""
    watch = asyncio.get_running_loop().create_task(record.watch())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait([watch])


async def test_kv_that_is_sent_to_a_decode_worker_at_once_is_never_recorded(path: Path) -> None:
    record = PinRecord(path)
    async with watched(record):
        for _ in range(3):
            a_pin(record).release()
    assert written(path) == HEAD
    record.close()


async def test_waiting_kv_is_recorded_with_later_pins_and_released(path: Path) -> None:
    record = PinRecord(path)
    async with watched(record):
        first, gone, _ = a_pin(record, "first"), a_pin(record, "gone"), a_pin(record, "second")
        gone.release()
        assert written(path) == HEAD
        await until(lambda: written(path).count(b"\n") == 3)
        first.release()
        killed(record)
    assert left_in(path) == ["second"]


async def test_a_pin_that_reached_the_file_with_a_new_one_is_released_there(path: Path) -> None:
    record = PinRecord(path)
    async with watched(record):
        pin = a_pin(record)
        removed(path)
        record.repair()
        pin.release()
        killed(record)
    assert left_in(path) == []


async def test_a_pin_that_is_refused_twice_is_released_for_good(path: Path) -> None:
    record = PinRecord(path)
    async with watched(record):
        pin = a_pin(record)
        await until(lambda: written(path) != HEAD)
        pin.hold()
        pin.release()
    record.close()
    assert left_in(path) == []


async def test_a_router_that_ends_writes_what_it_has_not_written(path: Path) -> None:
    record = PinRecord(path)
    async with watched(record):
        a_pin(record)
    killed(record)
    assert left_in(path) == ["r"]


def test_only_the_owner_may_read_the_record_whatever_its_mode_was(path: Path) -> None:
    path.write_bytes(HEAD)
    path.chmod(0o644)
    PinRecord(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", range(1, 150, 7))
def test_a_cut_off_line_is_accepted_and_loses_no_other(path: Path, cut: int) -> None:
    record = PinRecord(path)
    a_pin(record, "whole")
    whole = path.stat().st_size
    last = a_pin(record, "cut")
    killed(record)
    assert cut < len(last.line)
    os.truncate(path, whole + cut)
    assert left_in(path) == ["whole"]


@pytest.mark.parametrize("cut", range(len(HEAD) + 1))
def test_a_file_that_was_just_being_made_holds_nothing(path: Path, cut: int) -> None:
    path.write_bytes(HEAD[:cut])
    assert left_in(path) == []


def test_a_file_that_a_loss_of_power_left_as_zeros_holds_nothing(path: Path) -> None:
    path.write_bytes(bytes(500))
    assert left_in(path) == []


LEAST = b'{"n":1,"request":"r","prefiller":"http://p","at":1,"up":1,"prompt_tokens":1,"model":null,"params":{}}'
WRONG = [{"n": "2"}, {"n": 0}, {"request": 1}, {"request": "r\r\nx: y"}, {"request": "\u00e9"}, {"prefiller": None}]
WRONG += [{"prefiller": "http://[p"}, {"at": "x"}, {"up": "x"}, {"prompt_tokens": 0}, {"prompt_tokens": 99999999999}]
WRONG += [{"model": 1}, {"params": [1]}]


def test_a_line_with_the_least_values_is_a_pin(path: Path) -> None:
    path.write_bytes(HEAD + LEAST + b"\n")
    assert left_in(path) == ["r"]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\x00\xfe",
        b"[1]",
        b"{}",
        b"-x",
        *(orjson.dumps({**orjson.loads(LEAST), "n": 2, **wrong}) for wrong in WRONG),
    ],
)
def test_a_damaged_line_costs_no_other(path: Path, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    record = PinRecord(path)
    a_pin(record, "before")
    record.close()
    with path.open("ab") as file:
        file.write(line + b"\n")
    assert left_in(path) == ["before"] and "damaged lines" in caplog.text


def test_a_file_of_another_kind_is_refused_and_unchanged(path: Path) -> None:
    path.write_text("root:x:0:0\n")
    with pytest.raises(ConfigError, match="it holds something else"):
        PinRecord(path)
    assert path.read_text() == "root:x:0:0\n"


@pytest.mark.parametrize("spoilt", [b"root:x:0:0\n", b"\xff" * 300, b"\xff\n"], ids=["text", "one line", "bytes"])
def test_a_damaged_default_record_is_rewritten_with_its_readable_lines(
    path: Path, spoilt: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    record = PinRecord(path)
    a_pin(record, "kept")
    killed(record)
    path.write_bytes(spoilt + (path.read_bytes()[len(HEAD) :] if spoilt.endswith(b"\n") else b""))
    record = PinRecord(path, named=False)
    assert [pin.request_id for pin in record.left] == ["kept"] * spoilt.endswith(b"\n")
    assert [one.getMessage() for one in caplog.records] == ["damaged lines in the record of pinned KV"]
    killed(record)
    assert left_in(path) == ["kept"] * spoilt.endswith(b"\n")


def test_the_readable_lines_of_a_former_relays_damaged_record_are_taken_over(tmp_path: Path) -> None:
    mine, other = PinRecord(tmp_path / "mine", named=False), PinRecord(tmp_path / "other")
    a_pin(other, "theirs")
    killed(other)
    spoilt = tmp_path / "other"
    spoilt.write_bytes(b"x" + spoilt.read_bytes())
    assert [pin.request_id for pin in mine.take_over(spoilt)] == ["theirs"] and not spoilt.exists()
    mine.close()


def test_a_removed_record_is_recreated_with_all_held_pins(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = PinRecord(path)
    taken, _ = a_pin(record, "taken"), a_pin(record, "kept")
    record.repair()
    assert not caplog.records
    path.unlink()
    taken.release()
    record.repair()
    assert [one.getMessage() for one in caplog.records] == ["pinned KV is recorded again"]
    with pytest.raises(ConfigError, match="another router is using it"):
        PinRecord(path)
    a_pin(record, "later")
    killed(record)
    assert left_in(path) == ["kept", "later"]


def test_a_record_in_a_temporarily_unreachable_folder_is_logged_as_complete_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = PinRecord(path)
    for _ in range(2):  # the second time is told as well
        with monkeypatch.context() as patched:
            patched.setattr(module, "is_at", out_of_reach)
            record.repair()
            a_pin(record, "kept").release()
            record.repair()
        record.repair()
        record.repair()
    messages = ["pinned KV is not recorded", "pinned KV is recorded again"]
    assert [one.getMessage() for one in caplog.records] == messages * 2
    record.close()


def out_of_reach(*_: object) -> bool:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_removed_record_is_recreated_with_the_next_line(path: Path) -> None:
    record = PinRecord(path)
    a_pin(record, "first")
    path.unlink()
    a_pin(record, "second")
    killed(record)
    assert left_in(path) == ["first", "second"]
    record = PinRecord(path)
    first, _ = record.left
    path.unlink()
    first.release()
    killed(record)
    assert left_in(path) == ["second"]


def test_a_removed_record_does_not_touch_the_file_in_its_place(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = PinRecord(path)
    path.unlink()
    second = PinRecord(path)
    a_pin(second, "theirs")
    record.repair(), record.repair()
    killed(second)
    path.write_text("root:x:0:0\n")
    record.repair()
    assert [one.getMessage() for one in caplog.records] == ["pinned KV is not recorded"]
    assert path.read_text() == "root:x:0:0\n"
    killed(record)


def test_a_record_begins_again_once_the_disk_has_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = PinRecord(path)
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", FullDisk(path, 0))
        a_pin(record, "then")
        record.repair()
    assert path.read_bytes() == b""
    record.repair()
    killed(record)
    assert left_in(path) == ["then"]


def test_a_record_that_is_not_needed_is_missing_until_its_file_can_be_used(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir()
    record = PinRecord(path, needed=False)
    a_pin(record, "a")
    record.repair()
    assert record.left == () and [one.getMessage() for one in caplog.records] == ["pinned KV is not recorded"]
    path.rmdir()
    record.repair()
    killed(record)
    assert left_in(path) == ["a"]


def test_a_file_in_use_is_refused_until_its_router_has_ended(path: Path) -> None:
    record = PinRecord(path)
    with pytest.raises(ConfigError, match="another router is using it"):
        PinRecord(path)
    a_pin(record, "mine")
    killed(record)
    assert left_in(path) == ["mine"]


@pytest.mark.parametrize("what", ["another user's file", "pipe"])
def test_a_record_is_a_file_of_the_routers_own_user(path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="accepted is a file of the router's own user"):
        PinRecord(path)


@pytest.mark.parametrize("what", ["folder", "no folder", "link"])
def test_an_unusable_pins_file_is_refused_in_one_line(path: Path, what: str) -> None:
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to("/dev/null")
    else:
        path = path / "pins"
    with pytest.raises(ConfigError, match=r"lifecycle\.pins_file = .*cannot be used: [A-Z]") as refused:
        PinRecord(path)
    assert "\n" not in str(refused.value)


def test_the_file_size_is_bounded_by_the_held_pins(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_BYTES", 10_000)
    record = PinRecord(path)
    a_pin(record, "stays")
    for number in range(2000):
        a_pin(record, str(number)).release()
        assert path.stat().st_size <= 10_000
    with pytest.raises(ConfigError, match="another router"):
        PinRecord(path)
    killed(record)
    assert left_in(path) == ["stays"]
    assert [one.name for one in path.parent.iterdir()] == ["pins"]


def test_a_large_record_is_not_rewritten_constantly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_BYTES", 1000)
    record = PinRecord(path)
    inodes = set()
    for number in range(1000):
        a_pin(record, str(number))
        inodes.add(path.stat().st_ino)
    assert len(inodes) < 10
    killed(record)
    assert len(left_in(path)) == 1000


def test_a_partial_rewrite_changes_nothing(path: Path) -> None:
    record = PinRecord(path)
    a_pin(record, "held")
    killed(record)
    (path.parent / "pins.new").write_bytes(HEAD + b'{"half')
    assert left_in(path) == ["held"]


def test_a_full_disk_leaves_an_empty_record_and_stops_no_request(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = PinRecord(path)
    first = a_pin(record)

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", full)
        second = a_pin(record)
    first.release(), second.release(), second.hold()
    assert "not recorded" in caplog.text
    assert left_in(path) == []


class FullDisk:
    """One that has room for so many bytes more, and for no content of another file than `path`."""

    def __init__(self, path: Path, room_bytes: int) -> None:
        self._path, self._room_bytes, self._write = path, room_bytes, os.write

    def __call__(self, file: int, data: bytes) -> int:
        if not os.path.samestat(os.fstat(file), self._path.stat()) or len(data) > self._room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._room_bytes -= len(data)
        return self._write(file, data)


def test_the_next_router_continues_with_the_existing_file_when_the_disk_is_full(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = PinRecord(path)
    a_pin(first, "a"), a_pin(first, "b")
    killed(first)
    path.write_bytes(path.read_bytes() + b'{"n":3,"cut off')
    path.chmod(0o644)
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", FullDisk(path, 300))
        second = PinRecord(path)
        assert [pin.request_id for pin in second.left] == ["a", "b"]
        second.left[0].release()
        a_pin(second, "c")
        killed(second)
        third = PinRecord(path)
        assert [pin.request_id for pin in third.left] == ["b", "c"]
        assert not caplog.records
        killed(third)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert left_in(path) == ["b", "c"]
    assert [one.name for one in path.parent.iterdir()] == ["pins"]


@pytest.mark.parametrize("left", [b"", HEAD[:5], bytes(100)], ids=["none", "half a line", "zeros"])
def test_a_router_with_an_empty_record_and_a_full_disk_runs_without_a_record_and_logs_it_once(
    path: Path, left: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(left)
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", FullDisk(path, 0))
        record = PinRecord(path)
        a_pin(record).release()
    assert [one.getMessage() for one in caplog.records] == ["pinned KV is not recorded"]
    assert left_in(path) == []


def test_a_record_that_has_no_room_to_be_written_anew_grows_and_is_written_anew_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "COMPACT_BYTES", 1000)
    record = PinRecord(path)
    held = a_pin(record, "held")
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", FullDisk(path, 10_000))
        for number in range(20):
            a_pin(record, str(number)).release()
        assert not caplog.records and path.stat().st_size > 2000
        assert list(path.parent.iterdir()) == [path]  # the file that was begun takes no room
    for number in range(20):
        a_pin(record, str(number)).release()
    assert path.stat().st_size < 2000
    killed(record)
    assert left_in(path) == [held.request_id]


def test_a_record_that_finds_no_free_descriptor_to_be_written_anew_grows_and_is_written_anew_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "COMPACT_BYTES", 1000)
    record = PinRecord(path)
    held = a_pin(record, "held")

    tries: list[object] = []

    def exhausted(*args: object) -> int:
        tries.append(args)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "open", exhausted)
        for number in range(20):
            a_pin(record, str(number)).release()
    assert len(record) == 1 and not caplog.records
    assert path.stat().st_size > 2000
    assert 1 <= len(tries) <= path.stat().st_size // 1000  # not with every line
    for number in range(20):
        a_pin(record, str(number)).release()
    assert path.stat().st_size < 2000
    killed(record)
    assert left_in(path) == [held.request_id]


@pytest.mark.parametrize("room", [10_000, math.inf], ids=["a full disk", "room"])
def test_writing_a_record_anew_leaves_no_descriptor_open(
    path: Path, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPACT_BYTES", 1000)
    record = PinRecord(path)
    if room < math.inf:
        monkeypatch.setattr(module.os, "write", FullDisk(path, int(room)))
    before = open_files(path.parent)
    for number in range(20):
        a_pin(record, str(number)).release()
    assert open_files(path.parent) == before
    record.close()


def test_a_record_that_is_begun_without_a_free_descriptor_is_accepted_by_the_next_router(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def only_the_record(name: Path, *args: int) -> int:
        if name != path:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(name, *args)

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "open", only_the_record)
        record = PinRecord(path)
        held = a_pin(record)
        killed(record)
    assert left_in(path) == [held.request_id]


@pytest.mark.parametrize("tokens", [1, DRAWN_TOKENS, 5000])
def test_a_stand_in_prompt_has_the_size_of_the_original_and_is_unique(path: Path, tokens: int) -> None:
    record = PinRecord(path)
    pin = a_pin(record, prompt_tokens=tokens)
    request = stand_in(pin)
    ids = orjson.loads(request.prompt_json)
    assert len(ids) == request.prompt_tokens == tokens and all(10 <= one < 100 for one in ids)
    assert request.rest["model"] == "m" and not request.stream
    if tokens >= DRAWN_TOKENS:
        assert ids[:16] != orjson.loads(stand_in(pin).prompt_json)[:16]
    assert "model" not in stand_in(a_pin(record, model=None)).rest
    record.close()


def test_another_record_is_taken_over_once_its_owner_has_ended(tmp_path: Path) -> None:
    mine, other = PinRecord(tmp_path / "mine"), PinRecord(tmp_path / "other")
    a_pin(mine, "own")
    a_pin(other, "gone").release()
    a_pin(other, "left", prompt_tokens=77)
    assert mine.take_over(tmp_path / "other") == () and (tmp_path / "other").exists()
    killed(other)
    (taken,) = mine.take_over(tmp_path / "other")
    assert (taken.request_id, taken.prompt_tokens, taken.kv_transfer_params) == ("left", 77, PARAMS)
    assert not (tmp_path / "other").exists() and mine.take_over(tmp_path / "other") == ()
    (tmp_path / "notes").write_text("something else\n")
    assert mine.take_over(tmp_path / "notes") == () and (tmp_path / "notes").exists()
    killed(mine)
    assert left_in(tmp_path / "mine") == ["own", "left"]
    successor = PinRecord(tmp_path / "mine")
    successor.left[1].release()
    killed(successor)
    assert left_in(tmp_path / "mine") == ["own"]
