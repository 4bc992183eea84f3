"""Whose share of the memory a body takes."""

import pytest

from balanceroute.proxy.client.labels import holder_of


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
def test_addresses_of_one_customer_are_one_holder(peer: str, holder: str) -> None:
    assert holder_of(peer) == holder
