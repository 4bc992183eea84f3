"""What knowing prefixes costs the router: hashing a prompt, and the way of a request through the scheduler.

    .venv/bin/python -m scripts.bench.prompt_blocks

The request's way is submit, dispatch and the probe's answer on 8 prefillers whose indexes are full of other prompts.
Both policies take turns, each figure is the least of all rounds, and the difference is what `prefix_affinity` adds: the
hashes, the search for them in 8 indexes, and taking them down. Not measured: HTTP and JSON, which no policy changes.
"""

import argparse
import random
from collections.abc import Callable
from time import perf_counter

import orjson

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec
from balanceroute.proxy.wire.client_request import ClientRequest, parse
from balanceroute.proxy.wire.prompt_blocks import PromptBlocks

PREFILLERS, FILLED, ROUNDS, REQUESTS = 8, 2000, 300, 20


def a_request(seed: int, size: int) -> ClientRequest:
    """A chat of about so many bytes."""
    text = "".join(random.Random(seed).choices("abcdefgh ", k=size))
    return parse("chat", orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}))


def a_scheduler(policy: str, blocks: PromptBlocks) -> Scheduler:
    """Prefillers that know many other prompts."""
    scheduler = Scheduler(make_policy(PolicySettings(policy="pool_fifo")), SchedulerConfig(prefill_policy=policy))
    for index in range(PREFILLERS):
        scheduler.add_worker(WorkerSpec(f"p{index}", Role.PREFILL), 0.0)
        for other in range(FILLED):
            scheduler.snapshot.prefillers[index].cache.use(range(8 * other, 8 * other + 8), 256)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    return scheduler


def one_way(scheduler: Scheduler, blocks: PromptBlocks | None, requests: list[ClientRequest]) -> None:
    """Each request from its arrival to the end of its prefill."""
    for number, request in enumerate(requests):
        name = str(number)
        spec = RequestSpec(name, 1000)
        if blocks is not None:
            spec.prefix, spec.block_tokens = blocks.of(request, 1000)
        scheduler.submit(spec, 0.0)
        scheduler.dispatch(0.0)
        scheduler.prefilled(name, 1000, 0.0)
    for number in range(len(requests)):
        scheduler.finish(str(number), Outcome.FINISHED, 0.0)


def least_us(rounds: int, per: int, *jobs: Callable[[], None]) -> list[float]:
    """Microseconds per unit of each job, the least of all rounds, in turns."""
    best = [float("inf")] * len(jobs)
    for _ in range(rounds):
        for index, job in enumerate(jobs):
            begun = perf_counter()
            job()
            best[index] = min(best[index], (perf_counter() - begun) / per * 1e6)
    return best


def main() -> None:
    """Print all figures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    blocks = PromptBlocks()
    for size in (4_000, 100_000):
        request = a_request(size, size)
        (us,) = least_us(ROUNDS, 50, lambda request=request: [blocks.of(request, 1000) for _ in range(50)] and None)  # type: ignore[misc]
        print(f"hashes of a prompt of {size:>7,} bytes   {us:7.1f} us")
    requests = [a_request(seed, 4_000) for seed in range(REQUESTS)]
    plain, knowing = a_scheduler("least_tokens", blocks), a_scheduler("prefix_affinity", blocks)
    without, with_prefixes = least_us(
        ROUNDS,
        REQUESTS,
        lambda: one_way(plain, None, requests),
        lambda: one_way(knowing, blocks, requests),
    )
    print(f"a request of 4 kB: least_tokens {without:.1f} us, prefix_affinity {with_prefixes:.1f} us,", end=" ")
    print(f"{with_prefixes - without:.1f} us more")


if __name__ == "__main__":
    main()
