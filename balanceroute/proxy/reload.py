"""Applies a new configuration to a running router, or refuses it and names what needs a restart.

What needs a restart: the listening sockets, whether they speak TLS, the connector and its callback address, and what a
`WorkerSpec` says of a worker that is in use. Everything else changes while requests are under way; none is lost.

Another policy or predictor starts from the snapshot: admitted requests stay, waiting ones are decided on anew, and all
forecasts are renewed. A predictor learns from the history file, or without one from the former predictor's memory;
`exact_match` then has the lengths, but not the prompts that they belong to.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from threading import Thread

from balanceroute.build import policy_settings, predicts, scheduler_config, worker_specs
from balanceroute.config import Config
from balanceroute.config.patience import in_time
from balanceroute.core.types import WorkerSpec
from balanceroute.errors import ConfigError
from balanceroute.proxy.admission.forecasts import Forecasts, Past, build_forecasts
from balanceroute.proxy.apart import WITHIN_S
from balanceroute.proxy.client.descriptors import warn_if_few
from balanceroute.proxy.coroutines import start_refits
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.perimeter.perimeter import Perimeter, warn_of_exposures
from balanceroute.proxy.workers.connector_check import shortened
from balanceroute.proxy.workers.places import Places

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewPredictor:
    """The new predictor; `forecasts` None: the configuration has no predictor."""

    forecasts: Forecasts | None


async def reload(services: Services, new: Config, perimeter: Perimeter | None = None) -> None:
    """Switch to `new`. Keys and a history, which may be large, are read in a thread.

    `perimeter`: of `new`, if its files and certificates were read already; None: they are read here. Raises:
    ConfigError: it needs a restart, or a file that it names is wrong; InputError: a model file is wrong. Nothing has
    changed then.
    """
    check(services, new)
    certificates = perimeter is None
    if perimeter is None:
        perimeter = await asyncio.to_thread(in_time, partial(Perimeter, new), "auth.client_keys", WITHIN_S)
    predictor = None
    if makes_predictor(services, new):
        predictor = NewPredictor(await asyncio.to_thread(build_forecasts, new, past_of(services)))
    apply(services, new, predictor, perimeter, certificates)


def past_of(services: Services) -> Past | None:
    """The present predictor's memory, for a new one to learn from; None: there is no predictor."""
    return None if services.forecasts is None else services.forecasts.past()


def apply(
    services: Services, new: Config, predictor: NewPredictor | None, perimeter: Perimeter, certificates: bool
) -> list[str]:
    """Switch to `new`; returns what changed, for the log.

    `predictor`: the new predictor, if it changes. `perimeter`: of `new`. `certificates`: also read its certificates.
    Raises: ConfigError: it needs a restart, or a certificate is wrong. Nothing has changed then.
    """
    try:
        check(services, new)
        if certificates:
            services.tls.reload(new)  # the last check: it also replaces the certificates
    except BaseException:
        if predictor is not None and predictor.forecasts is not None:
            predictor.forecasts.close()
        raise
    old, new = services.config, shortened(new, [worker.kv_connector for worker in services.fleet])
    changed = [name for name in type(new).model_fields if getattr(old, name) != getattr(new, name)]
    if perimeter.entries != services.perimeter.entries:
        changed.append("auth.client_keys")  # the workers of the file
    if perimeter is not services.perimeter:
        perimeter.inherit(services.perimeter)
    services.perimeter = perimeter
    services.configure(new)
    services.reloads += 1
    if predictor is not None or policy_settings(old) != policy_settings(new):
        reroute(services, new, predictor)
    change_workers(services, old, new)
    services.ledger.capacity_changed()
    log.info("configuration reloaded", extra={"changed": changed})
    warn_of_exposures(old, new)
    warn_if_few(new, old)
    return changed


def check(services: Services, new: Config) -> None:
    """Check that `new` can be applied. Raises: ConfigError: it needs a restart."""
    check_fixed(services.config, new)
    check_workers((worker.spec for worker in services.fleet), services.config, new)
    check_added((worker.spec for worker in services.fleet if not worker.leaving), services.config, new)


def check_workers(in_use: Iterable[WorkerSpec], old: Config, new: Config) -> None:
    """Check workers' names. Raises: ConfigError: `new` gives the id of a worker in use to another worker.

    Allowed: `new` repeats a worker of `old` that an operator has replaced by another one of that id, which stays.
    """
    wanted = _new_workers(old, new)
    for used in in_use:
        spec = wanted.get(used.id)
        if spec is not None and spec != used:
            changes = [
                f"{field.name} from {before or repr(before)} to {now or repr(now)}"
                for field in fields(spec)
                if (before := getattr(used, field.name)) != (now := getattr(spec, field.name))
            ]
            raise ConfigError(
                f"worker {used.id}: {', '.join(changes)}: cannot change while it is in use; "
                "remove it first, or restart the router"
            )


