"""An answer that is cut off anywhere is the same as whole, or ends with an error: random requests, cuts and events.

The engine here holds back what vLLM's parsers hold back: half of a character, the end of reasoning, and a tool call
until its function's name is complete. Its events may bring several tokens, as with drafts or `--stream-interval`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from balanceroute.errors import BadUpstreamReply, ConnectionLost, NotResumable
from balanceroute.proxy.client.outlets import PartAnswer
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.life.pull import Pull
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.wire.event_stream import payloads_of
from tests.unit.proxy.life.legs import LOST, PROMPT_IDS, Client, dispatching, idle
from tests.unit.proxy.virtual_time import Page, ScriptedUpstream, a_config, a_router, in_virtual_time

CASES = 240
THOUGHT, CALL, CALLED, END = range(1, 5)  # special tokens
TAGS = {THOUGHT: b"</think>", CALL: b"<call>", CALLED: b"</call>", END: b"<end>"}
WORDS = [b" one", b' "two"', b"\n", b"<", b" \\", "é".encode(), "\u2028".encode(), b" <call", b" x"]
BYTE, WORD = 10, 300  # ids of the first byte and the first word
NAME = '{"name": "look", "arguments": '
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def content(token: int) -> bytes:
    if token in TAGS:
        return TAGS[token]
    return WORDS[token - WORD] if token >= WORD else bytes([token - BYTE]) if token >= BYTE else b""


def spelled(text: str) -> list[int]:
    return [BYTE + byte for byte in text.encode()]


@dataclass
class Case:
    """A request, the tokens of its answer, and how its events come."""

    body: dict[str, Any]
    answer: list[int]
    per_event: int
    cuts: list[tuple[str, int]] = field(default_factory=list)  # kinds, and events before them

    @property
    def chat(self) -> bool:
        return "messages" in self.body

    @property
    def thinks(self) -> bool:
        return THOUGHT in self.answer


def a_case(draw: random.Random) -> Case:
    def words(most: int) -> list[int]:
        drawn = [[WORD + draw.randrange(len(WORDS))] if draw.random() < 0.8 else spelled("🎉") for _ in range(most)]
        return [token for word in drawn for token in word]

    kind = draw.choice(["completion", "chat", "thinking", "tools", "tools"])
    answer = [*words(3), THOUGHT] if kind == "thinking" or draw.random() < 0.3 and kind == "tools" else []
    answer += words(draw.randrange(1, 12))
    if kind == "tools":
        for count in range(draw.choice([1, 1, 2])):
            answer += [CALL, *spelled(NAME + f'{{"a": ["é", {count}]}}}}'), CALLED, *words(draw.choice([0, 2]))]
    stream = draw.random() < 0.8
    body: dict[str, Any] = {"model": "m", "max_tokens": draw.choice([3 if stream else 70, 300]), "stream": stream}
    if kind == "completion":
        answer = [token for token in answer if token not in TAGS]
        body |= {"prompt": PROMPT_IDS} | ({"logprobs": 1} if draw.random() < 0.3 else {})
    else:
        body["messages"] = [{"role": "user", "content": "a"}]
        body |= {"tools": TOOLS} if kind == "tools" else {}
        body |= {"logprobs": True} if draw.random() < 0.3 else {}
    if draw.random() < 0.4:
        body["return_token_ids"] = True
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": draw.random() < 0.5}
    kinds = ["lost", "recomputed", "abort", "unfinished"]
    most = draw.choice([4, len(answer)])
    cuts = [(draw.choice(kinds), draw.randrange(most)) for _ in range(draw.choice([1, 2]))]
    return Case(body, answer, draw.choice([1, 1, 2, 4]), cuts)


class Choice:
    """One engine's part of an answer: what it says of each token."""

    def __init__(self, case: Case, begun: list[int]) -> None:
        self._case = case
        self._bytes, self._buffer, self._sent, self._calls = b"", "", 0, 0
        self._part = "reasoning" if case.thinks and THOUGHT not in begun else "content"
        self.called = False

    def text(self, token: int) -> str:
        self._bytes += b"" if token in TAGS else content(token)
        try:
            text, self._bytes = self._bytes.decode(), b""
        except UnicodeDecodeError:
            return ""
        return text

    def delta(self, token: int) -> dict[str, Any]:
        """What the parsers make of it, of a chat."""
        text = self.text(token)
        if token == THOUGHT:
            self._part = "content"
        elif token == CALL:
            self._part, self._buffer, self._sent = "call", "", 0
        elif token == CALLED:
            self._part, self._calls = "content", self._calls + 1
        elif self._part == "call":
            return self._call(text)
        elif text:
            return {self._part: text}
        return {}

    def _call(self, text: str) -> dict[str, Any]:
        self._buffer += text
        if len(self._buffer) == len(NAME) and text:
            self.called = True
            function = {"name": "look", "arguments": ""}
            return {"tool_calls": [{"index": self._calls, "id": "c", "type": "function", "function": function}]}
        more = self._buffer[len(NAME) + self._sent : -1]  # the last brace is not of the arguments
        self._sent += len(more)
        return {"tool_calls": [{"index": self._calls, "function": {"arguments": more}}]} if more else {}


