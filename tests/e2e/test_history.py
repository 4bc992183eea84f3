"""The predictor's history over real restarts of `balanceroute serve`."""

import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.plain_http import PLAIN
from tests.processes import Running, emulated, forked_process, listening_port, wait_for
from tests.waiting import PATIENCE_S, block_until

pytestmark = pytest.mark.e2e

ROWS = "balanceroute_predictor_history_rows"
OPEN = 'balanceroute_predictor_gate_total{kind="open"}'
LENGTH = 60  # of every answer: within the horizon of 80, and nothing but the past tells it
CLOSED = 'balanceroute_predictor_gate_total{kind="closed"}'


@dataclass(frozen=True, slots=True)
class Served:
    """A running router."""

    url: str
    router: Running
    log: Path

    def ask(self, n: int = 1) -> None:
        """Ask `n` times, one after the other; the limit is far off."""
        body = {"model": "emulated", "prompt": "say it", "max_tokens": 4000}
        with httpx.Client(base_url=self.url, **PLAIN, timeout=PATIENCE_S) as client:
            for _ in range(n):
                reply = client.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                assert reply.json()["usage"]["completion_tokens"] == LENGTH

    def metric(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S, **PLAIN).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
        assert found is not None, page
        return float(found[1])

    def recorded(self, rows: float) -> None:
        """Wait until so many rows are in the file."""
        block_until(lambda: self.metric(ROWS) >= rows)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a running cluster."""
    flags = ["--time-scale", "0.05", "--output-lengths", f"fixed:{LENGTH}"]
    with emulated(tmp_path_factory.mktemp("emulate"), 1, 2, *flags) as running:
        yield running.config


@contextmanager
def serving(config: Path, history: Path, log: Path) -> Iterator[Served]:
    flags = ["--policy", "br_h", "--host", "127.0.0.1", "--port", "0"]
    settings = ["predictor.kind=exact_match", f"predictor.history={history}"]
    flags += [part for setting in settings for part in ("--set", setting)]
    with forked_process("serve", "--config", str(config), *flags, log=log) as router:
        url = f"http://127.0.0.1:{listening_port(log, router)}"
        wait_for(f"{url}/ready", log, router)
        yield Served(url, router, log)


def end(served: Served, sent: signal.Signals) -> int:
    served.router.send_signal(sent)
    return served.router.wait(PATIENCE_S)


def warnings_in(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if '"level":"warning"' in line and "history" in line]


def test_a_history_survives_a_restart_and_a_kill_loses_only_the_last_batch(cluster: Path, tmp_path: Path) -> None:
    history = tmp_path / "history.sqlite3"
    with serving(cluster, history, tmp_path / "first.log") as cold:
        assert cold.metric(ROWS) == 0
        cold.ask()
        assert (cold.metric(OPEN), cold.metric(CLOSED)) == (0, 1)  # nothing is known: an anchor
        cold.ask(3)
        assert end(cold, signal.SIGTERM) == 0
    with serving(cluster, history, tmp_path / "second.log") as warm:
        assert warm.metric(ROWS) == 4  # a clean end writes what is queued
        warm.ask()
        assert (warm.metric(OPEN), warm.metric('balanceroute_predictor_keys_total{kind="hit"}')) == (1, 1)
        warm.recorded(5)
        warm.ask(3)
        end(warm, signal.SIGKILL)
    with sqlite3.connect(history) as file:
        assert file.execute("PRAGMA quick_check").fetchone() == ("ok",)
        assert 5 <= file.execute("SELECT count(*) FROM finished").fetchone()[0] <= 8
    file.close()
    with serving(cluster, history, tmp_path / "third.log") as third:
        assert 5 <= third.metric(ROWS) <= 8
        assert warnings_in(third.log) == []


def test_a_damaged_history_is_one_warning_and_a_cold_start(cluster: Path, tmp_path: Path) -> None:
    history = tmp_path / "history.sqlite3"
    history.write_bytes(b"SQLite format 3\0" + b"damaged " * 500)
    with serving(cluster, history, tmp_path / "router.log") as served:
        warnings = warnings_in(served.log)
        assert len(warnings) == 1 and "damaged" in warnings[0], served.log.read_text()
        served.ask()
        served.recorded(1)
    assert len(list(tmp_path.glob("history.sqlite3.damaged-*"))) == 1
