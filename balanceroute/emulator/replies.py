"""Turning tokens into the bytes that vLLM sends: JSON replies and SSE chunks, key for key as captured.

One `Choice` per answer holds its ids and text; a `Call` per HTTP request puts its choices on the wire, as a
stream (`StreamCall`) or at once (`JsonCall`). Chunks are glued from prepared bytes: the hot path of the
emulator.
"""

import asyncio
import codecs
import json
import time
from abc import ABC, abstractmethod
from typing import Any

import orjson

from balanceroute.emulator.errors import INTERNAL, error_body
from balanceroute.emulator.requests import GenerationRequest
from balanceroute.emulator.sse import SseWriter
from balanceroute.emulator.structure import Part, Plan
from balanceroute.engine.tokens import LEAD_ID, TOKEN_BYTES, decode, decode_bytes

FINGERPRINT = "vllm-emulated"
RECOMPUTED = "recomputed"
LOGPROB = -0.6931471805599453  # every token of the emulated model has probability one half

_decoder = codecs.getincrementaldecoder("utf-8")


class Choice:
    """One answer: ids so far, text not yet sent, how it ended."""

    __slots__ = (
        "_decoder",
        "_held",
        "_leaks",
        "_request",
        "finish_reason",
        "ids",
        "index",
        "offset",
        "plan",
        "prompt",
        "sent",
        "stop_reason",
        "text",
        "texts",
    )

    def __init__(self, index: int, prompt: tuple[int, ...], request: GenerationRequest) -> None:
        self.index = index
        self.prompt = prompt
        self.ids: list[int] = []
        self.text = ""  # decoded and cleared to be sent
        self.sent = 0  # ids that are on the wire
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._request = request
        self._decoder = _decoder("replace")
        self._leaks = ""  # of a prompt that ends within a character vLLM's detokenizer takes all for text of the answer
        if prompt and prompt[-1] == LEAD_ID:
            self._leaks = self._decoder.decode(decode_bytes(prompt))
        self.plan = None if request.structure is None else Plan(request.structure, prompt)
        self.texts: dict[Part, str] = {}  # all text so far by part, where there is a plan
        self.offset = 0  # characters of the tokens whose logprobs are on the wire
        self._held = ""  # may be the beginning of a stop string

    def feed(self, token: int, ends: str | None) -> None:
        """Add a token; `ends` is the reason if the engine is done with it. Stop ids and strings may end it earlier."""
        self.ids.append(token)
        piece = TOKEN_BYTES[token]
        may_stop = len(self.ids) > self._request.min_tokens
        if may_stop and token in self._request.stop_token_ids:
            ends, self.stop_reason, piece = "stop", token, b""
        text = self._decoder.decode(piece, ends is not None)
        if text:
            text, self._leaks = self._leaks + text, ""
        if self._request.stop:
            text, ends = self._stop(text, ends, may_stop)
        self.text += text
        if self.plan is not None:
            self.texts[self.part] = self.texts.get(self.part, "") + text
            if ends == "stop" and Part.CALL in self.texts and self.stop_reason is None:
                ends = "tool_calls"
        self.finish_reason = ends

    @property
    def part(self) -> Part:
        """The part that the last token belongs to."""
        assert self.plan is not None
        return self.plan.part(len(self.ids) - 1)

    def calls(self, arguments: str, *, first: bool) -> list[dict[str, Any]]:
        """The one tool call, or a piece of it that is not the first."""
        assert self.plan is not None
        call: dict[str, Any] = {"index": 0, "function": {"arguments": arguments}}
        if first:
            function = {"name": self.plan.structure.calls, "arguments": arguments}
            call |= {"id": f"call_{self.index}", "type": "function", "function": function}
        return [call]

    def delta(self) -> dict[str, Any]:
        """The delta of a chat's chunk, from the text that may be sent."""
        if self.plan is None or self.part is Part.CONTENT:
            return {"content": self.text}
        if self.part is Part.REASONING:
            return {"reasoning": self.text}
        return {"tool_calls": self.calls(self.text, first=self.texts[Part.CALL] == self.text)}

    def give_up(self) -> None:
        """Popped by the recompute scheduler: a finish like any other, so what may begin a stop string is sent too."""
        self.text += self._held
        self.finish_reason, self.stop_reason = "stop", RECOMPUTED

    def _stop(self, text: str, ends: str | None, may_stop: bool) -> tuple[str, str | None]:
        held, text = len(self._held), self._held + text
        hits: list[tuple[int, str]] = []
        if may_stop:  # a stop string that ended within `min_tokens` does not count any more
            places = [(text.find(stop, max(0, held - len(stop) + 1)), stop) for stop in self._request.stop]
            hits = [(place, stop) for place, stop in places if place >= 0]
        if hits:
            place, self.stop_reason = min(hits)
            return text[:place], "stop"
        keep = 0 if ends else min(len(text), max(map(len, self._request.stop)) - 1)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ends


