"""`kv_transfer_params`: made by a prefiller, read by a decoder.

The reactions are those of the real connectors, several of which are silent on the wire: KV that was freed
and reused gives other tokens, a missing key a request that never starts, a bad block list a dead engine.
Each is also counted as a violation, so that a test can tell the router's fault from the engine's.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from balanceroute.engine.tokens import prompt_digest


class Connector(StrEnum):
    """How KV gets from prefiller to decoder."""

    MOONCAKE_V1 = "mooncake_v1"
    NIXL = "nixl"
    MOONCAKE_LAYERWISE = "mooncake_layerwise"


# the names of their classes, as engines are told them
CLASS_NAMES = {
    Connector.MOONCAKE_V1: "MooncakeConnectorV1",
    Connector.NIXL: "NixlConnector",
    Connector.MOONCAKE_LAYERWISE: "MooncakeLayerwiseConnector",
}

# kv_lease_duration of NIXL; VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT of Mooncake, which is not extended while a
# decoder queues
DEFAULT_LEASE_S = {Connector.MOONCAKE_V1: 480.0, Connector.NIXL: 30.0, Connector.MOONCAKE_LAYERWISE: 480.0}

REMEMBERED_PINS = 4096
_REQUIRED = ("remote_engine_id", "remote_host", "remote_port", "remote_request_id", "remote_block_ids")


class Reaction(StrEnum):
    """A decoder's reaction to a request's params."""

    PULL = "pull"  # read the pinned KV
    LOCAL = "local"  # compute the prompt itself
    PUSHED = "pushed"  # wait for the prefiller to push (layerwise)
    WRONG_TOKENS = "wrong_tokens"  # read what is not its KV
    HANG = "hang"  # wait for KV that never comes
    ERROR = "error"  # the request ends with an error
    ENGINE_DIES = "engine_dies"


class PinState(StrEnum):
    """The state of a prefilled prompt's KV."""

    PINNED = "pinned"
    CLAIMED = "claimed"  # a decoder is about to read it
    PULLED = "pulled"
    EXPIRED = "expired"


@dataclass(slots=True)
class Pin:
    """Prefilled KV as the prefiller remembers it, also for a while after it is gone."""

    request_id: str
    digest: int
    block_ids: tuple[int, ...]
    state: PinState = PinState.PINNED


class KvSource(Protocol):
    """The prefiller that a decoder pulls from, by the ids under which KV is pinned there."""

    def remembers(self, request_id: str) -> bool:
        """Whether its transfer engine answers, and is the one that has pinned this."""

    def claim(self, request_id: str) -> None:
        """A decoder is about to read it; with NIXL its heartbeats begin, and the lease does not run out."""

    def give_back(self, request_id: str) -> None:
        """The decoder does not read it after all; with NIXL the heartbeats stop, and a last lease begins."""

    def pull(self, request_id: str) -> bool:
        """Free the pinned KV after reading it; False when it is gone already."""


class PinSource(KvSource, Protocol):
    """A prefiller of this process."""

    engine_id: str
    host: str
    port: int
    pins: "PinBook"

    @property
    def reachable(self) -> bool:
        """Whether its transfer engine answers."""


class PinBook:
    """The pins of one prefiller; remembers the last `REMEMBERED_PINS` of them after they are gone."""

    def __init__(self) -> None:
        self._pins: OrderedDict[str, Pin] = OrderedDict()

    def add(self, pin: Pin) -> None:
        """Remember a fresh pin, forgetting the oldest ones that are gone."""
        self._pins[pin.request_id] = pin
        while len(self._pins) > REMEMBERED_PINS:
            self._pins.popitem(last=False)

    def get(self, request_id: object) -> Pin | None:
        """The pin of a prefilled request."""
        return self._pins.get(request_id) if isinstance(request_id, str) else None

    def mark(self, request_id: str, state: PinState) -> None:
        """Note what became of a pin."""
        pin = self._pins.get(request_id)
        if pin is not None:
            pin.state = state


# external request id, prompt digest -> whether a request waits for it
PushSink = Callable[[str, int], bool]


class KvExchange:
    """All prefillers of a cluster by engine id, present and former."""

    def __init__(self) -> None:
        self._sources: dict[str, PinSource] = {}
        self._former: set[str] = set()
        self._sinks: dict[str, PushSink] = {}

    def register(self, source: PinSource) -> None:
        """Make a prefiller known under its engine id."""
        self._sources[source.engine_id] = source

    def retire(self, engine_id: str) -> None:
        """The engine of that id is gone for good: a restarted one has another id."""
        if self._sources.pop(engine_id, None):
            self._former.add(engine_id)

    def find(self, engine_id: object) -> PinSource | None:
        """The live prefiller of that engine id."""
        return self._sources.get(engine_id) if isinstance(engine_id, str) else None

    def register_sink(self, engine_id: str, sink: PushSink) -> None:
        """Make a decoder known that prefillers push to (layerwise)."""
        self._sinks[engine_id] = sink

    def retire_sink(self, engine_id: str) -> None:
        """The decoder of that engine id is gone for good."""
        self._sinks.pop(engine_id, None)

    def sink(self, engine_id: object) -> PushSink | None:
        """The destination of KV for the decoder of that engine id."""
        return self._sinks.get(engine_id) if isinstance(engine_id, str) else None

    def was_there(self, engine_id: object) -> bool:
        """Whether an engine of that id once lived here."""
        return engine_id in self._former


