"""Which class each route is in."""

import pytest
from starlette.routing import Route

from balanceroute.proxy.app import create_app
from balanceroute.proxy.perimeter.routes import ACCESS, Access, access_of
from tests.unit.proxy.virtual_time import a_config

LAYERWISE = {"connector": "mooncake_layerwise", "layerwise": {"callback_url": "http://router"}}


def paths(**settings: object) -> set[str]:
    """Those of all that an application serves by ASGI."""
    config = a_config()
    app = create_app(config.model_validate(config.model_dump() | settings))
    return {route.path for route in app.routes if isinstance(route, Route)}


def test_the_table_names_the_routes_that_are_served_and_no_other() -> None:
    hot = {"/v1/completions", "/v1/chat/completions", "/v1/messages"}
    assert set(ACCESS) == paths(**LAYERWISE) | hot
    assert {path for path, access in ACCESS.items() if access is Access.DECODER} == paths(**LAYERWISE) - paths()


@pytest.mark.parametrize("path", sorted(path for path, access in ACCESS.items() if access is Access.OPEN))
def test_routes_that_are_open_to_everyone_change_nothing(path: str) -> None:
    methods = {
        method
        for route in create_app(a_config()).routes
        if isinstance(route, Route) and route.path == path
        for method in route.methods or ()
    }
    assert methods <= {"GET", "HEAD"} | ({"POST"} if path == "/ping" else set())  # some platforms post to it


def test_metrics_need_operator_access_when_not_public() -> None:
    assert access_of("/metrics") is Access.OPEN
    assert access_of("/metrics", public_metrics=False) is Access.ADMIN
    assert access_of("/health", public_metrics=False) is Access.OPEN


def test_a_route_that_is_in_no_class_cannot_be_served() -> None:
    with pytest.raises(KeyError):
        access_of("/new")
