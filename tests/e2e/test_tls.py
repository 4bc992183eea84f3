"""TLS towards clients and the listener for operators, on the process that `balanceroute serve` starts."""

import os
import re
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme
import yaml

from tests.processes import Running, forked_process, listening_port
from tests.waiting import PATIENCE_S, block_until

pytestmark = pytest.mark.e2e

WORKERS = {
    "prefill": {"workers": [{"url": "http://127.0.0.1:1"}]},
    "decode": {"workers": [{"url": "http://127.0.0.1:2"}], "max_num_seqs": 64},
    "predictor": {"kind": "none"},
}


class Authority:
    """A CA and what it has signed, as files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ca, self._folder = trustme.CA(), folder
        self.file = folder / f"{name}-ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def write_chain(self, file: Path) -> Path:
        """Certificate and key for 127.0.0.1 in one file."""
        self._ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
        return file

    def client(self, chain: Path | None = None) -> ssl.SSLContext:
        """A client that trusts this CA alone, with a certificate of its own or without."""
        context = ssl.create_default_context(cafile=str(self.file))
        if chain is not None:
            context.load_cert_chain(chain)
        return context


@dataclass(frozen=True, slots=True)
class Served:
    """A router's process, its ports and its log."""

    running: Running
    port: int
    log: Path

    def status(self, context: ssl.SSLContext, path: str = "/health") -> int:
        """What a new connection gets."""
        return httpx.get(
            f"https://127.0.0.1:{self.port}{path}", verify=context, timeout=PATIENCE_S, trust_env=False
        ).status_code

    def refuses(self, context: ssl.SSLContext) -> bool:
        """Whether no request gets through; in TLS 1.3 a client hears of it only after its own part is done."""
        try:
            self.status(context)
        except httpx.TransportError:
            return True
        return False

    def hang_up_and_wait_for(self, logged: str) -> None:
        """SIGHUP, and what the log says to it."""
        before = self.log.read_text().count(logged)
        os.kill(self.running.pid, signal.SIGHUP)
        block_until(lambda: self.log.read_text().count(logged) > before, logged)


@contextmanager
def serving(folder: Path, *flags: str, **sections: dict[str, str]) -> Iterator[Served]:
    config, log = folder / "router.yaml", folder / "router.log"
    config.write_text(yaml.safe_dump(WORKERS | sections))
    with forked_process("serve", "--config", str(config), "--port", "0", *flags, log=log) as running:
        yield Served(running, listening_port(log, running), log)


def test_clients_are_served_over_tls_alone_and_a_new_certificate_needs_no_restart(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    chain = old.write_chain(tmp_path / "chain.pem")
    with serving(tmp_path, tls={"cert_file": str(chain)}) as router:
        assert router.status(old.client()) == 200
        assert router.refuses(new.client())
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{router.port}/health", timeout=PATIENCE_S, trust_env=False)
        new.write_chain(chain)
        router.hang_up_and_wait_for('"event":"configuration reloaded"')
        assert router.status(new.client()) == 200 and router.refuses(old.client())
        chain.write_text("no certificate")
        router.hang_up_and_wait_for('"event":"reload refused"')
        assert "tls.cert_file" in router.log.read_text()
        assert router.status(new.client()) == 200


def test_a_new_client_ca_takes_effect_with_the_reload(tmp_path: Path) -> None:
    server, first, second = (Authority(tmp_path, name) for name in ("server", "first", "second"))
    ca = tmp_path / "clients.pem"
    ca.write_bytes(first.file.read_bytes())
    tls = {"cert_file": str(server.write_chain(tmp_path / "chain.pem")), "client_ca_file": str(ca)}
    known = server.client(first.write_chain(tmp_path / "first.pem"))
    unknown = server.client(second.write_chain(tmp_path / "second.pem"))
    with serving(tmp_path, tls=tls) as router:
        assert router.status(known) == 200
        assert router.refuses(unknown) and router.refuses(server.client())
        ca.write_bytes(second.file.read_bytes())
        router.hang_up_and_wait_for('"event":"configuration reloaded"')
        assert router.status(unknown) == 200
        assert router.refuses(known) and router.refuses(server.client())


def test_relays_speak_tls_and_the_cookie_of_their_dashboard_is_for_tls_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "server")
    chain = authority.write_chain(tmp_path / "chain.pem")
    flags = ("--relays", "2", "--set", f"listen.run_folder={tmp_path}")
    with serving(tmp_path, *flags, tls={"cert_file": str(chain)}, auth={"admin_token": "open-sesame" * 3}) as router:
        # before either is said, what asks the brain may get 503
        block_until(lambda: router.log.read_text().count('"event":"brain found"') >= 2)
        block_until(lambda: re.search(r'"event":"listening".*"epoch"', router.log.read_text()))
        answer = httpx.post(
            f"https://127.0.0.1:{router.port}/dashboard/session",
            verify=authority.client(),
            headers={"authorization": "Bearer " + "open-sesame" * 3},
            json={},
            timeout=PATIENCE_S,
            trust_env=False,
        )
        assert answer.status_code == 204, answer.text
        assert "; secure;" in answer.headers["set-cookie"].lower() + ";"


