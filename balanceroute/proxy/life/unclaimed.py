"""Pinned prefill KV whose relay is gone: the brain has it pulled, as a request that left would (`workers/drainer.py`).

What the brain knows of it are the prefiller's parameters and the size of the prompt, not the prompt. A decode worker
that pulls needs a prompt of that size and nothing else of it, as what it answers is thrown away: so it gets made-up
tokens, others each time, which no prefix cache takes for a prompt that it has.
"""

import random
from collections.abc import Callable
from typing import Final

import orjson

from balanceroute.proxy.life.services import TryServices
from balanceroute.proxy.link.messages import Pin
from balanceroute.proxy.wire.payloads import ClientRequest, parse
from balanceroute.proxy.workers.drainer import Drain

_TOKENS: Final = range(100, 1000)  # in every vocabulary, and no special ones


class PinKeeper:
    """Keeps what is pinned; a `Pins` of the hub."""

    def __init__(self, services: TryServices, authorization: Callable[[], bytes | None]) -> None:
        """`authorization`: the workers' key."""
        self._s, self._authorization = services, authorization

    def keep(self, request_id: str, pin: Pin) -> None:
        """This KV is pinned for the request."""

    def drop(self, request_id: str) -> None:
        """No more, if it was: a decode worker is told, or a relay takes care of it."""

    def free(self, request_id: str, pin: Pin) -> None:
        """Nobody waits for it any more, and nobody else takes care of it."""
        key = self._authorization()
        headers = ((b"authorization", key),) if key else ()
        pinned_s = self._s.tickets.now() - pin.age_s
        self._s.drainer.drain(Drain(request_id, stand_in(request_id, pin), pin.params, headers, pinned_s))

    def free_unclaimed(self, claimed: Callable[[str], bool]) -> None:
        """Free all that is kept and not claimed."""

    def close(self) -> None:
        """Keep the record for the next one."""


def stand_in(request_id: str, pin: Pin) -> ClientRequest:
    """A request with a prompt of the size of the one that is pinned."""
    ids = random.Random(request_id).choices(_TOKENS, k=pin.prompt_tokens)
    body = {"prompt": ids, "max_tokens": 1} | ({"model": pin.model} if pin.model else {})
    return parse("completions", orjson.dumps(body))
