"""What an operator does meanwhile: takes workers out of the running router and puts them back, one at a time."""

import asyncio
import random
from collections import Counter

import httpx

from scripts.chaos_run.stack import Shape

MEAN_GAP_S = 4.0
OUT_S = (0.1, 6.0)  # the shorter ones come back while they still leave, the longer ones as new workers
TRIES, PAUSE_S = 20, 0.5


class Operator:
    """Removes and adds workers over the router's own routes, in an order that the seed fixes."""

    def __init__(self, router_url: str, shape: Shape, base_port: int, seed: int) -> None:
        self._url = router_url
        self._random = random.Random(seed)
        self._prefill, self._decode = (
            shape.urls(base_port)[: shape.prefillers],
            shape.urls(base_port)[shape.prefillers :],
        )
        self._client = httpx.AsyncClient(trust_env=False, timeout=10.0)
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled; then every worker is back."""
        draw = self._random
        while True:
            await asyncio.sleep(draw.expovariate(1.0 / MEAN_GAP_S))
            role, urls = ("prefill", self._prefill) if draw.random() < 0.25 else ("decode", self._decode)
            url, out_s = draw.choice(urls), draw.uniform(*OUT_S)
            try:
                await self._change("remove", role, url)
                await asyncio.sleep(out_s)
            finally:
                await asyncio.shield(self._change("add", role, url))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _change(self, what: str, role: str, url: str) -> None:
        """Ask until it is taken: a relay that is killed takes the call along, and without a brain it is 503."""
        for _ in range(TRIES):
            try:
                reply = await self._client.post(f"{self._url}/instances/{what}", json={"type": role, "instances": url})
            except httpx.TransportError as error:
                self.done[f"{what} {role} failed ({error!r})"] += 1
            else:
                refusal = "" if reply.status_code == 200 else f" refused ({reply.text})"
                self.done[f"{what} {role}{refusal}"] += 1
                if reply.status_code != 503:
                    return  # taken, or it was before: its answer was lost
            await asyncio.sleep(PAUSE_S)
