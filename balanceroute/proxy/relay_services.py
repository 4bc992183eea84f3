"""The services of a relay, and its messages to and from the brain that concern no ticket."""

import asyncio
import logging
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from balanceroute.build import bounds
from balanceroute.config import Config
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.errors import ConfigError, NoHealthyWorkers
from balanceroute.proxy.admission.forecasts import Keys
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.life.pool_reaper import PERIOD_S, PoolReaper
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.life.suspicion import KNOWN_S, Loss, Suspicions
from balanceroute.proxy.link.membership import Membership
from balanceroute.proxy.link.messages import (
    Activity,
    ConnectorDoubted,
    Counted,
    Explained,
    Learned,
    PromptKeys,
    Silent,
    Welcome,
    Workers,
)
from balanceroute.proxy.link.remote import LOST, RemoteBrain
from balanceroute.proxy.ops.to_brain import ToBrain
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.kept_counts import CountsFile, Gone
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from balanceroute.proxy.telemetry.ticks import until_tick_s
from balanceroute.proxy.telemetry.troubles import Trouble
from balanceroute.proxy.wire.prompt_blocks import PromptBlocks
from balanceroute.proxy.workers.connector_check import WrongConnector
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.relay_fleet import RelayFleet
from balanceroute.proxy.workers.silence import FrozenGroup

log = logging.getLogger(__name__)

COUNTS_S: Final = 1.0
LIFE_S: Final = 5.0
FRESHEN_S: Final = 3600.0  # cleaners of temporary folders remove files older than some days
UNKNOWN: Final = "The workers are not known yet, because no process decides for this router (no brain leads)."


