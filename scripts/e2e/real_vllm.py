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
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from balanceroute.demo.processes import total
from scripts.chaos_run.aftermath import held_by_router
from scripts.e2e.features import DIFFERS, differences, features
from scripts.e2e.harness import wait_for

PREFILL, DECODE, ROUTER = 8100, (8200, 8201), 8300
SECOND_PREFILL = 8101  # started by the check that needs it
SIDE_CHANNEL = {PREFILL: 5600, SECOND_PREFILL: 5610, DECODE[0]: 5700, DECODE[1]: 5710}
MODEL = "tiny"
LEASE_S = 30
BASE = f"http://127.0.0.1:{ROUTER}"
HALVED = "half of a character"
"""How an error says that the client has token ids of a character that is not whole: no other decoder can end it."""


class Servers:
    """The vLLM servers and the router: started, watched, ended."""

    def __init__(self, logs: Path, relays: int = 0) -> None:
        self.logs = logs
        self.relays = relays
        """Relays of the router, where a check does not ask for a number of its own."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start_vllm(self, port: int, *options: str) -> None:
        """Start one vLLM server without waiting for it."""
        venv, model = os.environ["VLLM_VENV"], os.environ["VLLM_MODEL"]
        role = "kv_consumer" if port in DECODE else "kv_producer"
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        command = [f"{venv}/bin/vllm", "serve", model, "--served-model-name", MODEL, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "64", "--enforce-eager"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        command += ["--block-size", "32", "--kv-transfer-config", json.dumps(transfer), *options]
        env = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "UCX_TLS": "tcp,sm,self",
            "UCX_NET_DEVICES": "lo",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL[port]),
        }
        self._spawn(port, command, env)

    def start_router(
        self,
        port: int = ROUTER,
        connector: str = "nixl",
        prefillers: tuple[int, ...] = (PREFILL,),
        policy: str = "least_tokens",
        relays: int | None = None,
        slots: int = 64,
    ) -> None:
        """Start `balanceroute serve` in front of these prefillers and the decoders, `slots` of each."""
        config = self.logs / f"router-{port}.yaml"
        decoders, listed = (
            "\n".join(f"    - url: http://127.0.0.1:{each}" for each in ports) for ports in (DECODE, prefillers)
        )
        config.write_text(
            f"listen: {{host: 127.0.0.1, port: {port}, relays: {self.relays if relays is None else relays}, "
            f"run_folder: {self.logs}/run-{port}}}\n"
            f"connector: {connector}\n"
            f"prefill:\n  policy: {policy}\n  workers:\n{listed}\n"
            f"decode:\n  max_num_seqs: {slots}\n  shared_barrier: false\n  workers:\n{decoders}\n"
            "predictor: {kind: survival}\nhealth: {interval_s: 1.0}\n"
        )
        command = [sys.executable, "-m", "balanceroute", "serve", "--config", str(config)]
        self._spawn(port, command, dict(os.environ))

    def take_over(self) -> float:
        """Replace the router, as last configured, by `--take-over`; returns after how many s the old one ended."""
        old = self.processes.pop(ROUTER)
        config, started_s = str(self.logs / f"router-{ROUTER}.yaml"), time.monotonic()
        command = [sys.executable, "-m", "balanceroute", "serve", "--config", config, "--take-over"]
        self._run(ROUTER, command, dict(os.environ))
        assert old.wait(180) == 0, f"the old router ended with {old.returncode}"
        return time.monotonic() - started_s

    def _spawn(self, port: int, command: list[str], env: dict[str, str]) -> None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise SystemExit(f"port {port} is in use: what listens there would be checked instead")
        self._run(port, command, env)

    def _run(self, port: int, command: list[str], env: dict[str, str]) -> None:
        log = (self.logs / f"{port}.log").open("ab")
        self.processes[port] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self, port: int, timeout_s: float = 480.0) -> None:
        """Wait until the server's /health says 200."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.processes[port].poll() is not None:
                raise SystemExit(f"the server on port {port} ended: see {self.logs}/{port}.log")
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet: asked again below
            time.sleep(0.5)
        raise SystemExit(f"the server on port {port} is not ready after {timeout_s:.0f} s: see {self.logs}/{port}.log")

    def kill(self, port: int) -> None:
        """kill -9 of a server and its engine processes."""
        process = self.processes.pop(port)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def send(self, port: int, number: signal.Signals) -> None:
        """A signal to a server and its engine processes."""
        os.killpg(self.processes[port].pid, number)

    def end(self, port: int) -> None:
        """End a server in peace."""
        process = self.processes.pop(port)
        process.terminate()
        process.wait(30)

    def replace_router(
        self,
        prefillers: tuple[int, ...] = (PREFILL,),
        policy: str = "least_tokens",
        relays: int | None = None,
        slots: int = 64,
    ) -> None:
        """End the router and start another."""
        self.end(ROUTER)
        self.start_router(prefillers=prefillers, policy=policy, relays=relays, slots=slots)
        self.wait_ready(ROUTER, 120)

    def restart(self, port: int, *options: str) -> None:
        """Bring a killed vLLM server back."""
        self.start_vllm(port, *options)
        self.wait_ready(port)

    def stop(self) -> None:
        """End all of them."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def a_prompt(seed: int, length: int = 60) -> list[int]:
    """Token ids that depend on the seed alone."""
    return [random.Random(seed * 7919 + position).randrange(10, 1000) for position in range(length)]


def a_body(seed: int, max_tokens: int = 40, **more: Any) -> dict[str, Any]:
    """A greedy completions request."""
    body = {"model": MODEL, "prompt": a_prompt(seed), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | more


def completion(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """The one choice of a completion that is not streamed."""
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300, trust_env=False)
    reply.raise_for_status()
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def completion_ids(port: int, body: dict[str, Any]) -> list[int]:
    """Token ids of a non-streamed completion."""
    ids: list[int] = completion(port, body | {"return_token_ids": True})["token_ids"]
    return ids


def completion_text(port: int, body: dict[str, Any]) -> str:
    """Text of a non-streamed completion."""
    return str(completion(port, body)["text"])


def events_of(body: dict[str, Any], request_id: str) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion through the router."""
    url, headers = f"{BASE}/v1/completions", {"x-request-id": request_id}
    with httpx.stream(
        "POST", url, json=body | {"stream": True}, headers=headers, timeout=300, trust_env=False
    ) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def streamed_ids(
    body: dict[str, Any],
    on_event: Callable[[int], None] | None = None,
    request_id: str = "any",
    may_be_halved: bool = False,
) -> tuple[list[int], str | None]:
    """Token ids of a streamed completion through the router, and its finish reason (None: it ended unfinished).

    `may_be_halved`: its decoder is taken from it, which may be within a character: its reason is then `HALVED`.
    """
    ids: list[int] = []
    reason = None
    for event in events_of(body | {"return_token_ids": True}, request_id):
        if "error" in event:
            if may_be_halved and ids and HALVED in str(event["error"]):
                return ids, HALVED
            raise RuntimeError(f"error event: {event['error']}")
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
            reason = choice.get("finish_reason") or reason
        if on_event is not None:
            on_event(len(ids))
    return ids, reason


