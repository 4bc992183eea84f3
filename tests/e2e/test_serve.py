"""`balanceroute serve` in front of `balanceroute emulate`, as processes, with the official client."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from balanceroute.engine.tokens import FIRST_TRIPLE_ID, continuation, decode
from tests.at_first_use import AtFirstUse
from tests.plain_http import PLAIN
from tests.ports import free_base_port
from tests.processes import Cluster, emulated, forked_process, listening_port, process, wait_for
from tests.waiting import PATIENCE_S, block_until

openai = AtFirstUse("openai")
pytestmark = pytest.mark.e2e


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where both listen, and the router's process."""

    url: str
    worker_url: str
    router: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ["--max-num-seqs", "16", "--time-scale", "0.05"]
    with emulated(tmp_path_factory.mktemp("emulate"), 2, 4, *flags) as running:
        yield running


@pytest.fixture
def deployment(cluster: Cluster, tmp_path: Path) -> Iterator[Deployment]:
    log = tmp_path / "router.log"
    flags = ["--policy", "br_0", "--host", "127.0.0.1", "--port", "0"]
    with process("serve", "--config", str(cluster.config), *flags, log=log) as router:
        url = f"http://127.0.0.1:{listening_port(log, router)}"
        wait_for(f"{url}/ready", log, router)
        yield Deployment(url, cluster.prefillers[0], router)


async def ask(client: "openai.AsyncOpenAI", n: int) -> None:
    """The n-th of a mixed load, checked token by token."""
    draw = random.Random(n)
    prompt = list(range(FIRST_TRIPLE_ID + n, FIRST_TRIPLE_ID + n + draw.randrange(1, 300)))
    limit = draw.randrange(1, 80)
    expected = decode(continuation(prompt, limit))
    kind = n % 4
    if kind == 0:
        answer = await client.completions.create(
            model="emulated", prompt=prompt, max_tokens=limit, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].text == expected
        assert answer.usage is not None and answer.usage.completion_tokens == limit
        assert answer.usage.prompt_tokens == len(prompt)
    elif kind == 1:
        stream = await client.completions.create(
            model="emulated",
            prompt=prompt,
            max_tokens=limit,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, usage = "", None
        async for part in stream:
            text += part.choices[0].text if part.choices else ""
            usage = part.usage or usage
        assert text == expected
        assert usage is not None and usage.completion_tokens == limit and usage.prompt_tokens == len(prompt)
    else:
        messages = [{"role": "user", "content": f"question {n}"}]
        options = {"model": "emulated", "messages": messages, "max_tokens": limit, "extra_body": {"ignore_eos": True}}
        whole = await client.chat.completions.create(**options)  # type: ignore[call-overload]
        assert whole.usage.completion_tokens == limit
        if kind == 3:
            text = ""
            async for part in await client.chat.completions.create(**options, stream=True):  # type: ignore[call-overload]
                text += part.choices[0].delta.content or "" if part.choices else ""
            assert text == whole.choices[0].message.content


def test_the_official_client_gets_mixed_answers_and_no_request_remains(deployment: Deployment) -> None:
    async def load() -> None:
        http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=PATIENCE_S, **PLAIN)
        async with openai.AsyncOpenAI(
            base_url=f"{deployment.url}/v1", api_key="none", http_client=http, max_retries=0
        ) as client:
            await asyncio.gather(*(ask(client, n) for n in range(80)))

    def nothing_remains() -> bool:
        state = httpx.get(f"{deployment.url}/state", timeout=PATIENCE_S, **PLAIN).json()
        held = [*(worker["active"] for worker in state["workers"]), state["waiting"], state["queued"]]
        return not any(held) and all(p["inflight"] == 0 and p["pinned"] == 0 for p in state["prefillers"])

    asyncio.run(load())
    block_until(nothing_remains)
    state = httpx.get(f"{deployment.worker_url}/_emulator/state", timeout=PATIENCE_S, **PLAIN).json()
    assert state["violations"] == 0


