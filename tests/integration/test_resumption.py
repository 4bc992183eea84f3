"""Answers that are cut off: continued where token ids suffice, never continued where they do not."""

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from balanceroute.emulator import ClusterShape
from balanceroute.engine.tokens import continuation, decode
from tests.integration.router import Router, running
from tests.integration.test_proxy_answers import PROMPT, chat, completion, events

pytestmark = pytest.mark.anyio

PAIR = ClusterShape(prefillers=2, decoders=2, max_num_seqs=8, time_scale=0.02)
QUICK = {"retry": {"base_delay_s": 0.001, "max_delay_s": 0.01}}
JSON = {"response_format": {"type": "json_object"}, "ignore_eos": False}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": False}
FORGETFUL = {"chat_template_kwargs": {"enable_thinking": True, "parser_forgets": True}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}], "ignore_eos": False}


async def cut_everywhere(router: Router, after: int, kind: str = "recompute") -> None:
    """The next answer is cut off after so many tokens, once, wherever it runs."""
    for worker in router.cluster.decode:
        worker.faults.clear()
    await router.cluster.inject(router.cluster.decode[0].name, kind, after_events=after)
    await router.cluster.inject(router.cluster.decode[1].name, kind, after_events=after)


async def ask(router: Router, body: Mapping[str, Any], url: str = "") -> "Answer":
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    text = b""
    async with router.client.stream("POST", url + route, json=body) as reply:
        try:
            async for piece in reply.aiter_raw():
                text += piece
        except httpx.RemoteProtocolError:  # the unclean end after an error event
            assert b'{"error"' in text
    return Answer(reply.status_code, text.decode(), bool(body.get("stream")))


class Answer:
    """What a client makes of a reply: what it says, and whether it says that it is complete."""

    def __init__(self, status: int, text: str, stream: bool) -> None:
        self.status = status
        self.texts: dict[str, str] = {"content": "", "reasoning": "", "arguments": ""}
        self.finish: str | None = None
        self.error: str | None = None
        self.done = not stream
        for part in events(text) if stream and status == 200 else [json.loads(text)]:
            if part == "[DONE]":
                self.done = True
            elif "error" in part:
                self.error = part["error"]["message"]
            else:
                for choice in part["choices"]:
                    self._add(choice)

    def _add(self, choice: dict[str, Any]) -> None:
        self.finish = choice.get("finish_reason") or self.finish
        contents = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        self.texts["content"] += contents.get("content") or ""
        self.texts["reasoning"] += contents.get("reasoning") or ""
        for call in contents.get("tool_calls") or ():
            assert call.get("index", 0) == 0
            self.texts["arguments"] += call["function"].get("arguments") or ""

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.finish is not None and self.error is None and self.done


async def plain(router: Router, body: Mapping[str, Any]) -> Answer:
    """What one undisturbed server says."""
    return await ask(router, body, router.cluster.prefill_urls[0])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("a grammar", JSON),
        ("a named tool", TOOLS | {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
        ("a required tool", TOOLS | {"tool_choice": "required"}),
    ],
    ids=["grammar", "named", "required"],
)
@pytest.mark.parametrize("cut", ["recompute", "reset"])
async def test_a_grammar_that_has_begun_is_not_resumed(name: str, fields: dict[str, Any], cut: str) -> None:
    async with running(PAIR, **QUICK) as router:
        body = chat(max_tokens=200, **fields)
        whole = await plain(router, body)
        json.loads(whole.texts["arguments"] or whole.texts["content"])
        await cut_everywhere(router, 9, cut)
        streamed = await ask(router, body | {"stream": True})
        assert streamed.status == 200 and not streamed.complete and not streamed.done
        assert "cut off" in str(streamed.error)
        await cut_everywhere(router, 9, cut)
        collected = await ask(router, body)
        assert collected.complete and collected.texts == whole.texts
        resumes = router.app.services.metrics.resumes
        assert resumes.value("ended") == 1 and resumes.value("restarted") >= 1
        await router.settled()


async def test_an_error_of_the_engine_within_a_grammar_reaches_the_client_in_its_own_words() -> None:
    async with running(PAIR, **QUICK) as router:
        body = chat(max_tokens=200, stream=True, **JSON)
        await cut_everywhere(router, 9, "error_event")
        answer = await ask(router, body)
        assert answer.error == "Injected error" and answer.texts["content"] and not answer.done
        assert router.app.services.metrics.resumes.value("ended") == 1
        await router.settled()


