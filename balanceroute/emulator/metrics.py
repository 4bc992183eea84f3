"""vLLM's `/metrics` text for the workers behind one URL: its names, labels and order of labels."""

from collections.abc import Iterable, Sequence

from balanceroute.emulator.connectors import Connector
from balanceroute.emulator.prefill import PrefillWorker
from balanceroute.emulator.worker import Worker

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def render(workers: Sequence[Worker]) -> str:
    """The exposition; `engine` is the rank behind the URL."""
    lines: list[str] = []
    for name, kind, text in _FAMILIES:
        lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]
        lines += [line for index, worker in enumerate(workers) for line in _lines(name, index, worker)]
    return "\n".join(lines) + "\n"


def _lines(name: str, index: int, worker: Worker) -> Iterable[str]:
    model = f'model_name="{worker.shape.model}"'
    engine = f'engine="{index}"'
    if name == "request_success_total":
        for reason in FINISH_REASONS:
            labels = f'{engine},finished_reason="{reason}",{model}'
            yield f"vllm:{name}{{{labels}}} {float(worker.finished[reason])}"
        return
    if name == "cache_config_info":
        yield _cache_config(index, worker)
        return
    running, waiting, deferred = worker.queue_counts()
    if name == "num_requests_waiting_by_reason":
        for reason, value in (("capacity", waiting), ("deferred", deferred)):
            yield f'vllm:{name}{{{engine},{model},reason="{reason}"}} {float(value)}'
        return
    values = {
        "num_requests_running": running,
        "num_requests_waiting": waiting + deferred,
        "kv_cache_usage_perc": worker.kv.usage_ratio,
        "num_preemptions_total": worker.state().get("preemptions", 0),
        "prompt_tokens_total": worker.counters["prompt_tokens"],
        "prefix_cache_queries_total": worker.counters["prompt_tokens"],
        "prefix_cache_hits_total": worker.counters["prefix_hits"],
        "generation_tokens_total": worker.counters["generation_tokens"],
        "nixl_num_kv_expired_reqs_total": worker.prefiller.expired if isinstance(worker, PrefillWorker) else 0,
    }
    if name.startswith("prefix_cache") and not worker.shape.prefix_caching:
        return
    if name.startswith("nixl") and worker.shape.connector is not Connector.NIXL:
        return
    yield f"vllm:{name}{{{engine},{model}}} {float(values[name])}"


def _cache_config(index: int, worker: Worker) -> str:
    labels = {
        "block_size": worker.kv.block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": str(worker.shape.prefix_caching),
        "engine": index,
        "kv_cache_size_tokens": worker.kv.capacity_tokens,
        "num_gpu_blocks": worker.kv.num_blocks,
    }
    inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"vllm:cache_config_info{{{inner}}} 1.0"


_FAMILIES = (
    ("num_requests_running", "gauge", "Number of requests in model execution batches."),
    ("num_requests_waiting", "gauge", "Number of requests waiting to be processed."),
    (
        "num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests: for capacity, or deferred for KV.",
    ),
    ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage."),
    ("num_preemptions_total", "counter", "Cumulative number of preemption from the engine."),
    ("prompt_tokens_total", "counter", "Number of prefill tokens processed."),
    ("prefix_cache_queries_total", "counter", "Prefix cache queries, in terms of number of queried tokens."),
    ("prefix_cache_hits_total", "counter", "Prefix cache hits, in terms of number of cached tokens."),
    ("generation_tokens_total", "counter", "Number of generation tokens processed."),
    ("request_success_total", "counter", "Count of successfully processed requests."),
    ("nixl_num_kv_expired_reqs_total", "counter", "Number of requests that had their KV expire."),
    ("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig"),
)
