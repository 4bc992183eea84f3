"""What the predictor's history says after requests went all kinds of ways through a router."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from balanceroute.emulator import ClusterShape
from balanceroute.prediction import FinishedRequest, History, LearnedPredictor
from balanceroute.prediction.history import read_rows
from balanceroute.prediction.learned.predictor import LearnedFitter
from balanceroute.proxy.admission.forecasts import LiveForecasts
from tests.integration.router import running
from tests.integration.test_proxy_answers import PROMPT, chat, completion
from tests.integration.test_proxy_faults import PAIR, QUICK, inject_everywhere
from tests.plain_http import PLAIN
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio


def recording(path: Path, **predictor: Any) -> dict[str, Any]:
    return {
        "routing": {"policy": "br_h"},
        "predictor": {"kind": "exact_match", "history": str(path), **predictor},
        **QUICK,
    }


def of_one_key(rows: list[FinishedRequest]) -> bool:
    return len({row.prompt_key for row in rows}) == 1 and rows[0].prompt_key != ""


async def test_a_request_with_several_tries_is_one_history_row(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    async with running(PAIR, **recording(path)) as router:
        await router.client.post("/v1/completions", json=completion(max_tokens=24, stream=True))
        await inject_everywhere(router, "d", "recompute", after_events=7, count=1)
        await router.client.post("/v1/completions", json=completion(max_tokens=24, stream=True))
        await router.settled()
        assert router.app.services.metrics.recomputes.value("recomputed") > 0
        page = (await router.client.get("/metrics")).text
        assert 'balanceroute_predictor_keys_total{kind="' in page
    rows = read_rows(path)
    assert [(row.prompt_tokens, row.output_tokens, row.finish_reason) for row in rows] == [
        (len(PROMPT), 24, "length")
    ] * 2
    assert of_one_key(rows)


async def test_a_request_of_a_client_that_leaves_is_recorded_as_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    slow = ClusterShape(prefillers=1, decoders=1, time_scale=0.5)
    async with running(slow, **recording(path)) as router:
        async with (
            httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S, **PLAIN) as client,
            client.stream("POST", "/v1/completions", json=completion(max_tokens=2000, stream=True)) as stream,
        ):
            async for _ in stream.aiter_lines():
                break
        await router.settled()
    (row,) = read_rows(path)
    assert row.censored and row.finish_reason == "cancelled" and 0 < row.output_tokens < 2000


async def test_a_header_names_the_kind_of_request_and_other_policies_record_too(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    settings = recording(path, key_header="X-Task") | {"routing": {"policy": "least_kv"}}
    async with running(PAIR, **settings) as router:
        headers = {"X-Task": "summary"}
        await asyncio.gather(
            router.client.post("/v1/completions", json=completion(max_tokens=3), headers=headers),
            router.client.post("/v1/chat/completions", json=chat(), headers=headers),
        )
        await router.settled()
    rows = read_rows(path)
    assert len(rows) == 2 and of_one_key(rows)


@pytest.mark.timeout(1800)
async def test_trees_grow_in_the_background_and_then_give_forecasts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    # the process gives way to all others: on a busy machine 200 trees took minutes
    monkeypatch.setattr(LearnedPredictor, "fitter", lambda self: LearnedFitter(self._horizon, n_trees=10))
    caplog.set_level(logging.INFO, "balanceroute.prediction")
    path = tmp_path / "history.sqlite3"
    remembered = History(path)
    for at in range(1000):  # the size of a prompt tells its answer's length
        prompt_tokens = 100 + at * 37 % 3000
        finished_s = time.time() - 0.1 * (1000 - at)
        remembered.add(FinishedRequest("", prompt_tokens, 20 + prompt_tokens // 10, "stop", finished_s))
    remembered.close()
    settings = recording(path, kind="learned", refit_interval_s=0.1)
    async with running(PAIR, **settings) as router:
        forecasts = router.app.services.forecasts
        assert isinstance(forecasts, LiveForecasts)
        refitter = forecasts.metrics.refitter
        assert refitter is not None
        predictor = forecasts.forecaster.predictor
        assert isinstance(predictor, LearnedPredictor) and predictor.fitted.classifier is None
        await router.client.post("/v1/completions", json=completion(max_tokens=24))
        await until(lambda: refitter.fits or refitter.failures, within_s=1500.0)  # a process imports scikit-learn first
        assert refitter.failures == 0 and "predictor fitted anew" in caplog.text, caplog.text
        page = (await router.client.get("/metrics")).text
        assert 'fits_total{outcome="adopted"}' in page and 'fits_total{outcome="adopted"} 0.0' not in page
        assert predictor.fitted.classifier is not None
        asked = forecasts.forecaster.gate_open + forecasts.forecaster.gate_closed
        await router.client.post("/v1/completions", json=completion(max_tokens=500))
        assert forecasts.forecaster.gate_open + forecasts.forecaster.gate_closed > asked
        assert forecasts.forecaster.failures == 0