def streamed_text(body: dict[str, Any], on_event: Callable[[], None], request_id: str) -> tuple[str, str | None]:
    """Text of a streamed completion through the router, and that of its error event."""
    text = ""
    for event in events_of(body, request_id):
        if "error" in event:
            return text, str(event["error"]["message"])
        text += "".join(choice["text"] or "" for choice in event["choices"])
        on_event()
    return text, None


def metric(port: int, name: str) -> float:
    """Sum of a metric over its labels; 0 when the server does not have it."""
    return total(httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=10).text, name)


def router_state() -> dict[str, Any]:
    """What the router says of itself."""
    state: dict[str, Any] = httpx.get(f"{BASE}/state", trust_env=False).json()
    return state


def held() -> Counter[str]:
    """What the router still holds."""
    return Counter(held_by_router(router_state()))


def nothing_held() -> bool:
    """Whether all of the router's counters are zero."""
    return not held()


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


# The model is of bfloat16, and its largest logits are between 16 and 32, where bfloat16 goes in steps of 0.125. A lost
# or a wrong token makes gaps of 5 to 25 among those that follow.
ROUNDING_NATS = 0.2


def assert_greedy(bodies: Sequence[dict[str, Any]], got: Sequence[tuple[list[int], str | None]]) -> None:
    """Every stream is whole, and each token is the one that the engine holds for the likeliest after those before it.

    One that ended within a character, which only `may_be_halved` lets through, is right as far as it goes.

    Two runs of the engine itself need not be equal: where two tokens come out as likely as each other, its kernels for
    one request and those for a batch may choose differently, and a stream that a fault moves is in several batches.
    """
    wrong = []
    for number, (body, (ids, reason)) in enumerate(zip(bodies, got, strict=True)):
        far = [index for index, gap in enumerate(greedy_gaps_nats(body, ids)) if gap > ROUNDING_NATS]
        whole = reason == "length" and len(ids) == body["max_tokens"]
        if far or not (whole or reason == HALVED):
            wrong.append(f"{number}: tokens {far[:9]} of {len(ids)} ({body['max_tokens']} asked for, {reason})")
    assert not wrong, f"{len(wrong)} of {len(got)} streams are not what the engine answers: {'; '.join(wrong)}"


