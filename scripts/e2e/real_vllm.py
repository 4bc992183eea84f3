"""balanceroute in front of real vLLM: one prefiller, two decoders, NIXL over loopback, on CPU.

Starts the three servers and the router, then runs the checks below one by one and prints a line for each. Everything
listens on 127.0.0.1 and is ended by pid. Not part of the test suite: it needs vLLM and takes minutes.

    greedy          completions through the router have the token ids that one server gives for the same request
    chat            chat streams word for word what the non-streamed answer says
    bench           `vllm bench serve` sends 200 requests without an error
    cancel          clients that leave in every phase: the prefiller's KV is free within seconds, not after its lease
    params          no kv_transfer_params is used twice: as many pulls as prefills
    features        every feature of scripts/e2e/features.py beside one plain server: equal, or listed with the reason
    messages        Anthropic's client gets the messages that one server's own /v1/messages gives
    prompt_logprobs prompts' logprobs reach no decoder: both live on after 40 such requests at once
    kill_decoder    kill -9 of a decoder mid-stream: right tokens; every stream complete, but one cut within a character
    kill_prefiller  kill -9 of the prefiller after a probe: a clear error or a whole answer, and nothing is held
    freeze_decoder  SIGSTOP of a decoder with 8 streams and 8 fresh requests: all complete with the right tokens
    grammar         kill -9 of a decoder under answers with a grammar: valid, or an error event that says so
    wrong_connector a router that takes the pair for mooncake_v1: it serves, and its log and /ready say what is wrong
    no_log_stats    a prefiller with --disable-log-stats: the router serves, and /ready says "degraded"
    direct_clients  two clients go to one decoder directly: the router sees it, and sends its own to the other
    kill_brain      kill -9 of the brain of 2 relays mid-stream: every stream complete, with the right tokens
    kill_router     kill -9 of a router of 2 relays whose prompts wait: the next start has the prefiller's KV freed
    take_over       `serve --take-over` mid-stream: every stream complete, with the right tokens, and no request refused
    prefix_affinity 20 conversations of 6 turns on two prefillers find nearly as much cached as on one; equal answers
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from scripts.e2e.features import DIFFERS, differences, features
from scripts.e2e.harness import wait_for
from scripts.e2e.vllm_asks import (
    a_body,
    completion_ids,
    metric,
    nothing_held,
    outcome_of,
    ready,
    router_state,
    streamed_ids,
)
from scripts.e2e.vllm_faults import (
    check_freeze_decoder,
    check_grammar,
    check_kill_brain,
    check_kill_decoder,
    check_kill_prefiller,
    check_kill_router,
    check_take_over,
)
from scripts.e2e.vllm_servers import (
    BASE,
    DECODE,
    LEASE_S,
    MODEL,
    PREFILL,
    ROUTER,
    SECOND_PREFILL,
    Servers,
)


def check_greedy(servers: Servers) -> str:
    """Same ids as one server's own, streamed and not."""
    for seed in range(12):
        body = a_body(seed, max_tokens=10 + 7 * seed)
        own = completion_ids(DECODE[0], body)
        assert completion_ids(ROUTER, body) == own, f"seed {seed}: other tokens than one server's own"
        assert streamed_ids(body) == (own, "length"), f"seed {seed}: the stream has other tokens"
    return "12 prompts, streamed and not: the token ids are those of one server"


def check_chat(servers: Servers) -> str:
    """A chat stream says what the non-streamed answer says."""
    import openai  # here, as are the messages: a second of CPU each for whoever imports this module and needs neither

    client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", timeout=120)
    for seed in range(4):
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"tell me about {seed}"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        events = list(stream)
        text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        assert text == whole.choices[0].message.content, f"chat {seed}: stream and answer differ"
        assert events[-1].usage == whole.usage or events[-1].usage.total_tokens == whole.usage.total_tokens
    return "4 chats: stream and answer agree, usage too"


