"""A router's own parts without its network: workers that answer by script, on a clock that jumps.

Everything between the configuration and `Upstream.request` is the real thing, put together as `create_app` does it.
"""

import asyncio
import functools
import itertools
import selectors
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

from balanceroute.config import Config, validate
from balanceroute.errors import BalanceRouteError, ConnectFailed, UpstreamError
from balanceroute.proxy.app import build_services
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.workers.reply import Reply


@dataclass(frozen=True, slots=True)
class Page:
    """An answer. In `body`, `$ID` stands for the X-Request-Id that was asked with.

    `ends`: whether the body ends; else the worker says nothing more after it. `breaks`: how it breaks off instead.
    `pace_s`: the time before each event until the client gets the first; else all come at once.
    """

    body: bytes = b"{}"
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    ends: bool = True
    breaks: UpstreamError | None = None
    pace_s: float = 0.0


Answer = int | Page | BalanceRouteError | asyncio.Event | None
"""A status, a page, what is raised, an event to wait for (then 200), or None for silence."""

_Arguments = ParamSpec("_Arguments")


THREADS_S = 10.0  # real time for what runs in an executor; nothing in virtual time takes longer


class _Jump(selectors.SelectSelector):
    """Instead of waiting for a timer, moves the clock to it."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            ready = super().select(THREADS_S)  # a thread that ends wakes the loop
            assert ready, "everybody waits, and nothing will ever happen"
        elif not ready:
            self.now_s += timeout or 0.0
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Hours pass in milliseconds. Without sockets; of threads it waits for the last ones only."""

    def __init__(self) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now_s


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> None:
    """Run an async test on the virtual clock; an hour of it is too long."""

    async def bounded() -> None:
        async with asyncio.timeout(3600):
            await test()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(bounded())


def with_virtual_time(test: Callable[_Arguments, Awaitable[None]]) -> Callable[_Arguments, None]:
    """Have a test of pytest run on the virtual clock; see `in_virtual_time`."""

    @functools.wraps(test)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        in_virtual_time(functools.partial(test, *args, **kwargs))

    return run


async def let_pass(seconds: float) -> None:
    """Let virtual time pass; it costs none."""
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop), "real time would pass"
    await asyncio.sleep(seconds)


def stand_still(seconds: float) -> None:
    """As if the process had been stopped for so long: time passes, and nothing runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.jump.now_s += seconds


def _id_in(lines: bytes) -> bytes:
    """The X-Request-Id in header lines; empty where there is none."""
    fields = [line.split(b": ", 1) for line in lines.split(b"\r\n") if line]
    return next((value for name, value in fields if name == b"x-request-id"), b"")


class _Reply(Reply):
    """Stands for `Reply`: a body that is here as soon as the reply is."""

    aborted = False

    def __init__(
        self, page: Page, sent_id: bytes = b"", before_body: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.status, self._page, self.undelivered = page.status, page, False
        self._body: bytes | None = page.body.replace(b"$ID", sent_id)
        self._before_body = before_body
        self._error = page.breaks
        self.paused, self.over = False, page.ends and before_body is None
        self.loop = asyncio.get_running_loop()

    def header(self, name: bytes) -> bytes | None:
        return dict(self._page.headers).get(name)

    async def next_chunk(self) -> bytes | None:
        waits, self._before_body = self._before_body, None
        if waits is not None:
            await waits()
            self.over = self._page.ends
        body, self._body = self._body, None
        if body and self._page.pace_s:
            await let_pass(self._page.pace_s)
            event, end, self._body = body.partition(b"\n\n")
            return event + end
        if not body and self._error is not None:
            raise self._error
        if not body and not self.over:
            await asyncio.Event().wait()
        return body or None

    async def read(self, limit: int, *, cut: bool = False) -> bytes:
        body = b""
        while (part := await self.next_chunk()) is not None:
            body += part
        return body

    def attach(self, sink: Any) -> None:
        if self._body:
            sink.chunk(self._body)
        if self.over:
            sink.ended(self._error)

    def pause(self) -> None:
        self.paused = self.paused or not self.over

    def resume(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True

    def discard(self, grace_s: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to a worker; `number` counts over all workers."""

    number: int
    at_s: float
    body: bytes
    path: str = ""


