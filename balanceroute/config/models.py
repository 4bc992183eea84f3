"""The settings: one frozen model per section of the YAML, every field with its bounds, default and meaning.

The field is the only place where a setting is described: error texts (`loading.py`), the README's table and
`check-config` (`describe.py`) are derived from it. What one value may be is in `values.py`, the rules that involve two
settings in `rules.py`: `Config` asks for them and raises `ConfigError` itself, so a `Config` that exists is consistent,
however it was made.

None means unset: the value then follows from another setting, and the description says how. Zero is a value.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from balanceroute.config.addresses import host_in_url, is_loopback
from balanceroute.config.rules import broken_rules
from balanceroute.config.urls import normalised_url, server_of
from balanceroute.config.values import (
    KV_PIN_S,
    PREDICTOR_NAMES,
    Connector,
    FilePath,
    HeaderName,
    Host,
    HostAndPort,
    LeaseName,
    Level,
    Options,
    Origin,
    PolicyName,
    PredictorName,
    PrefillPolicyName,
    Seconds,
    SecondsOrEndless,
    SecondsOrZero,
    Secret,
    Url,
    WorkerId,
    is_wildcard,
    split_host_and_port,
)
from balanceroute.core.knobs import ALL, BR_H_BETA, CandidateOrder, Guard, PolicySettings, SlackPlacement
from balanceroute.errors import ConfigError

UNPINNED_TTL_S = 240.0
SHARED_BARRIER = "decode"  # the group of all decode workers that name none


class Section(BaseModel):
    """A part of the configuration: no unknown keys, immutable, finite numbers, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Listen(Section):
    """Where clients reach the router."""

    host: Host = Field(
        "127.0.0.1", description="Address to listen on; 0.0.0.0, or :: for IPv6, to be reached from other machines."
    )
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 lets the system choose one.")
    admin: HostAndPort | None = Field(
        None,
        description="HOST:PORT of a second listener, for the admin routes alone; the clients' listener answers "
        "these with 404 then. Set it to give operators an address that clients cannot reach. Unset: all routes "
        "on one listener.",
    )
    relays: int = Field(
        0,
        ge=0,
        le=64,
        description="Processes that hold clients and their streams, beside one that decides and one that "
        "watches over all of them ([several processes](relays.md)). 0: one process does everything, which is enough "
        "for 15,000 events per second.",
    )
    standbys: int = Field(
        1,
        ge=0,
        le=8,
        description="With listen.relays: further brains (deciding processes), which stand by and take the lead "
        "when the one that decides dies or stands still.",
    )
    link: HostAndPort | None = Field(
        None,
        description="With listen.relays: HOST:PORT at which the brain accepts relays of other machines, over "
        "TLS (tls.link_*). Unset: relays of this machine alone.",
    )
    brains: tuple[HostAndPort, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="With listen.relays, on a machine of relays alone: HOST:PORT of the brain's listen.link; no "
        "brain runs on this machine then. Name several where brains of several machines take turns by "
        "listen.lease.",
    )
    lease: LeaseName | None = Field(
        None,
        description="With listen.relays, in a pod of Kubernetes: NAME or NAMESPACE/NAME of a Lease. Of all routers "
        "that name it only the one that holds it decides and is ready; the others stand by. Unset: each decides.",
    )
    lease_duration_s: int = Field(
        15,
        ge=2,
        le=3600,
        description="How long after its last renewal a Lease keeps other routers from leading; its holder steps "
        "down after two thirds of that. Lower: another pod leads sooner after one dies, and the API server gets "
        "more calls. The same for all routers.",
    )
    service_account: FilePath = Field(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        description="With listen.lease: the folder with the pod's token, ca.crt and namespace.",
    )
    run_folder: FilePath | None = Field(
        None,
        description="Folder, of mode 0700, in which the processes of listen.relays find each other and keep their "
        "records of pinned KV. Unset: balanceroute-PORT in XDG_RUNTIME_DIR, or without that balanceroute-USER-PORT in "
        "the system's temporary folder.",
    )

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Host and port of `admin`."""
        return None if self.admin is None else split_host_and_port(self.admin)

    @property
    def link_address(self) -> tuple[str, int] | None:
        """Host and port of `link`."""
        return None if self.link is None else split_host_and_port(self.link)

    @property
    def brain_addresses(self) -> list[tuple[str, int]]:
        """Hosts and ports of `brains`."""
        return [split_host_and_port(brain) for brain in self.brains]


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
        None, ge=1, le=65536, description="Decode slots of this worker. Unset: decode.max_num_seqs."
    )
    slowdown: float = Field(
        1.0,
        gt=0,
        le=100,
        description="Time per KV token, relative to the others: 1.3 for a worker that takes 1.3 times as long. "
        "`balanceroute steps` finds it.",
    )
    barrier_group: WorkerId | None = Field(
        None,
        description="Name of the data-parallel group whose ranks wait for each other in every step; set it "
        "where there is more than one such group. Unset: decode.shared_barrier says.",
    )


class Prefill(Section):
    """The prefill tier."""

    workers: tuple[Worker, ...] = Field(
        min_length=1, strict=False, description="The prefillers: a list of {url, id, dp_rank}."
    )
    policy: PrefillPolicyName = Field(
        "prefix_affinity",
        description="Which prefiller computes a prompt. prefix_affinity: the one that has least of it left to "
        "compute, by what it still has of earlier prompts; where nothing is shared it decides as least_tokens. "
        "least_tokens: the one with the fewest prompt tokens under way; set it where prefillers cache nothing "
        "and do not report that. round_robin: each in turn.",
    )
    kv_usage_limit: float = Field(
        0.9, gt=0, le=1, description="No new prefill goes to a prefiller whose KV cache is fuller than this."
    )
    poll_interval_s: Seconds = Field(
        1.0,
        description="How often a worker's /metrics is read. A prefiller that can't be reached counts as full; "
        "one that doesn't tell its KV usage (404, no gauge) gets a few prefills at a time.",
    )
    max_inflight: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Most prefills under way at once per prefiller. A huge prompt counts as several: expected "
        "seconds together are at most those of so many mean prompts. The rest waits in the router, short prompts "
        "first. Set 2 to 4 where huge prompts delay short ones. Unset: KV usage alone decides.",
    )
    kv_pin_s: Seconds | None = Field(
        None,
        description="How long a prefiller keeps KV that no decoder has pulled. Set it when the engine's own "
        "setting was changed (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, before vllm-ascend 0.18 "
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT; kv_lease_duration), and to 120 with vllm-ascend 0.11. Unset: the "
        "connector's default, 480 for mooncake_v1, 30 for nixl; mooncake_layerwise pins none.",
    )

    @property
    def wants_prefix_caches(self) -> bool:
        """Whether `prefix_affinity` is asked for by name: as the default it calls no prefiller without one degraded."""
        return self.policy == "prefix_affinity" and "policy" in self.model_fields_set


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
        le=65536,
        description="Decode slots per worker (B). Must be the engine's own --max-num-seqs, per DP rank: above "
        "it requests queue in the engine, below it slots stay empty.",
    )
    overlap_requests: Annotated[int, Field(ge=0, le=65536)] | Literal["auto"] = Field(
        "auto",
        description="Requests that a policy with a pool sends to each worker beyond its slots, so that their KV "
        "moves while others run; at most as many as it has slots. `auto`: as many as measured transfers need, and "
        "none to a worker to which others send requests, too. 0: none; set it where decode workers are short of KV "
        "memory. None with mooncake_layerwise; see [tuning](tuning.md#transfers-that-take-long).",
    )
    request_tokens: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="c: a request costs as much step time as so many KV tokens, beside those that it has. "
        "`balanceroute steps` finds it. It matters where slots are free or differ between workers.",
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


def _knob(name: str, more: str = "", **unset: None) -> Any:
    """A knob of the core as a setting: its default and bounds, and what it means, here with `more`.

    `default=None`: what unset means depends on other settings.
    """
    knob = ALL[name]
    default = unset["default"] if unset else knob.default
    meaning = f"{knob.meaning} {more}".rstrip()
    if knob.least is None or knob.most is None or knob.endless:  # its type says what it may be
        return Field(default, description=meaning)
    number = int if isinstance(knob.default, int) else float
    least, most = number(knob.least), number(knob.most)
    over, at_least = (least, None) if knob.above_least else (None, least)
    return Field(default, gt=over, ge=at_least, le=most, description=meaning)


class Routing(Section):
    """Which request goes to which decode worker, and when: the knobs of `core/knobs.py`."""

    policy: PolicyName = _knob("policy")
    horizon_steps: int = _knob("horizon_steps", f"`auto`: {ALL['horizon_steps'].default} with horizon_auto.")
    alpha: float = _knob("alpha")
    beta: float | None = _knob("beta")
    gamma: float = _knob("gamma")
    s_greedy: int = _knob("s_greedy")
    r_max: int = _knob("r_max")
    candidate_order: CandidateOrder = _knob("candidate_order")
    slack_placement: SlackPlacement = _knob("slack_placement")
    guard: Guard = _knob("guard")
    max_wait_s: SecondsOrEndless | None = _knob(
        "max_wait_s",
        f"Unset: {ALL['max_wait_s'].default:g}, or half of pool.ttl_s where that is less. .inf: nobody goes first for "
        "having waited, until pool.ttl_s.",
        default=None,
    )
    hold_s: SecondsOrEndless = _knob("hold_s")
    pool_bypass: bool = _knob("pool_bypass")
    bypass_margin: int = _knob("bypass_margin")
    horizon_auto: bool = _knob("horizon_auto")
    seed: int = _knob("seed")
    options: Options = Field(
        default_factory=dict, description="Keyword arguments of a policy of your own; the others take none."
    )

    @model_validator(mode="before")
    @classmethod
    def _auto_horizon(cls, given: object) -> object:
        """`horizon_steps: auto` in full."""
        if isinstance(given, dict) and given.get("horizon_steps") == "auto":
            return {"horizon_auto": True, **{key: value for key, value in given.items() if key != "horizon_steps"}}
        return given


class Predictor(Section):
    """How br_h estimates the remaining output of a request."""

    kind: PredictorName = Field(
        "survival",
        description="What br_h knows of the lengths of answers. survival: history of output lengths; "
        "exact_match: history per prompt; learned: gradient-boosted trees (extra `learned`; needs "
        "predictor.model or predictor.history); none: br_h assumes that nothing finishes within the horizon.",
    )
    options: Options = Field(
        default_factory=dict,
        description="Keyword arguments of a predictor of your own, beside the horizon; the others take none.",
    )
    history: FilePath | None = Field(
        None,
        description="SQLite file of finished requests, so that a restart starts warm. Unset: in memory only.",
    )
    model: FilePath | None = Field(
        None,
        description="File written by `balanceroute predictor fit`, used until the first re-fit.",
    )
    max_rows: int = Field(200_000, ge=100, le=50_000_000, description="Most finished requests kept in the history.")
    max_age_s: float = Field(
        7 * 86_400.0, gt=0, le=10 * 366 * 86_400, description="Older rows leave the history (default a week)."
    )
    refit_interval_s: Seconds = Field(60.0, description="How often the predictor is fitted anew from the history.")
    period_steps: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Generated tokens between two predictions for a running request. Unset: half of "
        "routing.horizon_steps, at least 1.",
    )
    size_buckets: int = Field(
        0,
        ge=0,
        le=64,
        description="exact_match: where the key is unknown, use the history of requests of similar prompt size, "
        "in so many buckets. 0: the history of all requests.",
    )
    key_header: HeaderName | None = Field(
        None,
        description="Request header that names the kind of request, as the key of exact_match and learned; set "
        "it if clients can name kinds of similar length. Unset, or absent from a request: a salted hash of the "
        "prompt.",
    )

    @property
    def of_ones_own(self) -> bool:
        """Whether `kind` names a predictor that is none of ours."""
        return self.kind not in PREDICTOR_NAMES

    @property
    def by_key(self) -> bool:
        """Whether the predictor tells requests apart by their key."""
        return self.kind not in ("none", "survival")


class Pool(Section):
    """The prompt pool: prefilled requests that wait for a decode slot while their KV stays pinned."""

    max_entries: int = Field(
        512,
        ge=1,
        le=1_000_000,
        description="Most prefilled requests that wait for a decode slot; while there are so many no new "
        "prefill starts. Higher: more to choose from, and more KV pinned on prefillers; lower it if these run "
        "out of KV. With `mooncake_layerwise`, which decodes first: most that wait for a decode worker; above it "
        "429.",
    )
    ttl_s: Seconds | None = Field(
        None,
        description="Longest wait in the pool; then 503. Must be less than prefill.kv_pin_s, when the prefiller "
        "drops the KV. Unset: half of that for mooncake_v1 (240), two thirds for nixl (20), 240 for "
        "mooncake_layerwise.",
    )


class Queue(Section):
    """Arrivals that wait for a prefiller."""

    max_queued: int = Field(
        2048,
        ge=0,
        le=1_000_000,
        description="Most requests waiting for a prefiller; above it clients get 429. Raise it if bursts get "
        "429 that clients would rather wait out. 0: every request gets 429.",
    )
    deadline_s: Seconds = Field(
        120.0,
        description="Longest wait for a prefiller, and for the first token while workers answer 429 or 503; "
        "then 503. Raise it if clients have longer timeouts and would rather wait.",
    )
    no_worker_grace_s: SecondsOrZero = Field(
        5.0,
        description="When all prefillers or all decoders are down, new requests get 503 at once, and those that wait "
        "for one after this.",
    )


class FirstByte(Section):
    """Longest time until a worker's first byte or event."""

    prefill: Seconds = Field(
        300.0,
        description="Until a prefiller answers: queueing there plus the whole prefill of the longest prompt. "
        "Raise it if long prompts get 504.",
    )
    decode: Seconds = Field(
        120.0,
        description="Until a decoder's first event: KV transfer plus one step. A short answer that is not streamed may "
        "take limits.idle_timeout_s longer for each further token.",
    )


