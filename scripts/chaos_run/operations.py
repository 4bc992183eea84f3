"""What an operator does meanwhile: takes workers out of the running router and puts them back, one at a time, over its
routes or by its configuration; changes what a client key may do.
"""

import asyncio
import random
import signal
from collections import Counter
from contextlib import suppress

import httpx

from scripts.chaos_run.keys import write_keys
from scripts.chaos_run.stack import Stack

MEAN_GAP_S = 4.0
OUT_S = (0.1, 6.0)  # the shorter ones come back while they still leave, the longer ones as new workers
PAIRS = (("remove", "add"), ("remove", "add"), ("drain", "undrain"))
RELOAD_SHARE = 0.3  # of the changes: in the configuration, and SIGHUP
TRIES, PAUSE_S = 20, 0.5


class Operator:
    """Removes and adds workers, or drains and undrains them, in an order that the seed fixes."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack, self._url = stack, stack.url
        self._random = random.Random(seed)
        urls, prefillers = stack.shape.urls(stack.base_port), stack.shape.prefillers
        self._prefill, self._decode = urls[:prefillers], urls[prefillers:]
        self._client = httpx.AsyncClient(trust_env=False, timeout=10.0)
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled; then every worker is back."""
        draw = self._random
        while True:
            await asyncio.sleep(draw.expovariate(1.0 / MEAN_GAP_S))
            role, urls = ("prefill", self._prefill) if draw.random() < 0.25 else ("decode", self._decode)
            url, out_s = draw.choice(urls), draw.uniform(*OUT_S)
            change, (out, back) = self._change, draw.choice(PAIRS)
            if draw.random() < RELOAD_SHARE:
                change, (out, back) = self._reload, PAIRS[0]
                write_keys(self._stack.folder, draw)
            try:
                await change(out, role, url)
                await asyncio.sleep(out_s)
            finally:
                await asyncio.shield(change(back, role, url))

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

    async def _reload(self, what: str, role: str, url: str) -> None:
        """Change the list of workers and reload, until the router has it: one without a brain refuses, as does one in
        which another reload is under way.
        """
        self._stack.list_worker(role, url, listed=what == "add")
        for tries in range(1, TRIES + 1):
            self._stack.router.signal(signal.SIGHUP)
            await asyncio.sleep(PAUSE_S)
            with suppress(httpx.TransportError, ValueError, KeyError):
                state = (await self._client.get(f"{self._url}/state")).json()
                workers = state["prefillers" if role == "prefill" else "workers"]
                known = [f"http://{worker['id']}" for worker in workers if worker["state"] != "draining"]
                if (url in known) == (what == "add"):
                    self.done[f"reload to {what} {role}{' again' if tries > 1 else ''}"] += 1
                    return
        self.done[f"reload to {what} {role} in vain"] += 1
