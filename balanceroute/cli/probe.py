"""`balanceroute check-config --probe`: what the workers of a configuration say of themselves, and what of it is wrong.

Every URL is asked once, all at the same time, by GET alone: nothing is computed, nothing pinned.

    /health        must be 200
    /v1/models     must be a list; all workers serve the same names
    /metrics       vLLM's gauges: back-pressure reads them; `cache_config_info` tells prefix caching
    /server_info   max_num_seqs, KV connector and role; vLLM has it in development mode only (VLLM_SERVER_DEV_MODE=1),
                   so elsewhere these are unknown
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from balanceroute.cli.output import why
from balanceroute.config import Config, DecodeWorker, Worker
from balanceroute.proxy.perimeter.tls import Tls
from balanceroute.proxy.wire.metrics_page import read_samples

ROLES = {"prefill": ("kv_producer", "kv_both"), "decode": ("kv_consumer", "kv_both")}
CONNECTORS = {  # the first that is in an engine's name for it
    "Layerwise": "mooncake_layerwise",
    "SfaRemoteD2H": "mooncake_layerwise",
    "Nixl": "nixl",
    "Mooncake": "mooncake_v1",
}
_PREFIX_CACHING = re.compile(rb'vllm:cache_config_info\{[^}]*enable_prefix_caching="(True|False)"')


@dataclass(slots=True)
class Answer:
    """A worker's answers; None and empty: not reported. `problems`: one line each."""

    worker: str
    role: str
    healthy: bool = False
    models: tuple[str, ...] = ()
    reports_load: bool | None = None
    prefix_caching: bool | None = None
    max_num_seqs: int | None = None
    connector: str | None = None
    kv_role: str | None = None
    problems: list[str] = field(default_factory=list)


async def probe(config: Config) -> list[Answer]:
    """Ask every worker. Raises: ConfigError: a certificate file cannot be used."""
    key = config.auth.worker_api_key
    headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
    encrypted = any(w.url.startswith("https") for w in (*config.prefill.workers, *config.decode.workers))
    verify = Tls(config).for_workers() if encrypted else False
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(
        headers=headers, verify=verify, timeout=config.health.timeout_s, trust_env=False, limits=limits
    ) as client:
        tiers = [(worker, "prefill") for worker in config.prefill.workers]
        tiers += [(worker, "decode") for worker in config.decode.workers]
        answers = await asyncio.gather(*(_ask(client, config, worker, role) for worker, role in tiers))
    _compare_models(answers)
    return answers


async def _ask(client: httpx.AsyncClient, config: Config, worker: Worker, role: str) -> Answer:
    answer = Answer(worker.worker_id, role)
    try:
        reply = await _get(client, config, f"{worker.url}/health")
    except httpx.HTTPError as error:
        answer.problems.append(f"{worker.url} can't be reached: {why(error)}")
        return answer
    answer.healthy = reply.status_code == 200
    if not answer.healthy:
        answer.problems.append(f"/health answers {reply.status_code}")
    try:
        answer.problems += _read_models(answer, await _get(client, config, f"{worker.url}/v1/models"))
        answer.problems += _read_metrics(answer, config, await _get(client, config, f"{worker.url}/metrics"))
        reply = await _get(client, config, f"{worker.url}/server_info?config_format=json")
        if reply.status_code == 200:
            answer.problems += _read_server_info(answer, config, worker, _json(reply))
    except httpx.HTTPError as error:
        answer.problems.append(f"stopped answering: {why(error)}")
    return answer


async def _get(client: httpx.AsyncClient, config: Config, url: str) -> httpx.Response:
    """A whole answer. Raises: httpx.HTTPError; also for one that has begun and does not end."""
    timeout_s = config.health.timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await client.get(url)
    except TimeoutError:
        raise httpx.ReadTimeout(f"no whole answer within {timeout_s:g} s") from None


def _json(reply: httpx.Response) -> dict[str, Any]:
    try:
        return _object(reply.json())
    except (ValueError, RecursionError):
        return {}


def _object(value: object) -> dict[str, Any]:
    """The object that belongs here; empty where a server has put something else."""
    return value if isinstance(value, dict) else {}


