"""The configuration that the parent has read and checked, in memory that its children share.

There are two places, and the parent writes the one that is not read. A reader that finds another number afterwards
reads again.
"""

import mmap
import pickle
from dataclasses import dataclass
from typing import Final

from balanceroute.config import Config, KeyEntry
from balanceroute.errors import ConfigError
from balanceroute.proxy.perimeter.perimeter import Perimeter

MOST_BYTES: Final = 2**25  # some 100,000 keys; pages that nothing has been written to are not there


@dataclass(frozen=True, slots=True)
class Agreed:
    """A configuration, and what its file of keys held; None: it names none."""

    config: Config
    keys: tuple[KeyEntry, ...] | None

    @classmethod
    def of(cls, config: Config, perimeter: Perimeter) -> "Agreed":
        """What `perimeter`, made from `config`, has read."""
        return cls(config, None if perimeter.keys is None else tuple(key.entry for key in perimeter.keys))


class Agreement:
    """The memory; made before the processes that share it are forked. The parent alone writes."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._numbers = memoryview(mmap.mmap(-1, 24)).cast("q")  # how often one was put; the bytes in each place
        self._places = [mmap.mmap(-1, most_bytes) for _ in range(2)]

    def packed(self, agreed: Agreed) -> bytes:
        """For `put`. Raises: ConfigError: it is too large."""
        content = pickle.dumps(agreed)
        if len(content) > self._most_bytes:
            most = f"accepted are {self._most_bytes}, with all client keys"
            raise ConfigError(f"the configuration takes {len(content)} bytes of memory; {most}")
        return content

    def put(self, content: bytes) -> None:
        """From now on children get this one."""
        number = self._numbers[0] + 1
        place = number % 2
        self._places[place][: len(content)] = content
        self._numbers[1 + place] = len(content)
        self._numbers[0] = number

    def get(self) -> Agreed:
        """What was put last."""
        while True:
            number = self._numbers[0]
            place = number % 2
            content = self._places[place][: self._numbers[1 + place]]
            if self._numbers[0] == number:
                found = pickle.loads(content)
                assert isinstance(found, Agreed)
                return found
