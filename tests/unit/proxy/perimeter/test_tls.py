"""Certificates that change while the router runs, and those that workers and the router show each other."""

import asyncio
import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from balanceroute.config import Config
from balanceroute.errors import ConfigError, ConnectFailed
from balanceroute.proxy.app import build_services
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.perimeter.tls import Tls
from balanceroute.proxy.workers.upstream import Upstream
from tests.unit.proxy.reloading import apply
from tests.unit.proxy.servers import plain, read_request, worker
from tests.unit.proxy.virtual_time import a_config
from tests.waiting import until

pytestmark = pytest.mark.anyio


def chain(ca: trustme.CA, file: Path) -> str:
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
    return str(file)


def ca_file(ca: trustme.CA, file: Path) -> str:
    ca.cert_pem.write_to_path(str(file))
    return str(file)


def config(**tls: str) -> Config:
    return a_config(tls=tls)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await read_request(reader)
        writer.write(plain(b"served"))


async def asked(url: str, tls: Tls) -> bytes:
    upstream = Upstream(url.replace("http:", "https:"), ssl_context=tls.for_workers)
    try:
        return await (await upstream.request("GET", "/health")).read(100)
    finally:
        upstream.close()


async def test_a_worker_is_verified_by_its_ca_and_gets_the_routers_certificate(tmp_path: Path) -> None:
    theirs, ours, other = trustme.CA(), trustme.CA(), trustme.CA()
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.issue_cert("127.0.0.1").configure_cert(served)
    ours.configure_trust(served)
    served.verify_mode = ssl.CERT_REQUIRED
    trusted = ca_file(theirs, tmp_path / "theirs.pem")
    known = chain(ours, tmp_path / "ours.pem")
    async with worker(answer, tls=served) as server:
        assert await asked(server.url, Tls(config(worker_ca_file=trusted, worker_cert_file=known))) == b"served"
        unknown = chain(other, tmp_path / "other.pem")
        for settings in (
            {"worker_ca_file": trusted},
            {"worker_ca_file": trusted, "worker_cert_file": unknown},
            {"worker_ca_file": ca_file(other, tmp_path / "other-ca.pem"), "worker_cert_file": known},
            {"worker_cert_file": known},
        ):
            with pytest.raises(ConnectFailed):
                await asked(server.url, Tls(config(**settings)))


async def test_a_new_worker_ca_takes_effect_with_the_reload(tmp_path: Path) -> None:
    theirs, other = trustme.CA(), trustme.CA()
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.issue_cert("127.0.0.1").configure_cert(served)
    settings = config(worker_ca_file=ca_file(other, tmp_path / "ca.pem"))
    tls = Tls(settings)
    async with worker(answer, tls=served) as server:
        with pytest.raises(ConnectFailed):
            await asked(server.url, tls)
        ca_file(theirs, tmp_path / "ca.pem")
        tls.reload(settings)
        assert await asked(server.url, tls) == b"served"


async def test_every_worker_connection_uses_the_certificate_and_after_a_reload_the_new_one(tmp_path: Path) -> None:
    theirs = trustme.CA()
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.issue_cert("127.0.0.1").configure_cert(served)
    ca = tmp_path / "ca.pem"
    ca_file(trustme.CA(), ca)
    async with worker(answer, tls=served) as server:
        url = server.url.replace("http:", "https:")
        settings = a_config(tls={"worker_ca_file": str(ca)}, decode={"workers": [{"url": url, "id": "d0"}]})
        services = build_services(settings, asyncio.get_running_loop(), None, strict=True)
        upstream = services.fleet["d0"].upstream
        with pytest.raises(ConnectFailed):
            await upstream.request("GET", "/health")
        ca_file(theirs, ca)
        await apply(services, settings)
        assert await (await upstream.request("GET", "/health")).read(100) == b"served"
        services.fleet.close()


