"""Re-fits: a predictor answers from its present fit while the next one is computed in another thread or process.

A re-fit has three parts. On the loop: list the requests that run (10 ms for 9,000 of them, which is why it is
awaited: the lister pauses) and freeze a view of the recent rows (0.1 ms). In a worker thread: fit, from that
view alone. On the loop again: one assignment (`adopt`). For the survival curve the thread's time, 4 ms, goes
into short numpy calls, many of which release the interpreter lock (`scripts/bench/refit_stall.py`). Gradient
boosting would hold it for seconds, so the thread only starts and feeds a process of its own, which ends with
the fit, or is killed with the router.

When: as soon as the history has grown by an eighth, so that a cold start learns within its first dozens of
finishes (trees: within the first few hundred, which is what they need), and otherwise every `interval_s`; and
never sooner than nine times the duration of the last fit, which bounds re-fitting at a tenth of one core.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, Protocol, TypeVar, runtime_checkable

from balanceroute.arrays import IntArray
from balanceroute.errors import BalanceRouteError

from .observations import ObservationRing, Observations, Recent

log = logging.getLogger(__name__)

Fit = TypeVar("Fit")
# (age, prompt tokens) of the requests that run now, as pairs or an array of shape (n, 2)
Ages = Sequence[tuple[int, int]] | IntArray

FIRST_ROWS = 8  # below this a distribution says nothing yet
FIRST_ROWS_IN_PROCESS = 200  # below it the marginal curve beats any trees, and a process takes a second to start
GROWTH = 8  # re-fit when an eighth of the fitted rows is new
REST = 9  # rest this many times the duration of the last fit
POLL_S = 1.0


@runtime_checkable
class Refittable(Protocol[Fit]):
    """A predictor that is fitted from its ring of observations."""

    @property
    def refits_in_process(self) -> bool:
        """True when a fit takes seconds and would hold the interpreter lock."""

    @property
    def ring(self) -> ObservationRing:
        """The recent past."""

    def fitter(self) -> Callable[[Observations], Fit]:
        """Return the function that fits; it can be pickled and knows nothing of the predictor."""

    def adopt(self, fitted: Fit) -> None:
        """Answer from `fitted` from now on; one assignment."""


def _nobody() -> Ages:
    return ()


async def _no_running_requests() -> Ages:
    return ()


def has_grown(ring: ObservationRing, first_rows: int = FIRST_ROWS) -> bool:
    """Tell whether enough is new since the last fit to make another one worth it at once."""
    return ring.pending >= max(first_rows, (len(ring) - ring.pending) // GROWTH)


def refit_on_growth(predictor: Refittable[Fit], running: Callable[[], Ages] = _nobody) -> bool:
    """Fit here and now if the history has grown: for drivers without a loop (simulator, evaluation).

    `running` is only called then. True when it did fit. Amortised O(log n) per observation.
    """
    if not has_grown(predictor.ring):
        return False
    predictor.adopt(predictor.fitter()(predictor.ring.freeze(running()).joined()))
    return True


class ProcessEnded(Exception):
    """A fit's process was killed, or crashed."""


class NoThread(Exception):
    """The system has no thread for the worker now."""


EXPECTED = (BalanceRouteError, ArithmeticError, ValueError, MemoryError, OSError)  # a history no model can be made of