@dataclass(frozen=True, slots=True)
class PullPlan:
    """A decoder's reaction, the violation to count if the router caused trouble, and where the KV is, if anywhere."""

    reaction: Reaction
    violation: str | None = None
    source: KvSource | None = None
    request_id: str = ""  # under which it is pinned there


def reply_params(
    connector: Connector, source: PinSource, pin: Pin, prompt_tokens: int, block_size: int, last_token: int
) -> dict[str, Any] | None:
    """The parameters that a prefiller returns after a probe; None with the layerwise connector."""
    if connector is Connector.MOONCAKE_LAYERWISE:
        return None
    common = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(pin.block_ids)],
        "remote_engine_id": source.engine_id,
        "remote_request_id": pin.request_id,
        "remote_host": source.host,
        "remote_port": source.port,
    }
    if connector is Connector.NIXL:
        return common | {
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }
    return common | {
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_ptp_size": 1,
        "last_token_id": last_token,
        "remote_multi_nodes_meta_mapping": {"0": {"host": source.host, "engine_id": source.engine_id}},
        "num_prompt_blocks": len(pin.block_ids),
        "remote_block_size": block_size,
    }


def plan_pull(
    params: Mapping[str, Any] | None, prompt: tuple[int, ...], connector: Connector, exchange: KvExchange
) -> PullPlan:
    """Decide what a decoder does with a request that carries `params`."""
    plan = plan_from_params(params, connector)
    if plan is not None:
        return plan
    assert params is not None
    return plan_from_source(params, prompt_digest(prompt), exchange)


def plan_from_params(params: Mapping[str, Any] | None, connector: Connector) -> PullPlan | None:
    """The plan by the parameters alone; None: they name a prefiller's KV."""
    if not params or not params.get("do_remote_prefill"):
        return PullPlan(Reaction.LOCAL, "decoder_prefilled")
    if params.get("do_virtual"):
        return PullPlan(Reaction.LOCAL)
    if params.get("metaserver"):
        if connector is Connector.MOONCAKE_LAYERWISE:
            return PullPlan(Reaction.PUSHED)
        return PullPlan(Reaction.HANG, "wrong_connector")
    blocks = params.get("remote_block_ids")
    if "remote_block_ids" in params and not _is_block_list(blocks):
        return PullPlan(Reaction.ENGINE_DIES, "malformed_params")
    required = (*_REQUIRED, "tp_size") if connector is Connector.NIXL else _REQUIRED
    if any(params.get(name) is None for name in required):
        return PullPlan(Reaction.HANG, "malformed_params")
    return None


def plan_from_source(params: Mapping[str, Any], digest: int, exchange: KvExchange) -> PullPlan:
    """The plan by the prefiller's pins; `digest`: of the decoder's prompt."""
    engine_id = params["remote_engine_id"]
    source = exchange.find(engine_id)
    if source is None:
        return PullPlan(Reaction.ERROR, None if exchange.was_there(engine_id) else "unknown_engine")
    if not source.reachable:
        return PullPlan(Reaction.ERROR)
    if (params["remote_host"], params["remote_port"]) != (source.host, source.port):
        return PullPlan(Reaction.ERROR, "unknown_engine")
    pin = source.pins.get(params["remote_request_id"])
    if pin is None:
        return PullPlan(Reaction.WRONG_TOKENS, "params_unknown")
    if pin.state is not PinState.PINNED:
        expired = pin.state is PinState.EXPIRED
        return PullPlan(Reaction.WRONG_TOKENS, "params_expired" if expired else "params_reused")
    blocks = tuple(block for group in params["remote_block_ids"] for block in group)
    if len(blocks) < len(pin.block_ids):
        return PullPlan(Reaction.ENGINE_DIES, "malformed_params")
    if blocks != pin.block_ids:
        return PullPlan(Reaction.WRONG_TOKENS, "params_modified", source, pin.request_id)
    if pin.digest != digest:
        return PullPlan(Reaction.WRONG_TOKENS, "wrong_prompt", source, pin.request_id)
    return PullPlan(Reaction.PULL, None, source, pin.request_id)


def _is_block_list(blocks: object) -> bool:
    """A non-empty list of non-empty lists of ids."""
    return (
        isinstance(blocks, list)
        and bool(blocks)
        and all(isinstance(group, list) and group and all(type(b) is int for b in group) for group in blocks)
    )