class PriorityBounds(Section):
    """What `priority` may be in the router's own order, where lower goes first; the engines get the client's value."""

    min: int = Field(
        -10,
        ge=-(2**31),
        le=2**31 - 1,
        description="Least priority of a request in the router's own order; a lower one counts as this. Engines get "
        "the client's value.",
    )
    max: int = Field(
        10,
        ge=-(2**31),
        le=2**31 - 1,
        description="Greatest priority of a request in the router's own order; a higher one counts as this.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"accepted is a min that is not above max, not {self.min} and {self.max}")
        return self

    def clamped(self, priority: int) -> int:
        """The nearest priority within the bounds."""
        least, most = self.min, self.max
        return priority if least <= priority <= most else min(max(priority, least), most)


class Limits(Section):
    """Bounds on what one client, one request and one worker may take."""

    max_body_bytes: int = Field(
        32 * 2**20,
        ge=1024,
        le=2**31,
        description="Largest request body; above it 413. 200,000 token ids take 1.4 MB, images far more.",
    )
    max_incoming_bytes: int = Field(
        2**30,
        ge=2**20,
        le=2**40,
        description="Most bytes of request bodies that are still arriving, all together; above it 503. Of all "
        "relays on a machine.",
    )
    max_held_bytes: int = Field(
        2 * 2**30,
        ge=2**20,
        le=2**40,
        description="Most bytes of request bodies that are arriving or being served, all together; above it "
        "those that arrive get 503. Serving one takes up to three times its bytes of memory. One client may have "
        "half. Of all relays on a machine.",
    )
    max_choices: int = Field(
        128,
        ge=1,
        le=65536,
        description="Most answers per request, n times the number of prompts; each is a request of its own to the "
        "workers. Above it 400.",
    )
    priority: PriorityBounds = Field(
        default_factory=lambda: PriorityBounds.model_validate({}),
        description="What a request's `priority` may be in the router's own order.",
    )
    max_connections: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="Most client connections at once. Above it one that waits for a request, the longest first, is "
        "closed; where all of them are busy, 503. Of all relays on a machine. Each takes two open files: fewer where "
        "`ulimit -n` allows no more.",
    )
    request_timeout_s: Seconds = Field(
        3600.0,
        description="Longest life of a request, from arrival to last byte; X-Request-Timeout may shorten it.",
    )
    connect_timeout_s: Seconds = Field(5.0, description="Longest time to open a connection to a worker.")
    first_byte_timeout_s: FirstByte = Field(
        default_factory=lambda: FirstByte.model_validate({}),
        description="Longest time until a worker's first byte.",
    )
    idle_timeout_s: Seconds = Field(
        60.0,
        description="Longest gap between two events of a decode stream; then its worker counts as lost for it. "
        "Set it above the longest pause where the engine pauses requests (DyntraLB).",
    )
    client_header_timeout_s: Seconds = Field(
        30.0,
        description="Longest time a client may take to send its request, from the first byte of the headers to the "
        "last of the body; a large body has more, at client_min_rate_bytes_per_s. Above it 408.",
    )
    client_min_rate_bytes_per_s: int = Field(
        512,
        ge=1,
        le=2**30,
        description="Slowest rate at which a client may send a body that takes longer than "
        "client_header_timeout_s, and read an answer that waits for it.",
    )
    client_keep_alive_s: Seconds = Field(
        75.0,
        description="An idle client connection is closed after this; above the 60 s of common load balancers.",
    )
    client_buffer_bytes: int = Field(
        256 * 1024,
        ge=4096,
        le=2**28,
        description="Bytes held per stream for a client that reads slowly; then its worker's stream is not read "
        "either.",
    )
    client_stall_timeout_s: Seconds = Field(
        60.0,
        description="A client whose buffer is full, or whose answer is written, must have read "
        "client_min_rate_bytes_per_s over this long; else it is cut off.",
    )


