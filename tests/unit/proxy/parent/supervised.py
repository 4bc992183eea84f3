"""A router of small processes: `python -m tests.unit.proxy.parent.supervised FOLDER OPTIONS`, as JSON.

`brain` only waits. Each relay answers every line on a shared listening socket with its name, its process and the line.
What happens to a child it appends to FOLDER/events; who has died the parent appends to FOLDER/deaths. While
FOLDER/hold-NAME is there, that child does not end when it is told to drain. Where FOLDER/refuse is there, the parent
removes it and refuses a reload. While FOLDER/try is there, the child that tries a reload, `trial`, waits until
FOLDER/hold-trial is gone, and fails where FOLDER/fail is there. While FOLDER/no-fork is there, no process can be
started. Where FOLDER/short-NAME is there, that child removes it and ends as for lack of what it says: `memory`, or
an errno's name. Where FOLDER/closes is there, relays that drain accept no
more at once. Whatever happens, FOLDER/found is made again by the parent.

Options: `wrong`, a child that ends with a wrong configuration; `dies`, one that ends as soon as it is there; `deaf`,
one that ends for no signal; `slow`, one that is never up; `end_s`, for END_S; `mend_s`, for MEND_S; `steady_s`, for
STEADY_S; `drain_s`, for the time to drain; `kill_s`, for the time from then until children are killed; `within_s`, for
a trial; `agent`: signals that a thread of somebody else's gets when all are up; `beside`: another router runs that has
not been taken over from; `lingers`: the parent, at its end, makes FOLDER/lingers and waits until it is gone.
"""

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from balanceroute.errors import ConfigError
from balanceroute.proxy.parent import supervisor
from balanceroute.proxy.parent.handover import Handover, HandoverState
from balanceroute.proxy.parent.supervisor import Main, Supervisor
from balanceroute.proxy.telemetry.clock import Loop
from balanceroute.proxy.telemetry.logs import configure
from tests.waiting import block_until, until

log = logging.getLogger(__name__)

FOLDER = Path(sys.argv[1])
LIFE_S = 3600.0  # a child waits for its parent
OPTIONS: dict[str, Any] = json.loads(sys.argv[2])


def note(name: str, event: str) -> None:
    with (FOLDER / "events").open("a") as file:
        file.write(f"{name} {os.getpid()} {event}\n")


class Owner:
    """The parent's own part."""

    drain_timeout_s = OPTIONS.get("drain_s", 60.0)

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.lock = (FOLDER / "router").open("w+b")
        self.handover: Handover | None = None

    def try_reload(self) -> None:
        if (FOLDER / "try").exists():
            attempt()

    def reload(self, failure: ConfigError | None) -> bool:
        refusal = FOLDER / "refuse"
        refused = refusal.exists()
        refusal.unlink(missing_ok=True)
        if failure is not None:
            log.warning("reload refused", extra={"error": str(failure)})
        return failure is None and not refused

    def begin_drain(self) -> None:
        (FOLDER / "drains").touch()

    def stop_listening(self) -> None:
        self.listener.close()
        if self.handover is not None:
            self.handover.close()
            self.handover = None

    @property
    def accepts(self) -> bool:
        return not (FOLDER / "closes").exists()

    def all_up(self) -> None:
        state = HandoverState(os.getpid(), 1, decode_first=False)
        self.handover = Handover(FOLDER / "handover", state, [self.listener], self.lock, self.lock.fileno())
        (FOLDER / "all-up").touch()

    def succeeded(self) -> bool:
        return self.handover is not None and self.handover.look()

    def died(self, name: str) -> None:
        with (FOLDER / "deaths").open("a") as file:
            file.write(f"{name}\n")

    def repair(self) -> None:
        (FOLDER / "found").touch()

    @property
    def has_successor(self) -> bool:
        return self.handover is not None and self.handover.has_successor

    @property
    def has_predecessor(self) -> bool:
        return bool(OPTIONS.get("beside"))


def attempt() -> None:
    note("trial", "starts")
    block_until(lambda: not (FOLDER / "hold-trial").exists(), within_s=LIFE_S)
    if (FOLDER / "fail").exists():
        raise ConfigError("the predictor: wrong")


