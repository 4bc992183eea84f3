"""When a certificate expires, as read from a file that OpenSSL takes."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from balanceroute.proxy.perimeter.certificate_expiry import expiry_s

SOON, LATE = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2071, 8, 9, 10, 11, 12, tzinfo=UTC)
CA = trustme.CA()


def chain(parent: trustme.CA = CA, expires: datetime = SOON) -> bytes:
    issued = parent.issue_cert("127.0.0.1", not_after=expires)
    return b"".join(part.bytes() for part in (issued.private_key_pem, *issued.cert_chain_pems))


@pytest.mark.parametrize("expires", [SOON, LATE], ids=["two-digit-year", "four-digit-year"])
@pytest.mark.parametrize("parent", [CA, CA.create_child_ca()], ids=["leaf-alone", "leaf-and-intermediate"])
def test_a_chain_expires_with_its_first_certificate(expires: datetime, parent: trustme.CA) -> None:
    assert expiry_s(chain(parent, expires)) == expires.timestamp()


@pytest.mark.parametrize(
    ("old", "new"), [(b"\n", b"\r\n"), (b" CERT", b" X509 CERT")], ids=["lines-of-windows", "x509-heading"]
)
def test_what_openssl_takes_for_a_certificate_has_an_expiry(old: bytes, new: bytes, tmp_path: Path) -> None:
    file = tmp_path / "chain.pem"
    file.write_bytes(chain().replace(old, new))
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(file)
    assert expiry_s(file.read_bytes()) == SOON.timestamp()


@pytest.mark.parametrize("middle", [b"", b"no base64!", b"MIIB", b"MAA=", b"MIICAAAA"])
def test_what_is_no_certificate_has_no_expiry(middle: bytes) -> None:
    assert expiry_s(middle) is None
    assert expiry_s(b"-----BEGIN CERTIFICATE-----\n" + middle + b"\n-----END CERTIFICATE-----\n") is None
