"""Which relays of a run folder run: each holds a file locked as long as it does."""

import time

from balanceroute.proxy.link.files import is_locked
from balanceroute.proxy.run_folder.folder import PAUSE_S, RELAY_LOCK, TRIES, RunFolder


class RelayLocks:
    """The lock files of the relays of one run folder, by name."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def lock(self, relay: str) -> int:
        """Lock the file that says that this process is that relay; returns its descriptor.

        Raises: ConfigError: another process is that relay.
        """
        taken = f"another process is its {relay}; each router needs its own"
        return self._folder.lock_file(f"{RELAY_LOCK}{relay}", taken)

    def renew(self, relay: str, descriptor: int) -> bool:
        """Make that file again if somebody has removed it; returns whether that was so. `descriptor`: its own.

        Raises: ConfigError: it can't be made.
        """
        return self._folder.hold_again(f"{RELAY_LOCK}{relay}", descriptor)

    def running(self) -> list[str]:
        """The relays that run."""
        found = self._folder.folder.glob(f"{RELAY_LOCK}*")
        return [file.name.removeprefix(RELAY_LOCK) for file in found if is_locked(file)]

    def next_generation(self) -> int:
        """The generation of relays to be started: above those of the relays that run.

        Relays of a router that was killed are about to end, and are waited for.
        """
        for _ in range(TRIES):
            if not self.running():
                break
            time.sleep(PAUSE_S)
        return 1 + self.newest_generation()

    def newest_generation(self) -> int:
        """The highest generation of a relay that runs; 0: none runs."""
        return max(map(_generation, self.running()), default=0)


def relay_name(number: int, generation: int) -> str:
    """The name of a relay; no relay of another generation has it."""
    return f"relay-{number}" if generation == 1 else f"relay-{number}.{generation}"


def _generation(relay: str) -> int:
    _, _, generation = relay.partition(".")
    return int(generation) if generation.isdecimal() else 1
