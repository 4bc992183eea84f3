"""Which of several brains leads: who keeps the lead, under a number (epoch) that no leader has had before.

On one machine that is who holds the lock of a file, `FileLead`; in a Kubernetes cluster who holds a Lease as well
(`lease.py`). The kernel drops the lock with its process, however that ends. It does not for one that stands still, so a
leader also touches the file every `RENEW_S`. One that has not for `LEASE_S` is deposed: a standby puts another file in
its place, which it has locked before. The deposed one sees that when it goes on, and ends; relays see it by the brain's
socket, which is another one then (`remote.py`), and by the epoch. Where the event loop is late a thread touches the
file, so that a leader that has much to do keeps the lead: taking over the requests of thousands of streams may take
longer than `LEASE_S` on a busy machine. A loop that does nothing else for `STUCK_S` hangs.

    lead        the epoch of the last leader, locked and touched by it
    lead.next   room for that of the next one, written by who stands by: the disk may be full when it is needed
"""

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from balanceroute.errors import ConfigError
from balanceroute.proxy.link.files import is_at, locked
from balanceroute.proxy.link.messages import MAX_EPOCH
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

RENEW_S: Final = 0.25
TOUCH_S: Final = 0.4  # between two looks of the thread at whether the event loop renews
STUCK_S: Final = 10.0
LEASE_S: Final = 1.0  # a takeover breaks no stream, so a leader that is only slow may lose the lead for nothing


class Lead(Protocol):
    """The lead of one brain, from `take` until it is lost, released, or the process ends."""

    epoch: int
    others: int  # the last number under which a brain of another run folder has led, as far as is known; 0: none has

    def take(self) -> bool:
        """Take the lead, if it is free; a standby tries again and again. Raises: ConfigError: it can never work."""

    def renew(self) -> bool:
        """Show that the leader lives; False: it leads no more. Called every `RENEW_S`, and must not block."""

    def outrank(self, epoch: int) -> bool:
        """Go on under an epoch above this one, which a relay has seen; False: another brain may lead, and the next
        leader of this run folder gets an epoch above this one.
        """

    def resign(self) -> None:
        """The router drains: brains of other routers may lead. This one leads what it has begun to its end."""

    def release(self) -> None:
        """Let another process of the router lead at once."""


