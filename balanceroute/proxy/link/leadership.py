"""Which of several brains leads: one at a time holds the lead, under a number (epoch) larger than all before.

On one machine the leader holds the lock of a file (`FileLead`); in a Kubernetes cluster it holds a Lease as well
(`lease.py`). The kernel drops the lock when the process ends, but not when it is stopped. So a leader also touches the
file every `RENEW_S`. If it has not for `LEASE_S`, a standby deposes it: it puts another file, already locked, in place
of the leader's. A deposed leader that continues notices that, and ends; relays notice it by the brain's new socket
(`membership.py`) and by the epoch. If the event loop is late, a thread touches the file, so that a busy leader keeps
the lead: to take over thousands of streams may take longer than `LEASE_S` on a busy machine. A loop that is late by
`STUCK_S` counts as hung.

    lead        the epoch of the last leader, locked and touched by it
    lead.next   the next leader's file, written in advance by a standby: the disk may be full when it is needed
"""

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from balanceroute.errors import ConfigError, NoHealthyWorkers
from balanceroute.proxy.link.files import is_at, locked
from balanceroute.proxy.link.messages import MAX_EPOCH
from balanceroute.proxy.telemetry.ticks import Looks
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

RENEW_S: Final = 0.25
TOUCH_S: Final = 0.4  # between two checks of the thread whether the event loop renews
STUCK_S: Final = 10.0
LEASE_S: Final = 1.0  # short: a takeover breaks no stream, so it does little harm if the leader was only slow


class AnotherLeads(NoHealthyWorkers):
    """This process has lost the lead; the next leader can answer."""

    def __init__(self) -> None:
        super().__init__("Another brain leads now; send the request again.")


class Lead(Protocol):
    """The lead of one brain, from `take` until it is lost, released, or the process ends."""

    epoch: int
    others: int  # the last known epoch of a leader of another run folder; 0: there was none

    def take(self) -> bool:
        """Take the lead if it is free; a standby calls this repeatedly. Raises: ConfigError: it can never work."""

    def renew(self) -> bool:
        """Show that the leader runs; False: it has lost the lead. Called every `RENEW_S`; must not block."""

    def raise_epoch(self, epoch: int) -> bool:
        """Continue under an epoch above this one, which a relay has seen; False: another brain may lead, and the next
        leader of this run folder gets an epoch above this one.
        """

    def resign(self) -> None:
        """The router drains: brains of other run folders may lead. This one still finishes its own requests."""

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
        self._sign: tuple[int, int] | None = None  # the leader's file as last seen: which one, touched when
        self._sign_s = 0.0  # when that state was first seen
        self._looks = Looks()
        self._held = threading.Lock()  # so that the file is not closed while the thread touches it
        self._renewed_s = 0.0
        self._trouble = Trouble(log, "the file of the lead cannot be renewed")
        self.epoch = self.others = 0

    def take(self) -> bool:
        """Take the lead, if it is free or the leader does not respond. Raises: ConfigError: the file can't be used."""
        try:
            file = locked(self._path)
            if file is not None:
                self._begin(file)
            elif self._stands_still():
                file = self._deposed()
            else:
                with suppress(OSError):  # tried again at each look; there may be room before the leader ends
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
        self._touch(self._file)
        return True

    def lift(self, epoch: int) -> None:
        """Raise the file's epoch to that of the Lease. Raises: OSError."""
        with self._held:
            if self._file is not None and epoch > self.epoch:
                self._count_up(self._file, epoch - 1)

    def raise_epoch(self, epoch: int) -> bool:
        """See `Lead`.

        Without a Lease the holder of the lock leads all relays, also those of other machines. No other brain leads, so
        the larger epoch was in a file that is lost.
        """
        try:
            if not self.renew():
                return False
            self.lift(epoch + 1)
        except OSError:
            return False
        return True

    def resign(self) -> None:
        """Nothing: only processes of one router use the file."""

    def release(self) -> None:
        """Release the lock."""
        with self._held:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _lead(self, file: int) -> None:
        self._file = file
        self._renewed_s = time.monotonic()
        try:
            threading.Thread(target=self._touch_while_late, args=(file,), name="lead", daemon=True).start()
        except RuntimeError as error:  # no thread can be started: a leader that may be deposed is better than none
            log.warning(
                "the lead is lost if the event loop is slow: no thread can be started", extra={"error": str(error)}
            )

    def _touch_while_late(self, file: int) -> None:
        """In a thread: touch the file while the loop is late, but not when it hangs, until the lead is released or
        lost.
        """
        while True:
            time.sleep(TOUCH_S)
            with self._held:
                if self._file != file or not self._is_ours(file):
                    return
                if RENEW_S < time.monotonic() - self._renewed_s < STUCK_S:
                    self._touch(file)

    def _touch(self, file: int) -> None:
        """Touch the file. A failure is ignored: where this fails, a standby can hardly replace the file either."""
        try:
            os.utime(file)
        except OSError as error:
            self._trouble.begin(error=error.strerror)
        else:
            self._trouble.end()

    def _is_ours(self, file: int) -> bool:
        """Whether the locked file is still at the leader's path, as far as that can be checked."""
        try:
            return is_at(file, self._path)
        except OSError:  # no process of our user can check it, so none can have deposed this leader
            return True

    def _begin(self, file: int) -> None:
        """Write the next epoch into a locked file, which is closed if that fails. Raises: ConfigError; OSError."""
        try:
            self._count_up(file, self._epoch(file) or self._first - 1)
        except BaseException:
            os.close(file)  # its lock would look like a leader's
            raise

    def _epoch(self, file: int) -> int:
        """The epoch that the last leader has written. Raises: ConfigError: the file contains something else."""
        epoch = _number(os.pread(file, 32, 0))
        if epoch is None and not self._again:
            raise ConfigError(f"{self._path}: it holds no epoch; is it the right file?")
        return epoch or 0

    def _count_up(self, file: int, former: int) -> None:
        """Write the next epoch over the last one, which needs no disk space."""
        self.epoch = former + 1
        os.ftruncate(file, os.pwrite(file, b"%d\n" % self.epoch, 0))

    def _stands_still(self) -> bool:
        """Whether the file was not touched for `LEASE_S` by our clock, while this process ran all the time."""
        with suppress(FileNotFoundError):
            status = self._path.stat()
            now, sign = time.monotonic(), (status.st_ino, status.st_mtime_ns)
            if self._looks.stood_still(now, LEASE_S) or sign != self._sign:
                self._sign, self._sign_s = sign, now
            return now - self._sign_s > LEASE_S
        return False

    def _reserve(self) -> None:
        """Write the next leader's file in advance, so that there is room for its epoch. Raises: OSError."""
        with suppress(FileNotFoundError):
            if self._next.stat().st_size:
                return
        file = locked(self._next)
        if file is not None:
            with open(file, "wb") as opened:
                opened.write(b"0\n")

    def _deposed(self) -> int | None:
        """Put a locked file in place of the leader's; returns it. None: another standby was faster."""
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

    After a loss of power the file may contain zeros.
    """
    try:
        number = int(content.strip(b"\0") or b"0")
    except ValueError:
        return None
    return number if 0 <= number <= 2 * MAX_EPOCH else None  # leaders follow the largest that a relay may name
