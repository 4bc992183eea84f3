"""What requests cost a router's process in memory."""

import json
import socket
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from scripts.proc import resident_bytes
from tests.processes import listening_port, process, wait_for
from tests.waiting import block_until

pytestmark = pytest.mark.e2e

BODY = json.dumps({"model": "any", "prompt": "word " * 4_000_000, "max_tokens": 1}).encode()
COUNT = 4


class Silent(ThreadingHTTPServer):
    """A worker that answers only what it is asked by GET; of other requests it reads the head."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Silence)
        self.received: list[int] = []
        self.ended = Event()
        Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class Silence(BaseHTTPRequestHandler):
    """One connection to it."""

    server: Silent
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.received.append(int(self.headers["content-length"]))
        self.server.ended.wait()
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Not to stderr."""


def test_a_large_request_under_way_takes_three_times_its_body_not_four(tmp_path: Path) -> None:
    """Its prompt, the prefiller's body, and this with its head; the client's own bytes are dropped when read."""
    log = tmp_path / "log"
    with ExitStack() as stack:
        prefiller, decoder = stack.enter_context(Silent()), stack.enter_context(Silent())
        for worker in (prefiller, decoder):
            stack.callback(worker.shutdown)
            stack.callback(worker.ended.set)
        flags = ["--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "8"]
        for tier, worker in (("prefiller", prefiller), ("decoder", decoder)):
            flags += [f"--{tier}-hosts", "127.0.0.1", f"--{tier}-ports", str(worker.server_port)]
        router = stack.enter_context(process("serve", *flags, log=log))
        port = listening_port(log, router)
        wait_for(f"http://127.0.0.1:{port}/ready", log, router)
        before = resident_bytes([router.pid])
        for _ in range(COUNT):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
            )
        block_until(lambda: len(prefiller.received) == COUNT)
        block_until(lambda: 1 < (resident_bytes([router.pid]) - before) / (COUNT * len(BODY)) < 3.7)
