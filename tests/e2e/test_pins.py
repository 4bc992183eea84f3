"""`kill -9` of a router whose prefilled prompts wait for slots: the next one has their KV freed."""

import json
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.e2e.pin_records import recorded_pins
from tests.plain_http import PLAIN
from tests.processes import emulated, forked_process, listening_port, wait_for
from tests.waiting import PATIENCE_S, block_until

pytestmark = pytest.mark.e2e

SLOTS, REQUESTS = 2, 12
LEASE_S = 3600  # of real time, far longer than this test: only a decoder frees KV here


@pytest.mark.parametrize("connector", ["mooncake_v1", "nixl"])
def test_the_next_start_frees_kv_that_a_killed_router_left_pinned(tmp_path: Path, connector: str) -> None:
    pins, killed_log, next_log = (tmp_path / name for name in ("pins-record", "killed.log", "next.log"))
    flags = ["--max-num-seqs", str(SLOTS), "--connector", connector, "--lease", str(LEASE_S)]
    with emulated(tmp_path, 1, 1, *flags) as cluster:
        serve = ["serve", "--config", str(cluster.config), "--host", "127.0.0.1", "--port", "0"]
        serve += ["--set", f"lifecycle.pins_file={pins}", "--set", f"prefill.kv_pin_s={LEASE_S}"]

        def pinned() -> int:
            state = httpx.get(f"{cluster.prefillers[0]}/_emulator/state", timeout=PATIENCE_S, **PLAIN).json()
            assert state["violations"] == 0, state
            return sum(worker.get("pinned", 0) for worker in state["workers"].values())

        with forked_process(*serve, log=killed_log) as router:
            port = listening_port(killed_log, router)
            clients = [ask(port, number) for number in range(REQUESTS)]
            block_until(lambda: pooled(port) == REQUESTS - SLOTS)  # what it has not heard of it can't record
            block_until(lambda: pinned() == REQUESTS - SLOTS)
            block_until(lambda: recorded_pins(tmp_path) == REQUESTS - SLOTS)
            router.send_signal(signal.SIGKILL)
            router.wait()
            for client in clients:
                client.close()
        assert pinned() == REQUESTS - SLOTS
        assert pins.stat().st_mode & 0o777 == 0o600 and b"secret" not in pins.read_bytes()
        with forked_process(*serve, log=next_log) as router:
            wait_for(f"http://127.0.0.1:{listening_port(next_log, router)}/ready", next_log, router)
            block_until(lambda: pinned() == 0)
            assert f'"drains":{REQUESTS - SLOTS}' in next_log.read_text()
            router.send_signal(signal.SIGTERM)
            assert router.wait(PATIENCE_S) == 0
        assert pins.read_bytes().count(b"\n") <= 1 + REQUESTS + 2 * REQUESTS


def pooled(port: int) -> int:
    """Requests that wait for a slot, by the router's own word."""
    return len(httpx.get(f"http://127.0.0.1:{port}/state", timeout=PATIENCE_S, **PLAIN).json()["waiting"])


def ask(port: int, number: int) -> socket.socket:
    """A client that wants a long answer and reads none of it."""
    body = {"model": "emulated", "prompt": f"secret {number} " * 50, "max_tokens": 20_000, "ignore_eos": True}
    sent = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n")
    client.sendall(b"content-length: %d\r\n\r\n%b" % (len(sent), sent))
    return client
