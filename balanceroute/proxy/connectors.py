"""How KV gets from prefiller to decoder, as far as the router's messages differ.

Both pulling connectors take the same six keys in the probe, and their answer goes to the decoder whole. What differs
is what the router must know around it: whether a decoder's engine can have used up the parameters, and how one
upstream request is told from another.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import orjson

from balanceroute.config import Config
from balanceroute.proxy.payloads import (
    RESUME_IDS_KEY,
    ClientRequest,
    decode_body,
    drain_body,
    probe_body,
    push_body,
)

METASERVER_PATH: Final = "/v1/metaserver"


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
class LayerwiseConnector:
    """The bodies of the layerwise connector, and who waits for which callback.

    `callback_url` is the router's base URL as decode workers reach it.
    """

    callback_url: str
    name: str = "mooncake_layerwise"
    resume_key: str = RESUME_IDS_KEY
    decode_first: bool = True
    _expected: dict[str, Callback | None] = field(default_factory=dict)

    @property
    def params(self) -> bytes:
        """What the decode worker gets: nothing to pull, and where to ask."""
        url = self.callback_url + METASERVER_PATH
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

    def expect(self, external_id: str, callback: Callback) -> None:
        """A decode worker is about to be sent the request that it calls by this id."""
        self._expected[external_id] = callback

    def forget(self, external_id: str) -> None:
        """That attempt is over."""
        self._expected.pop(external_id, None)

    def called_back(self, external_id: str, asked: bytes) -> str:
        """A decode worker asks for a prefill; returns "accepted", "repeated" or "unknown"."""
        if external_id not in self._expected:
            return "unknown"
        callback = self._expected[external_id]
        if callback is None:
            return "repeated"
        self._expected[external_id] = None
        callback(asked)
        return "accepted"


def connector_for(config: Config) -> Connector:
    """The connector of a configuration."""
    if config.connector == "mooncake_layerwise":
        return LayerwiseConnector(config.callback_url)
    return PullConnector(config.connector)
