"""Ports for servers that a test starts in another process.

The kernel gives ports of its ephemeral range (32768 and up on Linux) to outgoing connections, so a port that was free
a moment ago may be taken when the server binds it. These lie below it, and test processes that run at the same time
draw from sets that share none.
"""

import os
import random
import re
import socket
from collections.abc import Iterable
from contextlib import ExitStack

HOST = "127.0.0.1"
SPACING = 200  # an emulated cluster's decode ranks begin 100 above its prefillers
PROCESSES = 8


def free_base_port(offsets: Iterable[int]) -> int:
    """A port such that nobody listens on it plus any of `offsets` (each below 200)."""
    found = re.search(r"\d+", os.environ.get("PYTEST_XDIST_WORKER", "0"))
    mine = int(found[0]) % PROCESSES if found else 0
    bases = range(11_000 + SPACING * mine, 26_800, SPACING * PROCESSES)
    wanted = tuple(offsets)
    for base in random.SystemRandom().sample(bases, len(bases)):
        with ExitStack() as stack:
            try:
                for offset in wanted:
                    stack.enter_context(socket.socket()).bind((HOST, base + offset))
            except OSError:
                continue
            return base
    raise RuntimeError(f"no {len(wanted)} free ports in {bases}")
