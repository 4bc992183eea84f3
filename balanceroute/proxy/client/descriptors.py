"""How many descriptors a process may have (`ulimit -n`), and for how many clients those are enough.

A client takes one for its connection and one for its worker's. Where they run out, requests that were accepted fail
half way; so no more clients are accepted than there are descriptors for, and the limit is raised as far as it may be.
"""

import logging
import resource
from typing import Final

from balanceroute.config import Config

log = logging.getLogger(__name__)

MOST: Final = 2**20  # more are of no use, and what loops over all possible ones takes long
PER_CLIENT: Final = 2
KEPT: Final = 128  # listeners, files, the link, and connections that are only refused
KEPT_PER_WORKER: Final = 4  # health and metrics, and what idles


def raise_limit() -> None:
    """Raise the limit of descriptors of this process and its children as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            log.warning("the limit of open files stays", extra={"limit": soft, "error": str(error)})


def limit() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def clients_within(descriptors: int, workers: int) -> int:
    """How many clients so many descriptors are enough for; workers take at most half of them."""
    kept = min(descriptors // 2, KEPT + KEPT_PER_WORKER * workers)
    return max(1, (descriptors - kept) // PER_CLIENT)


def most_clients(config: Config) -> int:
    """How many client connections all relays together accept: `limits.max_connections`, or what they have room for."""
    workers = len(config.prefill.workers) + len(config.decode.workers)
    return min(config.limits.max_connections, max(1, config.listen.relays) * clients_within(limit(), workers))


def warn_if_few(config: Config) -> None:
    """Log a warning if that is less than configured, or less than half of the default."""
    most, limits = most_clients(config), config.limits
    wanted = limits.max_connections if "max_connections" in limits.model_fields_set else limits.max_connections // 2
    if most < wanted:
        told = {"open_files": limit(), "clients": most, "max_connections": config.limits.max_connections}
        log.warning("open files (ulimit -n) are enough for fewer clients than limits.max_connections", extra=told)
