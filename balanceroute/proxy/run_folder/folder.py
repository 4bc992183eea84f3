"""The run folder of one router: the files that its processes share, which belong to our user alone.

`relay_locks.py` tells which relays run, `kept_counts.py` what they have counted.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from balanceroute.config import Config
from balanceroute.errors import ConfigError
from balanceroute.proxy.link.files import NEW, is_at, is_gone, is_locked, locked, replace_content

log = logging.getLogger(__name__)

COUNTS: Final = "counts-"  # before the name of a relay
_PINS: Final = "pins-"
_ROUTER: Final = "router"  # locked by the parent
RELAY_LOCK: Final = "life-"  # before the name of a relay: locked while it runs
_LONGEST: Final = "relay-63.9999"  # of the names of relays
_FILE: Final = re.compile(rf"(router|lead|lead\.next|identity|far|changes|({RELAY_LOCK}|{COUNTS}|{_PINS}).+)(\{NEW})?")
_SOCKET: Final = re.compile(r"(link|operators|handover|relay-[0-9.]+)\.sock")
TRIES: Final = 20  # for a lock: another process may hold it for a moment
PAUSE_S: Final = 0.05  # between two tries
MAX_SOCKET_PATH: Final = 107  # bytes of a unix socket's path on Linux


@dataclass(slots=True)
class RunFolder:
    """Where the processes of one router find each other. The folder outlives them; sockets in it are replaced."""

    folder: Path
    _identity: str = field(default="", init=False, repr=False, compare=False)  # once known

    @property
    def link(self) -> Path:
        """The socket at which relays find the brain."""
        return self.folder / "link.sock"

    @property
    def operators(self) -> Path:
        """The socket of the brain's own HTTP application, which relays send operators' requests to."""
        return self.folder / "operators.sock"

    @property
    def lead(self) -> Path:
        """The file that a leading brain holds locked; it contains the leader's epoch."""
        return self.folder / "lead"

    def identity(self) -> str:
        """The name of this folder in a cluster, which no other folder has. Only the leader may ask for it.

        A process that has asked once remembers the name, and so do its children. The file that keeps it is made again
        if it was removed, or spoilt by a loss of power. Raises: ConfigError: the file can't be used.
        """
        path = self.folder / "identity"
        try:
            name = self._identity or _name_in(path)
            if not name or is_gone(path):
                name = name or f"{socket.gethostname()}_{secrets.token_hex(8)}"
                replace_content(path, name.encode())
            self._identity = name
        except OSError as error:
            if not self._identity:
                raise _unusable(self.folder, f"cannot be used: {error.strerror}") from None
        return self._identity

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

    def claim(self, unanswered: bool = False) -> BinaryIO:
        """Take the folder for this router; it is taken as long as the returned file, or a copy of it, is open.

        `unanswered`: the router that was to be taken over has not answered; for the text of the error. Raises:
        ConfigError: another router has the folder; where a brain leads, somebody has removed that router's locked file.
        """
        held = "another router runs with it; --take-over takes that one's place, once it is up, or set another folder"
        if unanswered:
            held = "another router has it that can't be taken over, as it starts or is about to end; try again soon"
        lock = os.fdopen(self.lock_file(_ROUTER, held), "rb")
        if self._is_led():
            lock.close()
            raise _unusable(self.folder, held)
        return lock

    @property
    def is_claimed(self) -> bool:
        """Whether a router has taken the folder."""
        return self.folder.is_dir() and is_locked(self.folder / _ROUTER)

    def claim_again(self, lock: BinaryIO) -> bool:
        """Make the file of `claim` again if somebody has removed it; returns whether that was so.

        Raises: ConfigError: it can't be made, most likely because another router has taken the folder meanwhile.
        """
        return self.hold_again(_ROUTER, lock.fileno())

    def _is_led(self) -> bool:
        """Whether a brain leads; the lock of one that was just killed may last for a moment, which is waited for."""
        for _ in range(TRIES):
            if not (self.lead.exists() and is_locked(self.lead)):
                return False
            time.sleep(PAUSE_S)
        return True

    def renew_times(self) -> None:
        """Give all files the present time, or a cleaner of temporary folders would remove them. Raises: OSError.

        The leader's file is left out: by its time the leader shows that it runs.
        """
        for file in [*self.ours(_FILE), *self.ours(_SOCKET)]:
            if file != self.lead:
                with suppress(FileNotFoundError):
                    os.utime(file, follow_symlinks=False)

    def ours(self, name: re.Pattern[str]) -> list[Path]:
        """The files with such a name. Raises: OSError."""
        return [path for path in self.folder.iterdir() if name.fullmatch(path.name)]

    def lock_file(self, name: str, held: str, tries: int = TRIES) -> int:
        """A file of that name, locked. Raises: ConfigError: another process holds it."""
        try:
            # `RelayLocks.running` holds the lock for a moment, and so does a process just killed
            for number in range(tries):
                if number:
                    time.sleep(PAUSE_S)
                file = locked(self.folder / name)
                if file is not None:
                    return file
        except OSError as error:
            raise _unusable(self.folder, f"cannot be used: {error.strerror}") from None
        raise _unusable(self.folder, held)

    def hold_again(self, name: str, held: int) -> bool:
        """Make the file of that name again if it is gone, and lock it under the descriptor `held`.

        Returns: whether it was gone. Raises: ConfigError.
        """
        try:
            if is_at(held, self.folder / name):
                return False
            self.make(again=True)
            file = self.lock_file(name, f"another process holds {name} in it by now", tries=1)
            os.dup2(file, held, inheritable=False)  # so the caller's descriptor is that of the new file
            os.close(file)
        except OSError as error:
            raise _unusable(self.folder, f"cannot be used: {error.strerror}") from None
        return True

    def make(self, again: bool = False) -> None:
        """Make the folder, for our user alone. `again`: it has been ours, so files in the way are moved aside.

        Raises: ConfigError: it can't be made, or it is another user's, or others use it, too.
        """
        if len(os.fsencode(self.callbacks(_LONGEST))) > MAX_SOCKET_PATH:
            raise _unusable(self.folder, f"its path is too long for a socket in it, at most {MAX_SOCKET_PATH} bytes")
        try:
            with suppress(FileExistsError):
                self.folder.mkdir(mode=0o700, parents=True)
            status = self.folder.lstat()
            if stat.S_ISLNK(status.st_mode):
                raise _unusable(self.folder, "it is a symbolic link; accepted is a folder itself, or a new one")
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise _unusable(self.folder, "accepted is a folder of the router's own user, or a new one")
            if _is_shared(self.folder, status.st_mode):
                raise _unusable(self.folder, "others use it, too; accepted is one of the router alone, or a new one")
            self.folder.chmod(0o700)
            self._check(_FILE, _is_our_file, "file of ours", again)
            self._check(_SOCKET, _is_socket, "socket", again)
        except OSError as error:
            round_ = error.errno == errno.ELOOP
            why = "its path leads through too many symbolic links, or round in a circle" if round_ else error.strerror
            raise _unusable(self.folder, f"cannot be used: {why}") from None

    def _check(self, name: re.Pattern[str], is_right: Callable[[Path], bool], kind: str, again: bool) -> None:
        """Check that nothing else is where files of ours are to be. Raises: ConfigError; OSError."""
        for path in self.ours(name):
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
        log.warning(
            "unexpected file in the run folder renamed", extra={"file": str(path), "to": aside.name, "reason": why}
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within this context no other process moves files aside, unless one is stopped within it. Raises: OSError."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for _ in range(TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(PAUSE_S)
            yield
        finally:
            os.close(folder)


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
        raise ConfigError(
            f"listen.run_folder: not set, and no temporary folder can be written; set it ({error.strerror})"
        ) from None
    return RunFolder(temporary / f"balanceroute-{os.geteuid()}-{port}")


def _name_in(path: Path) -> str:
    """The name in a file; empty: there is no file, or no name in it. Raises: OSError."""
    try:
        name = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return name if name.isprintable() else ""


def _is_shared(folder: Path, mode: int) -> bool:
    """Whether it is open to others and seems to be theirs, too, as /dev/shm and /run are. Raises: OSError."""
    return bool(mode & stat.S_ISVTX) or (bool(mode & 0o077) and any(path.is_dir() for path in folder.iterdir()))


def _is_socket(path: Path) -> bool:
    return stat.S_ISSOCK(path.lstat().st_mode)


def _is_our_file(path: Path) -> bool:
    """Whether it is a regular file that we can read and write, if need be by a change of its mode.

    Raises: FileNotFoundError.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    if not os.access(path, os.R_OK | os.W_OK):  # or another process has just renamed it: then `chmod` raises
        try:
            path.chmod(0o600)
        except PermissionError:
            return False
    return True


def cannot_listen(path: Path, error: OSError) -> ConfigError:
    """The error for a socket that can't be made: a full disk, no free descriptor, a removed folder."""
    return ConfigError(f"{path}: cannot listen there: {os.strerror(error.errno or 0)}")


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"listen.run_folder = {str(folder)!r}: {why}")