class Refitter(Generic[Fit]):
    """Keeps one predictor fresh beside a running event loop.

    Args: interval_s between fits while anything is new; running lists the requests that run now, which a fit
    counts as alive at their age (`ObservationRing.freeze`), and may pause to let the loop go on.
    """

    def __init__(
        self,
        predictor: Refittable[Fit],
        *,
        interval_s: float = 60.0,
        running: Callable[[], Awaitable[Ages]] = _no_running_requests,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._predictor = predictor
        self._interval_s = interval_s
        self._running = running
        self._executor = executor
        self._process = FitProcess()
        self._clock = clock
        self._last_end_s = self._adopted_s = clock()
        self._last_duration_s = 0.0
        self.fits = 0
        self.failures = 0

    @property
    def fit_age_s(self) -> float:
        """Seconds since the present fit was adopted (since the start when there was none)."""
        return self._clock() - self._adopted_s

    @property
    def is_due(self) -> bool:
        """True when a fit is worth its time now."""
        ring = self._predictor.ring
        rested_s = self._clock() - self._last_end_s
        if not ring.pending or rested_s < REST * self._last_duration_s:
            return False
        first_rows = FIRST_ROWS_IN_PROCESS if self._predictor.refits_in_process else FIRST_ROWS
        return rested_s >= self._interval_s or has_grown(ring, first_rows)

    async def run(self) -> None:
        """Re-fit whenever it is due, until cancelled; ends its worker on the way out."""
        if self._predictor.refits_in_process:
            self._process.prepare()
        try:
            while True:
                await asyncio.sleep(min(POLL_S, self._interval_s))
                if self.is_due:
                    await self.refit()
        finally:
            self.close()

    def close(self) -> None:
        """End the worker; a fit under way is not waited for. Another `run` has another worker."""
        self._process.close()
        self._process = FitProcess()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    async def refit(self) -> bool:
        """Fit once in the worker and adopt the result; False when the fit failed and the present one stays."""
        recent, fitter = self._predictor.ring.freeze(await self._running()), self._predictor.fitter()
        started_s = self._clock()
        try:
            fitted = await self._fitting(fitter, recent)
        except (*EXPECTED, ProcessEnded, NoThread) as error:
            self.failures += 1
            ours = isinstance(error, BalanceRouteError)  # says all there is to say; of the others tell once where
            first = self.failures == 1 and not ours
            log.warning("predictor not fitted anew, keeping the present fit: %s", error, exc_info=first)
        else:
            self._predictor.adopt(fitted)
            self._adopted_s = self._clock()
            self.fits += 1
            took_s = round(self._clock() - started_s, 3)
            log.info("predictor fitted anew", extra={"fits": self.fits, "rows": recent.n_rows, "took_s": took_s})
            return True
        finally:
            self._last_end_s = self._clock()
            self._last_duration_s = self._last_end_s - started_s
        return False

    def _fitting(self, fitter: Callable[[Observations], Fit], recent: Recent) -> "asyncio.Future[Fit]":
        """A fit that has begun in the worker. Raises: NoThread."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="prediction-refit")
        in_process = self._process if self._predictor.refits_in_process else None
        try:
            return asyncio.get_running_loop().run_in_executor(self._executor, _fit, fitter, recent, in_process)
        except RuntimeError as error:
            self._executor.shutdown(wait=False, cancel_futures=True)  # it has queued the fit all the same
            self._executor = None
            raise NoThread(str(error)) from error


def _fit(fitter: Callable[[Observations], Fit], recent: Recent, in_process: "FitProcess | None") -> Fit:
    return fitter(recent.joined()) if in_process is None else in_process.fit(fitter, recent)


class FitProcess:
    """Fits in a process of its own, one fit at a time; `close` ends a fit under way from another thread.

    Started by a server process that forks for us: a fork of the router would share listening sockets and the history's
    connection, and starting a fresh one holds the interpreter lock until it runs, however busy the machine. The history
    goes over chunk by chunk, because writing it down in one go would hold the lock for milliseconds too.
    """

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._closed = False

    def prepare(self) -> None:
        """Start the server ahead of the first fit."""
        forkserver.ensure_running()

    def fit(self, fitter: Callable[[Observations], Fit], recent: Recent) -> Fit:
        """Fit and wait for the result. Raises: what the fit raises; ProcessEnded when there is no result."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        with ours:
            process = context.Process(target=_fit_and_send, args=(theirs, fitter), daemon=True)
            process.start()
            theirs.close()
            self._process = process
            if self._closed:
                process.kill()
            try:
                for chunk in recent.chunks:
                    ours.send(chunk)
                ours.send(replace(recent, chunks=()))
                answer = ours.recv()
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise ProcessEnded("its process ended without a result") from None
            finally:
                process.join()
                self._process = None
        if isinstance(answer, BaseException):
            raise answer
        fitted: Fit = answer
        return fitted

    def close(self) -> None:
        """No fit from now on."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()


def _fit_and_send(connection: Connection, fitter: Callable[[Observations], Fit]) -> None:
    os.nice(10)  # a re-fit may take longer, requests may not
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the router, which ends this process
    chunks: list[Observations] = []
    while isinstance(received := connection.recv(), Observations):
        chunks.append(received)
    try:
        answer: Fit | Exception = fitter(replace(received, chunks=tuple(chunks)).joined())
    except EXPECTED as error:
        answer = error
    connection.send(answer)
