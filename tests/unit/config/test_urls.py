"""A worker's base URL: one spelling, and nothing in it that could mean something else further on."""

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.config import normalised_url, validate
from balanceroute.errors import ConfigError
from balanceroute.proxy.workers.upstream import Upstream

ODD = {
    "path that is not ASCII": "http://h:1/\u00e9",
    "host that is not ASCII": "http://\u00e9:1",
    "port that is not ASCII": "http://h:\u0661",
    "port 0": "http://h:0",
    "port above 65535": "http://h:65536",
    "port below 0": "http://h:-1",
    "port with a sign": "http://h:+80",
    "dot segments": "http://h:1/../x",
    "encoded dot segments": "http://h:1/%2e%2e/x",
    "empty segment": "http://h:1/a//b",
    "encoded line end": "http://h:1/%0d%0a",
    "line end": "http://h\r\n:1",
    "tab": "http://h:1/\ta",
    "space": "http://h:1/a b",
    "null": "http://h:1/\0",
    "delete": "http://h:1/\x7f",
    "backslash": "http://h:1\\x",
    "empty query": "http://h:1?",
    "empty fragment": "http://h:1#",
    "user": "http://u:p@h:1",
    "other scheme": "file:///etc/passwd",
    "no scheme": "h:1",
    "no host": "http://:1",
    "nothing": "",
    "host of dots": "http://..:1",
    "host like a flag": "http://-h:1",
    "zone of an interface": "http://[fe80::1%eth0]:1",
    "text behind the bracket": "http://[::1]x:1",
    "bracket that is not closed": "http://[::1",
    "no IPv6 address in brackets": "http://[h]:1",
    "two hosts": "http://h,g:1",
    "two addresses without the space between them": "http://192.0.0.3192.0.0.3:1",
    "a number that no address has": "http://10.0.0.256:1",
    "host that no name server takes": f"http://{'a' * 300}:1",
    "endless path": f"http://h:1/{'a' * 4096}",
}


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://10.0.1.1:9000", "http://10.0.1.1:9000"),
        ("http://Host.Example:9000/", "http://host.example:9000"),
        ("https://h", "https://h"),
        ("http://42:1", "http://42:1"),
        ("http://127.1:9000", "http://127.0.0.1:9000"),
        ("http://[FE80::1]:9000", "http://[fe80::1]:9000"),
        ("http://h:1/base/", "http://h:1/base"),
        ("http://h:1/a/v1x", "http://h:1/a/v1x"),
        (" HTTP://worker_1.decode:1 ", "http://worker_1.decode:1"),
    ],
)
def test_a_url_has_one_spelling(given: str, url: str) -> None:
    assert normalised_url(given) == url


@pytest.mark.parametrize("url", ODD.values(), ids=ODD.keys())
def test_an_invalid_url_is_refused_with_what_is_accepted(url: str) -> None:
    with pytest.raises(ValueError, match="accepted is http://HOST:PORT"):
        normalised_url(url)
    with pytest.raises(ConfigError, match="workers"):
        validate({"prefill": {"workers": [{"url": url}]}, "decode": {"workers": [{"url": "http://d:1"}]}})


@pytest.mark.parametrize("url", ["http://h:1/v1", "http://h:1/v1/", "https://h/openai/v1"])
def test_a_url_with_the_path_of_the_api_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(ValueError, match="leave out /v1"):
        normalised_url(url)


@given(
    st.text(st.sampled_from("htps:/.[]%@?#\\ ahv1 9\r\n\t-_\u00e9\0"), max_size=24).map("http://h".__add__) | st.text()
)
def test_an_accepted_url_can_be_requested_unchanged(text: str) -> None:
    try:
        url = normalised_url(text)
    except ValueError:
        return
    assert normalised_url(url) == url
    upstream = Upstream(url)
    assert upstream.host and 1 <= upstream.port <= 65535
    head = upstream._message("GET", "/health", b"", ())
    assert head.count(b"\r\n") == head.count(b"\n") == 4 and head.count(b" ") == 4
    assert head.startswith(b"GET %s/health HTTP/1.1\r\nhost: " % urlsplit(url).path.encode())
