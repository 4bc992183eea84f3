"""Ports for servers that a test starts in another process.

The kernel gives ports of its ephemeral range (32768 and up on Linux) to outgoing connections, so a port that was free
a moment ago may be taken when the server binds it. These lie below it. Each test process locks a file for each base
port that it uses: else another one, of this run or of one that runs beside it, would find the same ports free between
our look and the server's bind, and then test the other one's cluster.
"""

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack

HOST = "127.0.0.1"
SPACING = 200  # an emulated cluster's decode ranks begin 100 above its prefillers
BASES = range(11_000, 20_900, SPACING)  # `balanceroute demo` and scripts look from 21,000 on, and lock no file
_locked: dict[int, int] = {}  # by base port, the file, while this process lives


def free_base_port(offsets: Iterable[int]) -> int:
    """A port such that nobody listens on it plus any of `offsets` (each below 200)."""
    wanted = tuple(offsets)
    for base in [*_locked, *random.SystemRandom().sample(BASES, len(BASES))]:  # few files, if the former are free again
        if not _ours(base):
            continue
        with ExitStack() as stack:
            try:
                for offset in wanted:
                    stack.enter_context(socket.socket()).bind((HOST, base + offset))
            except OSError:
                continue
            return base
    raise RuntimeError(f"no {len(wanted)} free ports in {BASES}")


def loopback() -> str:
    """The IPv6 loopback address; the IPv4 one on a machine without IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return HOST
    return "::1"


def _ours(base: int) -> bool:
    """Whether no other test process uses this base port; while we live none will."""
    if base in _locked:
        return True
    path = os.path.join(tempfile.gettempdir(), f"balanceroute-test-ports-{os.geteuid()}-{base}")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _locked[base] = file
    return True
