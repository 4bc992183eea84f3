"""Tells loopback addresses, and writes addresses in URLs and errors."""

import ipaddress
from typing import Final

NO_ADDRESS: Final = "there is no such address"


def is_loopback(host: str | None) -> bool:
    """Whether a host, as an IP address or `localhost`, is reached from this machine alone; no name is looked up."""
    if host == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def host_in_url(host: str) -> str:
    """A host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