def child(name: str, listener: socket.socket, on_up: Callable[[], None]) -> None:
    if name == OPTIONS.get("wrong"):
        raise ConfigError(f"{name}: wrong")
    if name == OPTIONS.get("dies"):
        note(name, "dies")
        os._exit(7)
    if name == "brain":
        listener.close()  # its copy would keep the port open
    with asyncio.Runner(loop_factory=Loop) as runner:  # as what ships
        runner.run(live(name, listener, on_up))


async def live(name: str, listener: socket.socket, on_up: Callable[[], None]) -> None:
    loop, drain, now, ends = asyncio.get_running_loop(), threading.Event(), threading.Event(), threading.Event()
    deaf = name == OPTIONS.get("deaf")

    def on_signal(number: signal.Signals) -> None:
        if ends.is_set():
            return  # the brain is told again when the relays have ended, perhaps while it ends
        note(name, number.name)
        if not deaf and number in (signal.SIGUSR2, signal.SIGUSR1):
            drain.set()
        elif not deaf and number == signal.SIGINT:
            now.set()

    note(name, "starts")
    await until(lambda: name != OPTIONS.get("slow") and not (FOLDER / f"slow-{name}").exists(), within_s=LIFE_S)
    for number in (signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        loop.add_signal_handler(number, on_signal, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    server = None if name == "brain" else await asyncio.start_server(partial(answer, name), sock=listener)
    note(name, "up")
    on_up()
    wrong, short = FOLDER / f"wrong-{name}", FOLDER / f"short-{name}"
    await until(lambda: drain.is_set() or now.is_set() or wrong.exists() or short.exists(), within_s=LIFE_S)
    if wrong.exists():
        raise ConfigError(f"{name}: wrong")
    if short.exists():
        lacking = short.read_text()
        short.unlink()
        raise MemoryError if lacking == "memory" else OSError(getattr(errno, lacking), lacking)
    if server is not None and (FOLDER / "closes").exists():
        server.close()
        on_up()
    await until(lambda: now.is_set() or not (FOLDER / f"hold-{name}").exists(), within_s=LIFE_S)
    ends.set()
    note(name, "ends")
    if server is not None:
        server.close()


async def answer(name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(b"%s %d %b" % (name.encode(), os.getpid(), line))
    writer.close()


def fork(forked: Callable[[], int] = os.fork) -> int:
    if (FOLDER / "no-fork").exists():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return forked()


def agent(numbers: list[str]) -> None:
    block_until(lambda: (FOLDER / "all-up").exists(), within_s=LIFE_S)
    for number in numbers:
        signal.pthread_kill(threading.get_ident(), signal.Signals[number])


def main() -> int:
    os.fork = fork
    if "agent" in OPTIONS:
        threading.Thread(target=agent, args=(OPTIONS["agent"],), daemon=True).start()
    supervisor.END_S = OPTIONS.get("end_s", supervisor.END_S)  # type: ignore[misc]
    supervisor.KILL_S = OPTIONS.get("kill_s", 0.0 if "drain_s" in OPTIONS else supervisor.KILL_S)  # type: ignore[misc]
    supervisor.MEND_S = OPTIONS.get("mend_s", LIFE_S)  # type: ignore[misc]  # it wakes the parent for all else
    supervisor.STEADY_S = OPTIONS.get("steady_s", supervisor.STEADY_S)  # type: ignore[misc]
    supervisor.WITHIN_S = OPTIONS.get("within_s", supervisor.WITHIN_S)  # type: ignore[misc]
    configure("info", "json")
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    (FOLDER / "port").write_text(str(listener.getsockname()[1]))
    mains: dict[str, Main] = {name: partial(child, name, listener) for name in ("brain", "relay-0", "relay-1")}
    code = Supervisor(mains, ("brain",), Owner(listener)).run()
    if OPTIONS.get("lingers"):
        (FOLDER / "lingers").touch()
        block_until(lambda: not (FOLDER / "lingers").exists())
    return code


if __name__ == "__main__":
    sys.exit(main())
