"""The vLLM plugin: wraps the engine core's step, when BALANCEROUTE_STEP_LOG names a folder to write to.

vLLM calls `register` in every process that it starts, several times; without the variable it returns at once and vLLM
is not touched. With it, the methods `step`, `step_with_batch_queue` (asynchronous scheduling) and `execute_dummy_batch`
(an idle rank of an expert-parallel group) of `EngineCore` are wrapped, and each engine's `scheduler.schedule`. The
wrappers call what they wrap in any case and let its exceptions pass; an exception of our own ends the recording of that
process with one warning, and the engine goes on.

Cost: a sum over the running requests and one buffered line per step.
"""

import functools
import logging
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from balanceroute.instrumentation.step_log import Batch, StepLog

VARIABLE = "BALANCEROUTE_STEP_LOG"
_RECORDED = "_balanceroute_recorded"  # an attribute of our wrapper of `schedule`

log = logging.getLogger("vllm.balanceroute")  # under vLLM's own logger, or its level would hide the warning


def register() -> None:
    """vLLM's entry point. Never raises."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    try:
        from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found,unused-ignore]

        instrument(EngineCore, Path(folder))
    except Exception as error:
        log.warning("balanceroute: no step log (%s: %s)", type(error).__name__, error)


def instrument(engine_core: Any, folder: Path) -> None:
    """Wrap the methods of an engine core class, once."""
    if getattr(engine_core, "_balanceroute_step_log", None) is not None:
        return
    recorder = Recorder(folder)
    engine_core._balanceroute_step_log = recorder
    for name in ("step", "step_with_batch_queue"):
        if hasattr(engine_core, name):
            setattr(engine_core, name, _recorded_step(getattr(engine_core, name), recorder))
    if hasattr(engine_core, "execute_dummy_batch"):
        engine_core.execute_dummy_batch = _recorded_dummy(engine_core.execute_dummy_batch, recorder)
    if hasattr(engine_core, "shutdown"):
        engine_core.shutdown = _closing(engine_core.shutdown, recorder)


class Recorder:
    """What the wrappers share; one per process, as an engine core is. Its methods never raise."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log: StepLog | None = None
        self._pid = 0
        self._watched: Any = None  # the scheduler of the last step
        self.off = False

    def attach(self, core: Any) -> None:
        """See this engine's batches from now on, too."""
        if self.off or core.scheduler is self._watched and self._pid == os.getpid():
            return
        try:
            if self._pid == os.getpid():  # not what a process has written that this one was forked from
                self.close()
            self._pid = os.getpid()
            self._log = StepLog(self._folder, dp_rank(core), prefills=only_prefills(core))
            self._watched = core.scheduler
            if not hasattr(core.scheduler.schedule, _RECORDED):  # engines of one process may take turns
                core.scheduler.schedule = self._recorded_schedule(core.scheduler)
        except Exception as error:
            self._give_up(error)

    def completed(self, outputs: object) -> None:
        """A step call has returned; None says that it only scheduled."""
        if outputs is not None:
            self._record(StepLog.completed)

    def dummy(self, began: float) -> None:
        """A dummy batch has been computed."""
        self._record(lambda log: log.dummy(began))

    def close(self) -> None:
        """Write what is buffered; an engine process may end without Python's own exit."""
        if self._log is not None:
            try:
                self._log.close()
            except OSError as error:
                self._give_up(error)

    def _recorded_schedule(self, scheduler: Any) -> Callable[..., Any]:
        schedule = scheduler.schedule

        @functools.wraps(schedule)
        def recorded(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            planned = schedule(*args, **options)
            self._record(lambda log: log.scheduled(batch_of(scheduler, planned), began))
            return planned

        setattr(recorded, _RECORDED, True)
        return recorded

    def _record(self, tell: Callable[[StepLog], None]) -> None:
        if not self.off and self._log is not None:
            try:
                tell(self._log)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.off = True
        log.warning("balanceroute: the step log ends here (%s: %s)", type(error).__name__, error)


def batch_of(scheduler: Any, planned: Any) -> Batch:
    """What a vLLM v1 scheduler has just put together."""
    running = scheduler.running
    _, waiting = scheduler.get_request_counts()  # over several queues, which each version names otherwise
    return Batch(
        running_reqs=len(running),
        total_tokens=sum(request.num_computed_tokens for request in running),
        waiting_reqs=waiting,
        kv_cache_usage=float(scheduler.kv_cache_manager.usage),
        empty=planned.total_num_scheduled_tokens == 0,
    )


def dp_rank(core: Any) -> str:
    """The engine's data-parallel rank: its configuration, its process's name, its launch arguments, else unknown."""
    parallel = getattr(getattr(core, "vllm_config", None), "parallel_config", None)
    for holder, name in ((core, "dp_rank"), (parallel, "data_parallel_index"), (parallel, "data_parallel_rank")):
        value = getattr(holder, name, None)
        if isinstance(value, int):
            return str(value)
    named = re.search(r"DP(\d+)", multiprocessing.current_process().name)
    return named[1] if named else _rank_argument(sys.argv)


def only_prefills(core: Any) -> bool:
    """Whether the engine is the producer of a prefill-decode pair."""
    transfer = getattr(getattr(core, "vllm_config", None), "kv_transfer_config", None)
    return getattr(transfer, "kv_role", None) == "kv_producer"


def _rank_argument(arguments: Sequence[str]) -> str:
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in ("--data-parallel-rank", "-dpn"):
            value = value or next(iter(arguments[position + 1 :]), "")
            if value.isdigit():
                return value
    return "unknown"


def _recorded_step(step: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(step)
    def recorded(core: Any, *args: Any, **options: Any) -> Any:
        recorder.attach(core)
        result = step(core, *args, **options)
        recorder.completed(result[0] if isinstance(result, tuple) and result else None)
        return result

    return recorded


def _closing(shutdown: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(shutdown)
    def closing(core: Any, *args: Any, **options: Any) -> Any:
        recorder.close()
        return shutdown(core, *args, **options)

    return closing


def _recorded_dummy(execute: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(execute)
    def recorded(core: Any, *args: Any, **options: Any) -> Any:
        recorder.attach(core)
        began = time.perf_counter()
        result = execute(core, *args, **options)
        recorder.dummy(began)
        return result

    return recorded
