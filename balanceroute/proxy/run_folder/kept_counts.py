"""What the processes of a run folder have counted for `/metrics`, kept for those that take their place."""

import logging
import math
import os
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final

from balanceroute.proxy.link.files import NEW, is_gone, locked, overwritten, replace_content
from balanceroute.proxy.run_folder.folder import COUNTS, RELAY_LOCK, RunFolder
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

LEADER: Final = "brain"  # in place of a relay's name: the counts of all brains that have led
GONE_S: Final = 60.0  # a relay dead for so long will not return: to start it again takes less, also after failures
COUNTS_ROOM_BYTES: Final = 4096  # for labels and digits to come; the counts are some 20 KB minutes after a start
_LEFT: Final = re.compile(rf"({RELAY_LOCK}|{COUNTS}).+")  # files that relays, or brains, leave behind
_GONE_LOOK_S: Final = 5.0  # between two looks for relays that are gone


class KeptCounts:
    """The files of one run folder with what its relays, and its leaders, have counted."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._locks = folder, RelayLocks(folder)

    def gone(self) -> set[str]:
        """The relays that do not run, and have left files. Raises: OSError."""
        names = {path.name for path in self._folder.ours(_LEFT) if path.suffix != NEW}
        relays = {name.removeprefix(RELAY_LOCK).removeprefix(COUNTS) for name in names}
        return relays.difference([LEADER], self._locks.running())

    def clean_up(self, relay: str, inherit: Callable[[bytes], bool]) -> bool:
        """Remove the files of a relay that will not return, except its pins; returns whether that was done.

        `inherit`: takes what the relay has counted, and returns whether it is kept. Raises: OSError.
        """
        lock = locked(self._folder.folder / f"{RELAY_LOCK}{relay}")  # so that no process becomes this relay meanwhile
        if lock is None:
            return False
        try:
            if not inherit(self.of(relay)):
                return False
            self.file(relay).unlink(missing_ok=True)
            (self._folder.folder / f"{RELAY_LOCK}{relay}").unlink(missing_ok=True)
            return True
        finally:
            os.close(lock)

    def of(self, relay: str) -> bytes:
        """What former processes of this relay, or of the leader, have counted; empty: nothing."""
        try:
            return self.file(relay).read_bytes().rstrip(b" ")
        except FileNotFoundError:
            return b""

    def of_others(self, known: Collection[str]) -> list[bytes]:
        """What all relays except the `known` ones have counted, also relays that have ended. Raises: OSError."""
        names = [file.name.removeprefix(COUNTS) for file in self._folder.folder.glob(f"{COUNTS}*")]
        others = [name for name in names if not name.endswith(NEW) and name != LEADER and name not in known]
        return [self.of(name) for name in others]

    def keep(self, relay: str, counts: bytes) -> None:
        """Keep what this relay, or the leader, has counted. A kill meanwhile leaves what was kept before.

        On a full disk the new counts are written over the old ones, in the room that the file has to grow, so that
        counters still do not fall. Raises: OSError: they can't be kept.
        """
        file, roomy = self.file(relay), counts.ljust(len(counts) + COUNTS_ROOM_BYTES)
        try:
            replace_content(file, roomy)
        except OSError:
            if not overwritten(file, counts):
                raise

    def forget(self) -> None:
        """Remove the counts of all relays that do not run, and of the leader: a router begins to count."""
        kept = {self.file(relay) for relay in self._locks.running()}
        for file in self._folder.folder.glob(f"{COUNTS}*"):
            if file not in kept:
                file.unlink(missing_ok=True)

    def file(self, relay: str) -> Path:
        """The file with what this relay, or the leader, has counted."""
        return self._folder.folder / f"{COUNTS}{relay}"


class Gone:
    """The relays of one run folder that have been gone for so long that nobody starts them again."""

    def __init__(self, folder: RunFolder) -> None:
        self._kept = KeptCounts(folder)
        self._since: dict[str, float] = {}
        self._trouble, self._look_s = Trouble(log, "files of former relays cannot be removed"), -math.inf

    def clean_up(self, now: float, inherit: Callable[[str, bytes], bool]) -> None:
        """Remove the files of relays that are gone once `inherit` has their counts. To be called often; it acts every
        few seconds. See `KeptCounts.clean_up`.
        """
        if now < self._look_s:
            return
        self._look_s = now + _GONE_LOOK_S
        try:
            gone = self._kept.gone()
            self._since = {relay: self._since.get(relay, now) for relay in gone}
            for relay in sorted(gone):
                if now - self._since[relay] >= GONE_S and self._kept.clean_up(relay, partial(inherit, relay)):
                    del self._since[relay]
            self._trouble.end()
        except OSError as error:  # most likely no descriptor is free; files that stay do no harm
            self._trouble.begin(error=error.strerror)


class CountsFile:
    """What one relay, or the leader, has counted, kept for the process that takes its place."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        """`name`: of a relay, or `LEADER`."""
        self._files, self._name = KeptCounts(folder), name
        self._kept: bytes | None = None  # the counts in the file, if this process has put them there
        self._trouble = Trouble(log, "counters cannot be saved", "counters are saved again")

    def last(self) -> bytes:
        """What former processes have counted; empty where it can't be read, which is no reason not to start."""
        try:
            return self._files.of(self._name)
        except OSError as error:
            log.warning("counters of the previous process cannot be read", extra={"error": error.strerror})
            return b""

    def has(self, counts: bytes) -> bool:
        """Whether this process has kept these counts, and nobody has removed the file."""
        return counts == self._kept and not is_gone(self._files.file(self._name))

    def keep(self, counts: bytes) -> bool:
        """Keep these counts; returns whether that worked."""
        self._kept = None
        try:
            self._files.keep(self._name, counts)
        except OSError as error:
            self._trouble.begin(relay=self._name, error=error.strerror)
            return False
        self._kept = counts
        self._trouble.end(relay=self._name)
        return True
