"""How KV gets from prefiller to decoder, as far as the router's messages differ.

Both pulling connectors take the same six keys in the probe, and their answer goes to the decoder whole. What differs
is what the router must know around it: whether a decoder's engine can have used up the parameters, and how one
upstream request is told from another.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import orjson

from balanceroute.config import Config
from balanceroute.proxy.wire.payloads import (
    RESUME_IDS_KEY,
    ClientRequest,
    decode_body,
    drain_body,
    probe_body,
    push_body,
)

_ONLY_OF: Final = {  # keys of a prefiller's kv_transfer_params that no other connector has, from the engines' sources
    "nixl": frozenset(("tp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode")),
    "mooncake_v1": frozenset(("remote_ptp_size", "remote_pcp_size", "last_token_id", "num_prompt_blocks")),
}
METASERVER_PATH: Final = "/v1/metaserver"
TOKEN_BYTES: Final = 24


def connector_of(kv_transfer_params: bytes) -> str | None:
    """Which connector a prefiller's parameters are of; None where they don't tell."""
    keys = orjson.loads(kv_transfer_params).keys()
    fits = [name for name, only in _ONLY_OF.items() if not only.isdisjoint(keys)]
    return fits[0] if len(fits) == 1 else None


class Connector(Protocol):
    """The bodies that one kind of KV transfer needs."""

    name: str
    resume_key: str
    """Where a resumed chat's token ids go inside kv_transfer_params."""
    decode_first: bool
    """Whether the decode worker is chosen before the prefill."""

    def probe(self, request: ClientRequest) -> bytes:
        """For the prefiller."""
        ...

    def decode(self, request: ClientRequest, kv_transfer_params: bytes) -> bytes:
        """For the decoder, with what the prefiller returned."""
        ...

    def drain(self, request: ClientRequest, kv_transfer_params: bytes) -> bytes:
        """For the decoder that frees KV nobody waits for."""
        ...


@dataclass(slots=True)
class PullConnector:
    """Prefill first; the decoder pulls: vllm-ascend's MooncakeConnectorV1 and vLLM's NixlConnector.

    `resume_key` is where a chat's token ids go when it is resumed: vLLM >= 0.27 reads `prompt_token_ids`.
    """

    name: str
    resume_key: str = RESUME_IDS_KEY
    decode_first: bool = False

    def probe(self, request: ClientRequest) -> bytes:
        """One token, KV pinned."""
        return probe_body(request)

    def decode(self, request: ClientRequest, kv_transfer_params: bytes) -> bytes:
        """The client's wishes and the KV to pull."""
        return decode_body(request, kv_transfer_params)

    def drain(self, request: ClientRequest, kv_transfer_params: bytes) -> bytes:
        """Pull, one token, forget."""
        return drain_body(request, kv_transfer_params)


Callback = Callable[[bytes], None]


@dataclass(slots=True)
class _Expected:
    """A callback that a decode worker was told to make; `callback` is None once it has come."""

    external_id: str
    callback: Callback | None


@dataclass(slots=True)
class LayerwiseConnector:
    """The bodies of the layerwise connector, and who waits for which callback.

    `callback_url` is the router's base URL as decode workers reach it. Each attempt has a token of its own in the URL
    that its decode worker is sent, so nobody else can say where a request's KV is to be pushed. It begins with the name
    of the `relay` that made it, as the callback may arrive at another one; "": there is only one process.
    """

    callback_url: str
    relay: str = ""
    name: str = "mooncake_layerwise"
    resume_key: str = RESUME_IDS_KEY
    decode_first: bool = True
    _expected: dict[str, _Expected] = field(default_factory=dict)  # by token

    def new_token(self) -> str:
        """One for an attempt, which nobody can guess."""
        secret = secrets.token_urlsafe(TOKEN_BYTES)
        return f"{self.relay}.{secret}" if self.relay else secret

    def params(self, token: str) -> bytes:
        """What the decode worker gets: nothing to pull, and where to ask."""
        url = f"{self.callback_url}{METASERVER_PATH}/{token}"
        return orjson.dumps({"do_remote_decode": False, "do_remote_prefill": True, "metaserver": url})

    def probe(self, request: ClientRequest) -> bytes:
        """As for a pulling connector; not used while the decode worker is first."""
        return probe_body(request)

    def decode(self, request: ClientRequest, kv_transfer_params: bytes) -> bytes:
        """The client's wishes and the address to ask at."""
        return decode_body(request, kv_transfer_params)

    def push(self, request: ClientRequest, asked: bytes) -> bytes:
        """For the prefiller: one token, and the decode worker's own words on where the KV goes."""
        return push_body(request, asked)

    def drain(self, request: ClientRequest, kv_transfer_params: bytes) -> bytes:
        """As for a pulling connector; nothing is ever pinned here."""
        return drain_body(request, kv_transfer_params)

    def expect(self, token: str, external_id: str, callback: Callback) -> None:
        """A decode worker is about to be sent the request that it calls by this id, with this unguessable token."""
        self._expected[token] = _Expected(external_id, callback)

    def forget(self, token: str) -> None:
        """That attempt is over."""
        self._expected.pop(token, None)

    def expects(self, token: str) -> bool:
        """Whether a decode worker was sent this token for an attempt that goes on."""
        return token in self._expected

    def called_back(self, token: str, external_id: str, asked: bytes) -> str:
        """A decode worker asks for a prefill; returns "accepted", "repeated" or "unknown"."""
        expected = self._expected.get(token)
        if expected is None or expected.external_id != external_id:
            return "unknown"
        callback, expected.callback = expected.callback, None
        if callback is None:
            return "repeated"
        callback(asked)
        return "accepted"


def owner_of(token: str) -> str:
    """The relay that has made a token; "": it names none."""
    return token.rpartition(".")[0]


def connector_for(config: Config, relay: str = "") -> Connector:
    """The connector of a configuration, in the relay of that name."""
    if config.connector == "mooncake_layerwise":
        return LayerwiseConnector(config.callback_url, relay)
    return PullConnector(config.connector)
