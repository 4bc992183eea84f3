"""The limit of descriptors (`ulimit -n`), and the number of clients that it allows.

A client takes two: its connection and its worker's. If they run out, accepted requests fail half way. So the limit is
raised as far as possible, and no more clients are accepted than it allows.
"""

import logging
import resource
from typing import Final

from balanceroute.config import Config
from balanceroute.errors import ConfigError

log = logging.getLogger(__name__)

MOST: Final = 2**20  # more are useless, and code that loops over all possible descriptors gets slow
LEAST: Final = 64  # with 20 a router in one process does not start, with 30 one with two relays does not
PER_CLIENT: Final = 2
KEPT: Final = 128  # listeners, files, the link, and connections that are only refused
KEPT_PER_WORKER: Final = 4  # health checks, metrics, idle connections


def raise_limit() -> None:
    """Raise the limit of descriptors of this process and its children as far as the system allows.

    Raises: ConfigError: even that is too low to start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST:
        raise ConfigError(f"open files (ulimit -Hn) are limited to {hard}; at least {LEAST} are needed")
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            log.warning("the limit of open files cannot be raised", extra={"limit": soft, "error": str(error)})


def limit() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def clients_within(descriptors: int, workers: int) -> int:
    """The clients that this many descriptors allow, with at most half of them for workers."""
    kept = min(descriptors // 2, KEPT + KEPT_PER_WORKER * workers)
    return max(1, (descriptors - kept) // PER_CLIENT)


def most_clients(config: Config) -> int:
    """The client connections that all relays together accept: `limits.max_connections`, or fewer if descriptors are
    short.
    """
    return min(config.limits.max_connections, max(1, config.listen.relays) * most_clients_here(config))


def most_clients_here(config: Config) -> int:
    """The client connections that one process accepts, because the limit of descriptors holds for each process."""
    return clients_within(limit(), len(config.prefill.workers) + len(config.decode.workers))


def warn_if_few(config: Config, before: Config | None = None) -> None:
    """Log a warning if that is less than configured, or less than half of the default.

    `before`: the configuration that a reload replaces; it was warned of.
    """
    most, limits = most_clients(config), config.limits
    if before is not None and before.limits.max_connections == limits.max_connections:
        return
    wanted = limits.max_connections if "max_connections" in limits.model_fields_set else limits.max_connections // 2
    if most < wanted:
        fields = {"open_files": limit(), "clients": most, "max_connections": config.limits.max_connections}
        log.warning("open files (ulimit -n) are enough for fewer clients than limits.max_connections", extra=fields)
