"""Starts the processes of one router, watches them, and starts again the one that died.

    parent ---- brain, brain-2     one leads, the other stands by
       |------- relay-0
       '------- relay-1

Operators signal the parent. It has no event loop, no thread of ours and no connection: it waits for signals and for
children, so little can make it fail. Children are forked from it, so a restarted child runs the same code on the same
sockets within milliseconds, whatever has been installed meanwhile.

SIGTERM, SIGINT     all children drain (SIGUSR2); a child that the others need ends after them, and leaves (SIGUSR1)
                    if a successor prepares to take over by then
                    while a successor prepares to take over: nothing, unless the successor ends; then children drain
                    before this router has taken over: all children leave (SIGUSR1), and its predecessor goes on
the same again      all children end now (SIGINT), or are killed `END_S` later
SIGHUP              one more child reads the configuration and tries all of it (`trial.py`), while all else goes on; if
                    it can be used, the children are told to use it
SIGIO               a child is up, or another router is ready to take over, for which all children leave (SIGUSR1)
a child dies        it is started again: at once the first time, after ever longer pauses if it dies soon after its
                    start, or if the machine has no process or memory for it
a child exits 2     before all children have been up: the configuration can't be used. All children end (or leave, where
                    the predecessor goes on), and the parent exits with 2. Later: as a child that dies
the parent dies     the kernel kills the children

A child starts with SIGHUP blocked, and unblocks it once it has a handler; a signal that comes earlier waits until then.
No thread may be started before that with SIGHUP unblocked: the signal would be delivered to it, and end the process.

Every child leads a process group of its own, so that Ctrl-C in a terminal reaches the parent alone. SIGTERM may come to
children from others: a service manager that signals a whole control group, or somebody who means one process. The
parent tells children to drain by another signal (SIGUSR2). A child that gets SIGTERM alone ends alone, and is started
again.
"""

import ctypes
import errno
import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final, NoReturn, Protocol

from balanceroute.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.parent.handover import signal_input
from balanceroute.proxy.parent.trial import WITHIN_S, Attempt, Trial
from balanceroute.proxy.telemetry.process_gauges import NAME
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

STEADY_S: Final = 5.0  # a child that lived longer did not fail at its start
PAUSE_S: Final = 0.1  # pause before the second start in a row; doubled before each further one
MAX_PAUSE_S: Final = 5.0
END_S: Final = 5.0  # from the signal to end now until a child is killed
MEND_S: Final = 5.0  # between two checks whether somebody has removed a file of the router
KILL_S: Final = 30.0  # after the time to drain: for pinned KV, until a child is killed
SOON_S: Final = 1e-6  # a timer of 0 s never ends
WRONG_CONFIG: Final = 2
TRIAL: Final = "trial"
NOT_TAKING_OVER: Final = "not taking over: the router that runs goes on"
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
_AWAITED: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGIO, signal.SIGALRM}
_OF_CHILDREN: Final = {signal.SIGUSR1, signal.SIGUSR2}  # ignored by the parent: they would end all streams
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC)
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_NAME: Final = 15


Main = Callable[[Callable[[], None]], None]
"""What a child runs. It calls its argument when it is up, and has a handler for SIGHUP by then."""


class Owner(Protocol):
    """What a `Supervisor` needs of the router whose processes it runs: `processes.Processes`."""

    @property
    def drain_timeout_s(self) -> float:
        """How long requests under way may take to finish."""

    def try_reload(self) -> None:
        """Read and try the configuration; runs in a process of its own. Raises: anything: it can't be used."""

    def reload(self, failure: ConfigError | None) -> bool:
        """Use the new configuration, or log why it can't be used.

        Args: failure: of `try_reload`. Returns: whether children are to use it.
        """

    def begin_drain(self) -> None:
        """Called before children are told to drain; another router may still take over."""

    def stop_listening(self) -> None:
        """Called before children are told to end or to leave, and in a drain when none accepts any more."""

    @property
    def accepts(self) -> bool:
        """Whether a child accepts connections."""

    def all_up(self) -> None:
        """Called when all children are up for the first time."""

    def succeeded(self) -> bool:
        """Read a successor's message; returns whether it is ready to take over."""

    @property
    def has_successor(self) -> bool:
        """Whether another router prepares to take over."""

    @property
    def has_predecessor(self) -> bool:
        """Whether another router still serves, from which this one is to take over."""

    def died(self, name: str) -> None:
        """Called when the child of that name has died."""

    def repair(self) -> None:
        """Make the files again by which others find this router, if somebody has removed them."""


