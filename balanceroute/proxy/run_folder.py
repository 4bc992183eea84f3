"""The files that the processes of one router share: its run folder, which belongs to our user alone.

`RunFolder` is one class with many short methods: each is a file, or what is done with it.
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
LEADER: Final = "brain"  # whose counts are those of every brain that has led; no relay's name
_ROUTER: Final = "router"  # locked by the parent
_LIFE: Final = "life-"  # locked by a relay while it lives
_LONGEST: Final = "relay-63.9999"
_FILE: Final = re.compile(rf"(router|lead|lead\.next|identity|far|changes|({_LIFE}|{_COUNTS}|{_PINS}).+)(\{NEW})?")
_LEFT: Final = re.compile(rf"({_LIFE}|{_COUNTS}).+")  # by a relay, or by brains
_SOCKET: Final = re.compile(r"(link|operators|handover|relay-[0-9.]+)\.sock")
GONE_S: Final = 60.0  # more than it takes to start a relay again, as often as that fails
_GONE_LOOK_S: Final = 5.0
_TRIES: Final = 20
_PAUSE_S: Final = 0.05
COUNTS_ROOM_BYTES: Final = 4096  # labels that appear, and digits: some 20 KB are written within minutes of a start
MAX_SOCKET_PATH: Final = 107  # bytes, of a unix socket's name on Linux


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
        """The file whose lock makes the leader, with the number of its leadership."""
        return self.folder / "lead"

    def identity(self) -> str:
        """The name of this folder in a cluster, which nobody else has; for who holds the lock.

        Whoever has asked for it once, and is forked from there, has the same name again, and makes a removed file anew;
        so is one that a machine has spoilt as it lost its power. Raises: ConfigError: the file that keeps it can't be
        used.
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
        """The names of the relays of other machines that are members."""
        return self.folder / "far"

    @property
    def handover(self) -> Path:
        """The socket at which a successor asks for the listening sockets."""
        return self.folder / "handover.sock"

    @property
    def changes(self) -> Path:
        """What operators have changed at run time."""
        return self.folder / "changes"

    def callbacks(self, relay: str) -> Path:
        """The socket at which this relay is told of callbacks that have arrived at another one."""
        return self.folder / f"{relay}.sock"

    def pins(self, relay: str) -> Path:
        """The record of the prefill KV that is pinned for requests of this relay."""
        return self.folder / f"{_PINS}{relay}"

    def other_pins(self, relay: str) -> list[Path]:
        """The records of all other relays, those as well that are gone. Raises: OSError."""
        found = self.folder.glob(f"{_PINS}*")
        return [file for file in found if file != self.pins(relay) and file.suffix != NEW]

    def come_to_life(self, relay: str) -> int:
        """This process is that relay, until it ends; returns the file that says so. Raises: ConfigError: another is."""
        return self._locked(f"{_LIFE}{relay}", f"another process is its {relay}; each router needs its own")

    def live_on(self, relay: str, life: int) -> bool:
        """Have the file say so once more, if somebody has removed it; returns whether that was so.

        Raises: ConfigError: it can't be.
        """
        return self._held_again(f"{_LIFE}{relay}", life)

    def claim(self, beside: bool = False, unanswered: bool = False) -> BinaryIO:
        """The folder is this router's as long as the file, or a copy of its descriptor, is open.

        `beside`: another router, which is about to leave. Without it no brain may lead here: where one does, its router
        runs, and somebody has removed the file that it had locked. `unanswered`: who was to be taken over has not
        answered. Raises: ConfigError: the folder is another one's.
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
        """Whether a router runs with it."""
        return self.folder.is_dir() and _is_locked(self.folder / _ROUTER)

    def claim_again(self, lock: BinaryIO) -> bool:
        """Have `lock` be the folder's once more, if somebody has removed the file; returns whether that was so.

        Raises: ConfigError: it can't be; another router has the folder meanwhile, most likely.
        """
        return self._held_again(_ROUTER, lock.fileno())

    def _is_led(self) -> bool:
        """Whether a brain leads that has not just been killed."""
        for _ in range(_TRIES):
            if not (self.lock.exists() and _is_locked(self.lock)):
                return False
            time.sleep(_PAUSE_S)
        return True

    def freshen(self) -> None:
        """Have no file look old: what cleans a folder of temporary files would remove it. Raises: OSError.

        The leader's is left out: by its time the leader shows that it lives.
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
            for number in range(tries):  # `living` holds it for a moment, and who has just been killed
                if number:
                    time.sleep(_PAUSE_S)
                file = locked(self.folder / name)
                if file is not None:
                    return file
        except OSError as error:
            raise _unusable(self.folder, f"cannot be used: {error.strerror}") from None
        raise _unusable(self.folder, held)

    def _held_again(self, name: str, held: int) -> bool:
        """Have this descriptor be the file of that name, locked, once more. Raises: ConfigError."""
        try:
            if is_at(held, self.folder / name):
                return False
            self.make(again=True)
            file = self._locked(name, f"another process holds {name} in it by now", tries=1)
            os.dup2(file, held, inheritable=False)  # who has the number goes on with it
            os.close(file)
        except OSError as error:
            raise _unusable(self.folder, f"cannot be used: {error.strerror}") from None
        return True

    def living(self) -> list[str]:
        """The relays that live."""
        found = self.folder.glob(f"{_LIFE}*")
        return [file.name.removeprefix(_LIFE) for file in found if _is_locked(file)]

    def generation(self) -> int:
        """The next one: above those of the relays that live, which those of a router that was killed soon do not."""
        for _ in range(_TRIES):
            if not self.living():
                break
            time.sleep(_PAUSE_S)
        return 1 + self.newest()

    def newest(self) -> int:
        """The last generation of which a relay lives; 0: none does."""
        return max(map(_generation, self.living()), default=0)

    def gone(self) -> set[str]:
        """The relays that do not live, and have left something. Raises: OSError."""
        names = {path.name for path in self._ours(_LEFT) if path.suffix != NEW}
        relays = {name.removeprefix(_LIFE).removeprefix(_COUNTS) for name in names}
        return relays.difference([LEADER], self.living())

    def bury(self, relay: str, inherit: Callable[[bytes], bool]) -> bool:
        """Remove the files of a relay that will not return, but for its pins; returns whether it is done.

        `inherit`: takes what it has counted, and returns whether that is safe. Raises: OSError.
        """
        life = locked(self.folder / f"{_LIFE}{relay}")  # nobody is this relay meanwhile
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
        """What the former lives of this relay, or of the leader, have counted; empty: nothing."""
        try:
            return self.counts_file(relay).read_bytes().rstrip(b" ")
        except FileNotFoundError:
            return b""

    def counts_of_others(self, known: Collection[str]) -> list[bytes]:
        """What relays but these have counted, those as well that have ended. Raises: OSError."""
        names = [file.name.removeprefix(_COUNTS) for file in self.folder.glob(f"{_COUNTS}*")]
        others = [name for name in names if not name.endswith(NEW) and name != LEADER and name not in known]
        return [self.counts(name) for name in others]

    def keep_counts(self, relay: str, counts: bytes) -> None:
        """Keep what this relay, or the leader, has counted; a kill in between leaves what was kept before.

        On a full disk it is written over that: the file has room to grow a little, so that counters still do not fall.
        Raises: OSError: it can't be kept.
        """
        file, roomy = self.counts_file(relay), counts.ljust(len(counts) + COUNTS_ROOM_BYTES)
        try:
            replace_content(file, roomy)
        except OSError:
            if not overwritten(file, counts):
                raise

    def forget_counts(self) -> None:
        """A router begins to count, beside those who live."""
        kept = {self.counts_file(relay) for relay in self.living()}
        for file in self.folder.glob(f"{_COUNTS}*"):
            if file not in kept:
                file.unlink(missing_ok=True)

    def counts_file(self, relay: str) -> Path:
        """Where it keeps what it has counted."""
        return self.folder / f"{_COUNTS}{relay}"

    def make(self, again: bool = False) -> None:
        """Make the folder, for our user alone. `again`: it has been ours, so what is in the way is moved away.

        Raises: ConfigError: it can't be, or it is somebody else's.
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
        """Find out now whether something else is where files of ours are to be. Raises: ConfigError; OSError."""
        for path in self._ours(name):
            with suppress(FileNotFoundError):
                if is_right(path):
                    continue
                if not again:
                    raise _unusable(self.folder, f"{path.name} in it is no {kind}; remove it")
                with self._alone():
                    if not is_right(path):  # still: who was faster may have put a file of ours there
                        self._move_away(path, f"no {kind}")

    def _move_away(self, path: Path, why: str) -> None:
        """Give it a name that nothing else has. Raises: OSError."""
        aside = path.with_name(f"aside-{secrets.token_hex(4)}-{path.name}")
        path.rename(aside)
        log.warning("moved out of the way", extra={"file": str(path), "to": aside.name, "reason": why})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time, unless it stands still. Raises: OSError."""
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
        """Every few seconds, remove what they have left once `inherit` has their counts; see `RunFolder.bury`."""
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
        except OSError as error:  # no descriptor is free, most likely; what stays does no harm
            self._trouble.begin(error=error.strerror)