class Engine(ScriptedUpstream):
    """Answers as the case says; the first decodes are cut off."""

    def __init__(self, case: Case, cuts: list[tuple[str, int]]) -> None:
        super().__init__()
        self._case, self._cuts = case, cuts

    async def request(self, method: str, path: str, body: bytes = b"", *more: Any, **options: Any) -> Any:
        asked = orjson.loads(body) if body else {}
        if path == "/detokenize":
            text = b"".join(map(content, asked["tokens"])).decode(errors="replace")
            self.detokenized = [Page(orjson.dumps({"prompt": text}))]
        elif path.startswith("/v1/"):
            self.answers = [self._answered(asked)]
        return await super().request(method, path, body, *more, **options)

    def _answered(self, asked: dict[str, Any]) -> Page:
        params = asked["kv_transfer_params"]
        prompt = asked.get("prompt") or params.get("prompt_token_ids") or PROMPT_IDS
        if params.get("do_remote_decode"):
            choice = {"index": 0, "text": "x", "message": {"content": "x"}, "finish_reason": "length"}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
            return Page(
                orjson.dumps(
                    {
                        "id": "cmpl-$ID",
                        "choices": [choice | {"prompt_token_ids": prompt}],
                        "usage": usage,
                        "kv_transfer_params": {"remote_engine_id": "p"},
                    }
                )
            )
        events = list(self._events(asked, prompt))
        if not self._cuts:
            return Page(b"".join(events) + b"data: [DONE]\n\n")
        kind, at = self._cuts.pop(0)
        if at >= len(events) - 2:
            return Page(b"".join(events) + b"data: [DONE]\n\n")
        kept = events[:at]
        if kind == "lost":
            return Page(b"".join(kept), breaks=LOST)
        if kind != "unfinished" and kept and b'"token_ids":[' in kept[-1]:
            end = {
                "recomputed": b'"finish_reason":"stop","stop_reason":"recomputed"',
                "abort": b'"finish_reason":"abort"',
            }
            kept[-1] = kept[-1].replace(b'"finish_reason":null', end[kind])
        return Page(b"".join(kept) + b"data: [DONE]\n\n")

    def _events(self, asked: dict[str, Any], prompt: list[int]) -> Iterator[bytes]:
        case, options = self._case, asked.get("stream_options") or {}
        begun = prompt[len(PROMPT_IDS) :]
        assert case.answer[: len(begun)] == begun, "it goes on from what has been generated"
        choice, tokens, offset = Choice(case, begun), 0, 0
        head = {"id": "cmpl-$ID", "created": len(prompt), "model": f"m{len(begun)}"}

        def event(contents: dict[str, Any] | None, count: int) -> bytes:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
            whole: dict[str, Any] = {**head, "choices": [] if contents is None else [{"index": 0, **contents}]}
            if contents is None or options.get("continuous_usage_stats"):
                whole["usage"] = usage | ({} if contents is None else {"completion_tokens_details": None})
            return b"data: %s\n\n" % orjson.dumps(whole)

        if case.chat:
            yield event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, 0)
        left = [*case.answer, END][len(begun) :][: asked["max_tokens"]]
        while left:
            ids, left = left[: case.per_event], left[case.per_event :]
            tokens += len(ids)
            finish = None if left else "stop" if ids[-1] == END else "length"
            brings: dict[str, Any] = {"logprobs": None, "finish_reason": finish, "token_ids": ids}
            pieces = [content(token).decode(errors="replace") for token in ids]
            if case.chat:
                delta: dict[str, Any] = {}
                for token in ids:
                    for name, value in choice.delta(token).items():
                        delta[name] = delta[name] + value if name in delta else value
                brings["delta"] = delta
                if asked.get("logprobs"):
                    brings["logprobs"] = {"content": [{"token": piece} for piece in pieces]}
                if finish == "stop" and choice.called:
                    brings["finish_reason"] = "tool_calls"
            else:
                brings["text"] = "".join(map(choice.text, ids))
                if asked.get("logprobs"):
                    offsets = [offset + sum(map(len, pieces[:place])) for place in range(len(pieces))]
                    offset += sum(map(len, pieces))
                    brings["logprobs"] = {"tokens": pieces, "text_offset": offsets}
            yield event(brings, tokens)
        yield event(None, tokens)