def check_bench(servers: Servers) -> str:
    """vLLM's own benchmark client."""
    venv, model = os.environ["VLLM_VENV"], os.environ["VLLM_MODEL"]
    command = [f"{venv}/bin/vllm", "bench", "serve", "--backend", "openai", "--base-url", BASE, "--model", MODEL]
    command += ["--tokenizer", model, "--dataset-name", "random", "--random-input-len", "100"]
    command += ["--random-output-len", "40", "--num-prompts", "200", "--request-rate", "20", "--ignore-eos"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    found = re.search(r"Successful requests:\s+(\d+)", result.stdout)
    assert found, f"vllm bench serve said: {(result.stdout + result.stderr)[-800:]}"
    assert int(found[1]) == 200, f"only {found[1]} of 200 succeeded"
    tpot = re.search(r"Median TPOT \(ms\):\s+(\S+)", result.stdout)
    return f"200 of 200 requests, median TPOT {tpot[1] if tpot else '?'} ms"


def check_cancel(servers: Servers) -> str:
    """Clients that leave after random times, from before the prefill to mid-stream."""
    rng = random.Random(5)
    # pairs that are still cold may have let some expire before: a first pull may outlast its lease on a busy machine
    expired = metric(PREFILL, "vllm:nixl_num_kv_expired_reqs_total")

    def leave(seed: int) -> None:
        timeout = httpx.Timeout(60, read=rng.choice([0.005, 0.02, 0.05, 0.1, 0.3, 1.0]))
        try:
            with httpx.stream(
                "POST",
                f"{BASE}/v1/completions",
                json=a_body(seed, max_tokens=1500, stream=True),
                timeout=timeout,
                trust_env=False,
            ) as reply:
                for index, _ in enumerate(reply.iter_lines()):
                    if index > rng.randrange(30):
                        return
        except httpx.TimeoutException:
            return

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(1000, 1100)))
    gone_s = wait_for("the router holds nothing", nothing_held, 20)
    limit_s = LEASE_S - 15
    free_s = wait_for("the prefiller's KV is free", lambda: metric(PREFILL, "vllm:kv_cache_usage_perc") == 0, limit_s)
    for port in DECODE:
        wait_for("decoders are empty", lambda port=port: metric(port, "vllm:num_requests_running") == 0, 10)  # type: ignore[misc]
    expired = metric(PREFILL, "vllm:nixl_num_kv_expired_reqs_total") - expired
    assert expired == 0, f"{expired:.0f} prefills were freed by their lease"
    freed = f"prefiller's KV free after {free_s:.1f} s more, 0 leases expired"
    return f"100 clients left: nothing held after {gone_s:.1f} s, {freed}"


def check_params(servers: Servers) -> str:
    """Pulls by the decoders against probes at the prefiller; one more of each where KV was pulled too late."""

    def counts() -> list[float]:
        finished = [metric(port, "vllm:request_success_total") for port in (PREFILL, *DECODE)]
        return [*finished, metric(ROUTER, "balanceroute_recomputes_total")]

    before = counts()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: completion_ids(ROUTER, a_body(seed)), range(2000, 2040)))
    probes, *decodes, again = (now - old for now, old in zip(counts(), before, strict=True))
    text = f"40 requests, {again:.0f} of them made again: {probes:.0f} probes and {sum(decodes):.0f} decodes"
    assert probes == sum(decodes) == 40 + again, text
    return text


def check_features(servers: Servers) -> str:
    """What clients may ask for, beside the same decoder asked directly."""
    cases, equal, different = features(), 0, []
    for name, route, body in cases:
        found = differences(BASE, f"http://127.0.0.1:{DECODE[0]}", route, body)
        if found and name not in DIFFERS:
            different.append(f"{name}: {found[:3]}")
            print(f"  differs: {different[-1]}", flush=True)
        equal += not found
    assert not different, f"{len(different)} of {len(cases)} differ:\n  " + "\n  ".join(different)
    return f"{equal} of {len(cases)} features equal, the other {len(cases) - equal} as listed"


def check_messages(servers: Servers) -> str:
    """Anthropic's client, sync and async, whole and streamed, with tools."""
    from scripts.e2e import messages

    return messages.compare(
        BASE, f"http://127.0.0.1:{DECODE[1]}", lambda: wait_for("the router holds nothing", nothing_held, 30)
    )


