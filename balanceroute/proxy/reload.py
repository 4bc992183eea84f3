"""A new configuration for a running router: what may change does, what may not is named.

May change: the sets of workers, retry, limits, health, lifecycle, auth, log, queue and pool bounds, the prefillers' KV
limit and poll interval. Everything else shapes objects that live requests depend on (the policy and its projection, the
connector and its callback address, the predictor, the listening socket) and needs a restart.
"""

import logging
from typing import Final

from balanceroute.build import scheduler_config, worker_specs
from balanceroute.config import Config
from balanceroute.errors import ConfigError
from balanceroute.proxy.services import Services

log = logging.getLogger(__name__)

FIXED: Final = ("listen", "connector", "layerwise", "routing", "predictor")


def apply(services: Services, new: Config) -> list[str]:
    """Switch to `new`; returns what changed, for the log. Raises: ConfigError: it needs a restart; nothing changed."""
    old = services.config
    for name in FIXED:
        if getattr(old, name) != getattr(new, name):
            raise ConfigError(f"{name}: cannot change while the router runs; restart it")
    changed = [name for name in type(new).model_fields if getattr(old, name) != getattr(new, name)]
    wanted = {spec.id: spec for spec in worker_specs(new)}
    for worker in services.fleet:
        spec = wanted.get(worker.id)
        if spec is not None and spec != worker.spec:
            raise ConfigError(f"worker {worker.id}: its settings cannot change while it is in use; remove it first")
    services.config = new
    services.ledger.configure(scheduler_config(new))
    of_old_file = {spec.id for spec in worker_specs(old)}
    for worker in services.fleet:
        if worker.id in of_old_file and worker.id not in wanted:  # those added by hand stay
            services.fleet.leave(worker)
    for spec in wanted.values():
        if spec.id not in services.fleet or services.fleet[spec.id].leaving:
            services.fleet.add(spec, new.lifecycle.join_attempts)
    services.ledger.capacity_changed()
    log.info("configuration reloaded", extra={"changed": changed})
    return changed
