"""The files that the processes of one router share: its run folder, which belongs to our user alone.

`RunFolder` is one class with many short methods, each for one file.
"""

import fcntl
import logging
import math
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from balanceroute.config import Config
from balanceroute.errors import ConfigError
from balanceroute.proxy.link.files import NEW, is_at, is_gone, locked, overwritten, replace_content
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

_COUNTS: Final = "counts-"
_PINS: Final = "pins-"
LEADER: Final = "brain"  # in place of a relay's name: the counts of all brains that have led
_ROUTER: Final = "router"  # locked by the parent
_LIFE: Final = "life-"  # locked by a relay while it lives
_LONGEST: Final = "relay-63.9999"  # of the names of relays
_FILE: Final = re.compile(rf"(router|lead|lead\.next|identity|far|changes|({_LIFE}|{_COUNTS}|{_PINS}).+)(\{NEW})?")
_LEFT: Final = re.compile(rf"({_LIFE}|{_COUNTS}).+")  # files that relays, or brains, leave behind
_SOCKET: Final = re.compile(r"(link|operators|handover|relay-[0-9.]+)\.sock")
GONE_S: Final = 60.0  # a relay dead for so long will not return: to start it again takes less, also after failures
_GONE_LOOK_S: Final = 5.0  # between two looks for relays that are gone
_TRIES: Final = 20  # for a lock: another process may hold it for a moment
_PAUSE_S: Final = 0.05  # between two tries
COUNTS_ROOM_BYTES: Final = 4096  # room for later labels and digits; counts take some 20 KB minutes after a start
MAX_SOCKET_PATH: Final = 107  # bytes of a unix socket's path on Linux


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the processes of one router find each other. The folder outlives them; sockets in it are replaced."""

    folder: Path
    _name: list[str] = field(default_factory=list, init=False, repr=False, compare=False)  # the identity, once known

    @property
    def link(self) -> Path:
        """The socket at which relays find the brain."""
        return self.folder / "link.sock"

    @property
    def operators(self) -> Path:
        """The socket of the brain's own HTTP application, which relays send operators' requests to."""
        return self.folder / "operators.sock"

    @property
    def lock(self) -> Path:
        """The file that a leading brain holds locked; it contains the leader's epoch."""
        return self.folder / "lead"

    def identity(self) -> str:
        """The name of this folder in a cluster, which no other folder has. Only the leader may ask for it.

        A process that has asked once remembers the name, and so do its children. The file that keeps it is made again
        if it was removed, or spoilt by a loss of power. Raises: ConfigError: the file can't be used.
        """
        path = self.folder / "identity"
        try:
            name = self._name[0] if self._name else _name_in(path)
            if not name or is_gone(path):
                name = name or f"{socket.gethostname()}_{secrets.token_hex(8)}"
                replace_content(path, name.encode())
            if not self._name:
                self._name.append(name)
        except OSError as error:
            if not self._name:
                raise _unusable(self.folder, f"cannot be used: {error.strerror}") from None
        return self._name[0]

    @property
    def far(self) -> Path:
        """The file with the names of the relays of other machines that are members."""
        return self.folder / "far"

    @property
    def handover(self) -> Path:
        """The socket at which a successor asks for the listening sockets."""
        return self.folder / "handover.sock"

    @property
    def changes(self) -> Path:
        """The file with the changes that operators have made at run time."""
        return self.folder / "changes"

    def callbacks(self, relay: str) -> Path:
        """The socket at which this relay gets callbacks that have arrived at another relay."""
        return self.folder / f"{relay}.sock"

    def pins(self, relay: str) -> Path:
        """The record of the prefill KV that is pinned for requests of this relay."""
        return self.folder / f"{_PINS}{relay}"

    def other_pins(self, relay: str) -> list[Path]:
        """The records of all other relays, also of relays that are gone. Raises: OSError."""
        found = self.folder.glob(f"{_PINS}*")
        return [file for file in found if file != self.pins(relay) and file.suffix != NEW]

    def come_to_life(self, relay: str) -> int:
        """Lock the file that says that this process is that relay; returns its descriptor.

        Raises: ConfigError: another process is that relay.
        """
        return self._locked(f"{_LIFE}{relay}", f"another process is its {relay}; each router needs its own")

    def live_on(self, relay: str, life: int) -> bool:
        """Make that file again if somebody has removed it; returns whether that was so. `life`: its descriptor.

        Raises: ConfigError: it can't be made.
        """
        return self._held_again(f"{_LIFE}{relay}", life)

    def claim(self, beside: bool = False, unanswered: bool = False) -> BinaryIO:
        """Take the folder for this router; it is taken as long as the returned file, or a copy of it, is open.

        Args:
            beside: another router has the folder, and is about to leave. If there is none, no brain may lead here:
                that would be one of a router that runs, and whose locked file somebody has removed.
            unanswered: the router that was to be taken over has not answered; for the text of the error.

        Raises: ConfigError: another router has the folder.
        """
        held = "another router runs with it; --take-over takes that one's place, once it is up, or set another folder"
        if unanswered:
            held = "another router has it that can't be taken over, as it starts or is about to end; try again soon"
        lock = os.fdopen(self._locked(_ROUTER, held), "rb")
        if not beside and self._is_led():
            lock.close()
            raise _unusable(self.folder, held)
        return lock

    @property
    def is_claimed(self) -> bool:
        """Whether a router has taken the folder."""
        return self.folder.is_dir() and _is_locked(self.folder / _ROUTER)

    def claim_again(self, lock: BinaryIO) -> bool:
        """Make the file of `claim` again if somebody has removed it; returns whether that was so.

        Raises: ConfigError: it can't be made, most likely because another router has taken the folder meanwhile.
        """
        return self._held_again(_ROUTER, lock.fileno())

    def _is_led(self) -> bool:
        """Whether a brain leads; the lock of one that was just killed may last for a moment, which is waited for."""
        for _ in range(_TRIES):
            if not (self.lock.exists() and _is_locked(self.lock)):
                return False
            time.sleep(_PAUSE_S)
        return True

    def freshen(self) -> None:
        """Give all files the present time, or a cleaner of temporary folders would remove them. Raises: OSError.

        The leader's file is left out: by its time the leader shows that it lives.
        """
        for file in [*self._ours(_FILE), *self._ours(_SOCKET)]:
            if file != self.lock:
                with suppress(FileNotFoundError):
                    os.utime(file, follow_symlinks=False)

    def _ours(self, name: re.Pattern[str]) -> list[Path]:
        return [path for path in self.folder.iterdir() if name.fullmatch(path.name)]

    def _locked(self, name: str, held: str, tries: int = _TRIES) -> int:
        """A file of that name, locked. Raises: ConfigError: another process holds it."""
        try:
            for number in range(tries):  # `living` holds the lock for a moment, and so does a process just killed
                if number:
                    time.sleep(_PAUSE_S)
                file = locked(self.folder / name)
                if file is not None:
                    return file
        except OSError as error:
            raise _unusable(self.folder, f"cannot be used: {error.strerror}") from None
        raise _unusable(self.folder, held)

    def _held_again(self, name: str, held: int) -> bool:
        """Make the file of that name again if it is gone, and lock it under the descriptor `held`.

        Returns: whether it was gone. Raises: ConfigError.
        """
        try:
            if is_at(held, self.folder / name):
                return False
            self.make(again=True)
            file = self._locked(name, f"another process holds {name} in it by now", tries=1)
            os.dup2(file, held, inheritable=False)  # so the caller's descriptor is that of the new file
            os.close(file)
        except OSError as error:
            raise _unusable(self.folder, f"cannot be used: {error.strerror}") from None
        return True

    def living(self) -> list[str]:
        """The relays that live."""
        found = self.folder.glob(f"{_LIFE}*")
        return [file.name.removeprefix(_LIFE) for file in found if _is_locked(file)]

    def generation(self) -> int:
        """The generation of relays to be started: above those of the relays that live.

        Relays of a router that was killed are about to die, and are waited for.
        """
        for _ in range(_TRIES):
            if not self.living():
                break
            time.sleep(_PAUSE_S)
        return 1 + self.newest()

    def newest(self) -> int:
        """The highest generation of a relay that lives; 0: none lives."""
        return max(map(_generation, self.living()), default=0)

    def gone(self) -> set[str]:
        """The relays that do not live, and have left files. Raises: OSError."""
        names = {path.name for path in self._ours(_LEFT) if path.suffix != NEW}
        relays = {name.removeprefix(_LIFE).removeprefix(_COUNTS) for name in names}
        return relays.difference([LEADER], self.living())

    def bury(self, relay: str, inherit: Callable[[bytes], bool]) -> bool:
        """Remove the files of a relay that will not return, except its pins; returns whether that was done.

        `inherit`: takes what the relay has counted, and returns whether it is kept. Raises: OSError.
        """
        life = locked(self.folder / f"{_LIFE}{relay}")  # so that no process becomes this relay meanwhile
        if life is None:
            return False
        try:
            if not inherit(self.counts(relay)):
                return False
            self.counts_file(relay).unlink(missing_ok=True)
            (self.folder / f"{_LIFE}{relay}").unlink(missing_ok=True)
            return True
        finally:
            os.close(life)

    def counts(self, relay: str) -> bytes:
        """What former processes of this relay, or of the leader, have counted; empty: nothing."""
        try:
            return self.counts_file(relay).read_bytes().rstrip(b" ")
        except FileNotFoundError:
            return b""

    def counts_of_others(self, known: Collection[str]) -> list[bytes]:
        """What all relays except the `known` ones have counted, also relays that have ended. Raises: OSError."""
        names = [file.name.removeprefix(_COUNTS) for file in self.folder.glob(f"{_COUNTS}*")]
        others = [name for name in names if not name.endswith(NEW) and name != LEADER and name not in known]
        return [self.counts(name) for name in others]

    def keep_counts(self, relay: str, counts: bytes) -> None:
        """Keep what this relay, or the leader, has counted. A kill meanwhile leaves what was kept before.

        On a full disk the new counts are written over the old ones, in the room that the file has to grow, so that
        counters still do not fall. Raises: OSError: they can't be kept.
        """
        file, roomy = self.counts_file(relay), counts.ljust(len(counts) + COUNTS_ROOM_BYTES)
        try:
            replace_content(file, roomy)
        except OSError:
            if not overwritten(file, counts):
                raise

    def forget_counts(self) -> None:
        """Remove the counts of all relays that do not live, and of the leader: a router begins to count."""
        kept = {self.counts_file(relay) for relay in self.living()}
        for file in self.folder.glob(f"{_COUNTS}*"):
            if file not in kept:
                file.unlink(missing_ok=True)

    def counts_file(self, relay: str) -> Path:
        """The file with what this relay, or the leader, has counted."""
        return self.folder / f"{_COUNTS}{relay}"

    def make(self, again: bool = False) -> None:
        """Make the folder, for our user alone. `again`: it has been ours, so files in the way are moved aside.

        Raises: ConfigError: it can't be made, or it is another user's.
        """
        if len(os.fsencode(self.callbacks(_LONGEST))) > MAX_SOCKET_PATH:
            raise _unusable(self.folder, f"its path is too long for a socket in it, at most {MAX_SOCKET_PATH} bytes")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise _unusable(self.folder, "accepted is a folder of the router's own user, or a new one")
            self.folder.chmod(0o700)
            self._check(_FILE, _is_our_file, "file of ours", again)
            self._check(_SOCKET, _is_socket, "socket", again)
        except OSError as error:
            raise _unusable(self.folder, f"cannot be used: {error.strerror}") from None

    def _check(self, name: re.Pattern[str], is_right: Callable[[Path], bool], kind: str, again: bool) -> None:
        """Check that nothing else is where files of ours are to be. Raises: ConfigError; OSError."""
        for path in self._ours(name):
            with suppress(FileNotFoundError):
                if is_right(path):
                    continue
                if not again:
                    raise _unusable(self.folder, f"{path.name} in it is no {kind}; remove it")
                with self._alone():
                    if not is_right(path):  # checked again: another process may have made it right
                        self._move_away(path, f"no {kind}")

    def _move_away(self, path: Path, why: str) -> None:
        """Rename a file to a name that nothing else has. Raises: OSError."""
        aside = path.with_name(f"aside-{secrets.token_hex(4)}-{path.name}")
        path.rename(aside)
        log.warning("moved out of the way", extra={"file": str(path), "to": aside.name, "reason": why})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within this context no other process moves files aside, unless one stands still in it. Raises: OSError."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for _ in range(_TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_PAUSE_S)
            yield
        finally:
            os.close(folder)


