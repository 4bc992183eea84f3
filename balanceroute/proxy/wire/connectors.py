"""KV connectors: their parameters, and the callbacks of the layerwise one.

The pulling connectors (vllm-ascend's MooncakeConnectorV1 and V2, vLLM's NixlConnector) use the same messages: a
prefiller's parameters go to the decoder unchanged, and show whose they are. A layerwise decode worker pulls nothing: it
gets a URL, and asks there for its prefill.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import orjson

_ONLY_OF: Final = {  # keys of kv_transfer_params that only one connector has, from the engines' sources
    "nixl": frozenset(("tp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode")),
    "mooncake_v1": frozenset(  # the last one: MooncakeConnectorV2
        ("remote_ptp_size", "remote_pcp_size", "last_token_id", "num_prompt_blocks", "remote_num_prompt_tokens")
    ),
}
METASERVER_PATH: Final = "/v1/metaserver"
TOKEN_BYTES: Final = 24

Callback = Callable[[bytes], None]


def connector_of(kv_transfer_params: bytes) -> str | None:
    """The connector that a prefiller's parameters belong to; None: they do not show it."""
    keys = orjson.loads(kv_transfer_params).keys()
    fits = [name for name, only in _ONLY_OF.items() if not only.isdisjoint(keys)]
    return fits[0] if len(fits) == 1 else None


@dataclass(slots=True)
class _Expected:
    """A callback that a decode worker is to make; `callback` is None once it has come."""

    external_id: str
    callback: Callback | None


@dataclass(slots=True)
class Callbacks:
    """The callbacks of decode workers that requests wait for (layerwise).

    `url` is the router's base URL as decode workers reach it. The URL for each attempt contains its own token, so only
    its decode worker can say where the KV is to be pushed. The token begins with the name of the `relay` that made it,
    because the callback may arrive at another one; "": there is only one process. `arrive`: whether those that arrive
    elsewhere are passed on to this process.
    """

    url: str
    relay: str = ""
    arrive: Callable[[], bool] = lambda: True
    _expected: dict[str, _Expected] = field(default_factory=dict)  # by token

    def new_token(self) -> str:
        """A token for one attempt, which nobody can guess."""
        secret = secrets.token_urlsafe(TOKEN_BYTES)
        return f"{self.relay}.{secret}" if self.relay else secret

    def params(self, token: str) -> bytes:
        """The decode worker's KV parameters: nothing to pull, and the URL to ask at."""
        url = f"{self.url}{METASERVER_PATH}/{token}"
        return orjson.dumps({"do_remote_decode": False, "do_remote_prefill": True, "metaserver": url})

    def expect(self, token: str, external_id: str, callback: Callback) -> None:
        """Expect a callback with this token, for the request that the decode worker knows under this id."""
        self._expected[token] = _Expected(external_id, callback)

    def forget(self, token: str) -> None:
        """Expect no callback with this token any more."""
        self._expected.pop(token, None)

    def expects(self, token: str) -> bool:
        """Whether the token belongs to an attempt that is under way."""
        return token in self._expected

    def called_back(self, token: str, external_id: str, asked: bytes) -> str:
        """Take a decode worker's callback; returns "accepted", "repeated" or "unknown"."""
        expected = self._expected.get(token)
        if expected is None or expected.external_id != external_id:
            return "unknown"
        callback, expected.callback = expected.callback, None
        if callback is None:
            return "repeated"
        callback(asked)
        return "accepted"


def owner_of(token: str) -> str:
    """The name of the relay that made a token; "": the token contains none."""
    return token.rpartition(".")[0]