def said(body: bytes) -> dict[str, Any]:
    """What a client makes of an answer, streamed or not."""
    found: dict[str, Any] = {"text": "", "reasoning": "", "calls": {}, "ids": [], "logprobs": {}, "finish": None}
    heads, kinds_of_usage, streamed = set(), set(), body.startswith(b"data:")
    for payload in payloads_of(body) if streamed else [body]:
        if payload == b"[DONE]":
            continue
        part = orjson.loads(payload)
        heads.add((part["id"], part["created"], part["model"]))
        if part["choices"] and "usage" in part and streamed:
            kinds_of_usage.add(frozenset(part["usage"]))
        elif part.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            found["usage"] = [part["usage"][name] for name in names]
        for choice in part["choices"]:
            assert found["finish"] is None, "nothing follows the end"
            contents = choice.get("delta") or choice.get("message") or choice
            found["text"] += contents.get("content") or contents.get("text") or ""
            found["reasoning"] += contents.get("reasoning") or ""
            for place, call in enumerate(contents.get("tool_calls") or ()):
                index = call.get("index", place)
                found["calls"][index] = found["calls"].get(index, "") + call["function"]["arguments"]
            found["ids"] += choice.get("token_ids") or ()
            for name, values in (choice.get("logprobs") or {}).items():
                found["logprobs"][name] = found["logprobs"].get(name, []) + values
            found["finish"] = choice["finish_reason"]
    assert len(heads) == 1, f"one answer has one head: {heads}"
    assert len(kinds_of_usage) < 2, f"its usages have the same fields: {kinds_of_usage}"
    return found


def run(case: Case, cuts: list[tuple[str, int]]) -> dict[str, Any] | None:
    """What the client gets; None: an error, after which it knows that this is not all."""
    results: list[dict[str, Any] | None] = []

    async def answered() -> None:
        services = a_router(a_config(2, 3))
        for worker in services.fleet:
            worker.upstream = Engine(case, cuts)  # type: ignore[assignment]
        request = parse("chat" if case.chat else "completions", orjson.dumps(case.body))
        outlet = Client() if request.stream else PartAnswer(request)
        leg = Leg(services, "r", request, outlet, [], Pull)
        async with dispatching(services):
            try:
                await leg.run()
                body = outlet.got if isinstance(outlet, Client) else outlet.answer(leg)
                results.append(said(body))
            except (NotResumable, BadUpstreamReply, ConnectionLost):
                results.append(None)
        assert idle(services)

    in_virtual_time(answered)
    return results[0]


@pytest.mark.parametrize("part", range(4))
def test_an_answer_that_is_cut_off_anywhere_is_the_same_as_whole_or_ends_with_an_error(part: int) -> None:
    equal = ended = 0
    for seed in range(part * CASES // 4, (part + 1) * CASES // 4):
        case = a_case(random.Random(seed))
        whole, cut = run(case, []), run(case, list(case.cuts))
        assert whole is not None
        assert cut in (None, whole), f"case {seed}: {case}"
        equal, ended = equal + (cut is not None), ended + (cut is None)
    assert equal > 2 * ended > 0