class Retry(Section):
    """What happens when a worker fails. 4xx is never retried; 429 and 503 are no failures: the request waits."""

    max_attempts: int = Field(
        3,
        ge=1,
        le=100,
        description="Most failed tries of a request per tier (prefill, decode), each on another worker if there "
        "is one. A 429 or 503 of a worker is no failed try: the request waits for a worker, for its first token "
        "at most queue.deadline_s.",
    )
    base_delay_s: SecondsOrZero = Field(
        0.05, description="Upper end of the random delay before the second try; doubles from try to try."
    )
    max_delay_s: SecondsOrZero = Field(2.0, description="Upper end of the random delay before any try.")
    resume_on_worker_loss: bool = Field(
        True,
        description="Continue a stream on another worker from its token ids when its decoder is lost; otherwise the "
        "client gets an error event.",
    )
    resume_after_silence_s: SecondsOrZero = Field(
        5.0,
        description="How long a stream stays on a decoder that was judged down only because it is silent: it "
        "may just have paused. Where the connection broke, or no token has come yet, it is not waited for.",
    )


class Health(Section):
    """When a worker counts as down, and when as up again."""

    interval_s: Seconds = Field(2.0, description="How often each worker's /health is asked.")
    timeout_s: Seconds = Field(3.0, description="Longest wait for a /health or /metrics answer.")
    failure_threshold: int = Field(
        3, ge=1, le=1000, description="Failures in a row (of requests or checks) that take a worker out."
    )
    open_for_s: Seconds = Field(10.0, description="A worker that was taken out gets one trial request after this.")
    stall_after_s: Seconds = Field(
        30.0,
        description="A decoder with running requests and no token for this long counts as down, whatever its /health "
        "says.",
    )
    silence_window_s: Seconds = Field(
        5.0,
        description="Workers that fall silent within this time of each other did so together. If they are most "
        "of a barrier_group, or of all workers, no request is moved, and /ready names them.",
    )
    group_wait_s: SecondsOrZero = Field(
        60.0,
        description="How long requests wait for a group that fell silent together, beyond limits.idle_timeout_s "
        "and limits.first_byte_timeout_s.",
    )


