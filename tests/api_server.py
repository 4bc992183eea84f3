"""A small API server of Kubernetes with Leases, over TLS, that can be made to fail.

What it does is what the real one does with them: it asks for the token, names the version of each write, refuses one
that is based on another version (409), and takes no Lease that its schema does not have.
"""

import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme

from balanceroute.proxy.link.kubernetes import LeaseApi

PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([a-z0-9-]+)/leases(?:/([a-z0-9.-]+))?")
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
SPEC: dict[str, type] = {
    "holderIdentity": str,
    "leaseDurationSeconds": int,
    "acquireTime": str,
    "renewTime": str,
    "leaseTransitions": int,
}


@dataclass
class ApiServer:
    """What it holds, and how it fails."""

    url: str
    account: Path
    tokens: set[str]
    leases: dict[str, dict[str, Any]] = field(default_factory=dict)  # by namespace/name
    calls: list[tuple[str, int]] = field(default_factory=list)
    failure: int | None = None  # the status of every answer
    lost_answers: int = 0  # writes that are done, but not answered
    blank_answers: int = 0  # writes that are done, and answered by a Lease that says nothing
    version: int = 0
    namespaces: set[str] = field(default_factory=lambda: {"serving"})
    turn: threading.Lock = field(default_factory=threading.Lock)
    goes_on: threading.Event = field(default_factory=threading.Event)  # unset: calls hang

    def api(self, name: str = "router", timeout_s: float = 5.0) -> LeaseApi:
        """Its Lease of this name."""
        return LeaseApi(self.url, "serving", name, self.account, timeout_s)

    @property
    def spec(self) -> dict[str, Any]:
        """Of the only Lease."""
        (lease,) = self.leases.values()
        spec: dict[str, Any] = lease["spec"]
        return spec

    def answer(self, method: str, path: str, authorization: str, body: bytes) -> tuple[int, dict[str, Any] | bytes]:
        """Status and object, or the bytes of whoever answers in its place."""
        matched = PATH.fullmatch(path)
        if self.failure is not None:
            return self.failure, _status(self.failure, "injected")
        if authorization.removeprefix("Bearer ") not in self.tokens:
            return 401, _status(401, "Unauthorized")
        if matched is None or matched[1] not in self.namespaces:
            return 404, _status(404, f"{path} not found")
        given = json.loads(body) if body else {}
        with self.turn:
            if method == "POST" and matched[2] is None:
                return self._create(matched[1], given)
            key = f"{matched[1]}/{matched[2]}"
            if key not in self.leases:
                return 404, _status(404, f'leases.coordination.k8s.io "{matched[2]}" not found')
            return (200, self.leases[key]) if method == "GET" else self._replace(key, given)

    def _create(self, namespace: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        key = f"{namespace}/{given['metadata']['name']}"
        if key in self.leases:
            return 409, _status(409, f'leases.coordination.k8s.io "{key}" already exists')
        if problem := _problem(given):
            return 422, _status(422, problem)
        return 201, self._stored(key, given)

    def _replace(self, key: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if problem := _problem(given):
            return 422, _status(422, problem)
        version = given["metadata"].get("resourceVersion")
        if version is None:
            return 422, _status(422, "metadata.resourceVersion: must be specified for an update")
        if version != self.leases[key]["metadata"]["resourceVersion"]:
            return 409, _status(409, "the object has been modified; please apply your changes to the latest version")
        return 200, self._stored(key, given)

    def _stored(self, key: str, given: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        metadata = given["metadata"] | {"resourceVersion": str(self.version), "uid": "7"}
        self.leases[key] = given | {"metadata": metadata}
        if self.blank_answers:
            self.blank_answers -= 1
            return given | {"metadata": metadata, "spec": {}}
        return self.leases[key]


def _problem(lease: dict[str, Any]) -> str | None:
    """What the schema has against it."""
    if lease.get("apiVersion") != "coordination.k8s.io/v1" or lease.get("kind") != "Lease":
        return "no Lease"
    spec = lease.get("spec", {})
    for name, value in spec.items():
        if name not in SPEC or type(value) is not SPEC[name]:
            return f"spec.{name}: Invalid value: {value!r}"
        if name.endswith("Time") and not MICRO_TIME.fullmatch(value):
            return f"spec.{name}: Invalid value: {value!r}"
    if spec.get("leaseDurationSeconds", 1) <= 0 or spec.get("leaseTransitions", 0) < 0:
        return "spec: must be greater than 0"
    return None


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


@contextmanager
def an_api_server(folder: Path) -> Iterator[ApiServer]:
    """One that runs; `folder` gets the service account of its clients."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("serving")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            state.goes_on.wait()
            status, text = state.answer(self.command, self.path, self.headers.get("authorization", ""), body)
            if body and self.headers.get("content-type") != "application/json":
                status, text = 415, _status(415, "the body of the request was in an unknown format")
            state.calls.append((self.command, status))
            if self.command == "PUT" and state.lost_answers:
                state.lost_answers -= 1
                self.close_connection = True
                return
            answer = text if isinstance(text, bytes) else json.dumps(text).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                pass  # a client that has given up waiting

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self) -> tuple[Any, Any]:
            connection, address = self.socket.accept()
            return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    with Server(("127.0.0.1", 0), Handler) as server:
        state = ApiServer(f"https://127.0.0.1:{server.server_address[1]}", folder, {"first"})
        state.goes_on.set()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            state.goes_on.set()
            server.shutdown()
            thread.join()
