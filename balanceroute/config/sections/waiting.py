"""`queue` and `pool`: requests that wait for a prefiller, and for a decode slot."""

from pydantic import Field

from balanceroute.config.sections.section import Section
from balanceroute.config.values import Seconds, SecondsOrZero


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
        description="Longest wait for a prefiller, and for the first token once a decode worker has answered 429 or "
        "503; then 503. Raise it if clients have longer timeouts and would rather wait. An answer that has begun, and "
        "goes on elsewhere, waits for limits.request_timeout_s at most.",
    )
    no_worker_grace_s: SecondsOrZero = Field(
        5.0,
        description="When all prefillers or all decoders are down, new requests get 503 at once, and waiting ones "
        "after this time.",
    )