class Lifecycle(Section):
    """Start, stop and changes of the set of workers."""

    drain_timeout_s: SecondsOrZero = Field(
        120.0, description="After SIGTERM, how long running requests may finish before they are aborted."
    )
    join_interval_s: Seconds = Field(
        10.0, description="How often a worker added by POST /instances/add is asked whether it is ready."
    )
    join_attempts: int = Field(
        3, ge=1, le=100_000, description="An added worker that is not ready after so many tries is dropped."
    )
    pins_file: FilePath | None = Field(
        None,
        description="File with a record of the KV that prefillers keep for requests under way: after a kill the "
        "next start has it drained. Set it, one file per router, best in memory: /run/balanceroute/pins. Unset: "
        "prefill.kv_pin_s frees that KV. With listen.relays each has its own record in listen.run_folder, "
        "whatever is set here.",
    )


class Auth(Section):
    """Secrets; they are masked wherever the configuration is shown."""

    worker_api_key: Secret | None = Field(
        None,
        description="Sent to workers as Authorization: Bearer, in place of the client's own. Unset: "
        "OPENAI_API_KEY of the environment; without that the client's Authorization as it came, or none with "
        "auth.client_keys.",
    )
    client_keys: FilePath | None = Field(
        None,
        description="File of client keys as SHA-256 hashes (`balanceroute key` makes entries); then requests of "
        "clients need one. Unset: whoever can connect may use the cluster.",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        strict=False,
        description="Origins whose web pages may use the client routes (CORS), such as https://chat.example.com; `*` "
        "is every page, as with vLLM. Empty: pages of other sites are refused.",
    )
    admin_token: Secret | None = Field(
        None,
        description="Bearer token of the admin routes (/instances, /state, /decisions, /dashboard, /routing/policy, "
        "/reset_prefix_cache, profiling). Unset: they are open to the router's own machine only.",
    )


