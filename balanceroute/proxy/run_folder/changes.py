"""Operators' changes at run time, kept in the run folder for the next brain of the router.

A restarted brain would otherwise have only the configuration: it would not know workers that were added by hand, or
that are leaving, although they have streams, and would bring back removed ones. The file also names the workers that
are down, or under trial: the next brain would fill them with requests before it knows. It is valid for a lineage: a
router and its successors, by a number that the first one draws. It is dropped at a restart of the whole router, and
when a router of another machine leads meanwhile (`lease.py`), because operators have used that one since. A reload
while no brain led is applied to the file as a brain would have applied it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from balanceroute.build import worker_specs
from balanceroute.config import Config, normalised_url
from balanceroute.core.knobs import Option
from balanceroute.core.types import WorkerSpec
from balanceroute.errors import ConfigError
from balanceroute.proxy.link.files import is_gone, replace_content
from balanceroute.proxy.link.leadership import AnotherLeads, Lead
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.ops.steering import with_policy
from balanceroute.proxy.telemetry.ticks import until_tick_s
from balanceroute.proxy.telemetry.troubles import Trouble
from balanceroute.proxy.workers.circuit import CircuitState
from balanceroute.proxy.workers.places import Places

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
_UNTRIED: Final = (CircuitState.OPEN, CircuitState.HALF_OPEN, CircuitState.TRIAL)  # rests end about as soon as a brain
FIRST: Final = 1  # the number of a router's first configuration


class Changes(msgspec.Struct, frozen=True):
    """Changes to the configuration in a lineage: workers added, removed and drained, and another policy.

    `added`: also workers that differ from the configuration's of the same id, which are in `replaced`. `removed` and
    `replaced`: as the configuration described them; a worker that it describes differently now is as it says.
    `options`: of that policy. `workers`: all that the router has, because workers that leave may still have requests.
    `down`: those of them that health checks found down, or that have passed none yet. `doubted`: those that did not
    answer the last one. `untried`: those that are to have one request only, because earlier ones have failed there, or
    got no token. `number`: of the configuration
    (`parent/configured.py`). `epoch`: of the brain that wrote this.
    """

    lineage: int
    added: tuple[WorkerSpec, ...] = ()
    replaced: tuple[WorkerSpec, ...] = ()
    removed: tuple[WorkerSpec, ...] = ()
    drained: tuple[str, ...] = ()
    policy: str | None = None
    options: dict[str, Option] = {}
    workers: tuple[WorkerSpec, ...] = ()
    down: tuple[str, ...] = ()
    doubted: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    number: int = 0
    epoch: int = 0

    def in_use(self, config: Config) -> list[WorkerSpec]:
        """The workers of a router of this configuration with these changes.

        A brain writes all of them as soon as it leads. Where a Lease decides who does, none may have led here: then no
        request of this router is on any worker.
        """
        if self.workers or config.listen.lease is not None:
            return list(self.workers)
        return worker_specs(config)

    def config(self, config: Config) -> Config:
        """The configuration with the policy that an operator has chosen."""
        if self.policy is None:
            return config
        try:
            return with_policy(config, self.policy, self.options)
        except ConfigError as error:  # the configuration has changed since
            log.warning(
                "the policy that an operator chose is dropped", extra={"policy": self.policy, "error": str(error)}
            )
            return config

    def apply(self, services: Services) -> None:
        """Make these changes in a new brain, before it has requests.

        An added worker that is down is waited for: it may have served for long. One whose server the configuration
        names under another name by now leaves: that server would get twice its share. A drained server stays drained
        under another name. A worker whose server was down or doubted, or that no brain has known, gets no new requests
        before its first answer; one that was not down is not out before as many failed checks as ever.
        """
        fleet = services.fleet
        configured = {worker.id: worker.spec for worker in fleet}
        removed = {spec.id for spec in self.removed if configured.get(spec.id) == spec}
        added = [spec for spec in self.added if configured.get(spec.id) in (None, *self.replaced)]
        changed = removed.union(spec.id for spec in added)
        named = Places(worker.spec for worker in fleet if worker.id not in changed)
        before, drained = Places(self.workers), Places(spec for spec in self.workers if spec.id in self.drained)
        for spec in added:
            if spec.id in fleet and fleet[spec.id].spec != spec:
                fleet.leave(fleet[spec.id])
                fleet.sweep()
            if spec.id not in fleet and named.whose(spec) is None:
                fleet.restore(spec)
        for worker in fleet:
            if worker.id in removed:
                fleet.leave(worker)
            moved = worker.id in self.drained and before.whose(worker.spec) is None  # to a server that nobody had
            if moved or drained.whose(worker.spec) is not None:
                fleet.drain(worker)
        for spec in self.workers:
            if spec.id not in fleet:
                fleet.leave(fleet.restore(spec))
        down, untried = {None, *self.down}, set(self.untried)
        for worker in fleet:
            name = before.whose(worker.spec)  # None: no brain has known its server
            if name in untried:
                worker.circuit.await_trial()
            worker.seen_healthy = name not in down
            if name in down or name in self.doubted:
                fleet.await_answer(worker)  # not out: its group may be frozen, which this brain does not know yet


def changes_of(
    services: Services,
    base: Config,
    lineage: int,
    number: int = 0,
    epoch: int = 0,
    workers: Sequence[WorkerSpec] | None = None,
) -> Changes:
    """The changes of a running router to its configuration `base` of this `number`.

    Args: epoch: of its brain. workers: those of `base`, if the caller knows them.
    """
    configured = {spec.id: spec for spec in (worker_specs(base) if workers is None else workers)}
    staying = {worker.id: worker.spec for worker in services.fleet if not worker.leaving}
    routing = services.config.routing
    chosen = routing.policy != base.routing.policy
    down = [worker.id for worker in services.fleet if worker.unknown or not worker.healthy]
    added = tuple(spec for spec in staying.values() if spec != configured.get(spec.id))
    return Changes(
        lineage,
        added=added,
        replaced=tuple(configured[spec.id] for spec in added if spec.id in configured),
        removed=tuple(spec for name, spec in sorted(configured.items()) if name not in staying),
        drained=tuple(worker.id for worker in services.fleet if worker.drained and not worker.leaving),
        policy=routing.policy if chosen else None,
        options=dict(routing.options) if chosen else {},
        workers=tuple(worker.spec for worker in services.fleet),
        down=tuple(down),
        doubted=tuple(worker.id for worker in services.fleet if worker.doubted and worker.id not in down),
        untried=tuple(worker.id for worker in services.fleet if worker.circuit.state in _UNTRIED),
        number=number,
        epoch=epoch,
    )


def saved_changes(path: Path, lineage: int) -> Changes:
    """The changes that a brain of this lineage has left in the file; none where it can't be read."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Changes)
        for spec in (*found.added, *found.workers):
            _check(spec)
        if found.lineage == lineage:
            return found
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        log.warning("saved changes of operators cannot be read", extra={"file": str(path), "error": str(error)})
    return Changes(lineage)