def check_added(added: Iterable[WorkerSpec], old: Config, new: Config) -> None:
    """Check added workers. Raises: ConfigError: `new` names the server of one under another id.

    That server would get twice its share. `added` may contain workers of `old`.
    """
    named = {spec.id for spec in worker_specs(old)}
    brought = Places(_new_workers(old, new).values())
    for spec in added:
        name = brought.whose(spec) or spec.id
        if name != spec.id and spec.id not in named:
            raise ConfigError(
                f"worker {name}: is the server of worker {spec.id}, which was added at run time; give it that id, or "
                "remove that one first"
            )


def check_taken_over(in_use: Iterable[WorkerSpec], new: Config) -> None:
    """Check ids over a takeover. Raises: ConfigError: `new` moves one to the other tier, or to the server of another.

    Requests that the former relays still have would end, or count on the wrong server.
    """
    former = {spec.id: spec for spec in in_use}
    places = Places(former.values())
    for spec in worker_specs(new):
        known, here = former.get(spec.id), places.whose(spec)
        if known is None:
            continue
        moved = here is not None and Places((known,)).whose(spec) is None
        if moved or known.role is not spec.role:
            was = f"{here} is the worker" if moved else f"it is a {known.role} worker"
            raise ConfigError(
                f"worker {spec.id}: {was} at {spec.url} in the router that runs: cannot change with --take-over; give "
                "it a new id, or remove it there first"
            )


def _new_workers(old: Config, new: Config) -> dict[str, WorkerSpec]:
    """The workers of `new`, by id, that `old` does not have, or describes differently."""
    named = {spec.id: spec for spec in worker_specs(old)}
    return {spec.id: spec for spec in worker_specs(new) if spec != named.get(spec.id)}


def check_fixed(old: Config, new: Config) -> None:
    """Check fixed settings. Raises: ConfigError: one has changed that needs a restart."""
    now = _fixed(new)
    if changed := [key for key, value in _fixed(old).items() if now[key] != value]:
        raise ConfigError(f"{', '.join(changed)}: cannot change while the router runs; restart it")


def _fixed(config: Config) -> dict[str, object]:
    """The settings that need a restart, by their paths."""
    sections = {"listen": config.listen, "layerwise": config.layerwise}
    values = {f"{name}.{key}": value for name, section in sections.items() for key, value in section}
    return {"connector": config.connector, **values, "lifecycle.pins_file": config.lifecycle.pins_file}


def asks_another_predictor(old: Config, new: Config) -> bool:
    """Whether the predictor's settings have changed."""
    horizons = [config.routing.horizon_steps if predicts(config) else None for config in (old, new)]
    return horizons[0] != horizons[1] or old.predictor != new.predictor


def makes_predictor(services: Services, new: Config) -> bool:
    """Whether a reload makes a predictor anew: another one is asked for, or the history could not be opened so far."""
    opened = services.forecasts is None or services.forecasts.history.path is not None
    return asks_another_predictor(services.config, new) or not (opened or new.predictor.history is None)


def reroute(services: Services, new: Config, predictor: NewPredictor | None) -> None:
    """Switch to another policy and, with `predictor`, to that one."""
    before = services.forecasts
    if predictor is not None:
        services.forecasts = predictor.forecasts
        services.keyer = None if services.forecasts is None else services.forecasts.keys
    services.ledger.reroute(policy_settings(new), scheduler_config(new), services.forecasts)
    services.decisions.samples.clear()  # their runners-up would be the new policy's
    services.metrics.policy = new.routing.policy
    if predictor is None:
        return
    if before is not None:
        services.metrics.leave_out(before.metrics)
        _close(before)
    if services.forecasts is not None:
        services.metrics.include(services.forecasts.metrics)
    if services.tasks:
        start_refits(services)


def _close(before: Forecasts) -> None:
    """Close a predictor in a thread, because that waits for the disk; directly if no thread can be started."""
    try:
        Thread(target=before.close, name="prediction-close").start()
    except RuntimeError:
        before.close()


def change_workers(services: Services, old: Config, new: Config) -> None:
    """Remove workers of the old file that the new one does not name, and add new ones; operators' changes stay.

    A worker that an operator removed comes back if the file describes it differently. New workers of the file are
    waited for, as at the start: an engine may take minutes until it answers. A drained server stays drained under
    another name.
    """
    fleet = services.fleet
    wanted = {spec.id: spec for spec in worker_specs(new)}
    of_old_file = {spec.id: spec for spec in worker_specs(old)}
    drained = Places(worker.spec for worker in fleet if worker.drained and not worker.leaving)
    for worker in fleet:
        if worker.id in of_old_file and worker.id not in wanted:
            fleet.leave(worker)
    for spec in wanted.values():
        if spec.id in fleet and not fleet[spec.id].leaving:
            fleet[spec.id].joining = None
        elif spec != of_old_file.get(spec.id):
            worker = fleet.add(spec)
            if drained.whose(spec) is not None:
                fleet.drain(worker)
    services.check_health()
