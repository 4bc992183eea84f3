"""Requests with their right answers, drawn from a seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from balanceroute.emulator.requests import render_chat
from balanceroute.emulator.structure import Part, Plan, Structure
from balanceroute.engine.tokens import (
    EOS_ID,
    FIRST_TRIPLE_ID,
    FIRST_WORD_ID,
    OutputLengths,
    TokenStream,
    continuation,
    decode,
    encode,
    plan_length,
)

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
COUNTED = (COMPLETIONS, CHAT, MESSAGES)
FUNCTION = "look_up"
DEFAULT_COMPLETION_LIMIT = 16  # of vLLM
_WORDS = "the load of every worker is kept level so that no step waits for the fullest one of them all".split()


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the client does besides waiting: leaves after so many seconds or events, or stops reading for a while."""

    leave_after_s: float | None = None
    leave_after_events: int | None = None
    reset: bool = False  # leaves with RST instead of FIN
    half_sent: bool = False  # leaves in the middle of its own request
    pause_s: float = 0.0  # reads nothing for so long after the first event

    @property
    def leaves(self) -> bool:
        """Whether it may be gone before its answer is whole."""
        return self.half_sent or self.leave_after_s is not None or self.leave_after_events is not None


PATIENT = Behaviour()


@dataclass(frozen=True, slots=True)
class Right:
    """One choice of the right answer."""

    ids: tuple[int, ...]
    finish_reason: str
    prompt: tuple[int, ...] = ()
    shown: str | None = None  # its text, if that is not the text of the ids
    stop: str | None = None  # the stop string that ends it
    reasoning: str = ""
    arguments: str = ""  # of its tool call

    @property
    def text(self) -> str:
        """Its text."""
        return decode(self.ids) if self.shown is None else self.shown

    def until(self, stop: str) -> "Right":
        """The same, ended by a stop string if it is met."""
        for count in range(1, len(self.ids) + 1):
            place = decode(self.ids[:count]).find(stop)
            if place >= 0:
                shown = decode(self.ids[:count])[:place]
                return replace(self, ids=self.ids[:count], finish_reason="stop", shown=shown, stop=stop)
        return self


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and its right answer; `malformed` says what is wrong with a request that must be refused."""

    number: int
    path: str
    body: bytes
    timeout_s: float
    behaviour: Behaviour = PATIENT
    stream: bool = False
    prompt_tokens: int = 0
    choices: tuple[Right, ...] = ()
    want_ids: bool = False
    want_usage: bool = False
    want_logprobs: bool = False
    want_prompt_logprobs: bool = False
    key: str = ""
    malformed: str = ""
    method: str = "POST"
    timeout_header: str = ""  # in place of timeout_s, to be wrong on purpose

    @property
    def id(self) -> str:
        """Its X-Request-Id."""
        return f"chaos-{self.number}"

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return self.path == CHAT

    @property
    def tokens(self) -> int:
        """Tokens of the right answer, over all choices."""
        return sum(len(choice.ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares and sizes of the requests; sizes are inclusive ranges in tokens."""

    prompt_tokens: tuple[int, int] = (4, 160)
    long_prompt_tokens: tuple[int, int] = (200, 500)
    output_tokens: tuple[int, int] = (1, 120)
    timeout_s: tuple[float, float] = (20.0, 30.0)
    long_share: float = 0.1
    chat_share: float = 0.4
    stream_share: float = 0.65
    leave_share: float = 0.2
    malformed_share: float = 0.01
    hurried_share: float = 0.03  # with a deadline that the answer may miss
    pausing_share: float = 0.02
    several_share: float = 0.08  # with n > 1, or several prompts
    message_share: float = 0.08
    tools_share: float = 0.06  # of the chats
    scored_share: float = 0.03  # of the completions
    keys: tuple[str, ...] = ("",)