class Call(ABC):
    """One HTTP request on its way through a worker."""

    def __init__(self, request: GenerationRequest, base_id: str) -> None:
        self.request = request
        self.id = ("chatcmpl-" if request.chat else "cmpl-") + base_id
        self.created = int(time.time())
        self.choices = [
            Choice(index * request.n + copy, prompt, request)
            for index, prompt in enumerate(request.prompts)
            for copy in range(request.n)
        ]
        self.kv_transfer_params: dict[str, Any] | None = None
        self.cached_tokens: int | None = None  # cached tokens of the prompts; None: not reported
        self.open = len(self.choices)

    def external_id(self, choice: Choice) -> str:
        """vLLM's own id of one sequence, without its random tail."""
        prefix = f"{choice.index % self.request.n}_" if self.request.n > 1 else ""
        return prefix + (self.id if self.request.chat else f"{self.id}-{choice.index // self.request.n}")

    def _echoed(self, choice: Choice) -> str:
        """vLLM leaves the prompt's text out where token ids are wanted."""
        return decode(choice.prompt) if self.request.echo and not self.request.return_token_ids else ""

    def usage(self) -> dict[str, int]:
        """Token counts so far, over all choices."""
        prompt = sum(map(len, self.request.prompts))
        completion = sum(len(choice.ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    @abstractmethod
    def token(self, choice: Choice, token: int, ends: str | None) -> None:
        """A choice got a token."""

    @abstractmethod
    def recomputed(self, choice: Choice) -> None:
        """The recompute scheduler gave a choice up."""

    @abstractmethod
    def fail(self, message: str = INTERNAL) -> None:
        """The engine gave the request up."""


class JsonCall(Call):
    """Collects everything; `result` gets the reply's status and body."""

    def __init__(self, request: GenerationRequest, base_id: str) -> None:
        super().__init__(request, base_id)
        self.result: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def token(self, choice: Choice, token: int, ends: str | None) -> None:
        """Keep it."""
        choice.feed(token, ends)
        if choice.finish_reason:
            self._close()

    def recomputed(self, choice: Choice) -> None:
        """End the choice with the marker, which a non-streaming reply always shows."""
        choice.give_up()
        self._close()

    def fail(self, message: str = INTERNAL) -> None:
        """Answer 500."""
        if not self.result.done():
            self.result.set_result((500, error_body(message)))

    def _close(self) -> None:
        self.open -= 1
        if not self.open and not self.result.done():
            self.result.set_result((200, orjson.dumps(self._body())))

    def _body(self) -> dict[str, Any]:
        chat = self.request.chat
        head: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self.request.model,
            "choices": [self._chat_choice(c) if chat else self._text_choice(c) for c in self.choices],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": self.usage() | {"prompt_tokens_details": self._details(), "completion_tokens_details": None},
        }
        if chat:
            ids = list(self.request.prompts[0]) if self.request.return_token_ids else None
            prompt_logprobs = self._prompt_logprobs(self.choices[0])
            head |= {"prompt_logprobs": prompt_logprobs, "prompt_token_ids": ids, "prompt_text": None}
        return head | {
            "kv_transfer_params": self.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _details(self) -> dict[str, int] | None:
        return None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}

    def _text_choice(self, choice: Choice) -> dict[str, Any]:
        wants_ids = self.request.return_token_ids
        return {
            "index": choice.index,
            "text": self._echoed(choice) + ("" if self.request.echo_only else choice.text),
            "logprobs": self._logprobs(choice) if self.request.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.ids if wants_ids else None,
            "prompt_logprobs": self._prompt_logprobs(choice),
            "prompt_token_ids": list(choice.prompt) if wants_ids else None,
            "routed_experts": None,
        }

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        if not self.request.echo:
            return text_logprobs(choice.ids)
        logprobs = text_logprobs([*choice.prompt, *([] if self.request.echo_only else choice.ids)])
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None  # nothing comes before the first token
        return logprobs

    def _prompt_logprobs(self, choice: Choice) -> list[Any] | None:
        if self.request.prompt_logprobs is None:
            return None
        logprobs = [
            {str(token): {"logprob": LOGPROB, "rank": 1, "decoded_token": decode([token])}} for token in choice.prompt
        ]
        return [None, *logprobs[1:]]

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        if self.request.repeats:
            message["content"] = self.request.repeats + choice.text
        elif choice.plan is not None:
            message |= {"content": choice.texts.get(Part.CONTENT), "reasoning": choice.texts.get(Part.REASONING)}
            if Part.CALL in choice.texts:
                calls = choice.calls(choice.texts[Part.CALL], first=True)
                message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.ids) if self.request.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.ids if self.request.return_token_ids else None,
            "routed_experts": None,
        }