class FileLead:
    """The lead among the processes that share a folder."""

    def __init__(self, path: Path, first: int = 1, again: bool = False) -> None:
        """`path`: the file, in a folder that outlives the processes. `first`: the epoch where the file contains none.
        `again`: the file has been ours, so if it contains no number, a number was lost.
        """
        self._first, self._again = first, again
        self._path, self._next = path, path.with_name(f"{path.name}.next")
        self._file: int | None = None
        self._sign: tuple[int, int] | None = None  # of the leader's life, as it was seen last: which file, touched when
        self._sign_s = self._looked_s = 0.0  # when that was seen first, and when we looked last
        self._held = threading.Lock()  # the file is not closed while it is touched
        self._renewed_s = 0.0
        self._trouble = Trouble(log, "the leader cannot show that it lives")
        self.epoch = self.others = 0

    def take(self) -> bool:
        """Take the lead, if it is free or the leader stands still. Raises: ConfigError: the file can't be used."""
        try:
            file = locked(self._path)
            if file is not None:
                self._begin(file)
            elif self._stands_still():
                file = self._deposed()
            else:
                with suppress(OSError):  # it is tried again at each look, and the leader may last until there is room
                    self._reserve()
            if file is None:
                return False
            self._lead(file)
            return True
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None

    def renew(self) -> bool:
        """Touch the file, if it is still ours."""
        self._renewed_s = time.monotonic()
        if self._file is None or not self._is_ours(self._file):
            return False
        self._show_life(self._file)
        return True

    def lift(self, epoch: int) -> None:
        """Lead under this larger epoch, which a lead beside this one (a Lease) has. Raises: OSError."""
        with self._held:
            if self._file is not None and epoch > self.epoch:
                self._count_up(self._file, epoch - 1)

    def outrank(self, epoch: int) -> bool:
        """See `Lead`. The holder of the lock leads all relays, also those of other machines: without a Lease no other
        brain does, so that epoch was in a file that is lost.
        """
        try:
            if not self.renew():
                return False
            self.lift(epoch + 1)
        except OSError:
            return False
        return True

    def resign(self) -> None:
        """Nothing: all who know the file are processes of one router."""

    def release(self) -> None:
        """Let another one lead."""
        with self._held:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _lead(self, file: int) -> None:
        self._file = file
        self._renewed_s = time.monotonic()
        try:
            threading.Thread(target=self._touch, args=(file,), name="lead", daemon=True).start()
        except RuntimeError as error:  # no thread is to be had: a leader that may be deposed is better than none
            log.warning("leading without patience for a slow event loop", extra={"error": str(error)})

    def _touch(self, file: int) -> None:
        """In a thread: touch the file when the loop is late, not when it hangs, until the lead is released or lost."""
        while True:
            time.sleep(TOUCH_S)
            with self._held:
                if self._file != file or not self._is_ours(file):
                    return
                if RENEW_S < time.monotonic() - self._renewed_s < STUCK_S:
                    self._show_life(file)

    def _show_life(self, file: int) -> None:
        """Touch the file. Nothing is done where that fails: a standby can hardly put another file in its place."""
        try:
            os.utime(file)
        except OSError as error:
            self._trouble.begin(error=error.strerror)
        else:
            self._trouble.end()

    def _is_ours(self, file: int) -> bool:
        """Whether the locked file is still the one at the leader's path, as far as that can be seen."""
        try:
            return is_at(file, self._path)
        except PermissionError:  # for the other processes of our user as well: nobody can have deposed us
            return True

    def _begin(self, file: int) -> None:
        """Count up in a file that is locked; it is closed where that fails. Raises: ConfigError; OSError."""
        try:
            self._count_up(file, self._epoch(file) or self._first - 1)
        except BaseException:
            os.close(file)  # else we would take ourselves for a leader
            raise

    def _epoch(self, file: int) -> int:
        """The epoch that the last leader has written. Raises: ConfigError: the file is none of ours."""
        epoch = _number(os.pread(file, 32, 0))
        if epoch is None and not self._again:
            raise ConfigError(f"{self._path}: it holds no epoch; is it the right file?")
        return epoch or 0

    def _count_up(self, file: int, former: int) -> None:
        """Write the next epoch over the last one, which needs no more room."""
        self.epoch = former + 1
        os.ftruncate(file, os.pwrite(file, b"%d\n" % self.epoch, 0))

    def _stands_still(self) -> bool:
        """Whether the leader has shown no sign of life for `LEASE_S` by our clock, while we looked all the time."""
        with suppress(FileNotFoundError):
            status = self._path.stat()
            now, sign = time.monotonic(), (status.st_ino, status.st_mtime_ns)
            if sign != self._sign or now - self._looked_s > LEASE_S:  # or it was us who stood still
                self._sign, self._sign_s = sign, now
            self._looked_s = now
            return now - self._sign_s > LEASE_S
        return False

    def _reserve(self) -> None:
        """Write something into the next leader's file, so that there is room for its epoch. Raises: OSError."""
        with suppress(FileNotFoundError):
            if self._next.stat().st_size:
                return
        file = locked(self._next)
        if file is not None:
            with open(file, "wb") as opened:
                opened.write(b"0\n")

    def _deposed(self) -> int | None:
        """Put a file of ours in place of the leader's; returns it. None: another standby is faster."""
        file = locked(self._next)
        if file is None:
            return None
        try:
            status = self._path.stat()
            if self._sign != (status.st_ino, status.st_mtime_ns):
                os.close(file)
                return None
            self._count_up(file, _number(self._path.read_bytes()) or 0)
            self._next.replace(self._path)
        except BaseException:
            os.close(file)
            raise
        return file


def _number(content: bytes) -> int | None:
    """The number in a leader's file; None: it contains something else.

    A machine that lost its power may leave zeros where it was.
    """
    try:
        number = int(content.strip(b"\0") or b"0")
    except ValueError:
        return None
    return number if 0 <= number <= MAX_EPOCH else None