class Gone:
    """The relays of one run folder that have been gone for so long that nobody starts them again."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._since: dict[str, float] = {}
        self._trouble, self._look_s = Trouble(log, "files of former relays are not removed"), -math.inf

    def bury(self, now: float, inherit: Callable[[str, bytes], bool]) -> None:
        """Remove the files of relays that are gone once `inherit` has their counts. To be called often; it acts every
        few seconds. See `RunFolder.bury`.
        """
        if now < self._look_s:
            return
        self._look_s = now + _GONE_LOOK_S
        try:
            gone = self._folder.gone()
            self._since = {relay: self._since.get(relay, now) for relay in gone}
            for relay in sorted(gone):
                if now - self._since[relay] >= GONE_S and self._folder.bury(relay, partial(inherit, relay)):
                    del self._since[relay]
            self._trouble.end()
        except OSError as error:  # most likely no descriptor is free; files that stay do no harm
            self._trouble.begin(error=error.strerror)


class CountsFile:
    """What one relay, or the leader, has counted, kept for the process that takes its place."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        """`name`: of a relay, or `LEADER`."""
        self._folder, self._name = folder, name
        self._trouble = Trouble(log, "counts not kept", "counts are kept again")

    def last(self) -> bytes:
        """What former processes have counted; empty where it can't be read, which is no reason not to start."""
        try:
            return self._folder.counts(self._name)
        except OSError as error:
            log.warning("counts of a former life are of no use", extra={"error": error.strerror})
            return b""

    @property
    def is_lost(self) -> bool:
        """Whether somebody has removed the file, or there is none yet."""
        return is_gone(self._folder.counts_file(self._name))

    def keep(self, counts: bytes) -> bool:
        """Keep these counts; returns whether that worked."""
        try:
            self._folder.keep_counts(self._name, counts)
        except OSError as error:
            self._trouble.begin(relay=self._name, error=error.strerror)
            return False
        self._trouble.end(relay=self._name)
        return True