class StreamCall(Call):
    """Writes every token as an SSE chunk the moment it exists."""

    def __init__(self, request: GenerationRequest, base_id: str, sse: SseWriter, interval: int) -> None:
        super().__init__(request, base_id)
        self.sse = sse
        self._interval = request.stream_interval or interval
        kind = "chat.completion.chunk" if request.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": request.model}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._failed = False

    def token(self, choice: Choice, token: int, ends: str | None) -> None:
        """Write it, or keep it until the stream interval is full; the first and the last token never wait."""
        if self.request.chat and not choice.ids:
            self._role(choice)
        choice.feed(token, ends)
        unsent = len(choice.ids) - choice.sent
        if unsent >= self._interval or choice.finish_reason or not choice.sent or choice.plan is not None:
            self.sse.event(self._chunk(choice))
            choice.sent, choice.text = len(choice.ids), ""
        if choice.finish_reason:
            self._close()

    def recomputed(self, choice: Choice) -> None:
        """Write the marker, unless nothing was sent yet: then vLLM drops the chunk and with it the finish reason."""
        if choice.ids:
            choice.give_up()
            self.sse.event(self._chunk(choice))
        elif self.request.chat:
            self._role(choice)
        self._close()

    def fail(self, message: str = INTERNAL) -> None:
        """Write the error event and `[DONE]`."""
        if not self._failed and self.open:
            self._failed = True
            error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
            self.sse.event(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
            self.sse.done()

    def _close(self) -> None:
        self.open -= 1
        if self.open or self._failed:
            return
        if self.request.include_usage:
            usage = orjson.dumps(self.usage() | self._cached())
            tail = b'],"usage":%b,"system_fingerprint":"%b"}\n\n' % (usage, FINGERPRINT.encode())
            self.sse.event(self._head + tail)
        self.sse.done()

    def _cached(self) -> dict[str, Any]:
        """The details of a stream's usage, which vLLM leaves out where nothing was cached."""
        return {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}} if self.cached_tokens else {}

    def _role(self, choice: Choice) -> None:
        ids = orjson.dumps(self.request.prompts[0]) if self.request.return_token_ids else b"null"
        body = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        tail = b',"prompt_token_ids":%b,"prompt_text":null}\n\n' % ids
        self.sse.event(self._head + body % choice.index + self._usage(choice) + tail)
        if self.request.repeats:
            body = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]'
            text = orjson.dumps(self.request.repeats)
            self.sse.event(self._head + body % (choice.index, text) + self._usage(choice) + b"}\n\n")

    def _chunk(self, choice: Choice) -> bytes:
        """The event with the tokens that are not sent yet."""
        request, ids = self.request, choice.ids[choice.sent :]
        finish = b'"%b"' % choice.finish_reason.encode() if choice.finish_reason else b"null"
        token_ids = orjson.dumps(ids) if request.return_token_ids else b"null"
        made = self._chat_part if request.chat else self._text_part
        tail = b"}\n\n"
        if choice.finish_reason and not request.include_usage:
            tail = b',"system_fingerprint":"%b"}\n\n' % FINGERPRINT.encode()
        return self._head + made(choice, ids, finish, token_ids) + self._usage(choice) + tail

    def _chat_part(self, choice: Choice, ids: list[int], finish: bytes, token_ids: bytes) -> bytes:
        logprobs = orjson.dumps(chat_logprobs(ids)) if self.request.logprobs is not None else b"null"
        stop = b',"stop_reason":' + orjson.dumps(choice.stop_reason) if choice.finish_reason else b""
        delta = orjson.dumps(choice.delta())
        body = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b,"token_ids":%b}]'
        return body % (choice.index, delta, logprobs, finish, stop, token_ids)

    def _text_part(self, choice: Choice, ids: list[int], finish: bytes, token_ids: bytes) -> bytes:
        request = self.request
        logprobs = b"null"
        if request.logprobs is not None:
            token_logprobs = text_logprobs(ids, choice.offset)
            logprobs = orjson.dumps(token_logprobs)
            choice.offset += sum(map(len, token_logprobs["tokens"]))
        prompt = orjson.dumps(choice.prompt) if request.return_token_ids and not choice.sent else b"null"
        shown = "" if request.echo_only else choice.text
        if not choice.sent:
            shown = self._echoed(choice) + shown
        body = (
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b,'
            b'"prompt_token_ids":%b,"token_ids":%b}]'
        )
        text, stop = orjson.dumps(shown), orjson.dumps(choice.stop_reason)
        return body % (choice.index, text, logprobs, finish, stop, prompt, token_ids)

    def _usage(self, choice: Choice) -> bytes:
        if not self.request.continuous_usage:
            return b""
        prompt, completion = len(choice.prompt), len(choice.ids)
        details = b',"completion_tokens_details":null' if self.request.chat else b""
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}' % (
            prompt,
            prompt + completion,
            completion,
            details,
        )


def text_logprobs(ids: list[int], start: int = 0) -> dict[str, Any]:
    """Minimal `logprobs` of completions, whose first token begins at character `start` of the answer."""
    tokens = [decode([token]) for token in ids]
    offsets = [start + sum(map(len, tokens[:index])) for index in range(len(tokens))]
    return {
        "text_offset": offsets,
        "token_logprobs": [LOGPROB] * len(ids),
        "tokens": tokens,
        "top_logprobs": [{token: LOGPROB} for token in tokens],
    }


def chat_logprobs(ids: list[int]) -> dict[str, Any]:
    """Minimal `logprobs` of chat."""
    content = []
    for token in ids:
        entry = {"token": decode([token]), "logprob": LOGPROB, "bytes": list(TOKEN_BYTES[token])}
        content.append(entry | {"top_logprobs": [entry]})
    return {"content": content}
