"""When a certificate expires, read from its DER: the `ssl` module tells that of a peer's certificate only.

    Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version (may be missing), serialNumber, signature, issuer,
                                                         validity SEQUENCE { notBefore, notAfter }, ... }, ... }

(RFC 5280, section 4.1)
"""

import re
from binascii import a2b_base64
from datetime import UTC, datetime
from typing import Final

_PEM: Final = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)-----END ", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags
_BEFORE_VALIDITY: Final = 3  # serialNumber, signature, issuer


def expiry_s(pem: bytes) -> float | None:
    """The Unix time at which the first certificate expires; None: there is none that can be read."""
    found = _PEM.search(pem)
    if found is None:
        return None
    try:
        return _not_after_s(a2b_base64(found[1]))
    except (ValueError, IndexError):
        return None


def _not_after_s(der: bytes) -> float:
    """Raises: ValueError, IndexError: it is no certificate."""
    _, certificate, _ = _element(der, 0)
    _, at, _ = _element(der, certificate)
    tag, _, end = _element(der, at)
    if tag == _VERSION:
        at = end
    for _ in range(_BEFORE_VALIDITY):
        _, _, at = _element(der, at)
    _, not_before, _ = _element(der, at)
    _, _, not_after = _element(der, not_before)
    tag, begin, end = _element(der, not_after)
    text = der[begin:end].decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """The tag of the element at this place, and where its content begins and ends."""
    tag, size, begin = der[at], der[at + 1], at + 2
    if size & 0x80:  # the length of the length
        begin += size & 0x7F
        size = int.from_bytes(der[at + 2 : begin])
    return tag, begin, begin + size
