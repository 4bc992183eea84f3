"""Starts the processes of one router, watches them, and starts again the one that died.

    parent ---- brain, brain-2     one leads, the other stands by
       |------- relay-0
       '------- relay-1

The parent is the one that an operator knows. It has no loop, no thread and no connection, so that there is little it
could die of: it waits for signals and for children. They are forked from it, so one that is started again runs the same
code on the same sockets within milliseconds, whatever has been installed meanwhile.

SIGTERM, SIGINT     all children drain (SIGUSR2); who is needed by the others ends when they have
                    while another router prepares to take over: nothing, unless it ends; then they drain
                    before this router has taken over from another one: all children leave (SIGUSR1), that one goes on
the same again      all end now (SIGINT), or are killed `END_S` later
SIGHUP              the configuration is read again, by one more child that tries all of it (`apart.py`), while all else
                    goes on; if it can be used, children go by it
SIGIO               a child is up, or another router is ready to take over, for which all children leave (SIGUSR1)
a child dies        it is started again, at once the first time, ever later if it dies as soon as it is there, or where
                    the machine has no process or memory for it
a child exits 2     before all have been up: a configuration that can't be used. All end, or leave where another router
                    goes on, and so does the parent, with 2. Later it is a child that dies: what runs goes on without
                    it, and it is tried again
the parent dies     the kernel kills the children

A child starts with SIGHUP blocked, and unblocks it once it has a handler: what comes meanwhile waits until then. No
thread is to be started before that where it is not blocked: it would be delivered there, and end the process.

Every child leads a process group of its own, so that Ctrl-C in a terminal reaches the parent alone. SIGTERM may come to
children from others (a service manager that signals a whole control group, or somebody who means one process): the
parent's word to drain is another signal, without which the one child ends alone, and is started again.
"""

import ctypes
import errno
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn, Protocol

from balanceroute.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.apart import WITHIN_S, Trial
from balanceroute.proxy.handover import signal_input
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

STEADY_S: Final = 5.0  # who has lived so long starts well
PAUSE_S: Final = 0.1  # before the second start in a row; twice as long before every further one
MAX_PAUSE_S: Final = 5.0
END_S: Final = 5.0  # to end at once
MEND_S: Final = 5.0  # between two looks at what somebody may have removed
KILL_S: Final = 30.0  # beyond the time to drain: what is left is pinned KV, drained in less
WRONG_CONFIG: Final = 2
TRIAL: Final = "trial"
NOT_TAKING_OVER: Final = "not taking over: the router that runs goes on"
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
_AWAITED: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGIO}
_OF_CHILDREN: Final = {signal.SIGUSR1, signal.SIGUSR2}  # by mistake to the parent, they would end all streams
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC)
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_NAME: Final = 15


Main = Callable[[Callable[[], None]], None]
"""What a child runs; it calls its argument when it is up, and hears SIGHUP by then."""


class Owner(Protocol):
    """Whose children they are: `processes.Processes`."""

    @property
    def drain_timeout_s(self) -> float:
        """How long what runs may finish."""

    def try_reload(self) -> None:
        """Read the configuration again, in a process of its own. Raises: ConfigError, or anything: it can't be used."""

    def reload(self, failure: ConfigError | None) -> bool:
        """Go by what was read, or say why not; `failure`: of `try_reload`. Returns whether children are to go by it."""

    def begin_drain(self) -> None:
        """The children are about to be told to drain; another router may take over still."""

    def stop_listening(self) -> None:
        """The children are about to be told to end or to leave, or all that accepted have ended."""

    def all_up(self) -> None:
        """Every child is up, for the first time."""

    def succeeded(self) -> bool:
        """There is something to read: is it that another router is ready to take over?"""

    @property
    def has_successor(self) -> bool:
        """Whether another router prepares to take over."""

    @property
    def has_predecessor(self) -> bool:
        """Whether another router serves, which this one has not taken over from yet."""

    def died(self, name: str) -> None:
        """That child is there no more."""

    def mend(self) -> None:
        """Make anew what others find this router by, if somebody has removed it."""


