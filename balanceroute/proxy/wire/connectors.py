"""What the router must know of how KV gets from prefiller to decoder.

Both pulling connectors (vllm-ascend's MooncakeConnectorV1 and vLLM's NixlConnector) take the same messages, and a
prefiller's parameters go to the decoder whole; they tell which of the two it runs. A layerwise decode worker pulls
nothing: it is told where to ask for its prefill, and calls back.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import orjson

_ONLY_OF: Final = {  # keys of a prefiller's kv_transfer_params that no other connector has, from the engines' sources
    "nixl": frozenset(("tp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode")),
    "mooncake_v1": frozenset(("remote_ptp_size", "remote_pcp_size", "last_token_id", "num_prompt_blocks")),
}
METASERVER_PATH: Final = "/v1/metaserver"
TOKEN_BYTES: Final = 24

Callback = Callable[[bytes], None]


def connector_of(kv_transfer_params: bytes) -> str | None:
    """The connector that a prefiller's parameters belong to; None where they don't show it."""
    keys = orjson.loads(kv_transfer_params).keys()
    fits = [name for name, only in _ONLY_OF.items() if not only.isdisjoint(keys)]
    return fits[0] if len(fits) == 1 else None


@dataclass(slots=True)
class _Expected:
    """A callback that a decode worker was told to make; `callback` is None once it has come."""

    external_id: str
    callback: Callback | None


@dataclass(slots=True)
class Callbacks:
    """The callbacks of decode workers that requests wait for (layerwise).

    `url` is the router's base URL as decode workers reach it. Each attempt has a token of its own in the URL that its
    decode worker is sent, so nobody else can say where a request's KV is to be pushed. It begins with the name of the
    `relay` that made it, as the callback may arrive at another one; "": there is only one process.
    """

    url: str
    relay: str = ""
    _expected: dict[str, _Expected] = field(default_factory=dict)  # by token

    def new_token(self) -> str:
        """A token for one attempt, which nobody can guess."""
        secret = secrets.token_urlsafe(TOKEN_BYTES)
        return f"{self.relay}.{secret}" if self.relay else secret

    def params(self, token: str) -> bytes:
        """What the decode worker gets: nothing to pull, and where to ask."""
        url = f"{self.url}{METASERVER_PATH}/{token}"
        return orjson.dumps({"do_remote_decode": False, "do_remote_prefill": True, "metaserver": url})

    def expect(self, token: str, external_id: str, callback: Callback) -> None:
        """A decode worker is about to be sent the request that it calls by this id, with this unguessable token."""
        self._expected[token] = _Expected(external_id, callback)

    def forget(self, token: str) -> None:
        """The attempt with this token is over."""
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
    """The name of the relay that made a token; "": it contains none."""
    return token.rpartition(".")[0]