@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
def test_admin_routes_have_a_listener_of_their_own_where_one_is_set(tmp_path: Path, over_tls: bool) -> None:
    authority = Authority(tmp_path, "server")
    tls = {"cert_file": str(authority.write_chain(tmp_path / "chain.pem"))} if over_tls else {}
    with serving(tmp_path, listen={"admin": "127.0.0.1:0"}, tls=tls) as router:
        found = re.search(r'"admin_port":(\d+)', router.log.read_text())
        assert found
        scheme, verify = ("https", authority.client()) if over_tls else ("http", True)

        def status(port: int, method: str, path: str) -> int:
            url = f"{scheme}://127.0.0.1:{port}{path}"
            return httpx.request(method, url, verify=verify, timeout=PATIENCE_S, trust_env=False).status_code

        clients, operators = router.port, int(found[1])
        for method, path, there, here in (
            ("GET", "/state", 404, 200),
            ("GET", "/dashboard", 404, 200),
            ("POST", "/instances/add", 404, 400),
            ("GET", "/instances/add", 404, 405),
            ("OPTIONS", "/state", 404, 405),
            ("DELETE", "/v1/models", 405, 404),
            ("GET", "/v1/completions", 405, 404),
            ("GET", "/nowhere", 404, 404),
            ("GET", "/health", 200, 200),
            ("GET", "/metrics", 200, 200),
            ("GET", "/v1/models", 503, 404),
            ("POST", "/v1/completions", 400, 404),
            ("POST", "/v1/chat/completions", 400, 404),
        ):
            assert (status(clients, method, path), status(operators, method, path)) == (there, here), path


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        (["--host", "0.0.0.0"], {}, ["may use the cluster"]),
        (["--host", "0.0.0.0"], {"OPENAI_API_KEY": "sk-w"}, ["uses the workers' key", "may use the cluster"]),
        ([], {}, []),
    ],
)
def test_serve_logs_who_may_use_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], environ: dict[str, str], expected: list[str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with serving(tmp_path, *flags) as router:
        lines = [line for line in router.log.read_text().splitlines() if "auth.client_keys" in line]
        assert len(lines) == len(expected)
        assert all(text in line for text, line in zip(expected, lines, strict=True))


def test_unfinished_handshakes_block_no_client_and_are_closed_in_time(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "server")
    tls = {"cert_file": str(authority.write_chain(tmp_path / "chain.pem"))}
    limits = {"max_connections": 8, "client_header_timeout_s": 5.0}  # ample for a handshake
    with serving(tmp_path, tls=tls, limits=limits) as router, ExitStack() as stack:
        address = ("127.0.0.1", router.port)
        idle = [stack.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(200)]
        half_a_hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
        for number, one in enumerate(idle):
            with suppress(OSError):  # the first of them have made room for the last
                one.sendall(half_a_hello if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
        for _ in range(5):
            assert router.status(authority.client()) == 200
        for one in idle:
            assert ended(one)
        assert "Traceback" not in router.log.read_text() and '"level":"error"' not in router.log.read_text()


def ended(one: socket.socket) -> bool:
    """Whether the other side hangs up, after an alert of TLS at most."""
    try:
        while one.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_certificates_are_exchanged_under_load_without_a_failed_request(tmp_path: Path) -> None:
    first, second = (Authority(tmp_path, name) for name in ("first", "second"))
    chain = first.write_chain(tmp_path / "chain.pem")
    both = ssl.create_default_context(cafile=str(first.file))
    both.load_verify_locations(second.file)
    over = threading.Event()
    with serving(tmp_path, tls={"cert_file": str(chain)}) as router, ThreadPoolExecutor(4) as pool:

        def ask() -> int:
            asked = 0
            with httpx.Client(verify=both, trust_env=False, timeout=PATIENCE_S) as standing:
                while not over.is_set():
                    assert standing.get(f"https://127.0.0.1:{router.port}/health").status_code == 200
                    assert router.status(both) == 200  # a handshake of its own
                    asked += 1
            return asked

        clients = [pool.submit(ask) for _ in range(4)]
        try:
            for turn in range(6):
                (second, first)[turn % 2].write_chain(chain)
                router.hang_up_and_wait_for('"event":"configuration reloaded"')
        finally:
            over.set()
        assert all(client.result() for client in clients)
        assert router.status(first.client()) == 200 and router.refuses(second.client())
