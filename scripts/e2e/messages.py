"""Anthropic's official client, through the router and at one plain server's own `/v1/messages`: the same messages.

The tool's schema is strict, so that a model of random weights calls it and nothing else.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic

MODEL = "tiny"
USER = {"role": "user", "content": "tell me about foxes"}
GREEDY = {"extra_body": {"temperature": 0}}  # newer versions of the client have no argument for it
PLAIN: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": [USER], **GREEDY}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA, "strict": True}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]},
    "stop": {"stop_sequences": ["w7"], "max_tokens": 60},
    "end": {"messages": [{"role": "user", "content": "to dog"}], "max_tokens": 200},
    "unicode": {"messages": [{"role": "user", "content": '狐狸 🦊 é \u2028 \\ "'}]},
    "tool": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 250},
    "tools": {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 250},
    "metadata": {"metadata": {"user_id": "someone"}, "extra_body": {"temperature": 0, "top_k": 5, "top_p": 0.9}},
    "turns": {"messages": [USER, {"role": "assistant", "content": "so the"}, USER]},
}


def answer_of(message: Any) -> dict[str, Any]:
    """What a message says, without what each server makes up."""
    content = [block.model_dump(exclude={"id", "citations", "caller"}, exclude_none=True) for block in message.content]
    usage = message.usage
    read, made = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    counts = (usage.input_tokens + read + made, usage.output_tokens)
    return {"content": content, "stop": (message.stop_reason, message.stop_sequence), "tokens": counts}


def tool_loop(client: anthropic.Anthropic) -> list[dict[str, Any]]:
    """Call a tool, answer, go on: each turn as told."""
    messages: list[Any] = [USER]
    turns = []
    for _ in range(2):
        turn = client.messages.create(**PLAIN | ASKED["tool"] | {"messages": messages})
        turns.append(answer_of(turn))
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sun"}]}
            for block in turn.content
            if block.type == "tool_use"
        ]
        assert results, f"no tool was called: {turn}"
        messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": results}]
    last = PLAIN | {"messages": messages, "tools": [TOOL], "tool_choice": {"type": "none"}}
    return [*turns, answer_of(client.messages.create(**last))]


def streamed(client: anthropic.Anthropic, asked: dict[str, Any]) -> dict[str, Any]:
    """The final message of the streaming helper, whose text stream must say the same."""
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "".join(block.text for block in message.content if block.type == "text")
    return answer_of(message)


def compare(router: str, plain: str, settled: Callable[[], object]) -> str:
    """Compare the two servers; `settled` waits until the router holds nothing.

    Raises: AssertionError: they differ, or a refusal is not Anthropic's.
    """
    with (
        anthropic.Anthropic(base_url=router, api_key="none", timeout=300) as client,
        anthropic.Anthropic(base_url=plain, api_key="none", timeout=300) as own,
    ):
        expected = {name: answer_of(own.messages.create(**PLAIN | fields)) for name, fields in ASKED.items()}
        for name, fields in ASKED.items():
            for how in (
                lambda asked: answer_of(client.messages.create(**asked)),
                lambda asked: streamed(client, asked),
            ):
                found = how(PLAIN | fields)
                assert found == expected[name], f"{name}: {found}, not {expected[name]}"
        assert tool_loop(client) == tool_loop(own), "the tool loop goes another way"
        count = {"model": MODEL, "messages": [USER], "system": "be brief"}
        assert client.messages.count_tokens(**count).input_tokens == own.messages.count_tokens(**count).input_tokens
        _refusals(client)
        with client.messages.stream(**PLAIN | {"max_tokens": 1500}) as stream:
            next(iter(stream.text_stream))
        settled()
    found = asyncio.run(_at_once(router))
    assert all(each == expected["plain"] for each in found), "asked at once: not all are the same"
    return f"{len(expected)} messages whole and streamed, a tool loop and {len(found)} at once as the engine's own"


def _refusals(client: anthropic.Anthropic) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}
    for fields, kind in (
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"max_tokens": 100_000}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": [picture]}]}, anthropic.BadRequestError),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError),
    ):
        for stream in (False, True):
            try:
                client.messages.create(**PLAIN | fields, stream=stream)
            except kind as error:
                body = error.body
                assert isinstance(body, dict) and body["type"] == "error" and error.request_id == body["request_id"]
            else:
                raise AssertionError(f"{fields} is not refused")


async def _at_once(router: str) -> list[dict[str, Any]]:
    async with anthropic.AsyncAnthropic(base_url=router, api_key="none", timeout=300) as client:

        async def one(number: int) -> dict[str, Any]:
            if number % 2:
                return answer_of(await client.messages.create(**PLAIN))
            async with client.messages.stream(**PLAIN) as stream:
                return answer_of(await stream.get_final_message())

        return list(await asyncio.gather(*map(one, range(16))))
