"""Recorded exchanges with a real vLLM, taken apart; the README of `tests/data` says what each shows."""

from pathlib import Path

from tests.recorded import captures


def capture_files(pattern: str) -> list[Path]:
    """Paths of the recorded replies whose path under the captures matches."""
    return sorted(captures().glob(pattern))


def body_of(path: Path) -> tuple[bytes, bytes]:
    """Head in lower case and unframed body of a recorded reply; a reply cut short yields what there is."""
    head, _, rest = path.read_bytes().partition(b"\r\n\r\n")
    head = head.lower()
    if b"transfer-encoding: chunked" not in head:
        return head, rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        try:
            n = int(size, 16)
        except ValueError:
            break
        body += rest[:n]
        rest = rest[n + 2 :]
    return head, body


def request_of(path: Path) -> tuple[str, bytes]:
    """Route and body of the recorded request that belongs to a reply."""
    head, _, body = path.with_suffix(".req").read_bytes().partition(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), body