async def test_an_answer_that_restarts_is_known_by_its_own_prompt_and_length() -> None:
    async with running(PAIR, **QUICK) as router:
        body = chat(max_tokens=200, **JSON)
        await ask(router, body)
        means = router.app.services.ledger.scheduler.snapshot.means
        alone = (means.answer_tokens, means.log_prompt)
        await cut_everywhere(router, 9)
        await ask(router, body)
        assert router.app.services.metrics.resumes.value("restarted") == 1
        assert (means.answers, means.answer_tokens, means.log_prompt) == (2, *map(pytest.approx, alone))


async def test_a_grammar_without_a_token_sent_restarts_unnoticed() -> None:
    async with running(PAIR, **QUICK) as router:
        body = chat(max_tokens=200, stream=True, **JSON)
        await cut_everywhere(router, 0)
        answer = await ask(router, body)
        assert answer.complete and answer.texts == (await plain(router, body)).texts


async def test_a_chat_cut_off_in_its_reasoning_resumes_its_reasoning_also_before_a_grammar() -> None:
    async with running(PAIR, **QUICK) as router:
        for fields in (THINKING, THINKING | JSON):
            body = chat(max_tokens=200 if "response_format" in fields else 40, stream=True, **fields)
            await cut_everywhere(router, 5)
            answer = await ask(router, body)
            assert answer.complete and answer.texts == (await plain(router, body)).texts
            assert answer.texts["reasoning"] and answer.texts["content"]
        await router.settled()


async def test_reasoning_never_becomes_content_when_a_reasoning_parser_loses_its_state() -> None:
    async with running(PAIR, **QUICK) as router:
        body = chat(max_tokens=40, **FORGETFUL)
        whole = await plain(router, body)
        await cut_everywhere(router, 5)
        streamed = await ask(router, body | {"stream": True})
        assert not streamed.complete and "reasoning parser" in str(streamed.error)
        assert streamed.texts["content"] == "" and whole.texts["reasoning"].startswith(streamed.texts["reasoning"])
        await cut_everywhere(router, 20)  # past its reasoning the parser has nothing to forget
        streamed = await ask(router, body | {"stream": True})
        assert streamed.complete and streamed.texts == whole.texts
        await router.settled()


async def test_a_begun_tool_call_is_not_resumed_but_text_before_it_is() -> None:
    async with running(PAIR, **QUICK) as router:
        body = chat(max_tokens=200, stream=True, **TOOLS)
        whole = await plain(router, body)
        assert whole.finish == "tool_calls" and whole.texts["content"]
        await cut_everywhere(router, 4)
        before = await ask(router, body)
        assert before.complete and before.texts == whole.texts and before.finish == "tool_calls"
        await cut_everywhere(router, 20)
        within = await ask(router, body)
        assert not within.complete and "tool call" in str(within.error)
        await router.settled()


async def test_an_answer_that_is_cut_within_a_stop_string_ends_with_an_error_and_others_go_on() -> None:
    text = decode(continuation(PROMPT, 40))
    async with running(PAIR, **QUICK) as router:
        for after in range(3, 12):
            at = len(decode(continuation(PROMPT, after)))
            stop = text[at - 3 : at + 3]
            body = completion(stream=True, stop=[stop], max_tokens=40)
            await cut_everywhere(router, after)
            answer = await ask(router, body)
            assert not answer.complete and "stop is state" in str(answer.error)
        body = completion(stream=True, stop=["nowhere to be found"], max_tokens=40)
        await cut_everywhere(router, 9)
        assert (await ask(router, body)).texts["content"] == text
        await cut_everywhere(router, 9, "reset")  # what the worker held back is gone
        assert not (await ask(router, body)).complete
        await cut_everywhere(router, 9, "reset")
        assert (await ask(router, body | {"stop": ["\0"]})).texts["content"] == text  # nothing is held back for it
        await router.settled()


@pytest.mark.parametrize(
    "fields", [{"presence_penalty": 0.1}, {"frequency_penalty": 1}, {"seed": 7}, {"bad_words": ["x"]}]
)
async def test_a_small_penalty_does_not_prevent_a_resume(fields: dict[str, Any]) -> None:
    async with running(PAIR, **QUICK) as router:
        for cut in ("recompute", "reset"):
            await cut_everywhere(router, 9, cut)
            answer = await ask(router, completion(stream=True, max_tokens=60, **fields))
            assert answer.complete and answer.texts["content"] == decode(continuation(PROMPT, 60))
        assert router.app.services.metrics.resumes.value("approximate") >= 2
        await router.settled()


