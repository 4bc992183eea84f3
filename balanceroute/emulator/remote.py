"""KV transfers between emulated workers in different processes.

In one process a decode rank looks at a prefiller's pins and reads them as it starts a request. From another process it
asks over HTTP, twice, as the real connectors do over theirs: first what the parameters are worth, which claims the pin,
then, once it has a slot and blocks, for the KV itself. A prefiller that stands still lets it wait, one that is gone
fails the transfer.

    POST /_emulator/kv/plan      {"params": ..., "digest": ...} -> {"reaction", "violation", "pinned"}
    POST /_emulator/kv/pull      {"request_id": ...} -> {"pulled": bool}
    POST /_emulator/kv/release   {"request_id": ...}: claimed, and not pulled after all
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from balanceroute.emulator.connectors import (
    Connector,
    KvExchange,
    PullPlan,
    Reaction,
    plan_from_params,
    plan_from_source,
)
from balanceroute.engine.tokens import prompt_digest

SIDE_CHANNEL_PORT: Final = 5600  # NIXL's default; only a name here, nothing listens on it. Prefiller i has i more
TIMEOUT_S: Final = 60.0  # for a transfer from a stopped prefiller


class PrefillSide:
    """A prefiller process's answers to decode ranks in other processes; `exchange`: its own workers."""

    def __init__(self, exchange: KvExchange) -> None:
        self._exchange = exchange

    def answer(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one call. Raises: KeyError: an unknown call."""
        return {"plan": self._plan, "pull": self._pull, "release": self._release}[what](body)

    def _plan(self, body: Mapping[str, Any]) -> dict[str, Any]:
        plan = plan_from_source(body["params"], int(body["digest"]), self._exchange)
        if plan.source is not None:
            plan.source.claim(plan.request_id)
        return {"reaction": plan.reaction, "violation": plan.violation, "pinned": plan.source is not None}

    def _pull(self, body: Mapping[str, Any]) -> dict[str, Any]:
        source = self._exchange.find(body["engine_id"])
        return {"pulled": source is not None and source.pull(body["request_id"])}

    def _release(self, body: Mapping[str, Any]) -> dict[str, Any]:
        source = self._exchange.find(body["engine_id"])
        if source is not None:
            source.give_back(body["request_id"])
        return {}


class RemotePins:
    """One pinned prompt on a prefiller in another process, as its decode rank sees it: a `KvSource`."""

    def __init__(self, kv: "RemoteKv", url: str, params: Mapping[str, Any]) -> None:
        self._kv, self._url = kv, url
        self._body = {"engine_id": params["remote_engine_id"], "request_id": params["remote_request_id"]}
        self._reachable = True
        self._pulled: bool | None = None

    async def fetch(self) -> None:
        """Have the KV transferred; `remembers` and `pull` say what came of it."""
        answer = await self._kv.ask(self._url, "pull", self._body)
        if answer is None:
            self._reachable = False
        else:
            self._pulled = answer["pulled"]

    def remembers(self, request_id: str) -> bool:
        """Whether its process answered."""
        return self._reachable

    def pull(self, request_id: str) -> bool:
        """Whether the KV was read; where nothing was fetched, the decode rank lets go of it now."""
        if self._pulled is None:
            self._kv.tell(self._url, "pull", self._body)
            return True
        return self._pulled

    def claim(self, request_id: str) -> None:
        """The other side has done so, as it was asked for the plan."""

    def give_back(self, request_id: str) -> None:
        """Claimed, and not pulled after all."""
        self._kv.tell(self._url, "release", self._body)


class RemoteKv(KvExchange):
    """The prefillers of a cluster as decode ranks in other processes reach them."""

    def __init__(self, prefill_urls: Sequence[str]) -> None:
        super().__init__()
        self._urls = {SIDE_CHANNEL_PORT + index: url for index, url in enumerate(prefill_urls)}
        self._client = httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def plan(self, params: Mapping[str, Any] | None, prompt: tuple[int, ...], connector: Connector) -> PullPlan:
        """A decode rank's plan for a request with `params`; claims the pin."""
        known = plan_from_params(params, connector)
        if known is not None:
            return known
        assert params is not None
        url = self._urls.get(params["remote_port"])
        if url is None:
            return PullPlan(Reaction.ERROR, "unknown_engine")
        answer = await self.ask(url, "plan", {"params": dict(params), "digest": str(prompt_digest(prompt))})
        if answer is None:
            return PullPlan(Reaction.ERROR)
        if not answer["pinned"]:
            return PullPlan(Reaction(answer["reaction"]), answer["violation"])
        source = RemotePins(self, url, params)
        return PullPlan(Reaction(answer["reaction"]), answer["violation"], source, params["remote_request_id"])

    async def ask(self, url: str, what: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """One call to a prefiller's process; None when it can't be reached."""
        try:
            reply = await self._client.post(f"{url}/_emulator/kv/{what}", json=body)
            reply.raise_for_status()
            answer: dict[str, Any] = reply.json()
        except httpx.HTTPError:
            return None
        return answer

    def tell(self, url: str, what: str, body: dict[str, Any]) -> None:
        """The same without waiting for the answer."""
        task = asyncio.get_running_loop().create_task(self.ask(url, what, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Close the connections."""
        for task in list(self._tasks):
            task.cancel()
        await self._client.aclose()
