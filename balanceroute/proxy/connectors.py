"""How KV gets from prefiller to decoder, as far as the router's messages differ.

Both pulling connectors take the same six keys in the probe, and their answer goes to the decoder whole. What differs
is what the router must know around it: whether a decoder's engine can have used up the parameters, and how one
upstream request is told from another.
"""

from dataclasses import dataclass
from typing import Protocol

from balanceroute.proxy.payloads import RESUME_IDS_KEY, ClientRequest, decode_body, drain_body, probe_body


class Connector(Protocol):
    """The bodies that one kind of KV transfer needs."""

    name: str
    resume_key: str
    """Where a resumed chat's token ids go inside kv_transfer_params."""

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

    def probe(self, request: ClientRequest) -> bytes:
        """One token, KV pinned."""
        return probe_body(request)

    def decode(self, request: ClientRequest, kv_transfer_params: bytes) -> bytes:
        """The client's wishes and the KV to pull."""
        return decode_body(request, kv_transfer_params)

    def drain(self, request: ClientRequest, kv_transfer_params: bytes) -> bytes:
        """Pull, one token, forget."""
        return drain_body(request, kv_transfer_params)


def connector_for(name: str) -> Connector:
    """The connector of a configuration."""
    return PullConnector(name)
