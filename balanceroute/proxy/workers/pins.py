"""A record of pinned KV in a file, so that the next start after a kill can drain it.

    balanceroute pins 1                                the first line: whose file it is
    {"n":7,"request":...,"prefiller":URL,"at":...,     KV is pinned; its parameters are unused
     "up":...,"prompt_tokens":...,"model":...,
     "params":{...}}
    -7                                                 released: its parameters are about to be sent

Lines are appended and never synced: they survive the process, not a crash of the machine. The second line is written
before the parameters are sent, because they may be used only once; if a worker certainly has not seen them, the first
is written again. When the file has grown, a new one with the present pins replaces it.

The first line is delayed by `UNWRITTEN_S`: if slots are free, most KV goes to a decode worker sooner, and costs no
write. After a kill in this time, or while the prefiller's reply is on its way, the KV stays until its timeout.

Only the prompt's size is written. A decode worker pulls by the parameters, and needs of the prompt only its number of
tokens, so any prompt of that size drains the KV (`stand_in`).

A lock on the file prevents that a second router drains KV that the first one needs. If the disk is too full for a new
file, the old one grows. A record that can't be written any more is emptied, and the router continues without it until
`repair` writes it again, as it does with a removed file.
"""

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from balanceroute.config import normalised_url
from balanceroute.errors import ConfigError
from balanceroute.proxy.link.files import beside, is_at
from balanceroute.proxy.telemetry.clock import now_s
from balanceroute.proxy.telemetry.ticks import until_tick_s
from balanceroute.proxy.telemetry.troubles import Trouble
from balanceroute.proxy.wire.bounds import MAX_PARAMS_BYTES, token_count
from balanceroute.proxy.wire.client_request import ClientRequest

log = logging.getLogger(__name__)

HEAD: Final = b"balanceroute pins 1\n"
COMPACT_BYTES: Final = 2**20  # a few thousand requests
GROWTH: Final = 4  # times the present pins, and at least `COMPACT_BYTES`: a larger file is rewritten
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)  # no room for another file, or no descriptor
UNWRITTEN_S: Final = 0.005  # delay before KV is recorded
MEND_S: Final = 5.0  # between two checks whether the file was removed
DRAWN_TOKENS: Final = 32  # random ids: twice a block of vLLM's prefix cache, whose hashes are chained
_LEAST_ID: Final = 10  # ids that every vocabulary has
_IDS: Final = 90
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


@dataclass(slots=True, eq=False)
class Pin:
    """The record of a request's pinned KV.

    `prefiller_url`: of the server that keeps it, because a restart may give its worker another id. `at`: the earliest
    time of its pinning, as Unix time; `up`: the same, since the machine's start. `prompt_tokens`: of the prompt.
    `model`: as in the request.
    """

    request_id: str
    prefiller_url: str
    kv_transfer_params: bytes
    prompt_tokens: int
    model: str | None
    at: float
    up: float
    record: "PinRecord" = field(repr=False)
    number: int = 0
    line: bytes = b""

    def age_s(self) -> float:
        """Its age in seconds, at least; negative: unknown, because the clock was set back.

        It takes the larger of two ages: a clock set back by less shows less, and `up` ends with a restart of the
        machine.
        """
        age_s = time.time() - self.at
        return age_s if age_s < 0 else max(age_s, now_s() - self.up)

    def hold(self) -> None:
        """Record that its parameters are unused."""
        self.record.hold(self)

    def release(self) -> None:
        """Record that its parameters are about to be used, or never will be. Idempotent."""
        self.record.release(self)


