"""The sockets that the parent binds, and what it says where it can't."""

import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from balanceroute.config import Config
from balanceroute.errors import ConfigError
from balanceroute.proxy.parent.listeners import bound, listeners
from balanceroute.proxy.run_folder.folder import RunFolder
from tests.ports import HOST, loopback
from tests.unit.proxy.virtual_time import a_config


def predecessor(*, has: tuple[str, int] | None = None, sock: socket.socket | None = None) -> Any:
    """A router to take over from, which listens at this address."""
    return SimpleNamespace(listener=lambda *address: sock if address == has else None)


def refusal(config: Config, former: Any = None) -> str:
    with pytest.raises(ConfigError) as refused, ExitStack() as held:
        for sock in listeners(config, former):
            held.enter_context(sock)
    return str(refused.value)


def test_an_address_in_use_is_named_with_its_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        here = {"relays": 1, "run_folder": str(tmp_path)}
        assert refusal(a_config(listen=here | {"port": port})) == f"listen: {wrong}"
        assert refusal(a_config(listen=here | {"port": 0, "admin": f"127.0.0.1:{port}"})) == f"listen.admin: {wrong}"


def test_a_port_of_another_router_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, RunFolder(tmp_path).claim():
        config = a_config(listen={"relays": 1, "run_folder": str(tmp_path), "port": taken.getsockname()[1]})
        message = refusal(config)
        assert refusal(config, predecessor()).endswith("Address already in use"), "it is replaced already"
    assert "Address already in use: a router with relays runs there; --take-over replaces it" in message


def test_a_port_is_free_again_at_once_when_its_router_has_ended(tmp_path: Path) -> None:
    port = 0
    for _ in range(2):
        listen = {"relays": 1, "run_folder": str(tmp_path), "port": port}
        with next(listeners(a_config(listen=listen), None)) as sock:
            port = sock.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)):
                sock.accept()[0].close()  # first, so the kernel keeps the connection for a minute
            with pytest.raises(BlockingIOError):
                sock.accept()


def test_ipv6_leaves_the_port_of_ipv4_to_another_router(tmp_path: Path) -> None:
    port, hosts = 0, ("::", "0.0.0.0") if loopback() == "::1" else (HOST, "127.0.0.2")
    with ExitStack() as held:
        for host in hosts:
            listen = {"relays": 1, "run_folder": str(tmp_path), "host": host, "port": port}
            port = held.enter_context(next(listeners(a_config(listen=listen), None))).getsockname()[1]


def test_a_host_name_stands_for_its_ipv4_address_if_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, 0, 0, "", ("::1", 0, 0, 0)), (socket.AF_INET, 0, 0, "", (HOST, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with bound("listen", "has.both", 0, None) as sock:
        assert sock.getsockname()[0] == HOST
        assert bound("listen", "has.both", 8000, predecessor(has=(HOST, 8000), sock=sock)) is sock


def test_an_invalid_host_is_named() -> None:
    message = refusal(a_config(listen={"relays": 1, "host": "no.such.host.invalid", "port": 0}))
    assert message == "listen: cannot listen on no.such.host.invalid:0: there is no such address"


def test_an_ipv6_address_that_cannot_be_used_is_named_in_brackets(tmp_path: Path) -> None:
    message = refusal(a_config(listen={"relays": 1, "host": "2001:db8::1", "port": 8000, "run_folder": str(tmp_path)}))
    assert message.startswith("listen: cannot listen on [2001:db8::1]:8000: ")