@dataclass(slots=True, eq=False, kw_only=True)
class RelayServices(ClientServices):
    """The services of a relay; the `BrainListener` of its `membership`."""

    fleet: RelayFleet
    brain: RemoteBrain
    membership: Membership
    to_brain: ToBrain
    folder: RunFolder
    name: str
    counts_file: CountsFile
    sent_activity: Activity | None = None  # sent last; None: not to the present brain
    known: asyncio.Event = field(default_factory=asyncio.Event)  # a brain has named the workers

    def __post_init__(self) -> None:
        LifeServices.__post_init__(self)
        self.suspicions = Suspicions(self.send_explained)

    @property
    def movers(self) -> int:
        """See `LifeServices`: all relays, those of other machines too."""
        return max(1, self.brain.relays)

    def begin_drain(self) -> None:
        """Refuse every new request from now on."""
        self.brain.leaving = True

    def bounds(self, config: Config) -> SchedulerConfig:
        """See `LifeServices`."""
        return bounds(config)

    async def know_workers(self, within_s: float) -> None:
        """See `ClientServices`: a brain tells it."""
        try:
            async with asyncio.timeout(within_s):
                await self.known.wait()
        except TimeoutError:
            raise NoHealthyWorkers(UNKNOWN) from None

    def void(self, request_ids: Set[str]) -> None:
        """End the streams of requests that the brain can't take over. O(legs)"""
        for leg in self.legs:
            if leg.id in request_ids:
                leg.interrupt(NoHealthyWorkers(LOST))

    def name_workers(self, message: Workers, whole: bool) -> None:
        """Take the brain's list of workers, or changes of it."""
        self.fleet.follow(message, whole)
        if whole:
            self._report_connectors()
        for standing in message.changed:
            worker, connector = self.fleet[standing.spec.id], standing.kv_connector
            if worker.kv_connector is None and connector is not None:
                with suppress(WrongConnector):  # a brain that is of another connector, after a takeover
                    ClientServices.note_connector(self, worker, connector or None)
            worker.upstream.prepare()  # the brain's health checks go on in an outage of the name server
        if whole:  # workers may have left while this relay, or the brain, was away
            self.forget_absent_workers()
        self.known.set()

    def _report_connectors(self) -> None:
        """Tell a new brain what was learned of the workers that have not ended since, as far as it knows."""
        for worker in self.fleet:
            if worker.kv_connector is not None:
                self.brain.report(Learned(worker.id, worker.kv_connector or None))

    def note_connector(self, worker: Worker, connector: str | None) -> None:
        """Note a worker's connector, and tell the brain, which tells the other relays."""
        self.brain.report(Learned(worker.id, connector))
        ClientServices.note_connector(self, worker, connector)

    def doubt_connector(self, worker: Worker, reason: str) -> None:
        """See `LifeServices`: the brain, which answers `/ready`, tells it for all relays."""
        if worker.kv_connector is None:
            self.brain.report(ConnectorDoubted(worker.id, reason))

    def send_explained(self, losses: list[Loss]) -> None:
        """Tell the other relays which workers a request has killed."""
        now = self.loop.time()
        ages_s = tuple(now - loss.at_s for loss in losses)
        self.brain.report(Explained(tuple(loss.worker for loss in losses), ages_s))

    def explained(self, message: Explained) -> None:
        """Note that another relay's request has killed workers."""
        now = self.loop.time()
        for worker_id, age_s in zip(message.workers, message.ages_s, strict=False):
            self.suspicions.explained_elsewhere(worker_id, now - age_s)

    def send_counts(self) -> None:
        """Keep this relay's counts for its next start and for the next brain, and send them to the present brain."""
        self._send_counts(self.metrics.counts())

    def _send_counts(self, counts: bytes) -> None:
        self.counts_file.keep(counts)  # first: shown counters must not fall if this process ends
        self.brain.report(Counted(counts))

    async def count(self) -> None:
        """Every second, keep and send the counts if they have changed; until cancelled."""
        while True:
            await asyncio.sleep(until_tick_s(self.loop.time(), COUNTS_S))
            counts = self.metrics.counts()
            if not self.counts_file.has(counts):
                self._send_counts(counts)

    async def renew_times(self) -> None:
        """Every hour, renew the times of the run folder's files, against cleaners of old files; until cancelled."""
        while True:
            try:
                self.folder.renew_times()
            except OSError as error:
                log.warning("files of the run folder may look old", extra={"error": error.strerror})
            await asyncio.sleep(until_tick_s(self.loop.time(), FRESHEN_S))

    async def renew_lock(self, lock: int) -> None:
        """Every few seconds, make the file again by which brains see that this relay runs; until cancelled."""
        trouble, gone = Trouble(log, "the lock file of this relay cannot be renewed"), Gone(self.folder)
        while True:
            await asyncio.sleep(until_tick_s(self.loop.time(), LIFE_S))
            try:
                again = RelayLocks(self.folder).renew(self.name, lock)
            except ConfigError as error:
                trouble.begin(error=str(error))
            else:
                if again:
                    log.warning("the lock file of this relay was removed, and is restored", extra={"relay": self.name})
                trouble.end()
            if self.config.listen.brains:  # no brain on this machine takes over their counts
                gone.clean_up(self.loop.time(), lambda relay, counts: True)

    def silence(self, message: Silent) -> None:
        """Take the brain's list of groups of workers that are silent together."""
        now = self.loop.time()
        self.frozen[:] = [FrozenGroup(group.name, group.workers, now - group.age_s) for group in message.groups]

    def make_keys(self, message: PromptKeys) -> None:
        """Make the keys of prompts as the brain's predictor does."""
        self.keyer = None if message.salt is None else Keys(message.salt, message.by_header)

    async def look(self) -> None:
        """A few times per second, end requests that have waited too long, then report; until cancelled."""
        reaper = PoolReaper(self, lambda most: (), judges=False)
        while True:
            await asyncio.sleep(until_tick_s(self.loop.time(), PERIOD_S))
            reaper.look()
            self.report()

    def report(self) -> None:
        """Send the brain this relay's activity. While idle it is sent once, so that no process wakes up."""
        if self.membership.member is None:
            return  # later key use is sent to the next brain
        uses = self.fleet.uses(self.loop.time(), self.awaited())
        keys = () if self.perimeter.keys is None else self.perimeter.keys.uses()
        activity = Activity(self.exchanges, self.drainer.pending, uses, keys, self.metrics.orphaned_kv)
        if uses or keys or activity != self.sent_activity:
            self.brain.report(activity)
            self.sent_activity = activity

    def joined(self, welcome: Welcome) -> None:
        """After joining a brain, send again what is otherwise sent only on change, or may be lost; hash blocks of
        prompts as its other relays do.
        """
        self.prompt_blocks = PromptBlocks(welcome.block_seed)
        self.to_brain.switch_brain()
        self.sent_activity = None
        self.send_counts()
        explained = self.suspicions.explained_since(self.loop.time() - KNOWN_S)
        if explained:
            self.send_explained(explained)
        if self.perimeter.keys is not None:
            self.perimeter.keys.forget_elsewhere()