async def test_a_certificate_that_was_renewed_is_used_without_a_signal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = trustme.CA(), trustme.CA()
    file, next_file = tmp_path / "chain.pem", tmp_path / "next.pem"

    def put(write: Callable[[Path], Any]) -> None:
        """All at once, and with a time that says nothing, as what packs files gives them."""
        write(next_file)
        os.utime(next_file, ns=(1, 1))
        next_file.rename(file)

    put(lambda path: chain(old, path))
    tls = Tls(config(cert_file=str(file)))
    watching = asyncio.ensure_future(tls.watch(0.01))
    caplog.set_level("INFO")

    async def shown_by(ca: trustme.CA) -> bool:
        """Whether the next connection of a client would see a certificate of this CA."""
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ca.configure_trust(trusting)
        async with worker(answer, tls=tls.server) as server:
            port = int(server.url.rsplit(":", 1)[1])
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            except ssl.SSLError:
                return False
            writer.close()
            return True

    assert await shown_by(old)
    put(lambda path: path.write_text("half written"))
    await until(lambda: "certificates not reloaded" in caplog.text)
    assert await shown_by(old)
    put(lambda path: chain(new, path))
    await until(lambda: "certificates reloaded" in caplog.text)
    assert await shown_by(new) and not await shown_by(old)
    assert caplog.text.count("certificates not reloaded") == 1
    watching.cancel()


def expiries(services: Services) -> dict[str, float]:
    """What the page of metrics says, by setting."""
    families = text_string_to_metric_families(services.metrics.exposition().decode())
    (family,) = [each for each in families if each.name == "balanceroute_certificate_expiry_timestamp_seconds"]
    return {sample.labels["setting"]: sample.value for sample in family.samples}


async def test_the_page_says_when_each_certificate_expires_that_the_router_shows_now(tmp_path: Path) -> None:
    ca, files = trustme.CA(), {}
    first, second = datetime(2031, 1, 1, tzinfo=UTC), datetime(2032, 1, 1, tzinfo=UTC)

    def renew(name: str, expires: datetime) -> None:
        issued = ca.issue_cert("127.0.0.1", not_after=expires)
        files[name] = str(tmp_path / name)
        issued.private_key_and_cert_chain_pem.write_to_path(files[name])

    for name in ("cert_file", "worker_cert_file", "link_cert_file"):
        renew(name, first)
    settings = config(**files, link_ca_file=ca_file(ca, tmp_path / "ca.pem"))
    services = build_services(settings, asyncio.get_running_loop(), None, strict=True)
    before = dict.fromkeys(("tls.cert_file", "tls.worker_cert_file", "tls.link_cert_file"), first.timestamp())
    assert expiries(services) == before
    renew("cert_file", second)
    assert expiries(services) == before, "the file is not used yet"
    await apply(services, settings)
    assert expiries(services) == before | {"tls.cert_file": second.timestamp()}
    services.fleet.close()


async def test_a_router_without_certificates_says_of_none_when_it_expires() -> None:
    services = build_services(config(), asyncio.get_running_loop(), None, strict=True)
    assert expiries(services) == {}
    services.fleet.close()


async def test_switching_tls_or_client_certificates_needs_a_restart(tmp_path: Path) -> None:
    ca = trustme.CA()
    cert, client_ca = chain(ca, tmp_path / "chain.pem"), ca_file(ca, tmp_path / "ca.pem")
    for before, after in (
        ({}, {"cert_file": cert}),
        ({"cert_file": cert}, {}),
        ({"cert_file": cert}, {"cert_file": cert, "client_ca_file": client_ca}),
        ({"cert_file": cert, "client_ca_file": client_ca}, {"cert_file": cert}),
    ):
        with pytest.raises(ConfigError, match="restart"):
            Tls(config(**before)).reload(config(**after))


def test_no_client_may_renegotiate_a_connection(tmp_path: Path) -> None:
    server = Tls(config(cert_file=chain(trustme.CA(), tmp_path / "chain.pem"))).server
    assert server is not None
    assert server.options & ssl.OP_NO_RENEGOTIATION  # newer versions of OpenSSL refuse it anyway


def test_an_encrypted_key_is_refused_without_a_prompt_for_its_password(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    with pytest.raises(ConfigError, match="encrypted"):
        Tls(config(cert_file=str(tmp_path / "cert.pem"), key_file=str(tmp_path / "key.pem")))


def test_a_certificate_that_changes_during_a_refused_reload_is_loaded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = trustme.CA()
    before, after = tmp_path / "before.pem", tmp_path / "after.pem"
    tls = Tls(config(cert_file=chain(ca, before)))
    after.write_text("half written")

    def refuse_late(tls: Tls, settings: Config) -> None:
        chain(ca, after)
        raise ConfigError("half written")

    with monkeypatch.context() as patched:
        patched.setattr(Tls, "reload", refuse_late)
        tls.follow(config(cert_file=str(after)))
    shown = tls.server
    tls.catch_up()
    assert tls.server is not shown