def greedy_gaps_nats(body: dict[str, Any], ids: list[int]) -> list[float]:
    """By how much the likeliest token is likelier than each that came: zeros for a greedy answer."""
    prompt = completion(DECODE[1], body | {"max_tokens": 1, "return_token_ids": True})["prompt_token_ids"]
    again = body | {"prompt": prompt + ids, "max_tokens": 1, "prompt_logprobs": 1}
    logprobs = completion(DECODE[1], again)["prompt_logprobs"][len(prompt) :]
    return [
        max(entry["logprob"] for entry in entries.values()) - entries[str(token)]["logprob"]
        for token, entries in zip(ids, logprobs, strict=True)
    ]


@contextmanager
def under_way(
    bodies: Sequence[dict[str, Any]], spare: int = 0, may_be_halved: bool = False
) -> Iterator[tuple[ThreadPoolExecutor, list[Future[tuple[list[int], str | None]]]]]:
    """Streams of these bodies that have all given tokens, and their threads with so many to spare."""
    reached: set[int] = set()

    def one(number: int) -> tuple[list[int], str | None]:
        return streamed_ids(
            bodies[number], lambda tokens: reached.add(number) if tokens > 5 else None, may_be_halved=may_be_halved
        )

    with ThreadPoolExecutor(len(bodies) + spare) as pool:
        streams = [pool.submit(one, number) for number in range(len(bodies))]
        wait_for("all streams are under way", lambda: len(reached) == len(bodies), 120)
        yield pool, streams


def check_kill_decoder(servers: Servers) -> str:
    """All streams survive the death of one decoder with the right tokens, but those that it cuts within a character."""
    bodies = [a_body(seed, max_tokens=800) for seed in range(3000, 3012)]
    cut_before = metric(ROUTER, "balanceroute_resumes_total")
    with under_way(bodies, may_be_halved=True) as (_, streams):
        servers.kill(DECODE[0])
        got = [stream.result() for stream in streams]
    assert_greedy(bodies, got)
    wait_for("the router holds nothing", nothing_held, 30)
    servers.restart(DECODE[0])
    wait_for("the router uses the decoder again", lambda: workers_up() == 2, 60)
    halved = sum(reason == HALVED for _, reason in got)
    cut = metric(ROUTER, "balanceroute_resumes_total") - cut_before
    assert cut > halved, f"of {cut:.0f} streams that were cut off {halved} ended within a character, and none went on"
    whole = f"{len(bodies) - halved} of {len(bodies)} streams complete with the right tokens"
    return f"{whole}, {halved} of {cut:.0f} that were cut off ended within a character; decoder back in service"


def check_kill_brain(servers: Servers) -> str:
    """All streams survive the death of the brain with the right tokens, and the next one knows them."""
    bodies = [a_body(seed, max_tokens=1000) for seed in range(9200, 9212)]
    servers.replace_router(relays=2)
    try:
        with under_way(bodies) as (_, streams):
            running = sum(not stream.done() for stream in streams)
            os.kill(child_of(servers.processes[ROUTER].pid, "br-brain"), signal.SIGKILL)
            back_s = wait_for("another brain answers", lambda: ready(ROUTER)["code"] == 200, 30)
            active = held()["active"]
            got = [stream.result() for stream in streams]
        assert_greedy(bodies, got)
        assert running and active, (
            f"{running} streams ran when the brain was killed, {active} were known to the next one"
        )
        wait_for("the router holds nothing", nothing_held, 30)
    finally:
        servers.replace_router()
    known = f"{active} of them active at the next brain after {back_s:.2f} s"
    return f"{running} of {len(bodies)} streams ran, {known}; all complete with the right tokens"


