"""`lifecycle`, `log` and `layerwise`: start and stop, logs, and what only one connector needs."""

from typing import Literal

from pydantic import Field

from balanceroute.config.sections.section import Section
from balanceroute.config.values import FilePath, Level, Period, SecondsOrZero, Url


class Lifecycle(Section):
    """Start, stop and changes of the set of workers."""

    drain_timeout_s: SecondsOrZero = Field(
        120.0, description="After SIGTERM, how long running requests may finish before they are aborted."
    )
    join_interval_s: Period = Field(
        10.0, description="How often a worker added by POST /instances/add is asked whether it is ready."
    )
    join_attempts: int = Field(
        3, ge=1, le=100_000, description="An added worker that is not ready after so many tries is dropped."
    )
    pins_file: FilePath | None = Field(
        None,
        description="File with a record of the KV that prefillers keep for requests under way: after a kill the next "
        "start drains it. Set it, one file per router, best in memory: /run/balanceroute/pins. Unset: "
        "prefill.kv_pin_s frees that KV. With listen.relays each has its own record in listen.run_folder, whatever "
        "is set here.",
    )


class Log(Section):
    """What is logged, to standard error."""

    level: Level = Field(
        "info",
        description="Lowest level of lines that are shown, on standard error; debug logs every routing decision.",
    )
    format: Literal["auto", "json", "plain"] = Field(
        "auto",
        description="One JSON object per line, or plain text; auto is plain on a terminal and json elsewhere.",
    )


class Layerwise(Section):
    """What only the connector mooncake_layerwise needs."""

    callback_url: Url | None = Field(
        None,
        description="Base URL under which decode workers reach the router to ask for a prefill (they POST to "
        "/v1/metaserver there). Unset: http://HOST:PORT of listen, which must then be an address that they can reach.",
    )
