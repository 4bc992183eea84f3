"""The files that the processes of one router share: its run folder, which belongs to our user alone."""

import os
from dataclasses import dataclass
from pathlib import Path

from balanceroute.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the processes of one router find each other. The folder outlives them; sockets in it are replaced."""

    folder: Path

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

    def pins(self, relay: str) -> Path:
        """The record of the prefill KV that is pinned for requests of this relay."""
        return self.folder / f"pins-{relay}"

    def make(self) -> None:
        """Make the folder, for our user alone. Raises: ConfigError: it can't be, or it is somebody else's."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_uid != os.getuid():
                raise ConfigError(f"{self.folder}: the folder belongs to another user")
            self.folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"{self.folder}: {error.strerror}") from None
