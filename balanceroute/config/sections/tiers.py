"""`prefill` and `decode`: the workers, and what is particular to each tier."""

from typing import Annotated, Literal

from pydantic import Field

from balanceroute.config.sections.section import Section
from balanceroute.config.urls import server_of
from balanceroute.config.values import Period, PrefillPolicyName, Seconds, Url, WorkerId
from balanceroute.core.bounds import MOST_OVERLAP, MOST_REQUEST_TOKENS, MOST_SLOTS, MOST_SLOWDOWN

SHARED_BARRIER = "decode"  # the group of all decode workers that name none


class Worker(Section):
    """One schedulable (url, dp_rank) pair; several workers may share a url."""

    url: Url = Field(description="Base URL of the API server, http://HOST:PORT.")
    id: WorkerId | None = Field(
        None,
        description="Name in metrics, logs and /state. Unset: HOST:PORT, or HOST:PORT@RANK with a dp_rank, which "
        "stays the same when the list is reordered.",
    )
    dp_rank: int | None = Field(
        None,
        ge=0,
        le=4095,
        description="Sent as the header X-data-parallel-rank, for several ranks behind one URL (internal or "
        "hybrid load balancing; with hybrid the index within the node). Unset with one API server per rank.",
    )

    @property
    def address(self) -> str:
        """See `server_of`."""
        return server_of(self.url)

    @property
    def worker_id(self) -> str:
        """The given `id`, or the one made from the address and rank."""
        if self.id is not None:
            return self.id
        return self.address if self.dp_rank is None else f"{self.address}@{self.dp_rank}"


class DecodeWorker(Worker):
    """A decode worker, with what may differ between workers of one group."""

    max_num_seqs: int | None = Field(
        None, ge=1, le=MOST_SLOTS, description="Decode slots of this worker. Unset: decode.max_num_seqs."
    )
    slowdown: float = Field(
        1.0,
        gt=0,
        le=MOST_SLOWDOWN,
        description="Time per KV token, relative to the others: 1.3 for a worker that takes 1.3 times as long. "
        "`balanceroute steps` finds it.",
    )
    barrier_group: WorkerId | None = Field(
        None,
        description="Name of the data-parallel group whose ranks wait for each other in every step; set it where "
        "there is more than one such group. Unset: decode.shared_barrier decides.",
    )


class Prefill(Section):
    """The prefill tier."""

    workers: tuple[Worker, ...] = Field(
        min_length=1, strict=False, description="The prefillers: a list of {url, id, dp_rank}."
    )
    policy: PrefillPolicyName = Field(
        "prefix_affinity",
        description="Which prefiller computes a prompt. prefix_affinity: the one with the least work, counting only "
        "tokens that it has not cached; if prompts share no prefix it decides like least_tokens. least_tokens: the "
        "one with the fewest prompt tokens in flight; set it if prefillers cache nothing and do not report that. "
        "round_robin: each in turn.",
    )
    kv_usage_limit: float = Field(
        0.9, gt=0, le=1, description="No new prefill goes to a prefiller whose KV cache is fuller than this."
    )
    poll_interval_s: Period = Field(
        1.0,
        description="How often a worker's /metrics is read. A prefiller that can't be reached counts as full; "
        "one that doesn't report its KV usage (404, no gauge) gets a few prefills at a time.",
    )
    max_inflight: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Most concurrent prefills per prefiller. A huge prompt counts as several: a prefiller "
        "gets no other while it has the expected seconds of that many mean prompts. The others wait in the router, "
        "short prompts first. Set 2 to 4 if huge prompts delay short ones. Unset: KV usage alone decides.",
    )
    kv_pin_s: Seconds | None = Field(
        None,
        description="How long a prefiller keeps KV that no decoder has pulled. Set it when the engine's own "
        "setting was changed (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, before vllm-ascend 0.18 "
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT; kv_lease_duration of NixlConnector and MooncakeConnectorV2), and to 120 with "
        "vllm-ascend 0.11. Unset: the connector's default, 480 for mooncake_v1, 30 for nixl; mooncake_layerwise pins "
        "none.",
    )

    @property
    def knows_prefixes(self) -> bool:
        """Whether the policy uses the hashes of prompts' prefixes."""
        return self.policy == "prefix_affinity"

    @property
    def wants_prefix_caches(self) -> bool:
        """Whether such a policy is asked for by name: as the default it calls no prefiller without one degraded."""
        return self.knows_prefixes and "policy" in self.model_fields_set


class Decode(Section):
    """The decode tier: the data-parallel workers that share one step barrier."""

    workers: tuple[DecodeWorker, ...] = Field(
        min_length=1,
        strict=False,
        description="The decode workers: a list of {url, id, dp_rank, max_num_seqs, slowdown, barrier_group}.",
    )
    max_num_seqs: int = Field(
        64,
        ge=1,
        le=MOST_SLOTS,
        description="Decode slots per worker (B). Must be the engine's own --max-num-seqs, per DP rank: above "
        "it requests queue in the engine, below it slots stay empty.",
    )
    overlap_requests: Annotated[int, Field(ge=0, le=MOST_OVERLAP)] | Literal["auto"] = Field(
        "auto",
        description="Requests that a policy with a pool sends to each worker beyond its slots, so that their KV "
        "moves while others run; a number above its slots counts as so many. `auto`: as many as measured transfers "
        "need, and none to a worker to which others send requests, too. 0: none; set it where decode workers are short "
        "of KV memory. None with mooncake_layerwise; see [tuning](tuning.md#transfers-that-take-long).",
    )
    request_tokens: int = Field(
        0,
        ge=0,
        le=MOST_REQUEST_TOKENS,
        description="c: the step time of a request beyond that of its own KV tokens, in KV tokens. `balanceroute "
        "steps` finds it. It matters if slots are free or differ between workers.",
    )
    shared_barrier: bool = Field(
        True,
        description="Whether the decode workers without a barrier_group form one data-parallel group, whose "
        "ranks wait for each other in every step, as those of a mixture-of-experts model do. Then no request is "
        "moved when most of the group falls silent at once, since one frozen rank silences them all. Set false "
        "for independent servers, such as the ranks of a dense model; level_fit then lets no request wait long "
        "for a place that suits it.",
    )

    def slots_of(self, worker: DecodeWorker) -> int:
        """Decode slots of one worker."""
        return self.max_num_seqs if worker.max_num_seqs is None else worker.max_num_seqs

    def barrier_group_of(self, worker: DecodeWorker) -> str:
        """The group whose step barrier the worker shares; "" for none."""
        if worker.barrier_group is not None:
            return worker.barrier_group
        return SHARED_BARRIER if self.shared_barrier else ""
