"""A real engine's own `/v1/messages` beside what is made here of its answer to the chat that a message becomes.

Where the two differ, `DIFFERS` says so in words that stand in docs/anthropic.md with the reason.
"""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.message_answers import Counts, MessageStream, message_of
from balanceroute.proxy.wire.message_errors import message_error_body
from balanceroute.proxy.wire.message_requests import chat_of, parse_messages, tokenize_body
from balanceroute.proxy.wire.sse import EventScanner
from tests.unit.proxy.captures import body_of, capture_files, request_of

DOCS = Path(__file__).parents[4] / "docs" / "anthropic.md"
DIFFERS = {
    "id": "its own `id`",
    "signature": "signatures",
    "creation": "`cache_creation_input_tokens`",
    "start": "`message_start` has no figures of the cache",
    "sequence": "`stop_sequence` is left out where it is null",
    "ping": "no `ping`",
    "errors": "names of its own for the types of errors",
    "limit": "`max_completion_tokens`",
    "required": "in OpenAI's form",
    "input": "arguments that are no object",
}
PATHS = [path for path in capture_files("messages/*.resp") if not path.stem.endswith("-chat")]
ANSWERS = [path for path in PATHS if request_of(path)[0] == "/v1/messages"]


def beside(path: Path) -> Path:
    """The same, asked as a chat or, to be counted, of `/tokenize`."""
    return path.with_name(f"{path.stem}-chat.resp")


def status_of(path: Path) -> int:
    return int(body_of(path)[0].split()[1])


def cases(*, status: int, streamed: bool) -> list[Any]:
    """The answers with this status to a chat, each with its name."""
    found = [p for p in ANSWERS if beside(p).exists() and status_of(beside(p)) == status]
    return [pytest.param(p, id=p.stem) for p in found if bool(json.loads(request_of(p)[1]).get("stream")) == streamed]


def usage_of(usage: dict[str, int]) -> dict[str, int]:
    """The whole prompt: what of it was cached depends on what was asked before."""
    return {"input": sum(usage.values()) - usage["output_tokens"], "output": usage["output_tokens"]}


def as_told(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what an engine makes up."""
    content = [
        {**block, **dict.fromkeys(block.keys() & {"id", "signature"}, "made up")} for block in message["content"]
    ]
    rest = {"id": "made up", "content": content, "usage": usage_of(message["usage"])}
    return {"stop_sequence": None, **message, **rest}


def joined(wire: bytes) -> list[dict[str, Any]]:
    """The events of a stream: pieces of one block in one, and nothing that an engine makes up."""
    events: list[dict[str, Any]] = []
    for line in wire.decode().split("\n"):
        if not line.startswith("data: "):
            continue
        event = json.loads(line[6:])
        delta = event.get("delta", {})
        kind = delta.get("type")
        if event["type"] == "ping" or kind == "signature_delta":
            continue
        if event["type"] == "message_start":
            event["message"] |= {"id": "made up", "usage": usage_of(event["message"]["usage"])}
        elif event["type"] == "content_block_start":
            block = event["content_block"]
            block.pop("signature", None)
            block |= {"id": "made up"} if "id" in block else {}
        elif event["type"] == "message_delta":
            event["usage"] = usage_of(event["usage"])
        elif kind and events[-1].get("delta", {}).get("type") == kind:
            for name in delta.keys() - {"type"}:
                events[-1]["delta"][name] += delta[name]
            continue
        events.append(event)
    return events


def test_there_are_enough_captured_messages() -> None:
    assert len(ANSWERS) >= 20 and len(PATHS) - len(ANSWERS) == 2
    kinds = {json.loads(body_of(p)[1])["stop_reason"] for p in ANSWERS if body_of(p)[1].startswith(b'{"id"')}
    assert kinds == {"end_turn", "max_tokens", "stop_sequence", "tool_use"}


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem) for p in PATHS])
def test_a_translated_request_equals_the_captured_chat(path: Path) -> None:
    if beside(path).exists():
        translate = chat_of if path in ANSWERS else lambda body: orjson.loads(tokenize_body(orjson.dumps(body)))
        assert translate(json.loads(request_of(path)[1])) == json.loads(request_of(beside(path))[1])


@pytest.mark.parametrize("path", cases(status=200, streamed=False))
def test_a_translated_answer_equals_the_engines_own_message(path: Path) -> None:
    mine = json.loads(message_of(body_of(beside(path))[1], "msg_1"))
    if status_of(path) != 200:
        assert DIFFERS["input"] and path.stem == "619-tool-with-no-object"
        assert mine["content"][-1]["input"] == {} and mine["stop_reason"] == "tool_use"
        return
    assert as_told(mine) == as_told(json.loads(body_of(path)[1]))


@pytest.mark.parametrize("size", [1, 100, 10**9], ids=["bytes", "pieces", "at-once"])
@pytest.mark.parametrize("path", cases(status=200, streamed=True))
def test_a_translated_stream_equals_the_engines_own_events(path: Path, size: int) -> None:
    own, wire = joined(body_of(path)[1]), body_of(beside(path))[1]
    counts = Counts(own[0]["message"]["usage"]["input"], None, 0)
    scanner = EventScanner(want_usage=True, translation=lambda: MessageStream("msg_1", None, lambda: counts))
    mine = b"".join(scanner.feed(wire[at : at + size]) for at in range(0, len(wire), size))
    assert joined(mine) == own


@pytest.mark.parametrize("path", [*cases(status=400, streamed=False), *cases(status=404, streamed=False)])
def test_a_translated_refusal_equals_the_engines_own(path: Path) -> None:
    status, own = status_of(beside(path)), json.loads(body_of(path)[1])
    mine = json.loads(message_error_body(status, body_of(beside(path))[1], "req"))
    assert status_of(path) == status and mine["type"] == own["type"] == "error"
    assert mine["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert mine["error"]["message"] == own["error"]["message"].replace("max_completion_tokens", "max_tokens")


def test_router_and_engine_name_the_same_missing_field() -> None:
    (path,) = [path for path in ANSWERS if not beside(path).exists()]
    own = json.loads(body_of(path)[1])
    with pytest.raises(InvalidRequest) as raised:
        parse_messages(request_of(path)[1])
    assert status_of(path) == raised.value.status == 400
    assert own["error"]["param"] == f"body.{raised.value.param}" == "body.max_tokens"


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem) for p in PATHS if p not in ANSWERS])
def test_a_prompt_has_as_many_tokens_as_the_engine_counts(path: Path) -> None:
    assert json.loads(body_of(path)[1])["input_tokens"] == json.loads(body_of(beside(path))[1])["count"]


@pytest.mark.parametrize("words", DIFFERS.values(), ids=DIFFERS)
def test_every_difference_is_documented(words: str) -> None:
    assert words in " ".join(DOCS.read_text().split())