def _shown(value: object) -> str:
    """A server's text without control characters, for a terminal."""
    return "".join(character if character.isprintable() else "?" for character in str(value))


def _read_models(answer: Answer, reply: httpx.Response) -> Iterator[str]:
    if reply.status_code == 401:
        yield "/v1/models answers 401: auth.worker_api_key (or OPENAI_API_KEY) is not its key"
        return
    rows = _json(reply).get("data")
    names = [_shown(row["id"]) for row in map(_object, rows) if "id" in row] if isinstance(rows, list) else []
    answer.models = tuple(sorted(names))
    if not names:
        yield f"/v1/models (status {reply.status_code}) names no model: is this an OpenAI server?"


def _read_metrics(answer: Answer, config: Config, reply: httpx.Response) -> Iterator[str]:
    samples = read_samples(reply.content) if reply.status_code == 200 else {}
    answer.reports_load = any("kv_cache_usage_perc" in engine for engine in samples.values())
    if not answer.reports_load:
        yield f"/metrics (status {reply.status_code}) does not tell its load: is it started with --disable-log-stats?"
    match = _PREFIX_CACHING.search(reply.content)
    if match is not None:
        answer.prefix_caching = match[1] == b"True"
    if answer.prefix_caching is False and config.prefill.wants_prefix_caches and answer.role == "prefill":
        yield "prefix caching is off there, and prefill.policy is prefix_affinity"


def _read_server_info(answer: Answer, config: Config, worker: Worker, body: Mapping[str, Any]) -> Iterator[str]:
    settings = body.get("vllm_config")
    if not isinstance(settings, dict):
        return
    scheduler, transfer = _object(settings.get("scheduler_config")), _object(settings.get("kv_transfer_config"))
    slots, role, connector = scheduler.get("max_num_seqs"), transfer.get("kv_role"), transfer.get("kv_connector")
    answer.max_num_seqs = slots if isinstance(slots, int) else None
    answer.kv_role = _shown(role) if isinstance(role, str) else None
    answer.connector = _shown(connector) if isinstance(connector, str) else None
    if isinstance(worker, DecodeWorker) and answer.max_num_seqs is not None:
        ours = config.decode.slots_of(worker)
        if answer.max_num_seqs < ours:
            yield (
                f"max_num_seqs is {answer.max_num_seqs} there and {ours} here: requests would queue in the engine,"
                " where nobody balances them"
            )
        elif answer.max_num_seqs > ours:
            yield f"max_num_seqs is {answer.max_num_seqs} there and {ours} here: the slots above stay empty"
    if not transfer:
        yield "has no KV connector (--kv-transfer-config): it takes part in no disaggregated serving"
    elif answer.kv_role not in ROLES[answer.role]:
        yield f"its kv_role is {answer.kv_role}: a {answer.role} worker is a {' or '.join(ROLES[answer.role])}"
    named = next((name for part, name in CONNECTORS.items() if part in str(answer.connector)), None)
    if named is not None and named != config.connector:
        yield f"its connector is {answer.connector}: set connector: {named}, not {config.connector}"


def not_compared(answers: list[Answer]) -> dict[str, list[str]]:
    """The settings that could not be compared, with the workers that do not report them."""
    healthy = [answer for answer in answers if answer.healthy]
    silent = [a for a in healthy if a.max_num_seqs is None]  # of /server_info
    found = {
        "max_num_seqs": [a.worker for a in silent if a.role == "decode"],
        "connector and kv_role": [a.worker for a in silent],
        "prefix caching": [a.worker for a in healthy if a.role == "prefill" and a.prefix_caching is None],
    }
    return {name: workers for name, workers in found.items() if workers}


def _compare_models(answers: list[Answer]) -> None:
    """Note the workers whose models differ from those of most workers."""
    served = [answer.models for answer in answers if answer.models]
    if not served:
        return
    usual = max(set(served), key=served.count)
    for answer in answers:
        if answer.models and answer.models != usual:
            answer.problems.append(f"serves {', '.join(answer.models)}, where most serve {', '.join(usual)}")
