"""Checks and normalises the base URLs of workers from configuration, flags and admin routes.

A URL that passes can be dialled and put into a request line and a Host header as it is, so nothing behind this has to
check again. International host names are written in their ASCII form (xn--...).
"""

import ipaddress
import re
import socket
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from balanceroute.config.addresses import host_in_url

_ACCEPTED: Final = "accepted is http://HOST:PORT or https://HOST:PORT, an IPv6 HOST in brackets"
_MAX_CHARACTERS: Final = 2048
_SERVER: Final = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_.-]{1,253}))(?::[0-9]*)?")
_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.(?!-)[a-z0-9_-]{1,63})*\.?")
_PREFIX: Final = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~!$&'()*+,;=:@-]+)*")


def normalised_url(text: str) -> str:
    """Check a worker's base URL and write it in one way: lower-case host, no trailing slash, bracketed IPv6.

    Raises: ValueError with what is accepted.
    """
    text = text.strip()
    if len(text) > _MAX_CHARACTERS or not all("!" <= character <= "~" for character in text):
        raise ValueError(f"{_ACCEPTED}, in printable ASCII without spaces")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{_ACCEPTED} ({error})") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(_ACCEPTED)
    if "@" in parts.netloc:
        raise ValueError(f"{_ACCEPTED}, without user and password")
    if "?" in text or "#" in text:
        raise ValueError(f"{_ACCEPTED}, without query and fragment")
    if port == 0:
        raise ValueError(f"{_ACCEPTED}, PORT from 1 to 65535")
    return f"{parts.scheme}://{_host(parts.netloc)}{'' if port is None else f':{port}'}{_prefix(parts.path)}"


@lru_cache(4096)  # of each worker it is asked again and again
def server_of(url: str) -> str:
    """HOST:PORT of a checked base URL plus its path, if any: the same for all workers of one server."""
    parts = urlsplit(url)
    return f"{host_in_url(parts.hostname or '')}:{parts.port or (443 if parts.scheme == 'https' else 80)}{parts.path}"


@lru_cache(4096)
def place_of(url: str) -> str:
    """`server_of`, with one name for this machine: a connection to 0.0.0.0 or [::] goes there, too."""
    return re.sub(r"^(localhost|0\.0\.0\.0):", "127.0.0.1:", server_of(url).replace("[::]:", "[::1]:"))


def _host(netloc: str) -> str:
    server = _SERVER.fullmatch(netloc.lower())
    try:
        if server is None or (server["name"] and not _NAME.fullmatch(server["name"])):
            raise ValueError(netloc)
        if server["name"] and "." in server["name"] and server["name"].replace(".", "").isdigit():
            # of 127.1, too; not two that a shell has joined, nor one with too large a number
            return socket.inet_ntoa(socket.inet_aton(server["name"]))
        return server["name"] or f"[{ipaddress.IPv6Address(server['address']).compressed}]"
    except (ValueError, OSError):
        raise ValueError(f"{_ACCEPTED}; HOST is a name of letters, digits, - and _, or an address") from None


def _prefix(path: str) -> str:
    prefix = path.rstrip("/")
    if prefix.endswith("/v1"):
        raise ValueError("leave out /v1 at the end: the paths of the API are added to the base URL")
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(f"{_ACCEPTED}, at most with a plain path behind it, without empty parts, %, . and ..")
    return prefix
