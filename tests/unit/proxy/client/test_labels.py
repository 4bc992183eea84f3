"""What a refusal is called, and whose share of the memory a body takes."""

import pytest

from balanceroute.proxy.client.labels import holder_of, id_of


@pytest.mark.parametrize(
    ("peer", "holder"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "::ffff:203.0.113.9"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("a path", "a path"),
    ],
)
def test_addresses_of_one_network_share_one_byte_limit(peer: str, holder: str) -> None:
    assert holder_of(peer) == holder


def test_a_cut_off_request_id_is_replaced() -> None:
    head = b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: client-12"
    assert id_of(None, head + b"\r\n") == id_of(None, head + b"\r\n\r\nx") == b"client-12"
    assert not id_of(None, head).startswith(b"client")