def check_prompt_logprobs(servers: Servers) -> str:
    """Requests that today's decoders die of if they are forwarded."""
    kinds = [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 1, "max_tokens": 0}]
    with ThreadPoolExecutor(8) as pool:
        bodies = [a_body(seed, max_tokens=8) | kinds[seed % 3] for seed in range(40)]
        replies = list(pool.map(lambda body: httpx.post(f"{BASE}/v1/completions", json=body, timeout=120), bodies))
    statuses = {reply.status_code for reply in replies}
    assert statuses == {200}, statuses
    for port in DECODE:
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    wait_for("the router holds nothing", nothing_held, 20)
    return "40 requests for their prompts' logprobs answered, both decoders alive"


def check_wrong_connector(servers: Servers) -> str:
    """The README's command without `connector: nixl`, over a pair that speaks it."""
    port = ROUTER + 1
    servers.start_router(port, connector="mooncake_v1")
    try:
        servers.wait_ready(port, 30)
        assert ready(port)["status"] == "ready"
        ids = [completion_ids(port, a_body(seed)) for seed in range(9000, 9004)]
        assert ids == [completion_ids(DECODE[1], a_body(seed)) for seed in range(9000, 9004)]
        body = ready(port)
        assert body["code"] == 200 and body["status"] == "degraded" and "set connector: nixl" in body["reasons"][0], (
            body
        )
        log = (servers.logs / f"{port}.log").read_text()
        processes = 1 + servers.relays  # with relays, one is the brain
        assert 1 <= log.count('"event":"degraded"') <= processes, "not one line per process in the log"
    finally:
        servers.kill(port)
    return f"4 requests served; /ready 200: {body['reasons'][0]}"


def check_no_log_stats(servers: Servers) -> str:
    """An engine that tells nothing of its KV use, as the example proxies never ask for it."""
    servers.kill(PREFILL)
    servers.restart(PREFILL, "--disable-log-stats")
    try:
        wait_for("requests work again", lambda: outcome_of(a_body(1)) == "complete", 120)
        body = ready(ROUTER)
        assert (body["code"], body["status"]) == (200, "degraded"), body
        with ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(lambda seed: outcome_of(a_body(seed)), range(9100, 9140)))
        assert set(outcomes) == {"complete"}, outcomes
    finally:
        servers.kill(PREFILL)
        servers.restart(PREFILL)
    wait_for("no longer degraded", lambda: ready(ROUTER)["status"] == "ready", 60)
    return f"40 requests served; /ready 200: {body['reasons'][0]}"


def check_direct_clients(servers: Servers) -> str:
    """64 requests that the router knows nothing of take the 64 slots of one decoder.

    No two are of one length: alike they end together, and the decoder is as empty for a moment as it reports.
    """
    ended = threading.Event()

    def direct(seed: int) -> None:
        while not ended.is_set():
            completion_ids(DECODE[0], a_body(seed, max_tokens=200 + 6 * (seed % 64)))

    def foreign() -> int:
        return int(router_state()["workers"][0]["foreign"]["requests"])

    with ThreadPoolExecutor(80) as pool:
        clients = [pool.submit(direct, seed) for seed in range(6000, 6064)]
        try:
            seen_s = wait_for("the router sees the direct clients", lambda: foreign() >= 48, 60)
            before = metric(DECODE[1], "vllm:request_success_total")
            asked = list(pool.map(lambda seed: completion_ids(ROUTER, a_body(seed)), range(7000, 7012)))
            other = metric(DECODE[1], "vllm:request_success_total") - before
        finally:
            ended.set()
        for client in clients:
            client.result()
    gone_s = wait_for("the foreign load is gone", lambda: foreign() == 0, 60)
    share = f"{other:.0f} of {len(asked)} requests went to the other decoder"
    assert other >= len(asked) - 1, share
    return f"seen after {seen_s:.1f} s, {share}, gone {gone_s:.1f} s after the clients"


WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many"
).split()