def test_sigterm_lets_running_streams_finish_and_refuses_new_ones(cluster: Cluster, deployment: Deployment) -> None:
    body = {"model": "emulated", "prompt": "a", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=deployment.url, **PLAIN, timeout=PATIENCE_S) as client:
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            with (
                cluster.standing_still(),
                httpx.Client(base_url=deployment.url, **PLAIN, timeout=PATIENCE_S) as other,
            ):
                os.kill(deployment.router.pid, signal.SIGTERM)
                block_until(lambda: other.get("/ready").status_code == 503)
                refused = other.post("/v1/completions", json={**body, "stream": False})
            assert refused.status_code == 503 and "retry-after" in refused.headers
            rest = list(lines)
        assert "data: [DONE]" in rest
    assert deployment.router.wait(PATIENCE_S) == 0


def test_a_second_sigterm_ends_the_router_now(deployment: Deployment, tmp_path: Path) -> None:
    body = {"model": "emulated", "prompt": "a", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=deployment.url, **PLAIN, timeout=PATIENCE_S) as client:
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            os.kill(deployment.router.pid, signal.SIGTERM)
            block_until(lambda: httpx.get(f"{deployment.url}/ready", timeout=PATIENCE_S, **PLAIN).status_code == 503)
            assert deployment.router.poll() is None
            os.kill(deployment.router.pid, signal.SIGTERM)
            assert deployment.router.wait(PATIENCE_S) == 0
    log = (tmp_path / "router.log").read_text()
    assert "ending now" in log and "Traceback" not in log


REFUSED = {
    "port": ("--port={taken}", "listen: cannot listen on 127.0.0.1:{taken}: Address already in use"),
    "host": ("--host=no.such.invalid", "listen: cannot listen on no.such.invalid:0: there is no such address"),
    "admin": (
        "listen.admin=127.0.0.1:{taken}",
        "listen.admin: cannot listen on 127.0.0.1:{taken}: Address already in use",
    ),
    "model": ("predictor={{kind: learned, model: {text}}}", "{text}: "),
}