class KeptChanges:
    """The file of one run folder. `last`: its contents. `number`: of the configuration in force."""

    def __init__(self, path: Path, lineage: int, lead: Lead, number: int) -> None:
        """Read the file of an earlier brain of the lineage, without what a later reload, or a brain of another run
        folder, has undone. `lead`: only the leader writes the file.
        """
        self._path, self._lineage, self._lead, self.number = path, lineage, lead, number
        self._trouble = Trouble(
            log, "operators' changes cannot be saved for the next brain", "operators' changes are saved again"
        )
        self._base: Config | None = None
        self._configured: list[WorkerSpec] = []  # the workers of `_base`: kept, as they are looked at so often
        found = saved_changes(path, lineage)
        if found != Changes(lineage) and lead.others > found.epoch:
            log.info("saved changes of operators are dropped: another router has led since")
            down = tuple(spec.id for spec in found.workers)  # or not: this router has not checked them since
            found = Changes(lineage, workers=found.workers, down=down, number=found.number)  # they may have streams
        reloaded = number > max(found.number, FIRST)
        self.last = msgspec.structs.replace(found, policy=None) if reloaded else found

    def keep(self, services: Services, base: Config) -> None:
        """Write the changes that are not in the file yet. Failures to write are logged once, until it works again.

        Raises: AnotherLeads: the next leader does not know the changes.
        """
        if base is not self._base:
            self._base, self._configured = base, worker_specs(base)
        changes = changes_of(services, base, self._lineage, self.number, self._lead.epoch, self._configured)
        if changes == self.last and not is_gone(self._path):
            return
        if not self._lead.renew():
            raise AnotherLeads
        file = str(self._path)
        try:
            replace_content(self._path, msgspec.json.encode(changes))
        except OSError as error:
            self._trouble.begin(file=file, error=error.strerror)
            return
        self._trouble.end(file=file)
        self.last = changes

    async def watch(self, services: Services, base: Callable[[], Config]) -> None:
        """Write other changes of the workers (not made by an operator's request), until cancelled.

        Never a part of a change: if this process died then, the next brain would go on with that part.
        """
        while True:
            await asyncio.sleep(until_tick_s(services.loop.time(), LOOK_S))
            async with services.changing_workers:
                with suppress(AnotherLeads):  # this process is about to end
                    self.keep(services, base())


def _check(spec: WorkerSpec) -> None:
    """Check workers read from the file. Raises: ValueError: one is invalid."""
    normalised_url(spec.url)
    if not spec.id or spec.slots < 1 or not spec.slowdown > 0 or spec.request_tokens < 0:
        raise ValueError(f"worker {spec.id!r} has values that cannot be")