@dataclass(slots=True, eq=False)
class Child:
    """One process of the router, over all its lives."""

    name: str
    main: Main
    needed: bool  # by the others: it is there until they have ended
    pid: int | None = None
    lives: int = 0
    failures: int = 0  # in a row: it could not be started, or has died as soon as it was there
    up: bool = False
    started_s: float = 0.0
    due_s: float | None = 0.0  # when it is to be started; None: it is there, or not wanted any more


class Supervisor:
    """Runs children until a signal ends them."""

    def __init__(self, mains: Mapping[str, Main], needed: Collection[str], owner: Owner) -> None:
        """`mains`: what each child runs, by its name, in the order of their start. `needed`: who the others need."""
        self.children = [Child(name, main, name in needed) for name, main in mains.items()]
        self._owner = owner
        self._news, self._to_parent = os.pipe()  # the process ids of children that are up
        self._all_up = False
        self._signals = 0  # to end
        self._postponed = False  # a drain, for a successor
        self._drains = False  # and may be taken over still
        self._deadline_s: float | None = None  # then all that is left is killed
        self._code = 0
        self._trouble = Trouble(log, "no process can be started, tried again")
        self._reload_asked = False  # and not begun yet
        self._trial: Trial | None = None  # of the reload under way
        self._parent = os.getpid()

    def run(self) -> int:
        """Start all and watch over them; returns the exit code when the last one has ended."""
        gc.collect()
        gc.freeze()  # what is here stays shared with the children
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED | _OF_CHILDREN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who starts it may ignore it: no death would be heard of
        signal_input(self._news)
        try:
            while self._step():
                heard = signal.sigtimedwait(_AWAITED, self._patience_s())
                if heard is not None:
                    self._hear(heard.si_signo)
        finally:
            self._give_up_reload()
            self._kill()
            os.close(self._news)
            os.close(self._to_parent)
            gc.unfreeze()  # signals stay blocked: one that comes now must not be what the process dies of
        return self._code

    def _step(self) -> bool:
        """Note who has died, start who is due; whether anybody is there, or will be."""
        self._reap()
        now = time.monotonic()
        for child in self.children:
            if child.due_s is not None and child.due_s <= now:
                self._start(child)
        if not self._signals:
            self._owner.mend()
        if self._trial is not None and self._trial.deadline_s is not None and now >= self._trial.deadline_s:
            self._trial.give_up()
        if self._deadline_s is not None and now >= self._deadline_s:
            log.warning("children killed: they have not ended in time", extra={"children": self._alive})
            self._kill()
        return any(child.pid is not None or child.due_s is not None for child in self.children)

    def _patience_s(self) -> float:
        """Until something is to be done, though nobody signals."""
        now = time.monotonic()
        times_s = [now + MEND_S, *(child.due_s for child in self.children if child.due_s is not None)]
        if self._deadline_s is not None:
            times_s.append(self._deadline_s)
        if self._trial is not None and self._trial.deadline_s is not None:
            times_s.append(self._trial.deadline_s)
        return max(0.0, min(times_s) - now)

    @property
    def _alive(self) -> list[str]:
        return [child.name for child in self.children if child.pid is not None]

    @property
    def _others_run(self) -> bool:
        """Whether somebody is there who may need the one that is needed."""
        return any(child.pid is not None and not child.needed for child in self.children)

    # -- signals

    def _hear(self, number: int) -> None:
        if number == signal.SIGHUP:
            if not self._signals:
                self._reload_asked = True
                self._begin_reload()
        elif number == signal.SIGIO:
            self._note_who_is_up()
            if (self._drains or not self._signals) and self._owner.succeeded():
                self._leave("another router takes over")
            elif self._postponed and not self._signals and not self._owner.has_successor:
                self._drain()
        elif number in _ENDING:
            self._asked_to_end(number)

    def _begin_reload(self) -> None:
        """One after the other."""
        if not self._reload_asked or self._trial is not None:
            return
        self._reload_asked = False
        try:
            self._trial = Trial(self._owner.try_reload, partial(self._fork, TRIAL), WITHIN_S)
        except OSError as error:
            self._end_reload(ConfigError(f"no process can be started to try it: {error.strerror}"))

    def _end_reload(self, failure: ConfigError | None) -> None:
        if self._owner.reload(failure):
            self._send(signal.SIGHUP)

    def _give_up_reload(self) -> None:
        """Nobody is to follow it any more."""
        if self._trial is not None:
            self._trial.give_up()
        self._trial = None

    def _asked_to_end(self, number: int) -> None:
        if self._signals:
            self._signals += 1
            log.warning("ending now", extra={"signal": number})
            self._end(signal.SIGINT, END_S)
        elif self._owner.has_successor and not self._postponed:
            self._postponed = True  # its relays would refuse as well, under a brain that drains
            log.warning("not draining: another router prepares to take over", extra={"signal": number})
        elif self._owner.has_predecessor:
            self._leave(NOT_TAKING_OVER)
        else:
            self._drain()

    def _drain(self) -> None:
        log.warning("draining", extra={"children": self._alive})
        self._drains = True
        self._owner.begin_drain()
        self._start_none(self._owner.drain_timeout_s + KILL_S)
        self._send(signal.SIGUSR2)

    def _leave(self, why: str) -> None:
        """Another router has brains, and relays that accept: ours finish what they have."""
        log.warning(why, extra={"children": self._alive})
        for child in self.children:
            child.needed = False
        self._end(signal.SIGUSR1, self._owner.drain_timeout_s + KILL_S)

    def _note_who_is_up(self) -> None:
        with suppress(BlockingIOError):
            pids = os.read(self._news, 4096).split()  # each was written whole: it is less than PIPE_BUF
            for child in self.children:
                child.up = child.up or str(child.pid).encode() in pids
        if not self._all_up and all(child.up for child in self.children):
            self._all_up = True
            self._owner.all_up()

    def _end(self, number: signal.Signals, within_s: float) -> None:
        """Tell all children to end, and listen no more."""
        self._drains = False
        self._owner.stop_listening()
        self._start_none(within_s)
        self._send(number)

    def _start_none(self, within_s: float) -> None:
        """No child is started again but who is needed; who is left after that time is killed."""
        self._signals = max(1, self._signals)
        self._give_up_reload()
        for child in self.children:
            child.due_s = None
        deadline_s = time.monotonic() + within_s
        self._deadline_s = min(deadline_s, self._deadline_s or deadline_s)

    def _send(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.pid is not None:
                os.kill(child.pid, number)  # it is not reaped yet, so the number is nobody else's

    def _kill(self) -> None:
        """End all that are left, whatever they do."""
        self._deadline_s = None
        self._send(signal.SIGKILL)
        for child in self.children:
            if child.pid is not None:
                os.waitpid(child.pid, 0)
                child.pid = None

    # -- births and deaths

    def _reap(self) -> None:
        """Note who has died; as the first process of a container it is also the parent of others' orphans."""
        while self._alive or self._trial is not None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if self._trial is not None and self._trial.pid == pid:
                trial, self._trial = self._trial, None
                self._end_reload(trial.failure())
                self._begin_reload()
            for child in self.children:
                if child.pid == pid:
                    self._died(child, os.waitstatus_to_exitcode(status))

    def _died(self, child: Child, code: int) -> None:
        """`code`: its exit code, or less than 0, the signal that it died of."""
        now = time.monotonic()
        child.pid = None
        self._owner.died(child.name)
        if code == WRONG_CONFIG and not self._all_up and not self._signals:
            self._code = WRONG_CONFIG
            if self._owner.has_predecessor:
                self._leave(NOT_TAKING_OVER)
            else:
                self._end(signal.SIGINT, END_S)
        returns = child.needed and code and not self._code and self._signals == 1 and self._others_run
        if self._signals and not returns:
            if not self._others_run:
                self._end(signal.SIGUSR2, KILL_S)
            return
        child.failures = child.failures + 1 if now - child.started_s < STEADY_S else 0
        pause_s = _pause_s(child.failures - 1)
        child.due_s = now + pause_s
        told = {"signal": signal.Signals(-code).name} if code < 0 else {"exit_code": code}
        log.warning("child died", extra={"child": child.name, **told, "again_in_s": pause_s})

    def _start(self, child: Child) -> None:
        try:
            pid = self._fork(child.name, partial(child.main, partial(_say_up, self._to_parent)))
        except OSError as error:
            self._put_off(child, error)
            return
        self._trouble.end()
        child.pid, child.due_s, child.started_s = pid, None, time.monotonic()
        child.lives += 1
        log.info("child started", extra={"child": child.name, "pid": pid, "life": child.lives})

    def _put_off(self, child: Child, error: OSError) -> None:
        """No process is to be had, or no memory: the others go on, and there may be some later."""
        child.failures += 1
        child.due_s = time.monotonic() + _pause_s(child.failures)
        self._trouble.begin(child=child.name, error=error.strerror)

    def _fork(self, name: str, main: Callable[[], None]) -> int:
        """A process of that name, which runs `main`; returns its id. Raises: OSError: none is to be had."""
        pid = os.fork()
        if not pid:
            self._become(name, main)
        return pid

    def _become(self, name: str, main: Callable[[], None]) -> NoReturn:
        """What the new process is, from its first moment to its last."""
        code = 1
        try:
            _belong_to(self._parent, name)
            for number in _ENDING:
                signal.signal(number, signal.SIG_DFL)  # no traceback, wherever it is by then
            signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGHUP})  # whatever who starts the router has blocked
            main()
            code = 0
        except BalanceRouteError as error:
            code = WRONG_CONFIG
            self._tell_why(name, error)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:  # it must not return into the parent's code
            lacking = _shortage(error)
            if lacking is None:
                log.critical("internal error", exc_info=error, extra={"where": name})
            else:  # there may be some when it is started again
                log.error("child cannot run", extra={"child": name, "error": lacking})
        finally:
            with suppress(Exception):  # nobody takes the log, and the disk that it is on is full
                logging.shutdown()
                sys.stderr.flush()
            os._exit(code)

    def _tell_why(self, name: str, error: BalanceRouteError) -> None:
        """Say why this child can't run: at the start to who types the command, later as a line of the log."""
        if self._all_up:
            log.error("child cannot run", extra={"child": name, "error": str(error)})
        else:
            logging.shutdown()  # its lines come before the last words
            print(f"balanceroute: {error}", file=sys.stderr)


def _shortage(error: BaseException) -> str | None:
    """What the machine had too little of; None: that is not why."""
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno in _SHORTAGES else None


def _pause_s(times: int) -> float:
    """Before one more start, after so many in a row that came to nothing."""
    return min(MAX_PAUSE_S, PAUSE_S * 2.0 ** min(times - 1, 10)) if times > 0 else 0.0  # 2 ** 1024 is no float


def _say_up(pipe: int) -> None:
    os.write(pipe, b"%d\n" % os.getpid())


def be_called(name: str) -> None:
    """Be known by this name (`ps -o comm`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"br-{name}".encode(), 0, 0, 0)


def _belong_to(parent: int, name: str) -> None:
    """Die with the parent, however that dies, and be known by a name of one's own (`ps -o comm`)."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    be_called(name)
    if os.getppid() != parent:  # it has died meanwhile
        os._exit(1)