@dataclass(slots=True, eq=False)
class Child:
    """One process of the router, over all its starts."""

    name: str
    main: Main
    needed: bool  # other children need it: it ends after them
    pid: int | None = None
    starts: int = 0
    failures: int = 0  # consecutive failures: it could not be started, or died within `STEADY_S`
    up: bool = False
    started_s: float = 0.0
    due_s: float = 0.0  # time of the next start; infinite: it runs, or is not to run again


class Phase(IntEnum):
    """What the router does; it never returns to an earlier phase."""

    RUNS = 0
    POSTPONES = 1  # it runs, and drains if the successor that prepares to take over ends
    DRAINS = 2  # needed children are started again, and a successor may still take over
    ENDS = 3


class Supervisor:
    """Runs children until a signal ends them."""

    def __init__(self, mains: Mapping[str, Main], needed: Collection[str], owner: Owner) -> None:
        """`mains`: what each child runs, by its name, in the order of their start. `needed`: the names of the children
        that the others need.
        """
        self.children = [Child(name, main, name in needed) for name, main in mains.items()]
        self._owner = owner
        self._from_children, self._to_parent = os.pipe()  # the process ids of children that are up
        self._all_up = False
        self._phase = Phase.RUNS
        self._deadline_s = math.inf  # when remaining children are killed
        self._code = 0
        self._trouble = Trouble(log, "no process can be started, tried again")
        self._reload_asked = False  # a reload was requested, and has not begun
        self._trial: Trial | None = None  # of the reload under way
        self._parent = os.getpid()

    def run(self) -> int:
        """Start all and watch over them; returns the exit code when the last one has ended."""
        gc.collect()
        gc.freeze()  # so that the children's memory stays shared
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED | _OF_CHILDREN)
        for number in _AWAITED | _OF_CHILDREN:
            signal.signal(number, _pass_on)  # also SIGCHLD, which may be inherited as ignored
        signal_input(self._from_children)
        try:
            while self._step():
                self._handle_signal(next_signal(self._patience_s()))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._give_up_reload()
            self._kill()
            os.close(self._from_children)
            os.close(self._to_parent)
            gc.unfreeze()  # signals stay blocked: the process is to exit with its own code, not by a late signal
        return self._code

    def _step(self) -> bool:
        """Reap dead children, and start those that are due; returns whether any runs, or will."""
        self._reap()
        now = time.monotonic()
        for child in self.children:
            if child.due_s <= now:
                self._start(child)
        if self._phase < Phase.DRAINS:
            self._owner.repair()
        if self._trial is not None and now >= self._trial.deadline_s:
            self._trial.give_up()
        if now >= self._deadline_s:
            log.warning("children killed: they have not ended in time", extra={"children": self._alive})
            self._kill()
        return any(child.pid is not None or child.due_s < math.inf for child in self.children)

    def _patience_s(self) -> float:
        """How long to wait for a signal: until the next timed action."""
        now = time.monotonic()
        trial_ends_s = math.inf if self._trial is None else self._trial.deadline_s
        next_s = min(now + MEND_S, self._deadline_s, trial_ends_s, *(child.due_s for child in self.children))
        return max(0.0, next_s - now)

    @property
    def _alive(self) -> list[str]:
        return [child.name for child in self.children if child.pid is not None]

    @property
    def _others_run(self) -> bool:
        """Whether a child runs that may depend on the needed ones."""
        return any(child.pid is not None and not child.needed for child in self.children)

    # -- signals

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            if self._phase < Phase.DRAINS:
                self._reload_asked = True
                self._begin_reload()
        elif number == signal.SIGIO:
            self._note_who_is_up()
            if self._owner.succeeded():
                self._leave("another router takes over")
            elif self._phase is Phase.DRAINS and not (self._owner.accepts or self._owner.has_successor):
                self._owner.stop_listening()
            elif self._phase is Phase.POSTPONES and not self._owner.has_successor:
                self._drain()
        elif number in _ENDING:
            self._asked_to_end(number)

    def _begin_reload(self) -> None:
        """Try the configuration in a process of its own, unless an earlier trial has not ended."""
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
        """End the trial of a reload: children are to end, not to use it."""
        if self._trial is not None:
            self._trial.give_up()
        self._trial = None

    def _asked_to_end(self, number: int) -> None:
        if self._phase >= Phase.DRAINS:
            log.warning("ending now", extra={"signal": number})
            self._end(signal.SIGINT, END_S)
        elif self._owner.has_successor and self._phase is Phase.RUNS:
            self._phase = Phase.POSTPONES  # a brain that drains would make the successor's relays refuse, too
            log.warning("not draining: another router prepares to take over", extra={"signal": number})
        elif self._owner.has_predecessor:
            self._leave(NOT_TAKING_OVER)
        else:
            self._drain()

    def _drain(self) -> None:
        log.warning("draining", extra={"children": self._alive})
        self._phase = Phase.DRAINS
        self._owner.begin_drain()
        self._start_none(self._owner.drain_timeout_s + KILL_S)
        self._send(signal.SIGUSR2)

    def _leave(self, why: str) -> None:
        """Another router serves new clients: our children finish what they have, and end."""
        log.warning(why, extra={"children": self._alive})
        for child in self.children:
            child.needed = False
        self._end(signal.SIGUSR1, self._owner.drain_timeout_s + KILL_S)

    def _note_who_is_up(self) -> None:
        with suppress(BlockingIOError):
            pids = os.read(self._from_children, 4096).split()  # each was written whole: it is less than PIPE_BUF
            for child in self.children:
                child.up = child.up or str(child.pid).encode() in pids
        if not self._all_up and all(child.up for child in self.children):
            self._all_up = True
            self._owner.all_up()

    def _end(self, number: signal.Signals, within_s: float) -> None:
        """Stop listening, and send all children this signal, which ends them."""
        self._phase = Phase.ENDS
        self._owner.stop_listening()
        self._start_none(within_s)
        self._send(number)

    def _start_none(self, within_s: float) -> None:
        """From now on, restart only needed children, and kill the remaining ones after `within_s`."""
        self._give_up_reload()
        for child in self.children:
            if not (child.needed and self._phase is Phase.DRAINS and self._others_run):
                child.due_s = math.inf
        self._deadline_s = min(self._deadline_s, time.monotonic() + within_s)

    def _send(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.pid is not None:
                os.kill(child.pid, number)  # not reaped yet, so the number is still its own

    def _kill(self) -> None:
        """Kill the children that are left; none is started again."""
        self._deadline_s = math.inf
        self._send(signal.SIGKILL)
        for child in self.children:
            child.due_s = math.inf
            if child.pid is not None:
                os.waitpid(child.pid, 0)
                child.pid = None

    # -- births and deaths

    def _reap(self) -> None:
        """Reap dead children. As the first process of a container it also reaps orphans, which are ignored."""
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
        """Handle a child's death. `code`: its exit code; below 0: the signal that killed it."""
        now = time.monotonic()
        child.pid, child.up = None, False
        self._owner.died(child.name)
        if code == WRONG_CONFIG and not self._all_up and self._phase < Phase.DRAINS:
            self._code = WRONG_CONFIG
            if self._owner.has_predecessor:
                self._leave(NOT_TAKING_OVER)
            else:
                self._end(signal.SIGINT, END_S)
        start_again = child.needed and code and self._phase is Phase.DRAINS and self._others_run
        if self._phase >= Phase.DRAINS and not start_again:
            if not self._others_run:  # a brain that drains would make the successor's relays refuse, too
                self._end(signal.SIGUSR1 if self._owner.has_successor else signal.SIGUSR2, KILL_S)
            return
        child.failures = child.failures + 1 if now - child.started_s < STEADY_S else 0
        pause_s = _pause_s(child.failures - 1)
        child.due_s = now + pause_s
        cause = {"signal": signal.Signals(-code).name} if code < 0 else {"exit_code": code}
        log.warning("child died", extra={"child": child.name, **cause, "again_in_s": pause_s})

    def _start(self, child: Child) -> None:
        def report_up() -> None:
            self._all_up = True  # in the child's own memory; what fails later is for the log
            os.write(self._to_parent, b"%d\n" % os.getpid())

        try:
            pid = self._fork(child.name, partial(child.main, report_up))
        except OSError as error:
            self._put_off(child, error)
            return
        self._trouble.end()
        child.pid, child.due_s, child.started_s = pid, math.inf, time.monotonic()
        child.starts += 1
        log.info("child started", extra={"child": child.name, "pid": pid, "life": child.starts})

    def _put_off(self, child: Child, error: OSError) -> None:
        """Start a child later, because the machine lacks a process or memory for it."""
        child.failures += 1
        child.due_s = time.monotonic() + _pause_s(child.failures)
        self._trouble.begin(child=child.name, error=error.strerror)

    def _fork(self, name: str, main: Callable[[], None]) -> int:
        """Start a process of that name that runs `main`; returns its id. Raises: OSError: it can't be started."""
        pid = os.fork()
        if not pid:
            self._run_child(name, main)
        return pid

    def _run_child(self, name: str, main: Callable[[], None]) -> NoReturn:
        """In the new process: run `main`, then exit with a code and a log line that say how it ended."""
        code = 1
        try:
            _bind_to_parent(self._parent, name)
            for number in _AWAITED | _OF_CHILDREN:
                signal.signal(number, signal.SIG_DFL)  # one to end does so without a traceback, wherever the child is
            signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGHUP})  # replaces the inherited mask
            main()
            code = 0
        except BalanceRouteError as error:
            code = WRONG_CONFIG
            self._log_config_error(name, error)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:  # the child must not return into the parent's code
            lacking = _shortage(error)
            if lacking is None:
                log.critical("internal error", exc_info=error, extra={"where": name})
            else:  # at the next start the machine may have enough
                log.error("child cannot run", extra={"child": name, "error": lacking})
        finally:
            with suppress(Exception):  # the log's reader has gone, or its disk is full
                logging.shutdown()
                sys.stderr.flush()
            os._exit(code)

    def _log_config_error(self, name: str, error: BalanceRouteError) -> None:
        """Report why this child can't run: at the start on stderr, later in the log."""
        if self._all_up:
            log.error("child cannot run", extra={"child": name, "error": str(error)})
        else:
            logging.shutdown()  # flushes the log, so that this line is the last
            sys.stderr.write(f"balanceroute: {error}\n")  # `print` would write its end apart


