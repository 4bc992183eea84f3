"""A router of several processes before an emulated cluster, and streams through it."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import trustme

from balanceroute.config.addresses import host_in_url
from balanceroute.engine.tokens import FIRST_TRIPLE_ID, continuation, decode
from balanceroute.proxy.brain import LOST
from tests.plain_http import PLAIN
from tests.processes import Cluster, Running, forked_process, listening_port, process
from tests.waiting import pace, until

PREFILLERS, RANKS, SLOTS = 2, 2, 4
SHAPE: Final = (PREFILLERS, RANKS, "--max-num-seqs", str(SLOTS), "--time-scale", "1.0")
LONG = 130  # tokens: some seconds, at a pace at which they take little CPU
# while a cluster stands still (`Cluster.standing_still`), for as long as it may
PATIENT: Final = ("--set", "health.stall_after_s=600", "--set", "limits.idle_timeout_s=600")


class Authority:
    """The CA of a link, and one certificate of it."""

    def __init__(self, folder: Path, name: str = "link") -> None:
        ca = trustme.CA()
        self.ca, self.chain = folder / f"{name}-ca.pem", folder / f"{name}.pem"
        ca.cert_pem.write_to_path(str(self.ca))
        ca.issue_cert("127.0.0.1", "::1").private_key_and_cert_chain_pem.write_to_path(str(self.chain))

    def flags(self) -> list[str]:
        return ["--set", f"tls.link_ca_file={self.ca}", "--set", f"tls.link_cert_file={self.chain}"]

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.chain)
        return context


def a_folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


class Router:
    """The processes of one router, by what they have logged."""

    def __init__(self, log: Path, running: Running, client: httpx.AsyncClient) -> None:
        self.log, self.running, self.client = log, running, client
        self._lines: list[dict[str, Any]] = []
        self._read_bytes = 0

    def _read(self) -> None:
        """Take in the lines that have come since the last time: tests ask every few ms for the lines of an event."""
        with self.log.open("rb") as log:
            log.seek(self._read_bytes)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]  # what is written just now may be seen in part
        self._read_bytes += len(whole)
        self._lines += [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]

    def logged(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """The lines of an event, with these fields."""
        self._read()
        wanted = {"event": event, **fields}.items()
        return [line for line in self._lines if all(line.get(name) == value for name, value in wanted)]

    @property
    def relays(self) -> dict[str, int]:
        """Their present processes, by name."""
        return {line["relay"]: line["pid"] for line in self.logged("listening") if "relay" in line}

    @property
    def brains(self) -> list[int]:
        """The processes that have led, the present one last."""
        return [line["pid"] for line in self.logged("listening") if "epoch" in line]

    @property
    def deaths(self) -> list[dict[str, Any]]:
        """How children died; not those of brains that seemed to stand still on a busy machine, and lead no more."""
        deposed = {line["process"] for line in self.logged("this brain no longer leads")}
        died = self.logged("child died")
        return [line for line in died if not (line["child"] in deposed and line.get("exit_code") == LOST)]

    @property
    def have_left(self) -> bool:
        """Whether no relay accepts any more."""
        return {line["process"] for event in ("leaving", "brain left") for line in self.logged(event)} >= set(
            self.relays
        )

    def found(self, brain: int) -> set[str]:
        """The relays that have joined the brain of this process."""
        (epoch,) = (line["epoch"] for line in self.logged("listening", pid=brain))
        return {line["relay"] for line in self.logged("brain found", epoch=epoch) if line["relay"] in self.relays}

    @property
    def were_late(self) -> bool:
        """Whether the last brain decided before all relays had joined it."""
        return bool(self.logged("the brain decides")[-1]["relays"] < len(self.relays))

    async def get(self, path: str) -> httpx.Response:
        """Ask any relay, on a new connection; again while there is nobody to answer."""
        while True:
            try:
                answer = await self.client.get(path, headers={"connection": "close"})
            except httpx.TransportError:
                continue
            if answer.status_code != 503:
                return answer
            await pace(0.05)

    async def state(self) -> dict[str, Any]:
        """What the brain knows."""
        state: dict[str, Any] = (await self.get("/state")).json()
        return state

    async def active(self) -> int:
        """Requests on decode workers."""
        return sum(len(worker["active"]) for worker in (await self.state())["workers"])

    async def holds_nothing(self) -> bool:
        """Whether no request is left anywhere."""
        state = await self.state()
        return not (await self.active() or state["waiting"] or state["exchanges"])


@asynccontextmanager
async def a_router(
    cluster: Cluster,
    folder: Path,
    *flags: str,
    host: str = "127.0.0.1",
    port: int = 0,
    relays: int = 2,
    standbys: int = 0,
    log_name: str = "router.log",
    run_folder: Path | None = None,
    open_files: int | None = None,
) -> AsyncIterator[Router]:
    """`standbys`: any may take the lead where the machine is so busy that the leader seems to stand still.

    `run_folder`: where it is not `folder`, which has the log.
    """
    log = folder / log_name
    log.touch()
    logged_before = len(log.read_text())
    address = ["--host", host, "--port", str(port)]
    serve = ["serve", "--config", str(cluster.config), "--relays", str(relays), *address, *flags]
    serve += ["--set", f"listen.standbys={standbys}"]
    serve += ["--set", f"listen.run_folder={run_folder or folder}"]
    started = forked_process(*serve, log=log) if open_files is None else process(*serve, log=log, open_files=open_files)
    with started as running:
        limits = httpx.Limits(max_connections=None)
        url = f"http://{host_in_url(host)}:{await asyncio.to_thread(listening_port, log, running, logged_before)}"
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, **PLAIN) as client:
            router = Router(log, running, client)
            await until(lambda: len(router.relays) >= relays or running.poll() is not None)
            assert running.poll() is None, log.read_text()
            await router.get("/ready")
            leads = relays and "--take-over" not in flags and not any("listen.brains=" in flag for flag in flags)
            await until(lambda: router.brains or not leads)  # it answers before it says that it listens
            yield router


class Stream:
    """A request for a stream, and what has come of it."""

    def __init__(self, router: Router, number: int, tokens: int) -> None:
        self.prompt = list(range(FIRST_TRIPLE_ID + 10 * number, FIRST_TRIPLE_ID + 10 * number + 50))
        self.expected = decode(continuation(self.prompt, tokens))
        self.text = ""
        self.complete = False
        self._task = asyncio.get_running_loop().create_task(self._run(router, tokens))

    async def _run(self, router: Router, tokens: int) -> None:
        body = {"model": "emulated", "prompt": self.prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        headers = {"connection": "close"}  # a connection each, so that both relays get some
        try:
            async with router.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                assert answer.status_code in (200, 503), await answer.aread()
                async for line in answer.aiter_lines():
                    self._take(line)
        except httpx.TransportError:
            pass  # its relay has died

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.complete = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            self.text += "".join(choice["text"] for choice in event.get("choices", ()))

    @property
    def begun(self) -> bool:
        """Whether a token has come."""
        return bool(self.text)

    @property
    def running(self) -> bool:
        """Whether more may come."""
        return not self._task.done()

    async def end(self) -> "Stream":
        """Wait for it; whole or cut short, its tokens are right."""
        await self._task
        assert self.text == self.expected if self.complete else self.expected.startswith(self.text)
        return self


def streams(router: Router, count: int, tokens: int = LONG, first: int = 0) -> list[Stream]:
    return [Stream(router, first + number, tokens) for number in range(count)]


async def all_under_way(router: Router, those: list[Stream]) -> None:
    """Wait until as many as there are slots have begun, and relays have taken in the others."""

    async def are_known() -> bool:
        return (await router.state())["exchanges"] == sum(stream.running for stream in those)

    await until(lambda: sum(stream.begun for stream in those) >= RANKS * SLOTS)
    await until(are_known)


async def all_end(those: list[Stream]) -> int:
    """How many of them are complete."""
    return sum([(await stream.end()).complete for stream in those])


def with_router(
    test: Callable[[Router], Awaitable[None]],
    cluster: Cluster,
    folder: Path,
    *flags: str,
    relays: int = 2,
    standbys: int = 0,
) -> None:
    async def run() -> None:
        async with a_router(cluster, folder, *flags, relays=relays, standbys=standbys) as router:
            await test(router)
            await until(router.holds_nothing)
            await until(lambda: not cluster.holds_kv())

    asyncio.run(run())


async def keeps_asking(router: Router, number: int, ended: asyncio.Event) -> int:
    """One client on one connection, as far as it is let: how many right answers it got; a failure is the test's."""
    limits, url = httpx.Limits(max_connections=1), router.client.base_url
    prompt, count = [FIRST_TRIPLE_ID + 1000 + number], 0
    body = {"model": "emulated", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, **PLAIN) as client:
        while not ended.is_set():
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == decode(continuation(prompt, 3))
            count += 1
            await pace(0.05)
    return count