class PinRecord:
    """The file of one router. `left`: pins that the router before it has not released; they are held until released."""

    def __init__(self, path: str | Path, named: bool = True, needed: bool = True) -> None:
        """`named`: an operator has named the file, so it may be another program's; otherwise all readable lines are
        used. `needed`: a file that can't be used is an error; otherwise the router continues without it.

        Raises: ConfigError: the file can't be used, is another program's, or another router's.
        """
        self._path, self._named = Path(path), named
        self._live: dict[int, Pin] = {}
        self.left: tuple[Pin, ...] = ()
        self._unwritten: dict[int, Pin] = {}  # pins of `_live` that are not in the file yet
        self._writing: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # set while `watch` runs; else lines are written at once
        self._count = 0
        self._size = self._limit = 0
        self._file: int | None = None
        self._trouble = Trouble(log, "pinned KV is not recorded")
        try:
            self._file = os.open(self._path, _FLAGS, 0o600)
            self._lock(self._file, self._path)
            with open(self._file, "rb", closefd=False) as file:
                data = file.read()
            self._live = _held(data, self._path, self, named)
            self.left = tuple(self._live.values())
            self._count = max(self._live, default=0)
            if not self._rewritten():
                self._continue_file(data)
        except (OSError, ConfigError) as error:
            self._close_file()
            if isinstance(error, ConfigError):
                raise
            if needed:
                raise ConfigError(f"lifecycle.pins_file = {str(path)!r}: cannot be used: {error.strerror}") from None
            self._begin_trouble(error)

    def pin(
        self, request_id: str, prefiller_url: str, params: bytes, prompt_tokens: int, model: str | None, age_s: float
    ) -> Pin:
        """Record KV that was pinned `age_s` seconds ago at most."""
        at, up = time.time() - age_s, now_s() - age_s
        pin = Pin(request_id, prefiller_url, params, prompt_tokens, model, at, up, self)
        pin.hold()
        return pin

    def hold(self, pin: Pin) -> None:
        """See `Pin.hold`."""
        if not pin.number:
            self._count += 1
            pin.number = self._count
        elif pin.number in self._live:
            return
        self._live[pin.number] = self._unwritten[pin.number] = pin
        if self._loop is None:
            self._write_new()
        elif self._writing is None:
            self._writing = self._loop.call_later(UNWRITTEN_S, self._write_new)

    def release(self, pin: Pin) -> None:
        """See `Pin.release`."""
        if self._live.pop(pin.number, None) is None:
            return
        if self._unwritten.pop(pin.number, None) is None:
            self._append(b"-%d\n" % pin.number)
        elif not self._unwritten:
            self._write_no_more()

    def take_over(self, path: Path) -> tuple[Pin, ...]:
        """Move the pins of another record here and remove it, if no process holds it; returns these pins.

        After a kill in between the KV stays until its timeout, which is better than two records of the same parameters.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return ()  # another process was faster
        with open(file, "rb") as opened:
            try:
                self._lock(file, path)
                pins = tuple(_held(opened.read(), path, self, self._named).values())
                path.unlink()
            except (OSError, ConfigError):
                return ()  # a process holds it, or it is another program's
        for pin in pins:
            pin.number, pin.line = 0, b""
            self.hold(pin)
        self._write_new()
        return pins

    def repair(self) -> None:
        """Write the held pins again, if the file was removed or could not be written."""
        try:
            if self._file is None or not is_at(self._file, self._path):
                self._check_replaceable()
                self._rewrite()
            elif not self._trouble.lasts:
                return
        except (OSError, ConfigError) as error:
            self._begin_trouble(error)
        else:
            self._trouble.end()
            log.warning("pinned KV is recorded again", extra={"file": str(self._path)})

    async def watch(self) -> None:
        """Every few seconds, `repair`; until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(until_tick_s(now_s(), MEND_S))
                self.repair()
        finally:
            self._loop = None
            self._write_new()

    def __len__(self) -> int:
        """The number of held pins."""
        return len(self._live)

    def close(self) -> None:
        """Close the file; held pins stay in it for the next router."""
        self._write_new()
        self._close_file()

    # -- the file

    def _write_new(self) -> None:
        unwritten = list(self._unwritten.values())
        self._write_no_more()
        if unwritten:
            self._append(b"".join(map(_line, unwritten)))

    def _write_no_more(self) -> None:
        """Drop the waiting lines."""
        self._unwritten.clear()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _check_replaceable(self) -> None:
        """Check that a file at the path of the removed one may be replaced. Raises: ConfigError; OSError."""
        with suppress(FileNotFoundError):
            file = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(file, "rb") as opened:
                self._lock(file, self._path)
                _held(opened.read(), self._path, self, self._named)

    def _begin_trouble(self, error: OSError | ConfigError) -> None:
        why = error.strerror if isinstance(error, OSError) else str(error)
        self._trouble.begin(file=str(self._path), error=why)

    def _lock(self, file: int, path: Path) -> None:
        """Lock the file. Raises: ConfigError: another router has locked it; OSError."""
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(f"lifecycle.pins_file = {str(path)!r}: accepted is a file of the router's own user")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken() from None
        if not os.path.samestat(status, os.stat(path)):  # its owner replaced it while it was opened here
            raise self._taken()

    def _taken(self) -> ConfigError:
        return ConfigError(f"lifecycle.pins_file = {str(self._path)!r}: another router is using it; each needs its own")

    def _continue_file(self, data: bytes) -> None:
        """Continue the file, which contains `data`, after its last whole line. Raises: OSError."""
        assert self._file is not None
        self._size = data.rfind(b"\n") + 1
        self._limit = self._size + COMPACT_BYTES
        os.fchmod(self._file, 0o600)
        os.ftruncate(self._file, self._size)
        if not self._size:
            self._append(HEAD)

    def _append(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            if not os.fstat(self._file).st_nlink:  # the file was removed; a kill now must not lose the pins
                self.repair()
                return
            _write(self._file, line)
            self._size += len(line)
            if self._size > self._limit and not self._rewritten():
                self._limit = self._size + COMPACT_BYTES  # tried again then
        except OSError as error:
            self._give_up(error)

    def _rewritten(self) -> bool:
        """Rewrite the file without released pins; False: there is no room for another one now. Raises: OSError."""
        try:
            self._rewrite()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        return True

    def _rewrite(self) -> None:
        """Replace the file by one with only the held pins. Raises: OSError."""
        data = HEAD + b"".join(map(_line, self._live.values()))
        new = beside(self._path)
        new.unlink(missing_ok=True)
        file = os.open(new, _FLAGS | os.O_EXCL, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, data)
            new.replace(self._path)
        except OSError:
            os.close(file)
            new.unlink(missing_ok=True)
            raise
        self._close_file()
        self._write_no_more()
        self._file, self._size = file, len(data)
        self._limit = max(COMPACT_BYTES, GROWTH * len(data))

    def _give_up(self, error: OSError) -> None:
        """Continue without a record: none is better than one that lists used parameters as unused."""
        assert self._file is not None
        self._begin_trouble(error)
        try:
            os.ftruncate(self._file, 0)
        except OSError as second:
            fields = {"file": str(self._path), "error": second.strerror}
            log.warning("the record of pinned KV is out of date; remove it", extra=fields)
        self._close_file()


def _held(data: bytes, path: Path, record: PinRecord, named: bool) -> dict[int, Pin]:
    """The pins in a file, by number, as pins of `record`.

    Raises: ConfigError: it is another program's file, named by an operator.
    """
    data = data.lstrip(b"\0")  # after a loss of power a file may have its length but no contents
    is_ours = data.startswith(HEAD) or HEAD.startswith(data)
    if named and not is_ours:
        raise ConfigError(f"lifecycle.pins_file = {str(path)!r}: it holds something else; name another file")
    held: dict[int, Pin] = {}
    damaged = 0 if is_ours else 1
    _, _, lines = data.partition(b"\n")
    for line in lines.split(b"\n")[:-1]:  # the last line may be incomplete, or is empty
        try:
            if line.startswith(b"-"):
                held.pop(int(line[1:]), None)
            else:
                pin = _pin(line, record)
                held[pin.number] = pin
        except (ValueError, TypeError, KeyError):
            damaged += 1
    if damaged:
        log.warning("damaged lines in the record of pinned KV", extra={"file": str(path), "lines": damaged})
    return held


def stand_in(pin: Pin) -> ClientRequest:
    """A request with another prompt of the same size, to drain pinned KV whose prompt is not recorded.

    The worker may cache the KV under this prompt, to which it does not belong. So the first tokens are random: no
    request will match it.
    """
    drawn = min(pin.prompt_tokens, DRAWN_TOKENS)
    ids = [_LEAST_ID + secrets.randbelow(_IDS) for _ in range(drawn)] + [_LEAST_ID] * (pin.prompt_tokens - drawn)
    rest: dict[str, Any] = {} if pin.model is None else {"model": pin.model}
    return ClientRequest("completions", rest, orjson.dumps(ids), pin.prompt_tokens, stream=False, model=pin.model)


def _write(file: int, data: bytes) -> None:
    """Write all bytes. Raises: OSError."""
    while data:
        data = data[os.write(file, data) :]


def _line(pin: Pin) -> bytes:
    """The line of a pin, made when it is first needed."""
    if not pin.line:
        record = {
            "n": pin.number,
            "request": pin.request_id,
            "prefiller": pin.prefiller_url,
            "at": round(pin.at, 3),
            "up": round(pin.up, 3),
            "prompt_tokens": pin.prompt_tokens,
            "model": pin.model,
            "params": orjson.Fragment(pin.kv_transfer_params),
        }
        pin.line = orjson.dumps(record) + b"\n"
    return pin.line


def _pin(line: bytes, record: PinRecord) -> Pin:
    """The pin of a line of a former router. Raises: ValueError, TypeError, KeyError: it is damaged."""
    entry = orjson.loads(line)
    number, request, url, at, up, model = (entry[name] for name in ("n", "request", "prefiller", "at", "up", "model"))
    tokens, params = token_count(entry["prompt_tokens"], "prompt_tokens"), entry["params"]
    texts = isinstance(request, str) and isinstance(url, str) and isinstance(model, str | None)
    times = isinstance(at, float | int) and isinstance(up, float | int)
    if not (texts and times and isinstance(params, dict) and isinstance(number, int)):
        raise TypeError("values of other types")
    pinned = orjson.dumps(params)
    is_id = request.isascii() and request.isprintable()  # the id becomes a header
    if not is_id or number < 1 or tokens < 1 or len(pinned) > MAX_PARAMS_BYTES:
        raise ValueError("values out of bounds")
    return Pin(request, normalised_url(url), pinned, tokens, model, at, up, record, number, line + b"\n")
