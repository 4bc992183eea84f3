"""The table of all routes and their access classes. A route that is not in it is not served (`ops/guard.py`).

open      health and metrics only; names no client and no prompt
client    uses the cluster; a client key if keys are set
decoder   called by decode workers, with the token that they were sent for one request
admin     changes or shows the router itself
"""

from enum import StrEnum
from typing import Final


class Access(StrEnum):
    """Who may use a route."""

    OPEN = "open"
    CLIENT = "client"
    DECODER = "decoder"
    ADMIN = "admin"


ACCESS: Final[dict[str, Access]] = {
    "/": Access.OPEN,  # leads to the dashboard
    "/health": Access.OPEN,
    "/healthcheck": Access.OPEN,
    "/metrics": Access.OPEN,  # admin with `metrics.public: false`
    "/ping": Access.OPEN,
    "/ready": Access.OPEN,
    "/version": Access.OPEN,
    "/detokenize": Access.CLIENT,
    "/tokenize": Access.CLIENT,
    "/v1/chat/completions": Access.CLIENT,
    "/v1/completions": Access.CLIENT,
    "/v1/messages": Access.CLIENT,
    "/v1/messages/count_tokens": Access.CLIENT,
    "/v1/messages/batches{rest:path}": Access.CLIENT,
    "/v1/models": Access.CLIENT,
    "/v1/models/{model:path}": Access.CLIENT,
    "/v1/responses": Access.CLIENT,
    "/v1/responses/{rest:path}": Access.CLIENT,
    "/v1/metaserver": Access.DECODER,
    "/v1/metaserver/{token}": Access.DECODER,
    "/dashboard": Access.ADMIN,
    "/dashboard/assets/{name}": Access.ADMIN,
    "/dashboard/data": Access.ADMIN,
    "/dashboard/session": Access.ADMIN,
    "/dashboard/stream": Access.ADMIN,
    "/dashboard/what_if": Access.ADMIN,
    "/decisions": Access.ADMIN,
    "/instances/add": Access.ADMIN,
    "/instances/drain": Access.ADMIN,
    "/instances/remove": Access.ADMIN,
    "/instances/undrain": Access.ADMIN,
    "/reset_prefix_cache": Access.ADMIN,
    "/start_profile": Access.ADMIN,
    "/routing/policy": Access.ADMIN,
    "/state": Access.ADMIN,
    "/stop_profile": Access.ADMIN,
}


def access_of(path: str, *, public_metrics: bool = True) -> Access:
    """The class of a route by its path as declared. Raises: KeyError: the table does not have it."""
    if path == "/metrics" and not public_metrics:
        return Access.ADMIN
    return ACCESS[path]
