"""The `balanceroute` command, and `python -m balanceroute`."""

import sys

TYPE_CHECKING = False  # as `typing` has it; to import that is one more moment in which Ctrl-C prints where it was
if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 130


def main() -> None:
    """Run the command line. Ctrl-C while it is still being imported ends it as later: in silence, with status 130."""
    try:
        _command_line()()
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        sys.exit(INTERRUPTED)


def _command_line() -> "Callable[[], None]":
    """Import it. Signals that come meanwhile do not print where it was; SIGHUP does not end a router that will reload,
    and SIGTERM ends a container's first process, too.
    """
    import os
    import signal

    if "serve" in sys.argv:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # until a handler for reloads is installed
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # an exception would come out of imports as another one
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    if os.getpid() == 1:  # of a container: the kernel drops what ends other processes, where there is no handler
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    from balanceroute.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether that is what an import inside a command, or a callback, has made of Ctrl-C."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


if __name__ == "__main__":
    main()
