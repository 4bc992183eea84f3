"""What operators have changed at run time, kept in the run folder for the next brain of the same router.

A brain that is started again would otherwise know the configuration alone: streams on a worker that was added by hand
would have no place in it, and a worker that was taken out would be back. It holds for a lineage: a router and those
that have taken over from it, by the process id of the first parent. A restart of the whole router forgets it.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from balanceroute.build import worker_specs
from balanceroute.config import Config
from balanceroute.core.types import WorkerSpec
from balanceroute.errors import ConfigError
from balanceroute.proxy.link.files import replace_content
from balanceroute.proxy.ops.steering import with_policy
from balanceroute.proxy.services import Services
from balanceroute.proxy.telemetry.ticks import until_tick_s

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25


class Changes(msgspec.Struct, frozen=True):
    """Beside the configuration, in this lineage: workers added, removed and drained, and another policy.

    `unlike`: workers that have requests though they leave, or differ from those of the configuration.
    """

    lineage: int
    added: tuple[WorkerSpec, ...] = ()
    removed: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    policy: str | None = None
    unlike: tuple[WorkerSpec, ...] = ()

    def in_use(self, config: Config) -> list[WorkerSpec]:
        """The workers that a router of this configuration has."""
        specs = {spec.id: spec for spec in worker_specs(config) if spec.id not in self.removed}
        return list((specs | {spec.id: spec for spec in (*self.added, *self.unlike)}).values())

    def config(self, config: Config) -> Config:
        """The configuration under the policy that an operator has chosen."""
        if self.policy is None:
            return config
        try:
            return with_policy(config, self.policy)
        except ConfigError as error:  # it is another configuration by now
            log.warning("the policy is the configuration's again", extra={"policy": self.policy, "error": str(error)})
            return config

    def apply(self, services: Services) -> None:
        """Make the same changes again."""
        fleet = services.fleet
        for spec in self.added:
            if spec.id not in fleet:
                fleet.add(spec, services.config.lifecycle.join_attempts)
        for worker in fleet:
            if worker.id in self.removed:
                fleet.leave(worker)
            if worker.id in self.drained:
                fleet.drain(worker)


def changes_of(services: Services, base: Config, lineage: int) -> Changes:
    """What a running router has beyond its configuration `base`."""
    specs = {spec.id: spec for spec in worker_specs(base)}
    configured = set(specs)
    staying = {worker.id for worker in services.fleet if not worker.leaving}
    unlike = (worker.spec for worker in services.fleet if worker.leaving or worker.spec != specs.get(worker.id))
    added = tuple(worker.spec for worker in services.fleet if worker.id in staying - configured)
    policy = services.config.routing.policy
    return Changes(
        lineage,
        added,
        tuple(sorted(configured - staying)),
        tuple(worker.id for worker in services.fleet if worker.drained),
        None if policy == base.routing.policy else policy,
        tuple(spec for spec in unlike if spec not in added),
    )


class KeptChanges:
    """The file of one run folder."""

    def __init__(self, path: Path, lineage: int) -> None:
        """`last` is what a brain of the same lineage before this one has left."""
        self._path, self._lineage = path, lineage
        self.last = Changes(lineage)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Changes)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("what operators had changed can't be read", extra={"file": str(path), "error": str(error)})
            return
        if found.lineage == lineage:
            self.last = found

    def keep(self, changes: Changes) -> None:
        """Write it down, if it is new. Raises: OSError."""
        if changes == self.last:
            return
        replace_content(self._path, msgspec.json.encode(changes))
        self.last = changes

    async def watch(self, services: Services, base: Callable[[], Config]) -> None:
        """Keep what changes, until cancelled; that the file can't be written is told once, until it can be again."""
        kept, file = True, str(self._path)
        while True:
            await asyncio.sleep(until_tick_s(services.loop.time(), LOOK_S))
            try:
                self.keep(changes_of(services, base(), self._lineage))
            except OSError as error:
                if kept:
                    fields = {"file": file, "error": error.strerror}
                    log.warning("what operators change is not kept for another brain", extra=fields)
                kept = False
            else:
                if not kept:
                    log.info("what operators change is kept again", extra={"file": file})
                kept = True
