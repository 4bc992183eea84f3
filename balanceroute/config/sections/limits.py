"""`limits`: what one client, one request and one worker may take."""

from typing import Self

from pydantic import Field, model_validator

from balanceroute.config.sections.section import Section
from balanceroute.config.values import Seconds


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
        description="Largest request body; above it 413, as above half of max_held_bytes and above max_incoming_bytes. "
        "200,000 token ids take 1.4 MB, images far more.",
    )
    max_incoming_bytes: int = Field(
        2**30,
        ge=2**20,
        le=2**40,
        description="Most bytes of requests that are still arriving, all together, with those that clients have "
        "pipelined; above it 503. For all relays on a machine together.",
    )
    max_held_bytes: int = Field(
        2 * 2**30,
        ge=2**20,
        le=2**40,
        description="Most bytes of request bodies that are arriving or being served, of unstreamed answers that are "
        "not complete, and of what prefillers have told of requests, all together; above it those that arrive get 503. "
        "Serving a body takes some three times its bytes of memory. One client may have half. As many bytes of answers "
        "may be unread; above it the connections with most are closed. For all relays on a machine together.",
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
        description="Most client connections at once. Above it the connection that has waited longest for a request "
        "is closed; if all are busy, the new request gets 503. For all relays on a machine together. Each takes two "
        "open files: fewer if `ulimit -n` allows no more.",
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
        description="A client connection that is idle after an answer is closed after this; above the 60 s of common "
        "load balancers. One that has sent nothing yet: client_header_timeout_s.",
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
        "client_min_rate_bytes_per_s over this long; otherwise it is disconnected.",
    )
