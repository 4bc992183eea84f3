"""The process that decides for all relays of one router."""

from collections.abc import Callable
from pathlib import Path

from balanceroute.config import Config
from balanceroute.proxy.run_folder import RunFolder


def run_brain(
    config: Config, folder: RunFolder, relays: int, load: Callable[[], Config], journal: Path | None = None
) -> None:
    """Wait for the lead, then decide until a signal ends it: SIGTERM once drains, twice ends now; SIGHUP reloads.

    Args: relays: how many are expected to join. load: reads the configuration anew, for SIGHUP. journal: a file for
    every decision.

    Raises: ConfigError: a file or socket of the folder can't be used.
    """
    raise NotImplementedError
