"""Decisions and predictions that take long: while a router works one out, no token of any stream passes."""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from statistics import median

from balanceroute.core.knobs import DEFAULTS
from balanceroute.core.policy import AdmissionPolicy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec
from balanceroute.prediction import FinishedRequest, Predictor

WORKERS, SLOTS, WAITING = 8, 64, 512
DECISION_MS, PREDICTION_MS = 1.0, 0.1  # longer ones are too long
CALLS, MOST_S = 50, 1.0  # as many are timed, or fewer if these take so long together
clock_s = time.perf_counter


def slow_decisions(make: Callable[[], AdmissionPolicy]) -> str:
    """What is wrong if decisions on a full cluster take too long, else an empty text.

    It is empty for a policy that raises, too: the rules name that.
    """
    where = f" ({WORKERS} workers of {SLOTS} slots, {WAITING} requests waiting)"
    return _slow(f"a decision{where}", lambda: _decisions(make()), DECISION_MS)


def slow_predictions(make: Callable[[int], Predictor]) -> str:
    """The same for `predict_one`."""
    return _slow("predict_one", lambda: _predictions(make(DEFAULTS["horizon_steps"])), PREDICTION_MS)


def _slow(what: str, make_calls: Callable[[], Iterator[Callable[[], object]]], most_ms: float) -> str:
    try:
        taken_ms = 1000 * _median_s(make_calls())
    except (Exception, SystemExit):
        return ""
    if taken_ms <= most_ms:
        return ""
    return f"{what} takes {round(taken_ms, 2):g} ms; in a router nothing else happens meanwhile: {most_ms:g} ms at most"


def _median_s(calls: Iterator[Callable[[], object]]) -> float:
    """The median time of these calls."""
    next(calls)()  # fills the cluster
    taken_s: list[float] = []
    while len(taken_s) < CALLS and sum(taken_s) < MOST_S:
        call = next(calls)
        begun_s = clock_s()
        call()
        taken_s.append(clock_s() - begun_s)
    return median(taken_s)


def _decisions(policy: AdmissionPolicy) -> Iterator[Callable[[], object]]:
    """Decisions without end, before each of which a request has left the full cluster and another has come."""
    scheduler, random = Scheduler(policy), Random(0)
    for index in range(WORKERS):
        scheduler.add_worker(WorkerSpec(f"d{index}", Role.DECODE, slots=SLOTS), 0.0)
    for number in itertools.count():
        now = float(number)
        prompt_tokens = 1 + int(random.lognormvariate(7.5, 1.0))
        scheduler.submit_prefilled(RequestSpec(f"r{number}", prompt_tokens), now)
        if number < WORKERS * SLOTS + WAITING:
            continue
        yield partial(scheduler.admit, now)
        running = [request for worker in scheduler.snapshot.workers for request in worker.active]
        if running:
            scheduler.finish(random.choice(running), Outcome.FINISHED, now)


def _predictions(predictor: Predictor) -> Iterator[Callable[[], object]]:
    """Predictions without end, after some requests have been learned."""
    random = Random(0)
    for _ in range(1000):
        predictor.observe(FinishedRequest(f"{random.randrange(9)}", 1000, random.randrange(1, 2000), "stop", 0.0))
    while True:
        yield partial(predictor.predict_one, random.randrange(2000), 1000, "0")
