"""The accepted configuration, in memory that the parent and its children share.

There are two places. The process that tries another configuration (`trial.py`) writes it to the unused place, and the
parent switches to it if the trial succeeds. A reader whose number has changed meanwhile reads again.
"""

import mmap
import pickle
from dataclasses import dataclass, field, replace
from typing import Final

from balanceroute.config import Config, KeyEntry
from balanceroute.errors import ConfigError

MOST_BYTES: Final = 2**25  # room for some 100,000 keys; unwritten pages take no memory


@dataclass(frozen=True, slots=True)
class ConfigWithKeys:
    """A configuration, and the contents of its key file; None: it names none."""

    config: Config
    keys: tuple[KeyEntry, ...] | None
    number: int = field(default=0, compare=False)  # its number, once accepted


class SharedConfig:
    """The shared memory, made before the fork. One process at a time writes; only the parent accepts."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._numbers = memoryview(mmap.mmap(-1, 24)).cast("q")  # the number of acceptances; the bytes in each place
        self._places = [mmap.mmap(-1, most_bytes) for _ in range(2)]
        self._read: ConfigWithKeys | None = None  # by this process

    def propose(self, config: ConfigWithKeys) -> None:
        """Write a configuration for `accept`. Raises: ConfigError: it is too large."""
        number = self._numbers[0] + 1
        content = pickle.dumps(replace(config, number=number))
        if len(content) > self._most_bytes:
            most = f"accepted are {self._most_bytes}, with all client keys"
            raise ConfigError(f"the configuration takes {len(content)} bytes of memory; {most}")
        place = number % 2
        self._places[place][: len(content)] = content
        self._numbers[1 + place] = len(content)

    def accept(self) -> None:
        """Make the last proposed configuration the accepted one."""
        self._numbers[0] += 1

    def get(self) -> ConfigWithKeys:
        """The configuration that was accepted last. This process reads each once."""
        while True:
            number, read = self._numbers[0], self._read
            if read is not None and read.number == number:
                return read
            place = number % 2
            content = self._places[place][: self._numbers[1 + place]]
            if self._numbers[0] == number:
                found = pickle.loads(content)
                assert isinstance(found, ConfigWithKeys)
                self._read = found
                return found
