"""The adapter between uvicorn and the client protocol: all that is assumed of uvicorn.

uvicorn serves with any maker of protocols that it is given as `http=` (its settings page, "HTTP protocol
implementation"). What it expects of one is not documented; it is assumed here, and tested
(`tests/unit/proxy/client/test_uvicorn_protocol.py`) with the lowest and the newest version that pyproject.toml allows:

    it is called with the keywords config, server_state, app_state and _loop, once per connection
    server_state.connections is a set that a connection joins while it is open: the stop waits for it to be empty
    server_state.tasks is a set of the tasks of requests under way: the stop waits for them, then cancels them
    a connection has `shutdown()`, called when the server stops: it ends when its last answer is complete
"""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from balanceroute.proxy.client.edge import ClientLimits, Edge, Site
from balanceroute.proxy.client.handshake import Handshake
from balanceroute.proxy.client.protocol import ClientProtocol
from balanceroute.proxy.client.relay_loads import Load, alone


def protocol_factory(
    site: Site,
    limits: Callable[[], ClientLimits],
    tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    load: Callable[[], Load] = alone,
    on_bug: Callable[[str], None] = lambda where: None,
) -> Callable[..., asyncio.Protocol]:
    """What a `uvicorn.Config` takes as `http`: it makes the connections that serve `site` within `limits`.

    `tls`: called for each connection; returns its TLS context, or None for plain HTTP. `load`: called once, at the
    first connection. `on_bug`: counts a bug.
    """
    edge: Edge | None = None

    def connection(
        config: Any, server_state: Any, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> asyncio.Protocol:
        nonlocal edge
        if edge is None:
            loop = _loop or asyncio.get_running_loop()
            connections, tasks = server_state.connections, server_state.tasks
            edge = Edge(site, limits, loop, connections, tasks, app_state, load(), on_bug)
        context = tls()
        return ClientProtocol(edge) if context is None else Handshake(edge, context, partial(ClientProtocol, edge))

    return connection
