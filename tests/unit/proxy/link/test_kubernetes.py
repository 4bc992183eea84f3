"""What is said to the API server of Kubernetes, and what is made of its answers."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
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


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b'{"message": "' + b"x" * 9999 + b'"}', "x" * 300), (b"\xff" + b"x" * 9999, "\ufffd" + "x" * 299)],
    ids=["of the API server", "of another server"],
)
def test_the_reason_of_a_refusal_is_short_and_readable(
    server: ApiServer, api: LeaseApi, monkeypatch: pytest.MonkeyPatch, body: bytes, reason: str
) -> None:
    monkeypatch.setattr(server, "answer", lambda *_: (502, body))
    with pytest.raises(LeaseError) as refused:
        api.read()
    assert str(refused.value).endswith(f"status 502: {reason}")


@pytest.mark.parametrize(
    "answer",
    [
        {"kind": "Status", "metadata": {"resourceVersion": "1"}},
        {"kind": "Lease", "metadata": {"resourceVersion": ""}},
        {"kind": "Lease", "metadata": {"resourceVersion": "1"}, "spec": {"leaseTransitions": "1"}},
        {"kind": "Lease"},
        [],
    ],
    ids=["another kind", "no version", "a number in quotes", "no metadata", "no object"],
)
def test_an_answer_that_is_no_lease_is_an_error(
    server: ApiServer, api: LeaseApi, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    monkeypatch.setattr(server, "answer", lambda *_: (200, answer))
    with pytest.raises(LeaseError, match="no Lease"):
        api.read()


@pytest.mark.parametrize("written", [{"holder_identity": "b"}, {"lease_transitions": 2}], ids=["holder", "number"])
def test_an_answer_that_differs_from_what_was_written_is_an_error(
    server: ApiServer, api: LeaseApi, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    spec = msgspec.to_builtins(msgspec.structs.replace(A, **written))
    whole = {"kind": "Lease", "metadata": {"resourceVersion": "1"}, "spec": spec}
    monkeypatch.setattr(server, "answer", lambda *_: (201, whole))
    with pytest.raises(LeaseError, match="not what was written"):
        api.create(A)


def test_the_api_server_is_called_directly_whatever_proxy_others_use(
    api: LeaseApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    assert api.read() is None


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
    elsewhere, own = tmp_path / "elsewhere", (tmp_path / "ca.crt").read_bytes()
    elsewhere.mkdir()
    with an_api_server(elsewhere):
        shutil.copy(elsewhere / "ca.crt", tmp_path / "ca.crt")
    api = server.api()
    with pytest.raises(LeaseError, match="CERTIFICATE_VERIFY_FAILED"):
        api.read()
    assert not server.calls
    (tmp_path / "ca.crt").write_bytes(own)  # as when the cluster's CA is replaced
    assert api.read() is None
    api.close()


def test_a_lease_is_for_pods_alone(tmp_path: Path) -> None:
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    for name in inside:
        with pytest.raises(ConfigError, match=r"^listen\.lease = 'router': accepted only in a pod .* are not set$"):
            lease_api("router", tmp_path, inside | {name: ""}, 1.0)
    with pytest.raises(ConfigError, match=r"service account: .*/namespace: No such file"):
        lease_api("router", tmp_path, inside, 1.0)
    with pytest.raises(ConfigError, match=r"service account: .*/token: No such file"):
        lease_api("serving/router", tmp_path, inside, 1.0)
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    api = lease_api("serving/router", tmp_path, inside, 1.0)
    assert api.name == "serving/router"
    with pytest.raises(LeaseError, match=r"^GET https://\[fd00::1\]:443/apis/.*/serving/leases/router: "):
        api.read()  # with a damaged CA file
