"""`RecordingScheduler`: a scheduler that writes its calls and answers to a journal."""

import errno
import fcntl
import logging
import math
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import wraps
from hashlib import blake2b
from inspect import Parameter, signature
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, TypeVar

import orjson

from balanceroute import __version__
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy, settings_to_dict
from balanceroute.core.policy import StageTimer
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import (
    Reject,
    Release,
    RequestSpec,
    Standing,
)
from balanceroute.errors import InputError, InvariantError
from balanceroute.journal.lines import FORMAT, call_line, error_text

log = logging.getLogger(__name__)

BEGINNING = b'{"journal":'  # of every journal
FLUSH_EVERY_S = 1.0
BUFFER_BYTES = 1 << 18

Answer = TypeVar("Answer")


class JournalWriter:
    """Appends calls to a file; the first line says with what policy and bounds they are to be run again.

    Raises InputError when the file cannot be begun: another process still writes it, or it holds something else than a
    journal. When it cannot be continued (a full disk) it ends there, and says so: the router goes on without it.
    """

    def __init__(self, path: Path, settings: PolicySettings, config: SchedulerConfig) -> None:
        header = {"journal": FORMAT, "version": __version__, **settings_to_dict(settings), "config": asdict(config)}
        if os.path.isfile(path):
            check_replaceable(path)
        try:
            self._file = _begun_anew(path, orjson.dumps(header) + b"\n")
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
        self._path = path
        self._flushed_s = -math.inf
        self._ended = False

    def write(self, line: bytes, now: float) -> None:
        """Append one line."""
        if self._ended:
            return
        try:
            self._file.write(line)
            if now - self._flushed_s >= FLUSH_EVERY_S:
                self._file.flush()
                self._flushed_s = now
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        try:
            self._file.close()
        except OSError as error:
            if not self._ended:
                self._end(error)

    def _end(self, error: OSError) -> None:
        self._ended = True
        log.warning("the journal ends here", extra={"path": str(self._path), "error": error.strerror})


def claim(file: FileIO) -> None:
    """Have this file for this process alone until it is closed; a pipe or a device is anybody's.

    Raises: OSError: another process writes it.
    """
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another process writes it") from None
    except OSError:  # a file system without locks
        return


def check_replaceable(path: Path) -> None:
    """Raises: InputError: a file of this name is neither a journal nor empty, so no journal may take its place."""
    try:
        with path.open("rb") as file:
            beginning = file.read(len(BEGINNING)).strip()
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if not BEGINNING.startswith(beginning):
        raise InputError(f"{path}: it holds something else than a journal, and is not overwritten")


def _begun_anew(path: Path, header: bytes) -> BufferedWriter:
    """The file with this first line alone, claimed; what another run has written is deleted. Raises: OSError."""
    file = FileIO(path, "ab")
    try:
        claim(file)
        if path.is_file():
            file.truncate(0)
        file.write(header)
    except OSError:
        file.close()
        raise
    return BufferedWriter(file, BUFFER_BYTES)


class RecordingScheduler(Scheduler):
    """A scheduler that writes down what it is asked and what it answers; `close()` it at the end.

    Args: settings, config: as in the journal's header; path: the file, overwritten; stage_timer: see `StageTimer`.
    """

    def __init__(
        self, settings: PolicySettings, config: SchedulerConfig, path: Path, stage_timer: StageTimer | None = None
    ) -> None:
        super().__init__(make_policy(settings, stage_timer), config, stage_timer)
        self._writer = JournalWriter(path, settings, config)
        self._counts: dict[str, int] = {}
        self._now = 0.0
        self._inside = False  # a call that another call makes is not the driver's
        self._key = secrets.token_bytes(16)

    def close(self) -> None:
        """Write what is still in memory and close the file."""
        self._write_counts()
        self._writer.close()

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        try:
            super().progress(request_id, tokens, now)
        except InvariantError as error:
            self._write_counts()
            self._write("progress", now, {"request_id": request_id, "tokens": tokens}, {"raised": str(error)})
            raise
        if self._inside:
            return
        counts = self._counts
        counts[request_id] = counts.get(request_id, 0) + tokens
        self._now = now

    def submit(self, spec: RequestSpec, now: float) -> Reject | None:
        return self._record(super().submit, now, spec=self._disguised(spec))

    def submit_prefilled(self, spec: RequestSpec, now: float, expected_remaining: float | None = None) -> None:
        self._record(super().submit_prefilled, now, spec=self._disguised(spec), expected_remaining=expected_remaining)

    def adopt(self, standing: Standing, now: float) -> bool:
        return self._record(super().adopt, now, standing=replace(standing, spec=self._disguised(standing.spec)))

    def requeue(self, request_id: str, now: float, prefix: Sequence[int] = (), anew: bool = False) -> Release:
        arguments = {"prefix": [self._name(block) for block in prefix]} if prefix else {}
        return self._record(super().requeue, now, request_id=request_id, anew=anew, **arguments)

    def _disguised(self, spec: RequestSpec) -> RequestSpec:
        """The request with other names for its blocks, the same for the same block."""
        return replace(spec, prefix=[self._name(block) for block in spec.prefix]) if spec.prefix else spec

    def _name(self, block: int) -> int:
        return int.from_bytes(blake2b(block.to_bytes(8, "little"), digest_size=8, key=self._key).digest(), "little")

    def _record(self, method: Callable[..., Answer], now: float, **args: Any) -> Answer:
        if self._inside:
            return method(**args, now=now)
        self._write_counts()
        self._inside = True
        try:
            answer = method(**args, now=now)
        except BaseException as error:
            self._write(method.__name__, now, args, {"raised": error_text(error)})
            raise
        finally:
            self._inside = False
        self._write(method.__name__, now, args, {"answer": answer})
        return answer

    def _write_counts(self) -> None:
        if self._counts:
            counts, self._counts = self._counts, {}
            self._write("tokens", self._now, {"counts": counts}, {"answer": None})

    def _write(self, call: str, now: float, args: dict[str, Any], outcome: dict[str, Any]) -> None:
        self._writer.write(call_line(now, call, args, outcome), now)


def _recorded(name: str) -> Callable[..., Any]:
    """The method of `Scheduler` of that name, written down with all its arguments."""
    method = getattr(Scheduler, name)
    parameters = list(signature(method).parameters.values())[1:]
    defaults = {each.name: each.default for each in parameters if each.default is not Parameter.empty}

    @wraps(method)
    def call(self: RecordingScheduler, *args: Any, **kwargs: Any) -> Any:
        given = {each.name: value for each, value in zip(parameters, args, strict=False)} | kwargs
        for argument, value in defaults.items():
            given.setdefault(argument, value)
        return self._record(method.__get__(self), **given)

    return call


_RECORDED = """set_draining configure reroute add_worker remove_worker set_worker_state report_prefiller
    report_prefix_cache report_prefix_hits forget_prefixes report_decoder report_decoder_memory report_tokens_per_step
    dispatch prefilled prefill_failed admit start step began refresh request_prefill pushed push_failed put_back
    order_by_arrival finish expire"""
for _call in _RECORDED.split():
    setattr(RecordingScheduler, _call, _recorded(_call))
