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
from hashlib import blake2b
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
    Admit,
    Outcome,
    Prefill,
    Reject,
    Release,
    RequestSpec,
    Standing,
    WorkerSpec,
    WorkerState,
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

    def set_draining(self, draining: bool, now: float) -> None:
        self._record(super().set_draining, now, draining=draining)

    def configure(self, config: SchedulerConfig, now: float) -> None:
        self._record(super().configure, now, config=config)

    def reroute(self, settings: PolicySettings, now: float) -> None:
        self._record(super().reroute, now, settings=settings)

    def add_worker(self, spec: WorkerSpec, now: float) -> None:
        self._record(super().add_worker, now, spec=spec)

    def remove_worker(self, worker_id: str, now: float) -> None:
        self._record(super().remove_worker, now, worker_id=worker_id)

    def set_worker_state(self, worker_id: str, state: WorkerState, now: float) -> None:
        self._record(super().set_worker_state, now, worker_id=worker_id, state=state)

    def report_prefiller(self, worker_id: str, kv_usage: float | None, now: float) -> None:
        self._record(super().report_prefiller, now, worker_id=worker_id, kv_usage=kv_usage)

    def report_prefix_cache(
        self, worker_id: str, capacity_tokens: int | None, now: float, engine_block_tokens: int = 0
    ) -> None:
        self._record(
            super().report_prefix_cache,
            now,
            worker_id=worker_id,
            capacity_tokens=capacity_tokens,
            engine_block_tokens=engine_block_tokens,
        )

    def report_prefix_hits(self, worker_id: str, queried_tokens: float, hit_tokens: float, now: float) -> None:
        self._record(
            super().report_prefix_hits,
            now,
            worker_id=worker_id,
            queried_tokens=queried_tokens,
            hit_tokens=hit_tokens,
        )

    def forget_prefixes(self, worker_id: str, now: float) -> None:
        self._record(super().forget_prefixes, now, worker_id=worker_id)

    def report_decoder(
        self, worker_id: str, foreign_requests: int, foreign_tokens: int, least_own_slots: int, now: float
    ) -> None:
        self._record(
            super().report_decoder,
            now,
            worker_id=worker_id,
            foreign_requests=foreign_requests,
            foreign_tokens=foreign_tokens,
            least_own_slots=least_own_slots,
        )

    def report_tokens_per_step(self, worker_id: str, tokens_per_step: float, now: float) -> None:
        self._record(super().report_tokens_per_step, now, worker_id=worker_id, tokens_per_step=tokens_per_step)

    def report_decoder_memory(self, worker_id: str, capacity_tokens: int, now: float) -> None:
        self._record(super().report_decoder_memory, now, worker_id=worker_id, capacity_tokens=capacity_tokens)

    def submit(self, spec: RequestSpec, now: float) -> Reject | None:
        return self._record(super().submit, now, spec=self._disguised(spec))

    def submit_prefilled(self, spec: RequestSpec, now: float, expected_remaining: float | None = None) -> None:
        self._record(super().submit_prefilled, now, spec=self._disguised(spec), expected_remaining=expected_remaining)

    def dispatch(self, now: float, most: int | None = None) -> list[Prefill]:
        return self._record(super().dispatch, now, most=most)

    def prefilled(
        self,
        request_id: str,
        prompt_tokens: int,
        now: float,
        expected_remaining: float | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        self._record(
            super().prefilled,
            now,
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            expected_remaining=expected_remaining,
            cached_tokens=cached_tokens,
        )

    def prefill_failed(self, request_id: str, now: float) -> None:
        self._record(super().prefill_failed, now, request_id=request_id)

    def admit(self, now: float) -> list[Admit]:
        return self._record(super().admit, now)

    def start(self, request_id: str, now: float) -> None:
        self._record(super().start, now, request_id=request_id)

    def step(self, now: float) -> None:
        self._record(super().step, now)

    def began(self, request_id: str, now: float) -> None:
        self._record(super().began, now, request_id=request_id)

    def refresh(self, request_id: str, expected_remaining: float, now: float) -> None:
        self._record(super().refresh, now, request_id=request_id, expected_remaining=expected_remaining)

    def request_prefill(self, request_id: str, now: float) -> None:
        self._record(super().request_prefill, now, request_id=request_id)

    def pushed(self, request_id: str, prompt_tokens: int, now: float, cached_tokens: int | None = None) -> None:
        self._record(
            super().pushed, now, request_id=request_id, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens
        )

    def push_failed(self, request_id: str, now: float) -> None:
        self._record(super().push_failed, now, request_id=request_id)

    def put_back(self, request_id: str, now: float) -> None:
        self._record(super().put_back, now, request_id=request_id)

    def adopt(self, standing: Standing, now: float) -> bool:
        return self._record(super().adopt, now, standing=replace(standing, spec=self._disguised(standing.spec)))

    def order_by_arrival(self, now: float) -> None:
        self._record(super().order_by_arrival, now)

    def requeue(self, request_id: str, now: float, prefix: Sequence[int] = (), anew: bool = False) -> Release:
        arguments = {"prefix": [self._name(block) for block in prefix]} if prefix else {}
        return self._record(super().requeue, now, request_id=request_id, anew=anew, **arguments)

    def finish(self, request_id: str, outcome: Outcome, now: float) -> Release:
        return self._record(super().finish, now, request_id=request_id, outcome=outcome)

    def expire(self, now: float) -> list[Release]:
        return self._record(super().expire, now)

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
        except Exception as error:
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
