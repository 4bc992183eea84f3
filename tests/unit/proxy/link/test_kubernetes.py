"""What is said to the API server of Kubernetes, and what is made of its answers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.link.kubernetes import LeaseApi, LeaseError, LeaseSpec, lease_api
from tests.api_server import ApiServer, an_api_server

A = LeaseSpec(holder_identity="a", lease_duration_seconds=15, lease_transitions=1)
B = LeaseSpec(holder_identity="b", lease_duration_seconds=15, lease_transitions=2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with an_api_server(tmp_path) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> Iterator[LeaseApi]:
    its = server.api()
    yield its
    its.close()


def test_a_lease_is_created_once_and_replaced_only_with_its_latest_version(api: LeaseApi) -> None:
    assert api.read() is None
    made = api.create(A)
    assert made is not None and made.spec == A
    assert api.create(B) is None
    replaced = api.replace(made, B)
    assert replaced is not None and replaced.spec == B
    assert api.replace(made, A) is None
    found = api.read()
    assert found is not None and found.spec == B


def test_a_deleted_lease_is_not_replaced(server: ApiServer, api: LeaseApi) -> None:
    made = api.create(A)
    assert made is not None
    server.leases.clear()
    assert api.replace(made, B) is None and not server.leases


def test_the_token_is_read_for_each_call_because_it_is_replaced(server: ApiServer) -> None:
    api = server.api()
    assert api.read() is None
    server.tokens = {"second"}
    with pytest.raises(LeaseError, match="401: Unauthorized"):
        api.read()
    (server.account / "token").write_text("second")
    assert api.read() is None
    api.close()


def test_a_missing_namespace_is_an_error(server: ApiServer, api: LeaseApi) -> None:
    server.namespaces = {"default"}
    assert api.read() is None
    with pytest.raises(LeaseError, match="404: .*leases not found"):
        api.create(A)


@pytest.mark.parametrize(("status", "denied"), [(401, True), (403, True), (429, False), (500, False)])
def test_a_refusal_is_an_error_that_distinguishes_missing_rights(
    server: ApiServer, api: LeaseApi, status: int, denied: bool
) -> None:
    server.failure = status
    with pytest.raises(LeaseError, match=f"status {status}: injected") as refused:
        api.read()
    assert refused.value.denied is denied


def test_an_answer_that_is_no_lease_is_an_error(server: ApiServer, api: LeaseApi) -> None:
    server.failure = 200
    with pytest.raises(LeaseError, match="no Lease"):
        api.read()


def test_a_call_that_hangs_ends_and_the_next_one_has_a_new_connection(server: ApiServer, tmp_path: Path) -> None:
    api = server.api(timeout_s=0.1)
    server.goes_on.clear()
    with pytest.raises(LeaseError, match="timed out"):
        api.read()
    server.goes_on.set()
    api.close()
    patient = server.api()
    assert patient.read() is None
    patient.close()


def test_an_api_server_with_another_ca_receives_no_request(server: ApiServer, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with an_api_server(elsewhere):
        shutil.copy(elsewhere / "ca.crt", tmp_path / "ca.crt")
    api = server.api()
    with pytest.raises(LeaseError, match="CERTIFICATE_VERIFY_FAILED"):
        api.read()
    assert not server.calls


def test_a_lease_is_for_pods_alone(tmp_path: Path) -> None:
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match=r"^listen\.lease = 'router': accepted only in a pod .* are not set$"):
        lease_api("router", tmp_path, {}, 1.0)
    with pytest.raises(ConfigError, match=r"service account: .*/namespace: No such file"):
        lease_api("router", tmp_path, inside, 1.0)
    with pytest.raises(ConfigError, match=r"service account: .*/token: No such file"):
        lease_api("serving/router", tmp_path, inside, 1.0)
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    assert lease_api("serving/router", tmp_path, inside, 1.0).name == "serving/router"