_numbers = itertools.count()


class ScriptedUpstream:
    """Stands for `Upstream`; `answers` are used up in order, the last one stays.

    `detokenized` are those of /detokenize, which is asked before an answer goes on; it is not in `asked`.
    """

    def __init__(self, *answers: Answer) -> None:
        self.answers: list[Answer] = list(answers) or [200]
        self.detokenized: list[Answer] = [404]
        self.asked: list[Asked] = []
        self.under_way = self.most_under_way = 0
        self.closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: bytes | list[tuple[bytes, bytes]] = b"",
        about_to_send: Callable[[], None] | None = None,
        **options: Any,
    ) -> _Reply:
        answers = self.detokenized if path == "/detokenize" else self.answers
        unsent = isinstance(answers[0], ConnectFailed) and not answers[0].sent
        if about_to_send is not None and not unsent:
            about_to_send()
        if answers is self.answers:
            self.asked.append(Asked(next(_numbers), asyncio.get_running_loop().time(), body, path))
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if isinstance(answer, BalanceRouteError):
                raise answer
            if isinstance(answer, int | Page):
                page = Page(status=answer) if isinstance(answer, int) else answer
                waits = self.before_body if path.startswith("/v1/") else None
                return _Reply(page, _id_in(headers) if isinstance(headers, bytes) else b"", waits)
            await (answer or asyncio.Event()).wait()
            return _Reply(Page())
        finally:
            self.under_way -= 1

    async def before_body(self) -> None:
        """What passes between the head and the body of an answer to a request of clients."""

    def close(self) -> None:
        self.closed = True

    def retire(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def drop_idle(self) -> None:
        pass


class _Leaving(ScriptedUpstream):
    """Of a worker that is removed while it is asked, which closes its connections."""

    def __init__(self, services: Services, worker_id: str) -> None:
        super().__init__(ConnectFailed("closed", worker=worker_id, tier="decode"))
        self._services, self._worker_id = services, worker_id

    async def request(self, *args: Any, **options: Any) -> _Reply:
        fleet = self._services.fleet
        fleet.leave(fleet[self._worker_id])
        fleet.sweep()
        return await super().request(*args, **options)


def leaving(services: Services, worker_id: str) -> ScriptedUpstream:
    """Have a worker removed as soon as it is asked something."""
    upstream = services.fleet[worker_id].upstream = _Leaving(services, worker_id)  # type: ignore[assignment]
    return upstream


def a_config(prefillers: int = 1, decoders: int = 3, **sections: Any) -> Config:
    """A configuration with workers p0.., d0..; sections on top."""
    tree: dict[str, Any] = {
        "prefill": {"workers": [{"url": f"http://p{n}:1", "id": f"p{n}"} for n in range(prefillers)]},
        "decode": {"workers": [{"url": f"http://d{n}:1", "id": f"d{n}"} for n in range(decoders)]},
        "routing": {"policy": "br_0"},
        "predictor": {"kind": "none"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return validate(tree)


def a_router(config: Config | None = None) -> Services:
    """A router's parts with scripted workers, all of which answer 200."""
    services = build_services(config or a_config(), asyncio.get_running_loop(), None, strict=True)
    for worker in services.fleet:
        worker.upstream = ScriptedUpstream()  # type: ignore[assignment]
    return services


def script(services: Services, worker_id: str, *answers: Answer) -> ScriptedUpstream:
    """Have a worker answer like this from now on."""
    upstream = ScriptedUpstream(*answers)
    services.fleet[worker_id].upstream = upstream  # type: ignore[assignment]
    return upstream