class CountsFile:
    """What one process has counted, kept for its next life."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        """`name`: of a relay, or `LEADER`."""
        self._folder, self._name = folder, name
        self._trouble = Trouble(log, "counts not kept", "counts are kept again")

    def last(self) -> bytes:
        """What the former lives have counted; nothing where that can't be read, which is no reason not to live."""
        try:
            return self._folder.counts(self._name)
        except OSError as error:
            log.warning("counts of a former life are of no use", extra={"error": error.strerror})
            return b""

    @property
    def is_lost(self) -> bool:
        """Whether somebody has removed it, or there is none yet."""
        return is_gone(self._folder.counts_file(self._name))

    def keep(self, counts: bytes) -> bool:
        """Whether it is kept."""
        try:
            self._folder.keep_counts(self._name, counts)
        except OSError as error:
            self._trouble.begin(relay=self._name, error=error.strerror)
            return False
        self._trouble.end(relay=self._name)
        return True


def relay_name(number: int, generation: int) -> str:
    """The name of a relay, which those of no other generation have."""
    return f"relay-{number}" if generation == 1 else f"relay-{number}.{generation}"


def _generation(relay: str) -> int:
    _, _, generation = relay.partition(".")
    return int(generation) if generation.isdecimal() else 1


def run_folder(config: Config, port: int, environ: Mapping[str, str]) -> RunFolder:
    """The folder of the router that listens on this port, which tells it from others of the same user.

    Raises: ConfigError: none is named, and the system has no temporary folder that can be written.
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
    """What the file says; empty: there is none, or what it holds is no name. Raises: OSError."""
    try:
        name = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return name if name.isprintable() else ""


def _is_socket(path: Path) -> bool:
    return stat.S_ISSOCK(path.lstat().st_mode)


def _is_our_file(path: Path) -> bool:
    """Whether it is a file that we can read and write, now at the latest. Raises: FileNotFoundError."""
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
        return False  # somebody has removed it, or put something else in its place
    except OSError:
        return True  # it can't be seen: who waits for nobody loses less than who does not wait
    return False


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"listen.run_folder = {str(folder)!r}: {why}")