@pytest.mark.parametrize(("relays", "named"), [*((0, named) for named in REFUSED), (1, "port"), (1, "model")], ids=str)
def test_a_start_that_fails_says_why_in_one_line_and_ends_in_exit_code_2(
    relays: int, named: str, tmp_path: Path
) -> None:
    setting, expected = REFUSED[named]
    text = tmp_path / "text"
    text.write_text("neither a certificate nor a model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = {"taken": taken.getsockname()[1], "text": text, "folder": tmp_path}
        given = setting.format_map(words)
        flags = ["--prefiller-ports", "1", "--decoder-ports", "2", "--relays", str(relays), "--policy", "br_h"]
        flags += ["--port=0", given] if given.startswith("--") else ["--port=0", "--set", given]
        flags += ["--set", f"listen.run_folder={tmp_path}/run"]
        with forked_process("serve", *flags, log=tmp_path / "log") as router:
            assert router.wait(PATIENCE_S) == 2
    said = (tmp_path / "log").read_text()
    [line] = [line for line in said.splitlines() if not line.startswith("{")]
    assert '"level":"error"' not in said and said.endswith(f"{line}\n")
    assert line.startswith("balanceroute: ") and expected.format_map(words) in line


def test_sighup_as_soon_as_the_port_is_open_reloads_and_ends_nothing(tmp_path: Path) -> None:
    port, log = free_base_port((0,)), tmp_path / "router.log"
    flags = ["--prefiller-ports", "1", "--decoder-ports", "2", "--host", "127.0.0.1", "--port", str(port)]

    def is_open() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    with process("serve", *flags, log=log) as router:
        while not is_open():
            assert router.poll() is None
        os.kill(router.pid, signal.SIGHUP)
        block_until(lambda: '"event":"configuration reloaded"' in log.read_text() or router.poll() is not None)
        assert router.poll() is None


def test_sighup_reloads_the_file_and_a_wrong_file_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    config, log = tmp_path / "router.yaml", tmp_path / "router.log"
    text = cluster.config.read_text()
    config.write_text(text + "queue: {max_queued: 100}\n")
    with process("serve", "--config", str(config), "--host", "127.0.0.1", "--port", "0", log=log) as router:
        url = f"http://127.0.0.1:{listening_port(log, router)}"
        wait_for(f"{url}/ready", log, router)
        for change, logged in (
            ("queue: {max_queued: 3}\n", '"event":"configuration reloaded","changed":["queue"]'),
            ("queue: {max_queued: -3}\n", '"event":"reload refused"'),
        ):
            config.write_text(text + change)
            os.kill(router.pid, signal.SIGHUP)
            block_until(lambda logged=logged: logged in log.read_text(), logged)
        body = {"model": "emulated", "prompt": "a", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S, **PLAIN).status_code == 200


@pytest.mark.parametrize("relays", [0, 1])
def test_a_configuration_file_that_blocks_delays_no_request_and_the_next_sighup_works(
    cluster: Cluster, tmp_path: Path, relays: int
) -> None:
    config, log = tmp_path / "router.yaml", tmp_path / "router.log"
    text = cluster.config.read_text()
    config.write_text(text)
    flags = ["--host", "127.0.0.1", "--port", "0", "--relays", str(relays)]
    with process("serve", "--config", str(config), *flags, log=log) as router:
        url = f"http://127.0.0.1:{listening_port(log, router)}"
        wait_for(f"{url}/ready", log, router)
        refused = f"{config}, or a file that it names: no answer within 5 s"
        with ExitStack() as pipes:

            def is_answered_meanwhile() -> bool:
                """Again if it is refused before: a busy machine may need these 5 s itself."""
                config.unlink()
                os.mkfifo(config)
                refusals = log.read_text().count(refused)
                os.kill(router.pid, signal.SIGHUP)
                pipes.enter_context(open_when_read(config))
                assert httpx.get(f"{url}/ready", timeout=PATIENCE_S, **PLAIN).status_code == 200
                return log.read_text().count(refused) == refusals

            block_until(is_answered_meanwhile)
            config.unlink()
            config.write_text(text + "queue: {max_queued: 3}\n")
            os.kill(router.pid, signal.SIGHUP)
            block_until(lambda: refused in log.read_text(), refused)
            block_until(lambda: '"event":"configuration reloaded"' in log.read_text(), "reloaded")
        router.send_signal(signal.SIGTERM)
        assert router.wait(PATIENCE_S) == 0


@contextmanager
def open_when_read(pipe: Path) -> Iterator[None]:
    """Somebody stands in reading it, and gets nothing until this ends."""
    opened: list[int] = []

    def opens() -> bool:
        with suppress(OSError):  # ENXIO: nobody reads
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    block_until(opens, f"{pipe} is read")
    try:
        yield
    finally:
        os.close(opened[0])


def test_a_client_that_sends_no_headers_in_time_is_disconnected(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    flags = ["--host", "127.0.0.1", "--port", "0", "--set", "limits.client_header_timeout_s=0.3"]
    with process("serve", "--config", str(cluster.config), *flags, log=log) as router:
        port = listening_port(log, router)

        def answer_to(start: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as slow:
                slow.sendall(start)
                return slow.recv(100)

        assert answer_to(b"") == b""
        half = b"POST /v1/completions HTTP/1.1\r\nhost: x"
        block_until(lambda: answer_to(half).startswith(b"HTTP/1.1 408 "))  # a busy machine may send it too late


def test_a_router_whose_standard_streams_are_closed_serves_and_ends_as_any_other(cluster: Cluster) -> None:
    port = free_base_port((0,))
    command = f'exec "$0" -m balanceroute serve --config "$1" --host 127.0.0.1 --port {port} <&- >&- 2>&-'
    router = subprocess.Popen(["sh", "-c", command, sys.executable, str(cluster.config)])
    try:
        url = f"http://127.0.0.1:{port}"
        block_until(lambda: router.poll() is not None or _is_ready(url))
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=PATIENCE_S, **PLAIN)
        assert answer.status_code == 200
        router.send_signal(signal.SIGTERM)
        assert router.wait(PATIENCE_S) == 0
    finally:
        router.kill()
        router.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=PATIENCE_S, **PLAIN).status_code == 200
    except httpx.TransportError:
        return False