class TlsFiles(Section):
    """Certificates, as PEM files; read again when they change and on SIGHUP."""

    cert_file: FilePath | None = Field(None, description="Certificate (chain) that clients see. Unset: plain HTTP.")
    key_file: FilePath | None = Field(None, description="Its private key. Unset: it is in cert_file.")
    client_ca_file: FilePath | None = Field(
        None,
        description="CA of the clients' certificates: every client must show one, of every route. Unset: none is asked "
        "for.",
    )
    worker_ca_file: FilePath | None = Field(
        None, description="CA of the workers' certificates (https URLs). Unset: the system's."
    )
    worker_cert_file: FilePath | None = Field(
        None, description="Certificate that the router shows to https workers. Unset: none."
    )
    worker_key_file: FilePath | None = Field(None, description="Its private key. Unset: it is in worker_cert_file.")
    link_ca_file: FilePath | None = Field(
        None,
        description="CA of the link between machines, of nothing else: whoever has a certificate of it is one of the "
        "router's own processes. Needed with listen.link and listen.brains.",
    )
    link_cert_file: FilePath | None = Field(
        None,
        description="Certificate (chain) of this machine on the link; a brain's names the host of listen.brains.",
    )
    link_key_file: FilePath | None = Field(None, description="Its private key. Unset: it is in link_cert_file.")


