"""INV-11: the live proxy and the simulator decide alike on one trace.

The proxy serves a trace on an emulated cluster and writes its journal. The scheduler that the simulator composes for
the same policy and cluster, lock-step and with its own names for the workers, is then told call by call what the live
one was told (arrivals, prefills done, tokens, departures), and must answer every `dispatch` and `admit` with the same
actions.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from balanceroute.arrays import IntArray
from balanceroute.config import Config
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import POLICIES, make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.types import Outcome, RequestSpec
from balanceroute.emulator import ClusterShape, EmulatedCluster
from balanceroute.loadgen import LoadOptions, run_load
from balanceroute.prediction import FinishedRequest, Forecaster, TwoStage, build_predictor
from balanceroute.proxy.app import create_app
from balanceroute.simulator.oracle import PredictorForecast, TrueLengths
from balanceroute.simulator.setting import Setting
from balanceroute.simulator.simulation import Simulation
from balanceroute.traces import Trace, generate_trace
from tests.integration.router import configuration, patient, served
from tests.waiting import until

SHAPE = ClusterShape(prefillers=2, decoders=4, max_num_seqs=3, time_scale=0.02, max_model_len=4096)


def a_trace() -> Trace:
    """Forty requests of the heavy-tailed workload, small, in a burst that the slots cannot take at once."""
    return generate_trace("heavy_tailed", rows=40, seed=3).with_lengths(1 / 32, 1 / 64).at_rate(400.0)


class Soon:
    """Foresees that every request is done five tokens from now."""

    def __init__(self, horizon_steps: int) -> None:
        pass

    def observe(self, finished: FinishedRequest) -> None:
        """Nothing to learn."""

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        return 1.0, 5.0

    def predict(self, ages: IntArray, prompt_tokens: IntArray, keys: Sequence[str]) -> TwoStage:
        return TwoStage(np.full(len(keys), 1.0), np.full(len(keys), 5.0))


def live_run(policy: str, predictor: str, journal: Path) -> list[dict[str, Any]]:
    """Serve the trace; the lines of the journal."""

    async def run() -> Config:
        async with EmulatedCluster(patient(SHAPE)) as cluster:
            config = configuration(cluster, routing={"policy": policy}, predictor={"kind": predictor})
            app = create_app(config, journal=journal, strict=True)
            async with served(app) as url:
                # the simulator's workers are up from the start
                await until(lambda: not any(worker.unknown for worker in app.services.fleet))
                report = await run_load(a_trace(), LoadOptions(url))
            assert report.completed == report.requests, report.errors
            return config

    asyncio.run(run())
    return [json.loads(line) for line in journal.read_bytes().splitlines()]


def simulators_scheduler(header: dict[str, Any]) -> Scheduler:
    """The scheduler that the simulator makes for this policy and cluster."""
    settings = PolicySettings(policy=header["policy"], **header["params"])
    trace = a_trace()
    setting = Setting(n_workers=SHAPE.decoders, slots=SHAPE.max_num_seqs, prefillers=SHAPE.prefillers, pool=512)
    forecast = PredictorForecast(Forecaster(build_predictor("none", 80), 80))
    return Simulation(trace, setting, make_policy(settings), TrueLengths(trace), forecast).scheduler


def replay(scheduler: Scheduler, call: dict[str, Any], name: dict[str, str]) -> int:
    """Make a call of the journal again, which must be answered alike; returns how many requests it has admitted.

    `name`: of each of the journal's workers, in the simulator.
    """
    method, args, answer, now = call["call"], call["args"], call["answer"], call["t"]
    match method:
        case "submit":
            scheduler.submit(RequestSpec(**args["spec"]), now)
        case "report_prefiller" | "report_decoder_memory" | "report_prefix_cache":
            getattr(scheduler, method)(**{**args, "worker_id": name[args["worker_id"]]}, now=now)
        case "prefilled" | "refresh" | "requeue":  # a busy worker may close an idle connection as a request goes out
            getattr(scheduler, method)(**args, now=now)
        case "dispatch":
            sent = [(action.request, action.worker) for action in scheduler.dispatch(now)]
            assert sent == [(action["request"], name[action["worker"]]) for action in answer]
        case "admit":
            taken = [(action.request, action.worker, action.score) for action in scheduler.admit(now)]
            assert taken == [(action["request"], name[action["worker"]], action["score"]) for action in answer]
            return len(taken)
        case "tokens":
            for request_id, tokens in args["counts"].items():
                if not scheduler.snapshot.requests[request_id].running:
                    scheduler.start(request_id, now)  # as a replay does, with the first token
                scheduler.progress(request_id, tokens, now)
        case "finish":
            scheduler.finish(args["request_id"], Outcome(args["outcome"]), now)
        case "add_worker" | "set_worker_state" | "expire":
            assert not answer
        case other:
            raise AssertionError(f"an undisturbed run has no {other}")
    return 0


@pytest.mark.parametrize(
    ("policy", "predictor"), [*((policy, "none") for policy in sorted(POLICIES)), ("br_h", f"{__name__}:Soon")]
)
def test_the_simulator_and_the_live_proxy_decide_alike(policy: str, predictor: str, tmp_path: Path) -> None:
    header, *calls = live_run(policy, predictor, tmp_path / "journal.jsonl")
    scheduler = simulators_scheduler(header)
    joined = [call["args"]["spec"]["id"] for call in calls if call["call"] == "add_worker"]
    simulated = [f"p{i}" for i in range(SHAPE.prefillers)] + [f"d{i}" for i in range(SHAPE.decoders)]
    name = dict(zip(joined, simulated, strict=True))
    decisions = 0
    for call in calls:
        decisions += replay(scheduler, call, name)
        scheduler.snapshot.check_invariants()
    assert decisions == len(a_trace())
    assert not scheduler.snapshot.requests
