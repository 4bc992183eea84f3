"""`balanceroute` commands as processes that begin with its modules imported.

They are forked by a process that has imported them (one per process of the tests), because an interpreter's start takes
more CPU than most of what is tested then. `tests/e2e/test_serve.py` and others start the command as a user does.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

IMPORTED = ("balanceroute.cli", "balanceroute.emulator", "balanceroute.proxy.processes", "balanceroute.proxy.server")


class Forked:
    """Such a process, in a session of its own; with what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: tuple[str, ...], log: Path) -> None:
        log.touch()  # it is read at once
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        given = (arguments, str(log.absolute()), dict(os.environ))
        self._process: ForkServerProcess = context.Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, minus the number of a signal that has ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises: subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("balanceroute", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended: the fork server tells of it a moment later
                os.kill(self.pid, number)


def _run(arguments: tuple[str, ...], log: str, environ: dict[str, str]) -> None:
    """In the new process."""
    os.setsid()
    for descriptor, file, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
        opened = os.open(file, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["balanceroute", *arguments]
    from balanceroute.__main__ import main

    main()
