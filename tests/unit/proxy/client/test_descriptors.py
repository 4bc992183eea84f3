"""For how many clients a process has descriptors."""

import logging
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.client.descriptors import (
    clients_within,
    most_clients,
    most_clients_here,
    raise_limit,
    warn_if_few,
)
from balanceroute.proxy.client.edge import ClientLimits
from tests.unit.proxy.virtual_time import a_config


@pytest.fixture
def few() -> Iterator[None]:
    """This process may have 1024, as in most shells."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("descriptors", "workers", "clients"),
    [(1024, 6, 436), (65_536, 150, 32_404), (160, 6, 40), (160, 1000, 40), (1, 1, 1)],
)
def test_a_client_needs_two_descriptors_and_at_most_half_are_reserved_for_workers(
    descriptors: int, workers: int, clients: int
) -> None:
    assert clients_within(descriptors, workers) == clients


@pytest.mark.usefixtures("few")
def test_max_connections_is_limited_by_descriptors_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = a_config(listen={"relays": 2})
    one = clients_within(1024, len(config.prefill.workers) + len(config.decode.workers))
    limits = ClientLimits.of(config)
    assert limits.max_connections == most_clients(config) == 2 * one < 1024
    assert limits.max_connections_here == most_clients_here(config) == one
    warn_if_few(config)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.__dict__["clients"] == 2 * one


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("asked", "warned"), [(-1, False), (0, False), (1, True)])
def test_a_configured_max_connections_is_warned_about_when_missed_by_one(
    caplog: pytest.LogCaptureFixture, asked: int, warned: bool
) -> None:
    one = most_clients(a_config())
    warn_if_few(a_config(limits={"max_connections": one + asked}))
    assert bool(caplog.records) is warned


def test_a_limit_that_is_too_low_to_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(ConfigError, match=r"^open files \(ulimit -Hn\) are limited to 20; at least 64 are needed$"):
        raise_limit()


def test_the_default_max_connections_is_warned_about_only_below_half(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balanceroute.proxy.client.descriptors.limit", lambda: 20_000)
    config = a_config()
    warn_if_few(config)
    assert most_clients(config) < config.limits.max_connections and not caplog.records


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    script = (
        "import resource; from balanceroute.proxy.client.descriptors import limit, raise_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); raise_limit(); print(limit())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "300"