class Asker:
    """Draws requests; the same seed gives the same ones in the same order."""

    def __init__(self, seed: int, mix: Mix, lengths: OutputLengths) -> None:
        self._random = random.Random(seed)
        self._mix, self._lengths = mix, lengths
        self._count = 0

    def next(self) -> Ask:
        """The next request."""
        self._count += 1
        draw = self._random
        if draw.random() < self._mix.malformed_share:
            ask = self._malformed()
        elif draw.random() < self._mix.message_share:
            ask = self._message()
        else:
            ask = self._good()
        return replace(ask, key=draw.choice(self._mix.keys))

    def _good(self) -> Ask:
        draw, mix = self._random, self._mix
        chat = draw.random() < mix.chat_share
        if chat and draw.random() < mix.tools_share:
            return self._structured()
        if not chat and draw.random() < mix.scored_share:
            return self._scored()
        return self._generated(chat)

    def _generated(self, chat: bool) -> Ask:
        """Answers of the usual kind."""
        draw, mix = self._random, self._mix
        stream = draw.random() < mix.stream_share
        several = draw.random() < mix.several_share
        body, prompts = self._chat() if chat else self._completion(draw.randint(1, 3) if several else 0)
        n = draw.randint(1, 3) if several else 1
        if n > 1:
            body["n"] = n
        body["model"] = "emulated"
        ignore_eos = draw.random() < 0.3
        limit = self._limit(body, chat, ignore_eos)
        min_tokens = self._wish(body, chat, stream, limit, ignore_eos)
        choices = []
        for prompt in prompts:
            ids = continuation(prompt, limit, lengths=self._lengths, ignore_eos=ignore_eos, min_tokens=min_tokens)
            choices += [_right(ids, prompt)] * n
        if "stop" not in body and min_tokens == 0 and draw.random() < 0.08:
            body["stop"] = [self._stop(choices[0]), "</s>"]
            choices = [choice.until(body["stop"][0]) for choice in choices]
        told = {"return_token_ids", "logprobs"} & body.keys()
        if not chat and draw.random() < 0.1 and not told and not isinstance(_first(body["prompt"]), int):
            body["echo"] = True
            choices = [replace(choice, shown=decode(choice.prompt) + choice.text) for choice in choices]
        if not stream and draw.random() < 0.06:
            body["prompt_logprobs"] = 1
        return self._ask(
            CHAT if chat else COMPLETIONS,
            body,
            choices,
            prompt_tokens=sum(map(len, prompts)),
            want_ids="return_token_ids" in body,
            want_usage="stream_options" in body,
            want_logprobs="logprobs" in body,
            want_prompt_logprobs="prompt_logprobs" in body,
        )

    def _wish(self, body: dict[str, Any], chat: bool, stream: bool, limit: int, ignore_eos: bool) -> int:
        """Put rarer fields into a body; returns its `min_tokens`."""
        draw, min_tokens = self._random, 0
        if draw.random() < 0.1:
            min_tokens = body["min_tokens"] = draw.randint(0, min(8, limit))
        if ignore_eos:
            body["ignore_eos"] = True
        if draw.random() < 0.3:
            body["return_token_ids"] = True
        if draw.random() < 0.08:
            body["logprobs"] = True if chat else 1
        if draw.random() < 0.05:
            body["stop"] = draw.choice(["</s>", ["###", "</s>"]])  # never met, but text is held back for it
        if draw.random() < 0.1:
            body["priority"] = draw.randint(-3, 5)
        if draw.random() < 0.3:
            body |= {"temperature": 0.0, "seed": draw.randint(0, 2**31), "user": f"user-{draw.randint(0, 9)}"}
        want_usage = stream and draw.random() < 0.4
        if stream:
            body["stream"] = True
        if want_usage:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": draw.random() < 0.3}
        return min_tokens

    def _message(self) -> Ask:
        """In Anthropic's API."""
        draw = self._random
        body, [prompt] = self._chat()
        body |= {"model": "emulated", "max_tokens": draw.randint(*self._mix.output_tokens)}
        right = _right(continuation(prompt, body["max_tokens"], lengths=self._lengths, ignore_eos=False), prompt)
        if draw.random() < 0.15:
            body["stop_sequences"] = [self._stop(right)]
            right = right.until(body["stop_sequences"][0])
        if draw.random() < self._mix.stream_share:
            body["stream"] = True
        return self._ask(MESSAGES, body, [right])

    def _structured(self) -> Ask:
        """A chat whose answer has a tool call, reasoning, or both."""
        draw = self._random
        body, [prompt] = self._chat()
        calls, thinks = draw.choice([(True, False), (False, True), (True, True)])
        leads = calls and draw.random() < 0.5
        body |= {"model": "emulated", "max_tokens": draw.randint(*self._mix.output_tokens)}
        if calls:
            function = {"name": FUNCTION, "parameters": {"type": "object"}}
            choice = (
                "auto" if leads else draw.choice(["required", {"type": "function", "function": {"name": FUNCTION}}])
            )
            body |= {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
        if thinks:
            body["chat_template_kwargs"] = {"enable_thinking": True}
        if draw.random() < self._mix.stream_share:
            body["stream"] = True
        structure = Structure(thinks, calls=FUNCTION if calls else None, leads=leads)
        return self._ask(CHAT, body, [_structured(Plan(structure, prompt), prompt, body["max_tokens"], self._lengths)])

    def _scored(self) -> Ask:
        """A prompt that is only read."""
        body, [prompt] = self._completion(0)
        body |= {"model": "emulated", "max_tokens": 0, "echo": True}
        right = _right(continuation(prompt, 1, lengths=self._lengths, ignore_eos=False), prompt)
        return self._ask(COMPLETIONS, body, [replace(right, shown=decode(prompt))])

    def _ask(self, path: str, body: dict[str, Any], choices: list[Right], **wants: Any) -> Ask:
        draw, mix, stream = self._random, self._mix, "stream" in body
        low, high = (0.2, 2.0) if draw.random() < mix.hurried_share else mix.timeout_s
        return Ask(
            number=self._count,
            path=path,
            body=orjson.dumps(body),
            timeout_s=round(draw.uniform(low, high), 2),
            behaviour=self._behaviour(stream, len(choices[0].ids)),
            stream=stream,
            choices=tuple(choices),
            **{"prompt_tokens": len(choices[0].prompt)} | wants,
        )

    def _stop(self, right: Right) -> str:
        """A part of the answer: within a token, or over the border of two."""
        text = right.text
        place = self._random.randrange(max(1, len(text) - 4))
        return text[place : place + self._random.randint(4, 9)].strip("\ufffd") or "</s>"

    def _size(self) -> int:
        draw, mix = self._random, self._mix
        return draw.randint(*(mix.long_prompt_tokens if draw.random() < mix.long_share else mix.prompt_tokens))

    def _words(self, tokens: int) -> str:
        text = " ".join(self._random.choices(_WORDS, k=max(1, tokens * 3 // 4)))
        return f"{self._count} {text}"  # the number makes each prompt, hence each answer, the only one of its kind

    def _completion(self, several: int) -> tuple[dict[str, Any], list[list[int]]]:
        """A body with one prompt, or with a list of `several`, and the ids of each."""
        draw, sizes = self._random, [self._size() for _ in range(several or 1)]
        if draw.random() < 0.5:
            ids = [[draw.randrange(FIRST_TRIPLE_ID, FIRST_WORD_ID) for _ in range(size)] for size in sizes]
            return {"prompt": ids if several else ids[0]}, ids
        texts = [self._words(size) for size in sizes]
        return {"prompt": texts if several else texts[0]}, [encode(text) for text in texts]

    def _chat(self) -> tuple[dict[str, Any], list[list[int]]]:
        turns = self._random.choice([1, 1, 3])
        roles = ("user", "assistant")
        messages: list[dict[str, Any]] = [
            {"role": roles[turn % 2], "content": self._words(self._size() // turns)} for turn in range(turns)
        ]
        if self._random.random() < 0.2:
            messages[-1]["content"] = [{"type": "text", "text": messages[-1]["content"]}]
        return {"messages": messages}, [render_chat(messages)]

    def _limit(self, body: dict[str, Any], chat: bool, ignore_eos: bool) -> int:
        """Set a limit or leave it to the default; returns the one that applies."""
        draw = self._random
        limit = draw.randint(*self._mix.output_tokens)
        if draw.random() < 0.1 and not (chat and ignore_eos):
            return 1 << 20 if chat else DEFAULT_COMPLETION_LIMIT  # chat: the model ends by itself, far below
        if chat and draw.random() < 0.5:
            body["max_completion_tokens"] = limit
            if draw.random() < 0.2:
                body["max_tokens"] = limit + 7  # the other one wins
        else:
            body["max_tokens"] = limit
        return limit

    def _behaviour(self, stream: bool, tokens: int) -> Behaviour:
        draw, mix = self._random, self._mix
        if draw.random() < mix.leave_share:
            reset = draw.random() < 0.3
            kind = draw.random()
            if kind < 0.1:
                return Behaviour(half_sent=True, reset=reset)
            if kind < 0.5 and stream:
                return Behaviour(leave_after_events=draw.randint(1, max(1, tokens)), reset=reset)
            return Behaviour(leave_after_s=draw.choice([0.0, 0.02, 0.2, 1.0, 3.0]) * draw.random(), reset=reset)
        if stream and draw.random() < mix.pausing_share:
            return Behaviour(pause_s=draw.uniform(0.5, 4.0))
        return PATIENT

    def _malformed(self) -> Ask:
        name = self._random.choice(list(_MALFORMED))
        path, body = _MALFORMED[name]()
        method = "GET" if name == "wrong method" else "POST"
        header = "soon" if name == "wrong timeout" else ""
        return Ask(self._count, path, body, 10.0, malformed=name, method=method, timeout_header=header)


def _right(ids: Sequence[int], prompt: Sequence[int]) -> Right:
    return Right(tuple(ids), "stop" if ids[-1] == EOS_ID else "length", tuple(prompt))


def _structured(plan: Plan, prompt: Sequence[int], limit: int, lengths: OutputLengths) -> Right:
    """The answer of a plan; one without a call has the model's own length."""
    natural = TokenStream(prompt, lengths).remaining if plan.length is None else plan.length
    count, ends = plan_length(natural, limit, ignore_eos=False, min_tokens=0)
    stream = plan.stream()
    ids = [stream.next(eos=ends and index == count - 1) for index in range(count)]
    parts, whole = dict.fromkeys(Part, ""), ""
    for place in range(count):  # a character belongs to the part that it ends in
        text = decode(ids[: place + 1])
        shown = text if place == count - 1 else text.rstrip("\ufffd")
        parts[plan.part(place)] += shown[len(whole) :]
        whole = shown
    called = ends and bool(parts[Part.CALL])
    return Right(
        tuple(ids),
        "tool_calls" if called else "stop" if ends else "length",
        tuple(prompt),
        shown=parts[Part.CONTENT],
        reasoning=parts[Part.REASONING],
        arguments=parts[Part.CALL],
    )


def _first(prompt: Any) -> Any:
    """The first of a list of prompts or ids, which may be a list of ids."""
    while isinstance(prompt, list):
        prompt = prompt[0]
    return prompt


def _fields(path: str = COMPLETIONS, **fields: Any) -> Callable[[], tuple[str, bytes]]:
    whole: dict[str, Any] = {"prompt": "never answered", "max_tokens": 4}
    if path == CHAT:
        whole = {"messages": [{"role": "user", "content": "never answered"}], "max_tokens": 4}
    return lambda: (path, orjson.dumps(whole | fields))


_MALFORMED: dict[str, Callable[[], tuple[str, bytes]]] = {
    "empty body": lambda: (COMPLETIONS, b""),
    "half a body": lambda: (CHAT, b'{"messages": [{"role": "user", "con'),
    "not utf-8": lambda: (COMPLETIONS, b'{"prompt": "\xff\xfe"}'),
    "no object": lambda: (CHAT, b"[1, 2]"),
    "deep nesting": lambda: (COMPLETIONS, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "no prompt": _fields(prompt=None),
    "prompt of floats": _fields(prompt=[1.5, 2.5]),
    "messages no list": _fields(CHAT, messages="hello"),
    "no messages": _fields(CHAT, messages=[]),
    "limit of zero": _fields(max_tokens=0),
    "limit no number": _fields(CHAT, max_tokens="many"),
    "least above most": _fields(min_tokens=9),
    "stream no flag": _fields(stream="sometimes"),
    "options without stream": _fields(stream_options={"include_usage": True}),
    "no choices": _fields(n=0),
    "beam search": _fields(use_beam_search=True),
    "unknown model": _fields(model="another"),
    "prompt too long": _fields(prompt=[300] * 50_000),
    "no such token": _fields(prompt=[300, 10**6]),
    "cold": _fields(CHAT, temperature=-1.0),
    "wrong timeout": _fields(),
    "wrong method": lambda: (COMPLETIONS, b""),
    "wrong path": lambda: ("/v1/nothing", b"{}"),
}
