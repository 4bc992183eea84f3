"""How the benchmarks start and end processes."""

import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scripts.proc import tree


def allow_many_sockets() -> None:
    """Raise the soft limit of open files to the hard one; children inherit it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, its output in `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        for pid in tree(process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            continue
        return