def a_text(seed: int, size: int) -> str:
    """So many characters of words that depend on the seed alone."""
    return " ".join(random.Random(seed).choices(WORDS, k=size // 3))[:size]


def converse(seed: int, salt: str) -> list[str]:
    """The answers of a conversation of 6 turns; `salt` keeps its KV apart from that of others."""
    messages: list[dict[str, str]] = []
    answers = []
    for turn in range(6):
        messages.append({"role": "user", "content": a_text(100 * seed + turn, 300 if turn else 1000)})
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        body |= {"min_tokens": 16, "cache_salt": salt}
        reply = httpx.post(f"{BASE}/v1/chat/completions", json=body, timeout=300, trust_env=False)
        reply.raise_for_status()
        answers.append(reply.json()["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def converse_all(servers: Servers, prefillers: tuple[int, ...], policy: str) -> tuple[float, list[list[str]]]:
    """Share of the prompt tokens that the prefillers had cached, by their own metrics, and all answers."""
    servers.replace_router(prefillers, policy)
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    before = [sum(metric(port, name) for port in prefillers) for name in names]
    with ThreadPoolExecutor(4) as pool:
        salt = f"{policy} on {len(prefillers)}"
        answers = list(pool.map(lambda seed: converse(seed, salt), range(20)))
    hits, queried = (
        sum(metric(port, name) for port in prefillers) - old for name, old in zip(names, before, strict=True)
    )
    return hits / queried, answers


def check_prefix_affinity(servers: Servers) -> str:
    """The same conversations through one prefiller, through two by affinity, and by the fewest tokens."""
    both = (PREFILL, SECOND_PREFILL)
    servers.start_vllm(SECOND_PREFILL)
    servers.wait_ready(SECOND_PREFILL)
    try:
        one, expected = converse_all(servers, (PREFILL,), "least_tokens")
        affine, answers = converse_all(servers, both, "prefix_affinity")
        predicted = metric(ROUTER, "balanceroute_prefix_predicted_tokens_total")
        found = metric(ROUTER, "balanceroute_prefix_hit_tokens_total")
        spread, others = converse_all(servers, both, "least_tokens")
    finally:
        servers.replace_router((PREFILL,), "least_tokens")
        servers.end(SECOND_PREFILL)
    text = f"hit ratio {one:.3f} on one prefiller, {affine:.3f} on two by affinity, {spread:.3f} by least_tokens"
    different = sum(got != wanted for got, wanted in zip(answers + others, expected + expected, strict=True))
    assert not different, f"{different} of 40 conversations have other answers than on one prefiller"
    assert affine >= 0.9 * one, text
    return f"{text}; {predicted:.0f} cached tokens predicted, {found:.0f} found; answers equal"


CHECKS: dict[str, Callable[[Servers], str]] = {
    "greedy": check_greedy,
    "chat": check_chat,
    "bench": check_bench,
    "cancel": check_cancel,
    "params": check_params,
    "features": check_features,
    "messages": check_messages,
    "prompt_logprobs": check_prompt_logprobs,
    "kill_decoder": check_kill_decoder,
    "kill_prefiller": check_kill_prefiller,
    "freeze_decoder": check_freeze_decoder,
    "kill_brain": check_kill_brain,
    "kill_router": check_kill_router,
    "take_over": check_take_over,
    "direct_clients": check_direct_clients,
    "grammar": check_grammar,
    "wrong_connector": check_wrong_connector,
    "no_log_stats": check_no_log_stats,
    "prefix_affinity": check_prefix_affinity,
}


@contextmanager
def running(logs: Path, relays: int) -> Iterator[Servers]:
    """All servers up; ended on the way out."""
    servers = Servers(logs, relays)
    try:
        for port in (PREFILL, *DECODE):
            servers.start_vllm(port)
        for port in (PREFILL, *DECODE):
            servers.wait_ready(port)
        servers.start_router()
        servers.wait_ready(ROUTER, 120)
        with ThreadPoolExecutor(8) as pool:  # a decoder's first pull may outlast a lease on a busy machine
            list(pool.map(lambda seed: outcome_of(a_body(seed)), range(8)))
        yield servers
    finally:
        servers.stop()


def main() -> int:
    """Run the checks; the exit code says whether all held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="run these checks only")
    parser.add_argument("--relays", type=int, default=0, help="of the router, where a check does not set them")
    parser.add_argument("--logs", type=Path, default=None, help="where the servers' logs go")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with us
    logs = options.logs or Path(tempfile.mkdtemp(prefix="balanceroute-e2e-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"starting 1 prefiller and 2 decoders; logs in {logs}", flush=True)
    failed = 0
    with running(logs, options.relays) as servers:
        for name in options.only:
            start = time.monotonic()
            try:
                verdict = f"ok    {CHECKS[name](servers)}"
            except Exception as error:
                failed += 1
                verdict = f"FAIL  {type(error).__name__}: {error}"
            print(f"{name:<15} {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
