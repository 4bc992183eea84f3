"""One listening socket: uvicorn's HTTP/1.1 protocol over an application, with a transport that faults can
cut.

uvicorn's own `Server` wants the process's signals and polls ten times a second; with a score of servers in
one process its protocol class alone is the better building block.
"""

import asyncio
import logging
import os
import socket
import struct
from email.utils import formatdate
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from balanceroute.emulator.app import CONNECTION
from balanceroute.errors import ConfigError

logger = logging.getLogger(__name__)

STOP_S = 2.0  # requests whose connection is cut end within milliseconds; whatever has not by then is cancelled
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends RST


class _TransportConnection:
    """An asyncio transport as `sse.Connection`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def close(self) -> None:
        """End the connection after what is written."""
        self._transport.close()

    def reset(self) -> None:
        """Cut the connection with a TCP reset, if it is still there."""
        if self._transport.is_closing():
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol that also shows the application its transport."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # the servers own this extension, so its value need not be the dict that ASGI suggests
        connection = cast(dict[object, object], _TransportConnection(self.transport))
        self.scope["extensions"] = {CONNECTION: connection}


class HttpServer:
    """A listener that can be closed and opened again on the same port."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        self._config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            log_config=None,
        )
        self._config.load()
        self._state = ServerState()
        self._host = host
        self._server: asyncio.Server | None = None
        self.port = port

    async def start(self) -> None:
        """Listen. Raises: ConfigError when the port is taken."""
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode()), (b"server", b"uvicorn")]
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._protocol, self._host, self.port, backlog=2048, reuse_address=True
            )
        except OSError as error:
            code = error.errno or 0  # below 0 of a host's name; asyncio's own text has the address
            why = os.strerror(code) if code > 0 else error.strerror
            raise ConfigError(f"cannot listen on {self._host}:{self.port}: {why}") from error
        except UnicodeError:  # of a name with an empty or too long part
            raise ConfigError(f"cannot listen on {self._host!r}: no name of a host") from None
        if not self._server.sockets:  # asyncio passes over what is out of descriptors
            raise ConfigError(f"cannot listen on {self._host}:{self.port}: too many open files (`ulimit -n`)")
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and cut all connections, as a killed process does; its requests end within `STOP_S`.

        The caller may be one of these requests, since any server takes the order to stop any of them: that one is
        neither waited for (it would wait for itself, and every later stop for it) nor cancelled.
        """
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for connection in list(self._state.connections):
            # no isinstance check: uvloop's transports are none of asyncio's classes
            connection.transport.abort()
        await server.wait_closed()
        others = self._state.tasks - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=STOP_S)
            for task in late:
                logger.warning("request did not end with its connection", extra={"request": repr(task)})
                task.cancel()

    @property
    def listening(self) -> bool:
        """Whether the port is open."""
        return self._server is not None

    def _protocol(self) -> asyncio.Protocol:
        return _Protocol(config=self._config, server_state=self._state, app_state={})
