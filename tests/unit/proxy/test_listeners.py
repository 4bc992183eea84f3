"""The sockets that the parent binds, and what it says where it can't."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from balanceroute.config import Config
from balanceroute.errors import ConfigError
from balanceroute.proxy.listeners import listeners
from balanceroute.proxy.run_folder import RunFolder
from tests.unit.proxy.virtual_time import a_config


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as refused, ExitStack() as held:
        for sock in listeners(config, None):
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
        message = refusal(a_config(listen={"relays": 1, "run_folder": str(tmp_path), "port": taken.getsockname()[1]}))
    assert "Address already in use: a router with relays runs there; --take-over replaces it" in message


def test_an_invalid_host_is_named() -> None:
    message = refusal(a_config(listen={"relays": 1, "host": "no.such.host.invalid", "port": 0}))
    assert message == "listen: cannot listen on no.such.host.invalid:0: there is no such address"


def test_an_ipv6_address_that_cannot_be_used_is_named_in_brackets(tmp_path: Path) -> None:
    message = refusal(a_config(listen={"relays": 1, "host": "2001:db8::1", "port": 8000, "run_folder": str(tmp_path)}))
    assert message.startswith("listen: cannot listen on [2001:db8::1]:8000: ")
