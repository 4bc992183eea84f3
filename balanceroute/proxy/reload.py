"""Applies a new configuration to a running router, or refuses it and names what needs a restart (`ops/reload_checks`).

Everything else changes while requests are under way; none is lost.

Another policy or predictor starts from the snapshot: admitted requests stay, waiting ones are decided on anew, and all
forecasts are renewed. A predictor learns from the history file, or without one from the former predictor's memory;
`exact_match` then has the lengths, but not the prompts that they belong to.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from threading import Thread

from balanceroute.build import policy_settings, scheduler_config, worker_specs
from balanceroute.config import Config
from balanceroute.config.patience import in_time
from balanceroute.proxy.admission.forecasts import Forecasts, Past, build_forecasts
from balanceroute.proxy.client.descriptors import warn_if_few
from balanceroute.proxy.coroutines import start_refits
from balanceroute.proxy.ops.admin import AT_ONCE
from balanceroute.proxy.ops.reload_checks import asks_another_predictor, check_added, check_fixed, check_workers
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.parent.trial import WITHIN_S
from balanceroute.proxy.perimeter.perimeter import Perimeter, warn_of_exposures
from balanceroute.proxy.telemetry.turns import in_turns
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
    async with services.changing_workers:
        await apply(services, new, predictor, perimeter, certificates)


def past_of(services: Services) -> Past | None:
    """The present predictor's memory, for a new one to learn from; None: there is no predictor."""
    return None if services.forecasts is None else services.forecasts.past()


async def apply(
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
    await change_workers(services, old, new)
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


async def change_workers(services: Services, old: Config, new: Config) -> None:
    """Remove workers of the old file that the new one does not name, and add new ones, over several turns of the loop
    if they are many; operators' changes stay.

    A worker that an operator removed comes back if the file describes it differently. New workers of the file are
    waited for, as at the start: an engine may take minutes until it answers. A drained server stays drained under
    another name.
    """
    fleet = services.fleet
    wanted = {spec.id: spec for spec in worker_specs(new)}
    of_old_file = {spec.id: spec for spec in worker_specs(old)}
    drained = Places(worker.spec for worker in fleet if worker.drained and not worker.leaving)
    async for worker in in_turns(fleet, AT_ONCE):
        if worker.id in of_old_file and worker.id not in wanted:
            fleet.leave(worker)
    async for spec in in_turns(wanted.values(), AT_ONCE):
        if spec.id in fleet and not fleet[spec.id].leaving:
            fleet[spec.id].joining = None
        elif spec != of_old_file.get(spec.id):
            worker = fleet.add(spec)
            if drained.whose(spec) is not None:
                fleet.drain(worker)
    services.check_health()