async def test_offsets_and_logprobs_continue_over_a_cut() -> None:
    async with running(PAIR, **QUICK) as router:
        body = completion(logprobs=1, max_tokens=90)
        whole = (await router.client.post("/v1/completions", json=body)).json()["choices"][0]
        await cut_everywhere(router, 31)
        cut = (await router.client.post("/v1/completions", json=body)).json()["choices"][0]
        assert router.app.services.metrics.resumes.value("adjusted") >= 1
        assert cut == whole
        await router.settled()


@pytest.mark.parametrize("cut", ["reset", "recompute"])
async def test_an_answer_cut_off_within_a_character_resumes_before_it_and_shows_no_prompt(cut: str) -> None:
    """An event of several tokens has text, and may end with half of a character all the same."""
    async with running(PAIR, **QUICK) as router:
        for asked in (completion(max_tokens=30, stream=True), chat(max_tokens=30, stream=True)):
            body = asked | {"stream_interval": 3}
            whole = await plain(router, body)
            for after in range(1, 10):
                await cut_everywhere(router, after, cut)
                answer = await ask(router, body)
                assert answer.complete and answer.texts == whole.texts, f"cut off after {after} events"
        await router.settled()


@pytest.mark.parametrize("options", [{"return_token_ids": True}, {"logprobs": 1}], ids=["ids", "logprobs"])
async def test_a_stream_cut_within_a_character_of_sent_tokens_ends_and_an_unsent_answer_restarts(
    options: dict[str, Any],
) -> None:
    async with running(PAIR, **QUICK) as router:
        body, ended = completion(max_tokens=70, **options), 0
        whole = await plain(router, body)
        for after in range(1, 10):
            await cut_everywhere(router, after, "reset")
            answer = await ask(router, body | {"stream": True})
            assert answer.texts == whole.texts if answer.complete else "half of a character" in str(answer.error)
            ended += not answer.complete
            await cut_everywhere(router, after, "reset")
            assert (await ask(router, body)).texts == whole.texts
        assert 0 < ended < 5
        await router.settled()


def a_case(n: int) -> dict[str, Any]:
    """The n-th of all kinds of requests."""
    kinds: list[dict[str, Any]] = [
        completion([*PROMPT, 300 + n % 50], max_tokens=24),
        completion([*PROMPT, 300 + n % 50], max_tokens=70, presence_penalty=0.5, seed=3),
        completion([*PROMPT, 300 + n % 50], max_tokens=30, stop=["w1", "w2 "]),
        completion(f"say {n % 50}", max_tokens=120, structured_outputs={"json": {}}, ignore_eos=False),
        chat(f"say {n % 50}", max_tokens=120, **JSON),
        chat(f"say {n % 50}", max_tokens=40, **THINKING),
        chat(f"say {n % 50}", max_tokens=120, **THINKING, **{k: v for k, v in JSON.items() if k != "ignore_eos"}),
        chat(f"say {n % 50}", max_tokens=30, **FORGETFUL),
        chat(f"say {n % 50}", max_tokens=120, tool_choice="required", **TOOLS),
        chat(f"say {n % 50}", max_tokens=120, **TOOLS),
    ]
    return kinds[n % len(kinds)] | {"stream": n // len(kinds) % 3 > 0}


async def test_no_invalid_answer_among_150_recomputed_requests_ends_as_complete() -> None:
    shape = ClusterShape(prefillers=2, decoders=4, max_num_seqs=16, time_scale=0.002)
    async with running(shape, **QUICK) as router:
        expected: dict[str, Answer] = {}
        draw = random.Random(11)
        turns = asyncio.Semaphore(32)
        wrong, outcomes = [], {"complete": 0, "error": 0}

        async def one(n: int) -> None:
            body = a_case(n)
            async with turns:
                worker = draw.choice(router.cluster.decode).name
                await router.cluster.inject(worker, "recompute", after_events=draw.randrange(1, 45))
                answer = await ask(router, body)
            key = json.dumps(body, sort_keys=True)
            if key not in expected:
                expected[key] = await plain(router, body)
            outcomes["complete" if answer.complete else "error"] += 1
            if answer.complete and (answer.texts, answer.finish) != (expected[key].texts, expected[key].finish):
                wrong.append((n, body, answer.texts, expected[key].texts))
            if not answer.complete:
                assert answer.error, "neither complete nor an error"

        await asyncio.gather(*map(one, range(150)))
        assert wrong == []
        resumes = router.app.services.metrics.resumes
        assert outcomes["complete"] > 90 and outcomes["error"] > 0
        assert resumes.value("adjusted") > 12 and resumes.value("approximate") > 5 and resumes.value("restarted") > 10
        assert router.cluster.violations() == {}
        await router.settled()
