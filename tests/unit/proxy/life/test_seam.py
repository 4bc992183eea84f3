"""The end of an answer that was cut off, by what engines say of the text of its ids: whole characters, hidden text."""

import asyncio
from typing import Any

import orjson
import pytest

from balanceroute.errors import ConnectFailed
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.life.pull import Pull
from balanceroute.proxy.life.seam import ALL, TIMEOUT_S, seam_of
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.wire.probe_reply import PrefillResult
from tests.unit.proxy.life.legs import PROMPT_IDS, Client, a_leg, events
from tests.unit.proxy.virtual_time import Answer, Page, a_config, a_router, script, with_virtual_time

WHOLE, BROKEN = (Page(orjson.dumps({"prompt": text})) for text in (" so", " so\ufffd"))
REFUSED = ConnectFailed("refused", worker="p1", tier="prefill")


async def broken(
    first: list[Answer],
    second: list[Answer] | None = None,
    tokens: int = 3,
    others: list[Answer] | None = None,
    **fields: Any,
) -> tuple[int, float]:
    """The number, and how long it took to know. p1 has prefilled the prompt, and d1 was lost: what p1 tells, then p0,
    and `others`: then d0.
    """
    services = a_router(a_config(2, 2))
    for name, answers in (("p1", first), ("p0", second or [404]), ("d0", others or [404])):
        script(services, name).detokenized = answers
    leg = cut_off(services, tokens, **fields)
    at_s = services.loop.time()
    return (await seam_of(leg)).broken, services.loop.time() - at_s


def cut_off(services: Services, tokens: int, **fields: Any) -> Leg:
    """One that p1 has prefilled, and of which so many tokens have come."""
    leg = a_leg(services, **fields)
    leg.prefiller_id, leg.decoder_id = "p1", "d1"
    prefilled = PrefillResult(b"{}", len(PROMPT_IDS), None, PROMPT_IDS)
    leg.answer.prompt_counted(prefilled)
    leg.answer.begin(prefilled)
    leg.answer.scanner.feed(events(*range(20, 20 + tokens), finish=None).replace(b"$ID", b"request-1"))
    return leg


@with_virtual_time
@pytest.mark.parametrize(
    ("answers", "expected"),
    [([WHOLE], 0), ([BROKEN, WHOLE], 1), ([BROKEN, BROKEN, WHOLE], 2), ([BROKEN], ALL)],
    ids=["none", "one", "two", "all"],
)
async def test_token_ids_are_removed_until_the_text_ends_with_a_whole_character(
    answers: list[Answer], expected: int
) -> None:
    assert await broken(answers) == (expected, 0)


@with_virtual_time
@pytest.mark.parametrize("useless", [404, 500, Page(b"no JSON"), Page(b'{"prompt":7}'), Page(b"[]"), REFUSED])
async def test_a_prefiller_without_a_detokenized_text_is_followed_by_another(useless: Answer) -> None:
    assert await broken([useless], [BROKEN, WHOLE]) == (1, 0)
    assert await broken([useless], [useless]) == (0, 0), "the ids are taken as they are"


@with_virtual_time
async def test_another_decode_worker_detokenizes_when_no_prefiller_does() -> None:
    assert await broken([REFUSED], [500], others=[BROKEN, WHOLE]) == (1, 0)


@with_virtual_time
async def test_a_silent_prefiller_delays_a_resume_only_briefly() -> None:
    assert await broken([asyncio.Event()], [BROKEN, WHOLE]) == (1, TIMEOUT_S)


@with_virtual_time
@pytest.mark.parametrize(("tokens", "fields"), [(0, {}), (3, {"stop": ["held back"]})], ids=["nothing", "invalid"])
async def test_no_worker_detokenizes_when_the_answer_cannot_resume_from_ids(
    tokens: int, fields: dict[str, Any]
) -> None:
    assert await broken([BROKEN], [BROKEN], tokens, **fields) == (0, 0)


TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "look"}}]}


async def withheld(text: str, *deltas: dict[str, Any], **fields: Any) -> bool:
    """Whether a chat that was cut off after these deltas, each of two tokens, has hidden text in its ids, whose text a
    worker tells.
    """
    services = a_router(a_config(1, 1))
    script(services, "p0").detokenized = [Page(orjson.dumps({"prompt": text}))]
    request = parse("chat", orjson.dumps({"messages": [{"role": "user", "content": "a"}]} | fields))
    leg = Leg(services, "r", request, Client(), [], Pull)
    prefilled = PrefillResult(b"{}", len(PROMPT_IDS), None, PROMPT_IDS)
    leg.answer.prompt_counted(prefilled)
    leg.answer.begin(prefilled)
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": [20, 21]}
        leg.answer.scanner.feed(b"data: %s\n\n" % orjson.dumps({"id": "a", "created": 1, "choices": [choice]}))
    return (await seam_of(leg)).withheld


A, B, NOTHING = {"content": "I look"}, {"content": ' "it" up.'}, {"content": ""}


@with_virtual_time
@pytest.mark.parametrize(
    ("text", "deltas", "fields"),
    [
        ('\ufffd: I look "it" up.<tool_call>', [A, B], TOOLS),
        ('I look<tool_call>{"name', [A, NOTHING], TOOLS | {"return_token_ids": True}),
        ("I look\n<tool_call>\n", [A, {"content": "\n"}], TOOLS),
        ("<tool_call>", [NOTHING], TOOLS | {"return_token_ids": True, "tool_choice": "auto"}),
    ],
    ids=["in one event with text", "told by ids", "alike ends", "nothing shown"],
)
async def test_ids_of_a_chat_with_tools_hold_more_than_its_text_where_a_call_may_have_begun(
    text: str, deltas: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    assert await withheld(text, *deltas, **fields)
    assert not await withheld(text, *deltas, **fields | {"tools": []}), "nothing is held back"
    assert not await withheld(text, *deltas, **fields | {"tool_choice": "none"}), "nothing is held back"


@with_virtual_time
@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ('\ufffd look "it" up.', [A, B]),
        ('I look "it"up.', [A, B]),
        ('it" up.', [A, B]),
        ("I look", [A, NOTHING]),
        ("hm", [A, {"reasoning": "hm"}]),
        ("\n\n", [A, {"content": "\n\n"}]),
    ],
    ids=["whole", "less spaces", "shorter", "given back", "reasoning", "blank"],
)
async def test_ids_of_a_chat_with_tools_whose_text_was_shown_to_its_end_hold_nothing_back(
    text: str, deltas: list[dict[str, Any]]
) -> None:
    assert not await withheld(text, *deltas, **TOOLS)