class Layerwise(Section):
    """What only the connector mooncake_layerwise needs."""

    callback_url: Url | None = Field(
        None,
        description="Base URL under which decode workers reach the router to ask for a prefill (they POST to "
        "/v1/metaserver there). Unset: http://HOST:PORT of listen, which must then be an address that they can reach.",
    )


class MetricsPage(Section):
    """Who may read `/metrics`."""

    public: bool = Field(True, description="false: /metrics is an admin route (auth.admin_token).")


class Log(Section):
    """What is logged, to standard error."""

    level: Level = Field(
        "info",
        description="Lowest level of lines that are shown, on standard error; debug tells every routing decision.",
    )
    format: Literal["auto", "json", "plain"] = Field(
        "auto",
        description="One JSON object per line, or plain text; auto is plain on a terminal and json elsewhere.",
    )


class Config(Section):
    """The whole configuration of a router, checked."""

    listen: Listen = Listen.model_validate({})
    connector: Connector = Field(
        "mooncake_v1",
        description="How KV gets from prefiller to decoder; the engines' own connector. mooncake_v1: "
        "MooncakeConnectorV1 of vllm-ascend, the decoder pulls. nixl: NixlConnector of vLLM, the decoder pulls "
        "under a short lease. mooncake_layerwise: MooncakeLayerwiseConnector of vllm-ascend, the decoder comes "
        "first and asks for the prefill.",
    )
    prefill: Prefill
    decode: Decode
    routing: Routing = Routing.model_validate({})
    predictor: Predictor = Predictor.model_validate({})
    pool: Pool = Pool.model_validate({})
    queue: Queue = Queue.model_validate({})
    limits: Limits = Limits.model_validate({})
    retry: Retry = Retry.model_validate({})
    health: Health = Health.model_validate({})
    lifecycle: Lifecycle = Lifecycle.model_validate({})
    auth: Auth = Auth.model_validate({})
    tls: TlsFiles = TlsFiles.model_validate({})
    metrics: MetricsPage = MetricsPage.model_validate({})
    log: Log = Log.model_validate({})
    layerwise: Layerwise = Layerwise.model_validate({})

    @property
    def decode_first(self) -> bool:
        """Whether the decode worker is chosen before the prefill, and asks for it."""
        return self.connector == "mooncake_layerwise"

    @property
    def callback_url(self) -> str:
        """Base URL of the router as decode workers reach it (mooncake_layerwise); "" where it can't be known."""
        if self.layerwise.callback_url is not None:
            return self.layerwise.callback_url
        host, port = self.listen.host, self.listen.port
        elsewhere = not all(is_loopback(urlsplit(worker.url).hostname) for worker in self.decode.workers)
        if port == 0 or is_wildcard(host) or (elsewhere and is_loopback(host)):
            return ""
        scheme = "http" if self.tls.cert_file is None else "https"
        return normalised_url(f"{scheme}://{host_in_url(host)}:{port}")

    @property
    def kv_pin_s(self) -> float | None:
        """Seconds that a prefiller keeps KV nobody pulled; None: the connector pins none."""
        default = KV_PIN_S[self.connector][0]
        return default if self.prefill.kv_pin_s is None else self.prefill.kv_pin_s

    @property
    def pool_ttl_s(self) -> float:
        """Longest wait in the prompt pool, seconds: `pool.ttl_s` or the connector's default."""
        if self.pool.ttl_s is not None:
            return self.pool.ttl_s
        pin_s = self.kv_pin_s
        return UNPINNED_TTL_S if pin_s is None else pin_s * KV_PIN_S[self.connector][1]

    @property
    def max_wait_s(self) -> float:
        """Pool wait after which a request goes first, in seconds."""
        given = self.routing.max_wait_s
        return min(PolicySettings().max_wait_s, self.pool_ttl_s / 2) if given is None else given

    @property
    def beta(self) -> float | None:
        """Penalty per token above the margin; None: the number of decode workers at that moment (br_0)."""
        if self.routing.beta is not None:
            return self.routing.beta
        return None if self.routing.policy == "br_0" else BR_H_BETA

    @property
    def refresh_period_steps(self) -> int:
        """Generated tokens between two predictions (the paper's dT = H/2)."""
        given = self.predictor.period_steps
        return max(1, self.routing.horizon_steps // 2) if given is None else given

    @model_validator(mode="after")
    def _rules_between_settings(self) -> Self:
        if problems := list(broken_rules(self)):
            raise ConfigError(*problems)
        return self

    def all_workers(self) -> Iterator[tuple[str, Worker]]:
        """Every worker with the path of its key."""
        yield from ((f"prefill.workers[{i}]", worker) for i, worker in enumerate(self.prefill.workers))
        yield from ((f"decode.workers[{i}]", worker) for i, worker in enumerate(self.decode.workers))
