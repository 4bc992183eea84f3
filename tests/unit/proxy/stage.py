"""A router's own parts without its network: workers that answer by script, on a clock that jumps.

Everything between the configuration and `Upstream.request` is the real thing, put together as `create_app` does it.
"""

import asyncio
import itertools
import selectors
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from balanceroute.config import Config, validate
from balanceroute.errors import BalanceRouteError
from balanceroute.proxy.app import build_services
from balanceroute.proxy.services import Services

Answer = int | BalanceRouteError | asyncio.Event | None
"""A status, what is raised, an event to wait for (then 200), or None for silence."""


THREADS_S = 10.0  # real time for what runs in an executor; nothing on the stage takes longer


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
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def on_stage(test: Callable[[], Awaitable[None]]) -> None:
    """Run an async test on the virtual clock; an hour of it is too long."""

    async def bounded() -> None:
        async with asyncio.timeout(3600):
            await test()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(bounded())


class _Reply:
    def __init__(self, status: int) -> None:
        self.status = status

    async def read(self, limit: int) -> bytes:
        return b"{}"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to a worker; `number` counts over all workers."""

    number: int
    at_s: float
    body: bytes


_numbers = itertools.count()


class ScriptedUpstream:
    """Stands for `Upstream`; `answers` are used up in order, the last one stays."""

    def __init__(self, *answers: Answer) -> None:
        self.answers: list[Answer] = list(answers) or [200]
        self.asked: list[Asked] = []
        self.under_way = self.most_under_way = 0
        self.closed = False

    async def request(self, method: str, path: str, body: bytes = b"", headers: Any = (), **options: Any) -> _Reply:
        self.asked.append(Asked(next(_numbers), asyncio.get_running_loop().time(), body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if isinstance(answer, BalanceRouteError):
                raise answer
            if isinstance(answer, int):
                return _Reply(answer)
            await (answer or asyncio.Event()).wait()
            return _Reply(200)
        finally:
            self.under_way -= 1

    def close(self) -> None:
        self.closed = True


def a_config(prefillers: int = 1, decoders: int = 3, **sections: Any) -> Config:
    """A configuration with workers p0.., d0..; sections on top."""
    tree: dict[str, Any] = {
        "prefill": {"workers": [{"url": f"http://p{n}:1", "id": f"p{n}"} for n in range(prefillers)]},
        "decode": {"workers": [{"url": f"http://d{n}:1", "id": f"d{n}"} for n in range(decoders)]},
        "routing": {"policy": "br_0"},
        "predictor": {"kind": "none"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
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
