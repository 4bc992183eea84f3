"""Finds the token after which a cut-off answer may continue: never within a character, or within hidden text.

A character may take several tokens, and engines send its text with the last of them. An engine whose prompt ends within
one sends, as the first text of its answer, the whole prompt with it (vLLM 0.32 fills its `DecodeStream` with the
prompt's ids, and such a stream has shown nothing yet). An event of several tokens may end there though it has text:
with `--stream-interval`, with drafts, or where an engine was ahead of its API server.

Only a tokenizer can tell, and every engine has one. So before an answer is continued, a prefiller is asked for the text
of its last ids, or another decode worker if none answers. The text ends with U+FFFD if a character is incomplete; its
ids are generated again.

An engine's tool parser holds back what may begin a call, until it has the function's name. The parser of another engine
knows nothing of that, so the call would come as text. So the text of a chat with tools must end with what the client
was shown last. If it does not, then the ids that the client has been told, or that came in one event with a text, hold
more than has been shown.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

import orjson

from balanceroute.core.types import UP, Role
from balanceroute.errors import UpstreamError
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.wire.bounds import MAX_ERROR_BYTES
from balanceroute.proxy.workers.fleet import Worker

TIMEOUT_S: Final = 2.0  # for one question, which takes an engine a millisecond
_ASKED: Final = 2  # workers asked per tier; without an answer the ids are used unchanged
_TAIL: Final = 16  # ids whose text is asked for: a character has four bytes at most, and a token one at least
_MOST: Final = 16  # ids checked one by one; a longer broken end is no text
ALL: Final = 2**31  # none of these ends a character
_BROKEN: Final = "\ufffd"
_TIERS: Final = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Seam:
    """The end of an answer that was cut off.

    Attributes: `broken`: how many of its last ids are an incomplete character; `ALL`: none of the checked ids ends one.
    `withheld`: its ids hold text that the client has not been shown.
    """

    broken: int = 0
    withheld: bool = False


_SOUND: Final = Seam()


async def seam_of(leg: Leg) -> Seam:
    """The end of the leg's answer; a sound one also if no worker answers."""
    ids = leg.answer.ids_to_resume_from
    if not ids:
        return _SOUND
    shown = leg.answer.last_text
    prefillers, decoders = ([one for one in leg.services.fleet.of(role) if one.state is UP] for role in _TIERS)
    prefillers.sort(key=lambda worker: worker.id != leg.prefiller_id)
    decoders.sort(key=lambda worker: worker.id == leg.decoder_id)  # it may just have died
    for worker in (*prefillers[:_ASKED], *decoders[:_ASKED]):
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await _ask(leg, worker, ids[-_TAIL - _MOST :].tolist(), shown)
        except (UpstreamError, TimeoutError, ValueError, TypeError, KeyError):
            continue  # it does not serve the route, or answers something else
    return _SOUND


async def _ask(leg: Leg, worker: Worker, ids: list[int], shown: str | None) -> Seam:
    """The end by the text of the ids, which a worker's tokenizer tells. Raises: ValueError and the like: it has none.

    `shown`: what it must end with; None: anything.
    """
    for broken in range(min(_MOST, len(ids))):
        whole = len(ids) - broken
        text = await _text(leg, worker, ids[max(0, whole - _TAIL) : whole])
        if not text.endswith(_BROKEN):
            return Seam(broken, shown is not None and not _ends_alike(text.lstrip(_BROKEN), shown))
    return Seam(ALL)


def _ends_alike(text: str, shown: str) -> bool:
    """Whether one ends with the other; some tokenizers have fewer spaces in a text than in its pieces."""
    for one, other in ((text, shown), ("".join(text.split()), "".join(shown.split()))):
        if one and other and (one.endswith(other) or other.endswith(one)):
            return True
    return False


async def _text(leg: Leg, worker: Worker, ids: list[int]) -> str:
    model = leg.answer.request.model
    body = orjson.dumps({"tokens": ids} if model is None else {"model": model, "tokens": ids})
    reply = await worker.upstream.request("POST", "/detokenize", body, worker.headers_of(leg.upstream_id, leg.headers))
    content = await reply.read(MAX_ERROR_BYTES)
    if reply.status != 200:
        raise ValueError(f"status {reply.status}")
    text = orjson.loads(content)["prompt"]
    if not isinstance(text, str):
        raise TypeError("prompt is not a text")
    return text