def check_kill_router(servers: Servers) -> str:
    """What waits when all processes are killed has KV on the prefiller, which the next start has drained."""
    usage = "vllm:kv_cache_usage_perc"
    expired = metric(PREFILL, "vllm:nixl_num_kv_expired_reqs_total")
    servers.replace_router(relays=2, slots=2)
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(outcome_of, a_body(seed, max_tokens=1500)) for seed in range(9300, 9316)]
        # KV of a prefill that nobody has answered yet is in no record: it ends with its lease
        wait_for("requests wait with their KV on the prefiller", all_prefilled, 60)
        waiting = held()["waiting"]
        servers.kill(ROUTER)
        outcomes = [request.result() for request in asked]
    assert "truncated" not in outcomes and len(outcomes) - outcomes.count("complete") >= waiting, outcomes
    pinned = metric(PREFILL, usage)
    assert pinned > 0, "nothing was pinned on the prefiller"
    started_s = time.monotonic()
    servers.start_router(relays=2)
    servers.wait_ready(ROUTER, 120)
    up_s = time.monotonic() - started_s
    free_s = wait_for("the prefiller's KV is free", lambda: metric(PREFILL, usage) == 0, LEASE_S)
    expired = metric(PREFILL, "vllm:nixl_num_kv_expired_reqs_total") - expired
    servers.replace_router()
    assert expired == 0, f"{expired:.0f} prefills were freed by their lease"
    freed = f"free {free_s:.1f} s after the next router was up, which took {up_s:.1f} s"
    return f"{waiting} requests waited, {pinned:.1%} of the prefiller's KV; {freed}"


def check_take_over(servers: Servers) -> str:
    """Streams go on while another router takes over, and requests are served all the time."""
    bodies = [a_body(seed, max_tokens=1000) for seed in range(9400, 9412)]
    ended = threading.Event()

    def ask_on() -> list[str]:
        outcomes: list[str] = []
        while not ended.is_set():
            outcomes.append(outcome_of(a_body(9500 + len(outcomes), max_tokens=5)))
        return outcomes

    servers.replace_router(relays=2)
    try:
        with under_way(bodies, spare=1) as (pool, streams):
            meanwhile = pool.submit(ask_on)
            try:
                running = sum(not stream.done() for stream in streams)
                took_s = servers.take_over()
            finally:
                ended.set()
            got = [stream.result() for stream in streams]
            outcomes = meanwhile.result()
        assert_greedy(bodies, got)
        assert set(outcomes) == {"complete"}, Counter(outcomes)
        assert running, "no stream ran when the other router began"
        wait_for("the router holds nothing", nothing_held, 30)
    finally:
        servers.replace_router()
    ran = f"{running} of {len(bodies)} streams ran, all complete with the right tokens"
    return f"{ran}; {len(outcomes)} requests meanwhile, all complete; the old router left after {took_s:.1f} s"


def all_prefilled() -> bool:
    """Whether no prompt is being prefilled, or waits for that, and some wait for a decoder."""
    now = held()
    return now["waiting"] >= 8 and not now["queued"] and not now["inflight"]


def child_of(parent: int, name: str) -> int:
    """The child process of that name."""
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if Path(f"/proc/{pid}/comm").read_text().strip() == name:
            return int(pid)
    raise AssertionError(f"process {parent} has no child {name}")


def check_kill_prefiller(servers: Servers) -> str:
    """Requests under way when the prefiller dies end clearly; later ones work once it is back."""
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(outcome_of, a_body(seed, max_tokens=200)) for seed in range(4000, 4008)]
        time.sleep(0.05)
        servers.kill(PREFILL)
        outcomes = [request.result() for request in asked]
    wait_for("the router holds nothing", nothing_held, 60)
    refused = outcome_of(a_body(1))
    assert refused in ("502", "503", "504"), f"without a prefiller: {refused}"
    servers.restart(PREFILL)
    wait_for("requests work again", lambda: outcome_of(a_body(1)) == "complete", 60)
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    assert set(counts) <= {"complete", "502", "503", "504", "error event"}, counts
    return f"outcomes {counts}, then {refused} while it was gone, complete once it was back"


def check_freeze_decoder(servers: Servers) -> str:
    """A decoder that stands still: connections stay open, and nothing comes any more."""
    # those that are to stand still have far to go: a warm engine makes 200 tokens per second
    bodies = [a_body(seed, max_tokens=1500 if seed < 5008 else 600) for seed in range(5000, 5016)]
    begun: set[str] = set()
    got: dict[int, tuple[list[int], str | None]] = {}

    def ends(index: int) -> float:
        name = f"freeze-{index}"

        def on_event(tokens: int) -> None:
            if tokens > 20:
                begun.add(name)

        try:
            got[index] = streamed_ids(bodies[index], on_event, name, may_be_halved=True)
        finally:
            begun.discard(name)
        return time.monotonic()

    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [pool.submit(ends, index) for index in range(8)]
        frozen, on_it = decoder_of(begun, streams)
        servers.send(frozen, signal.SIGSTOP)
        frozen_s = time.monotonic()
        try:
            fresh = [pool.submit(ends, index) for index in range(8, 16)]
            fresh_s = max(each.result() for each in fresh) - frozen_s
            streams_s = max(each.result() for each in streams) - frozen_s
            moved = metric(ROUTER, "balanceroute_moves_total")
        finally:
            servers.send(frozen, signal.SIGCONT)
    assert_greedy([bodies[index] for index in got], list(got.values()))
    halved = sum(reason == HALVED for _, reason in got.values())
    assert moved, f"{on_it} streams were on the frozen decoder, {moved:.0f} requests moved"
    wait_for("the router uses the decoder again", lambda: workers_up() == 2, 60)
    wait_for("the router holds nothing", nothing_held, 30)
    for port in DECODE:
        wait_for("decoders are empty", lambda port=port: metric(port, "vllm:num_requests_running") == 0, 30)  # type: ignore[misc]
    return (
        f"{on_it} of 8 streams on it, {moved:.0f} requests moved, {halved} ended within a character; fresh ones"
        f" done after {fresh_s:.1f} s, streams after {streams_s:.1f} s"
    )


