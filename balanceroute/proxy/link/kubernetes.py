"""One Lease of a Kubernetes cluster (coordination.k8s.io/v1), read and written as the pod's service account.

Each of the three calls returns the present object. A write carries the `resourceVersion` that it is based on. So of two
writers that have read the same version one fails (409), and no change is overwritten unseen. The service account's
token is read for each call, because it is replaced about once per hour; the connection and the cluster's CA are kept
until a call fails.
"""

import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import orjson

from balanceroute.config.addresses import host_in_url
from balanceroute.errors import BalanceRouteError, ConfigError

_KIND: Final = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
_MOST_OF_A_REASON: Final = 300


class LeaseError(BalanceRouteError):
    """The API server can't be reached, or refuses the call. `denied`: with 401 or 403."""

    def __init__(self, text: str, denied: bool = False) -> None:
        super().__init__(text)
        self.denied = denied


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The spec of a Lease: its holder, its duration after each renewal, and how often the holder has changed.

    Times are by the holder's clock, for people; the program does not compare them.
    """

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """A Lease as the API server has it; `whole`: the whole object, with fields of others."""

    whole: dict[str, Any]
    spec: LeaseSpec


class LeaseApi:
    """Reads and writes one Lease. Each call may block for `timeout_s` between two bytes, and may raise LeaseError."""

    def __init__(self, url: str, namespace: str, name: str, account: Path, timeout_s: float) -> None:
        """`url`: of the API server. `account`: the folder of the service account."""
        self.name, self._account, self._timeout_s = f"{namespace}/{name}", account, timeout_s
        self._all = f"{url}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._one = f"{self._all}/{name}"
        self._new = {**_KIND, "metadata": {"name": name, "namespace": namespace}}
        self._client: httpx.Client | None = None

    def read(self) -> Lease | None:
        """Read the Lease; None: there is none."""
        return self._call("GET", self._one, None, absent=(404,))

    def create(self, spec: LeaseSpec) -> Lease | None:
        """Create the Lease; None: it exists already."""
        return _written(self._call("POST", self._all, self._new | {"spec": spec}, absent=(409,)), spec)

    def replace(self, lease: Lease, spec: LeaseSpec) -> Lease | None:
        """Write the Lease; None: it has changed since it was read, or is gone."""
        return _written(self._call("PUT", self._one, lease.whole | {"spec": spec}, absent=(404, 409)), spec)

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _call(self, method: str, url: str, body: dict[str, Any] | None, absent: tuple[int, ...]) -> Lease | None:
        try:
            token = (self._account / "token").read_text().strip()
            if self._client is None:
                self._client = self._connected()
            headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
            content = None if body is None else msgspec.json.encode(body)
            reply = self._client.request(method, url, content=content, headers=headers)
        except (httpx.HTTPError, OSError, ValueError) as error:
            self.close()
            raise LeaseError(f"{method} {url}: {error or type(error).__name__}") from error
        if reply.status_code in absent:
            return None
        if reply.status_code not in (200, 201):
            text = f"{method} {url}: status {reply.status_code}: {_reason(reply.content)}"
            raise LeaseError(text, denied=reply.status_code in (401, 403))
        return _lease(reply.content)

    def _connected(self) -> httpx.Client:
        """A client that trusts the cluster's CA. Raises: OSError: the CA's file can't be used."""
        trusted = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        return httpx.Client(verify=trusted, timeout=self._timeout_s, trust_env=False)


def lease_api(named: str, account: Path, environ: Mapping[str, str], timeout_s: float) -> LeaseApi:
    """The Lease NAME or NAMESPACE/NAME in the cluster of this pod.

    Raises: ConfigError: this process runs in no pod, or the pod has no service account.
    """
    problem = f"listen.lease = {named!r}: accepted only in a pod of Kubernetes"
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ConfigError(f"{problem}: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set")
    namespace, _, name = named.rpartition("/")
    try:
        namespace = namespace or (account / "namespace").read_text().strip()
        for file in ("token", "ca.crt"):
            (account / file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{problem} with a service account: {error.filename}: {error.strerror}") from None
    return LeaseApi(f"https://{host_in_url(host)}:{port}", namespace, name, account, timeout_s)


def _lease(body: bytes) -> Lease:
    try:
        whole = orjson.loads(body)
        if whole["kind"] != "Lease" or not whole["metadata"]["resourceVersion"]:
            raise ValueError(f"kind {whole['kind']!r}")
        return Lease(whole, msgspec.convert(whole.get("spec") or {}, LeaseSpec))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise LeaseError(f"the API server's answer is no Lease: {error}") from error


def _written(lease: Lease | None, spec: LeaseSpec) -> Lease | None:
    """Check the answer to a write. Raises: LeaseError: it is not what was written."""
    if lease is not None:
        written = lease.spec.holder_identity or "", lease.spec.lease_transitions
        if written != (spec.holder_identity or "", spec.lease_transitions):
            raise LeaseError(f"the API server's answer is not what was written: holder and number {written}")
    return lease


def _reason(body: bytes) -> str:
    """The reason of a refusal, from the API server's Status object."""
    with suppress(ValueError, AttributeError):
        return str(orjson.loads(body).get("message"))[:_MOST_OF_A_REASON]
    return body[:_MOST_OF_A_REASON].decode("utf-8", "replace")