def relay_name(number: int, generation: int) -> str:
    """The name of a relay; no relay of another generation has it."""
    return f"relay-{number}" if generation == 1 else f"relay-{number}.{generation}"


def _generation(relay: str) -> int:
    _, _, generation = relay.partition(".")
    return int(generation) if generation.isdecimal() else 1


def run_folder(config: Config, port: int, environ: Mapping[str, str]) -> RunFolder:
    """The run folder of the router that listens on this port; other routers of the same user have other ports.

    Raises: ConfigError: none is configured, and the system has no temporary folder that can be written.
    """
    if config.listen.run_folder is not None:
        return RunFolder(Path(config.listen.run_folder).absolute())
    own = environ.get("XDG_RUNTIME_DIR")
    if own:
        return RunFolder(Path(own) / f"balanceroute-{port}")
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # in a container whose root is read-only
        raise ConfigError(f"listen.run_folder = None: name a folder that can be written: {error.strerror}") from None
    return RunFolder(temporary / f"balanceroute-{os.geteuid()}-{port}")


def _name_in(path: Path) -> str:
    """The name in a file; empty: there is no file, or no name in it. Raises: OSError."""
    try:
        name = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return name if name.isprintable() else ""


def _is_socket(path: Path) -> bool:
    return stat.S_ISSOCK(path.lstat().st_mode)


def _is_our_file(path: Path) -> bool:
    """Whether it is a regular file that we can read and write, if need be by a change of its mode.

    Raises: FileNotFoundError.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    if not os.access(path, os.R_OK | os.W_OK):
        with suppress(PermissionError):
            path.chmod(0o600)
    return os.access(path, os.R_OK | os.W_OK)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, IsADirectoryError):
        return False  # somebody has removed the file, or put something else in its place
    except OSError:
        return True  # unknown: to wait for a process that is not there costs less than not to wait for one that is
    return False


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"listen.run_folder = {str(folder)!r}: {why}")