def check_grammar(servers: Servers) -> str:
    """What a decoder knows of a grammar beside tokens dies with it: no answer that breaks it ends as complete.

    vLLM 0.32 on CPU ignores the grammar of some seeds, asked directly too: those are left out.
    """
    grammar = re.compile("([a-f]{7}-){150}")
    asked = {"structured_outputs": {"regex": grammar.pattern}, "ignore_eos": False, "temperature": 1.0}
    candidates = [a_body(seed, max_tokens=1900) | {"seed": seed} | asked for seed in range(8000, 8024)]
    with ThreadPoolExecutor(12) as pool:
        undisturbed = list(pool.map(lambda body: completion_text(DECODE[1], body), candidates))
    bodies = [body for body, text in zip(candidates, undisturbed, strict=True) if grammar.fullmatch(text)][:12]
    assert len(bodies) == 12, f"the engine itself keeps to its grammar in {len(bodies)} of {len(candidates)} answers"
    begun: set[str] = set()

    def streamed(index: int) -> str:
        name = f"grammar-{index}"
        text, error = streamed_text(bodies[index], lambda: begun.add(name), name)
        begun.discard(name)
        return text if error is None else error

    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [pool.submit(streamed, index) for index in range(8)]
        answers = [pool.submit(completion_text, ROUTER, bodies[index]) for index in range(8, 12)]
        killed, _ = decoder_of(begun, streams)
        servers.kill(killed)
        texts = [each.result() for each in streams]
        wholes = [each.result() for each in answers]
    cut = [text for text in texts if "state that another decode worker does not have" in text]
    wrong = [text[:200] for text in texts + wholes if text not in cut and not grammar.fullmatch(text)]
    assert not wrong, f"{len(wrong)} answers break their grammar: {wrong[0]}"
    wait_for("the router holds nothing", nothing_held, 30)
    servers.restart(killed)
    wait_for("the router uses the decoder again", lambda: workers_up() == 2, 60)
    assert cut, "no stream was on the decoder that was killed"
    return (
        f"{len(cut)} of 8 streams ended by an error event, 4 unstreamed answers and the rest valid to the last letter"
    )


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


def ready(port: int) -> dict[str, Any]:
    """What the router on this port says of its readiness; its status code as `code`."""
    reply = httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False)
    return {**reply.json(), "code": reply.status_code}


def outcome_of(body: dict[str, Any]) -> str:
    """complete, a status, or what broke the stream."""
    try:
        ids, reason = streamed_ids(body)
    except httpx.HTTPStatusError as error:
        return str(error.response.status_code)
    except RuntimeError:
        return "error event"
    except httpx.TransportError as error:
        return type(error).__name__
    return "complete" if reason == "length" and len(ids) == body["max_tokens"] else "truncated"


def decoder_of(begun: set[str], streams: Sequence[Future[Any]]) -> tuple[int, int]:
    """The decoder that has most of these streams, by their request ids, and how many: two at least.

    Raises: AssertionError: all have ended before.
    """
    wait_for("two streams have begun", lambda: len(begun) >= 2, 240)
    while not all(stream.done() for stream in streams):
        held = [[each["id"].rpartition("-")[0] for each in worker["active"]] for worker in router_state()["workers"]]
        counts = [len(begun.intersection(names)) for names in held]
        if max(counts) >= 2:
            return DECODE[counts.index(max(counts))], max(counts)
    raise AssertionError("the streams ended before a decoder had two of them")


def workers_up() -> int:
    """Decode workers that the router takes as up."""
    return sum(worker["state"] == "up" for worker in router_state()["workers"])


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
