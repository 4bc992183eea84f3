"""What a configuration opens, and to whom."""

from pathlib import Path
from typing import Any

import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.perimeter.perimeter import Perimeter, exposures
from balanceroute.proxy.perimeter.routes import Access
from tests.unit.proxy.virtual_time import a_config

EVERYWHERE = {"listen": {"host": "0.0.0.0"}}
LENT = {"auth": {"worker_api_key": "k"}}
KEYS = {"client_keys": "keys.yaml"}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, []),
        ({"listen": {"host": "localhost"}}, []),
        ({"listen": {"host": "::1"}}, []),
        (EVERYWHERE, ["whoever reaches 0.0.0.0:8000"]),
        ({"listen": {"host": "::"}}, ["whoever reaches [::]:8000"]),
        ({"listen": {"host": "router.example"}}, ["whoever reaches router.example:8000"]),
        (LENT, ["whoever can connect uses the workers' key"]),
        (EVERYWHERE | LENT, ["whoever can connect uses the workers' key", "whoever reaches 0.0.0.0:8000"]),
        (EVERYWHERE | {"auth": LENT["auth"] | KEYS}, []),
        (EVERYWHERE | LENT | {"tls": {"cert_file": "c.pem", "client_ca_file": "ca.pem"}}, []),
        (EVERYWHERE | {"tls": {"cert_file": "c.pem"}}, ["whoever reaches 0.0.0.0:8000"]),
    ],
)
def test_open_routes_are_reported_to_the_operator(sections: dict[str, Any], expected: list[str]) -> None:
    lines = list(exposures(a_config(**sections)))
    assert len(lines) == len(expected)
    assert all(text in line for text, line in zip(expected, lines, strict=True))


@pytest.mark.parametrize(
    ("access", "ports"),
    [
        (Access.OPEN, {8000, 9000, None}),
        (Access.CLIENT, {8000, None}),
        (Access.DECODER, {8000, None}),
        (Access.ADMIN, {9000}),
    ],
)
def test_an_admin_listener_serves_only_operators_routes(access: Access, ports: set[int | None]) -> None:
    perimeter = Perimeter(a_config(listen={"admin": "127.0.0.1:9000"}))
    for port in (8000, 9000, None):
        if port in ports:
            perimeter.check_listener(access, port)
        else:
            with pytest.raises(InvalidRequest) as caught:
                perimeter.check_listener(access, port)
            assert caught.value.status == 404


@pytest.mark.parametrize("access", Access)
def test_without_an_admin_listener_one_listener_serves_every_route(access: Access) -> None:
    Perimeter(a_config()).check_listener(access, 8000)


def test_workers_get_the_authorization_that_the_settings_name(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("keys: []\n")
    keys = {"client_keys": str(tmp_path / "keys.yaml")}
    own, admin = [(b"authorization", b"Bearer own")], [(b"authorization", b"bearer  adm")]
    for auth, of_own, of_admin in (
        ({}, None, None),
        ({"admin_token": "adm"}, None, b""),
        (keys, b"", b""),
        ({"worker_api_key": "w", "admin_token": "adm"}, b"Bearer w", b"Bearer w"),
        (keys | {"worker_api_key": "w"}, b"Bearer w", b"Bearer w"),
    ):
        perimeter = Perimeter(a_config(auth=auth))
        assert perimeter.authorization_for(own) == of_own and perimeter.authorization_for(admin) == of_admin