def next_signal(within_s: float) -> int:
    """Wait for the next signal; SIGALRM: none has come in time.

    Not by `sigtimedwait`: in a process that is stopped and goes on after that time, as in a suspended machine, Python
    returns whatever was in its memory, which may be the number of a signal. The timer goes on, in case another thread
    takes its signal.
    """
    signal.setitimer(signal.ITIMER_REAL, max(within_s, SOON_S), MEND_S)
    return signal.sigwaitinfo(_AWAITED).si_signo


def _pass_on(number: int, _: object) -> None:
    """Another thread of the parent, such as a monitoring agent's that was started before `run`, has got a signal: there
    its default effect would end the parent. The main thread finds it at its next look.
    """
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _shortage(error: BaseException) -> str | None:
    """The resource that the machine lacks, such as memory or descriptors; None: the error has another cause."""
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno in _SHORTAGES else None


def _pause_s(times: int) -> float:
    """The pause before the next start after so many (`times`) failed ones in a row."""
    return min(MAX_PAUSE_S, PAUSE_S * 2.0 ** min(times - 1, 10)) if times > 0 else 0.0  # 2 ** 1024 is no float


def try_apart(attempt: Attempt, within_s: float = math.inf) -> None:
    """Try it in another process, and wait for that, for a parent that has no children yet.

    Raises: ConfigError: it fails, takes longer than `within_s`, or no process can be made.
    """
    try:
        trial = Trial(attempt, partial(_fork_trial, os.getpid()), within_s)
    except OSError as error:
        raise ConfigError(f"no process can be started to try the configuration: {error.strerror}") from None
    trial.wait()
    with suppress(ChildProcessError):  # where SIGCHLD is ignored, it says so at the end of the process
        os.waitpid(trial.pid, 0)
    failure = trial.failure()
    if failure is not None:
        raise failure


def _fork_trial(parent: int, run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _bind_to_parent(parent, TRIAL)
        run()
    finally:
        os._exit(0)


def be_called(name: str) -> None:
    """Set this process's name for `ps -o comm`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{NAME}{name}".encode(), 0, 0, 0)


def _bind_to_parent(parent: int, name: str) -> None:
    """Have the kernel kill this process when its parent dies, and make it the leader of its own process group."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    be_called(name)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(1)
