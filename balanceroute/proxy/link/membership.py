"""A relay's membership: finds the brain, joins it with all tickets (`remote.py`), and reads what it sends.

    looking for a brain --connected--> Hello --Welcome--> member --lost--> looking for a brain
                                         '----Farewell----'          (tickets go on; new ones wait)

A relay joins no brain whose epoch is smaller than one seen before. A brain that has stopped may have a successor: on
the same machine that replaces the former's socket, so a member checks whether the socket is still the same
(`reach.py`). Tickets that a brain can't take over are void: each is refused, and the listener ends the stream of
its request. A ticket that waits without a brain for longer than the queue's deadline is ended here.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Final, Protocol

from balanceroute.core.types import POOLED, QUEUED, Outcome, RejectReason
from balanceroute.proxy.admission.decider import MOST_ENDED, Refusal, RefusalKind, refusal
from balanceroute.proxy.admission.tickets import Ticket
from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.messages import (
    BEAT_S,
    SILENT_S,
    VERSION,
    Beat,
    Chosen,
    Explained,
    Farewell,
    Finish,
    FromRelay,
    Hello,
    KeysElsewhere,
    LinkError,
    PromptKeys,
    Refused,
    Seen,
    Silent,
    Welcome,
    Workers,
    read_from_brain,
)
from balanceroute.proxy.link.reach import RETRY_S, Moved, Pauses, Reach, UntrustedBrain
from balanceroute.proxy.link.remote import RemoteBrain
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.telemetry.ticks import Looks, until_tick_s
from balanceroute.proxy.telemetry.turns import over_turns

log = logging.getLogger(__name__)

ENDS: Final = "this relay ends"
FROZEN_S: Final = 2 * BEAT_S  # after this silence the relay itself ends requests that have waited too long
LOOK_S: Final = 0.25  # between two checks whether the connected brain runs, and is still the one that listens
NO_BRAIN: Final = "The request waited too long: what decides on it is not there."


class BrainListener(Protocol):
    """What a relay does with what the brain sends, besides the answers to its tickets: `RelayServices`."""

    def joined(self, welcome: Welcome) -> None:
        """This relay has become a member."""

    def void(self, request_ids: Set[str]) -> None:
        """The brain can't take over these requests; called for a bounded number in a turn of the loop."""

    def name_workers(self, message: Workers, whole: bool) -> None:
        """Workers that have changed or left; `whole`: there are no others."""

    def silence(self, message: Silent) -> None:
        """The groups of workers that are silent together."""

    def explained(self, message: Explained) -> None:
        """Another relay's request has killed workers."""

    def keys_elsewhere(self, relay: str, keys: tuple[KeyUse, ...]) -> None:
        """The use of client keys at another relay."""

    def make_keys(self, message: PromptKeys) -> None:
        """How the predictor's keys of prompts are made."""


class Membership:
    """Keeps a `RemoteBrain` connected while `run` runs.

    Attributes: `epoch`: the largest seen. `member`: the number of the membership; None: not a member.
    """

    listener: BrainListener  # set by `run`

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reach: Reach,
        relay: str,
        brain: RemoteBrain,
        on_bug: Callable[[str], None],
    ) -> None:
        """`reach`: the way to the brain. `relay`: this relay's name. `on_bug`: counts bugs, by where they are."""
        self._loop, self._reach, self._relay, self._on_bug = loop, reach, relay, on_bug
        self._brain, self._outbox = brain, brain.outbox
        self._process = secrets.randbits(48)  # no process id: relays in containers of a cloned machine have the same
        self.silent_s, self.frozen_s = SILENT_S, FROZEN_S
        self.epoch = 0
        self.member: int | None = None
        self._looks = Looks()
        self._expires: asyncio.Handle | None = None  # the next turn of the loop goes on with it
        self._knows_workers = False
        self._lost = asyncio.Event()
        self._troubles: set[str] = set()  # reasons for finding no brain that have been logged
        self._pauses = Pauses()
        self._bugs: set[str] = set()  # errors that have been logged since the last steady membership

    @property
    def logged_why(self) -> bool:
        """Whether the log says why there is no brain: one was lost, or could not be joined. At a start it does not."""
        return self._pauses.has_joined or bool(self._troubles)

    # -- joining

    async def run(self, listener: BrainListener) -> None:
        """Find a brain, stay its member, then find the next one; until cancelled. `listener`: gets what they send."""
        self.listener = listener
        try:
            while True:
                pause_s = await self._try()
                await asyncio.sleep(pause_s)
        finally:
            frames = self._outbox.frames
            if frames is not None:
                if self.member is not None:
                    self._outbox.send(Farewell(self.epoch, ENDS))
                frames.close(ENDS)

    async def _try(self) -> float:
        """Try to find a brain, and stay its member; returns after how many seconds to try again."""
        self._lost.clear()
        try:
            frames, moved = await self._reach.connect(self._connection)
        except OSError as error:
            self._expire()
            if not self._reach.near:  # on this machine the next brain is just starting
                self._log_trouble(str(error) or type(error).__name__)
            if not isinstance(error, UntrustedBrain):
                return RETRY_S
            self._pauses.refused()
            return self._pauses.next_s
        if not frames.open:  # the brain has closed it already
            self._reach.try_next_address()
            return RETRY_S
        if moved():  # another brain has replaced the socket meanwhile, so the peer may be either
            frames.abort("another brain listens there")
            return 0.0
        self._hello(frames)
        if not await self._stay(frames, moved):
            self._reach.try_next_address()
        self._expire()
        return self._pauses.next_s

    def _connection(self) -> Frames[FromRelay]:
        return Frames(self._loop, self._received, self._closed)

    def _hello(self, frames: Frames[FromRelay]) -> None:
        """Send a brain the relay's name and the state of each of its tickets."""
        held, unknown = self._brain.introduce()
        frames.send(Hello(VERSION, self._relay, self._process, self.epoch, tuple(held), self._outbox.token_counts.fd))
        self._outbox.open(frames)
        self._knows_workers = False
        for message in unknown:
            self._outbox.send(message)

    async def _stay(self, frames: Frames[FromRelay], moved: Moved) -> bool:
        """Wait until the connection is lost; returns whether this relay has been a member over it."""
        deadline_s, joined = self._loop.time() + self.silent_s, False
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal joined, timer
            timer = self._loop.call_later(until_tick_s(self._loop.time(), LOOK_S), look)  # first: the rest may fail
            joined = joined or self.member is not None
            if self.member is None:
                self._expire()
            if self.member is None and self._loop.time() > max(deadline_s, frames.received_s + self.silent_s):
                frames.abort("the brain does not answer")
            elif moved():
                frames.abort("another brain listens there")
            elif self.member is not None:
                self._look(frames)

        timer = self._loop.call_later(LOOK_S, look)  # costs less than to wake the task for each look
        try:
            await self._lost.wait()
        finally:
            timer.cancel()
        return joined

    def _look(self, frames: Frames[FromRelay]) -> None:
        """Check that the brain runs, and show it that this relay does; called every `LOOK_S` of a membership."""
        now = self._loop.time()
        if self._looks.stood_still(now, LOOK_S + self.silent_s / 2):
            frames.received_s = now
        if now - frames.sent_s > BEAT_S:
            frames.send(Beat())
        if now - frames.received_s > self.silent_s:
            frames.abort("the brain is silent")
        elif now - frames.received_s > self.frozen_s:
            self._expire()

    # -- without a brain

    def _closed(self, frames: Frames[FromRelay], reason: str) -> None:
        """The connection is lost."""
        if frames is not self._outbox.frames:
            return  # a connection that was never used
        if self.member is None and reason != ENDS:
            self._pauses.refused()
            self._log_trouble(self._refusal(frames, reason))
        elif self.member is not None:
            if not self._pauses.growing:
                level, event = (logging.INFO, "brain left") if reason == ENDS else (logging.WARNING, "brain lost")
                log.log(level, event, extra={"relay": self._relay, "epoch": self.epoch, "reason": reason})
            if self._pauses.left(self.epoch, self._loop.time()):
                self._bugs.clear()
        self._outbox.close()
        self.member = None
        self._lost.set()

    def _refusal(self, frames: Frames[FromRelay], reason: str) -> str:
        """What to log of a brain that has not welcomed this relay.

        A far one that does not accept the relay's certificate just closes the connection.
        """
        if self._reach.near:
            return reason
        hint = "" if frames.ended_here else "; the brain's log says why if it has refused this relay"
        return f"{self._reach.name}: {reason}{hint}"

    def _log_trouble(self, reason: str) -> None:
        """Log each reason for finding no brain once: somebody may have to act."""
        if reason not in self._troubles:
            self._troubles.add(reason)
            log.warning("this relay cannot join a brain", extra={"relay": self._relay, "reason": reason})

    def _expire(self) -> None:
        """End the tickets that have waited too long without a brain, as a brain would (`Scheduler.late`); if there will
        be none, all that wait. A bounded number in a turn of the loop, as streams go on meanwhile.

        A brain that has stopped may continue later, so it is sent their ends.
        """
        if self._expires is not None:
            self._expires.cancel()
            self._expires = None
        refused = 0
        for ticket, why in self._too_late():
            if refused == MOST_ENDED:
                self._expires = self._loop.call_soon(self._expire)
                break
            number = self._brain.refuse(ticket.id, why)
            self._outbox.send(Finish(number, Outcome.EXPIRED, "", 0, 0.0))
            refused += 1

    def _too_late(self) -> Iterator[tuple[Ticket, Refusal]]:
        brain, now = self._brain, self._loop.time()
        queue_limit, pool_limit = now - brain.bounds.queue_deadline_s, now - brain.bounds.pool_ttl_s
        for ticket in list(brain.tickets.by_id.values()):
            late = ticket.phase is QUEUED and not ticket.earlier_tokens and ticket.queued_s < queue_limit
            if brain.cut_off and (ticket.asking or ticket.phase in (QUEUED, POOLED)):
                yield ticket, refusal(RejectReason.DRAINING, brain.view)
            elif late or (ticket.phase is POOLED and ticket.pooled_s < pool_limit):
                yield ticket, Refusal(RefusalKind.EXPIRED, NO_BRAIN)

    # -- what the brain sends

    def _received(self, frames: Frames[FromRelay], body: bytes) -> None:
        try:
            self._read(body)
        except LinkError:
            raise
        except Exception as error:
            self._on_bug("link")
            if repr(error) not in self._bugs:
                self._bugs.add(repr(error))
                log.exception("internal error", extra={"where": "link"})
            raise LinkError("internal error") from error

    def _read(self, body: bytes) -> None:
        for message in read_from_brain(body):
            if isinstance(message, Welcome):
                self._welcome(message)
            elif isinstance(message, Farewell):
                self.epoch = max(self.epoch, message.epoch)
                # one that has never joined is itself the successor's: its own brain is yet to lead
                self._brain.cut_off = self._pauses.has_joined and self._reach.near and message.version != VERSION
                raise LinkError(message.reason)
            elif isinstance(message, Beat):
                pass  # also before its Welcome, while it reads a large Hello
            elif self.member is None:
                raise LinkError("the brain has sent a message before its Welcome")
            elif isinstance(message, Chosen | Refused):
                self._brain.answer(message)
            elif isinstance(message, Seen):
                self._brain.see(message.view, message.relays)
            elif isinstance(message, Workers):
                whole, self._knows_workers = not self._knows_workers, True
                self.listener.name_workers(message, whole)
            elif isinstance(message, Silent):
                self.listener.silence(message)
            elif isinstance(message, KeysElsewhere):
                self.listener.keys_elsewhere(message.relay, message.keys)
            elif isinstance(message, PromptKeys):
                self.listener.make_keys(message)
            elif isinstance(message, Explained):
                self.listener.explained(message)

    def _welcome(self, message: Welcome) -> None:
        if message.version != VERSION or message.epoch < self.epoch:
            its = f"version {message.version}, epoch {message.epoch}"
            raise LinkError(f"the brain has {its}; this relay needs version {VERSION}, epoch {self.epoch} or later")
        self._pauses.joined(message.epoch, self._loop.time())
        self.epoch, self.member, self._brain.cut_off = message.epoch, message.member, False
        self._troubles.clear()
        if not self._pauses.growing:
            log.info("brain found", extra={"relay": self._relay, "epoch": self.epoch, "member": self.member})
        self._brain.welcomed(message.reads_tokens)
        self.listener.joined(message)
        some = [message.void[at : at + MOST_ENDED] for at in range(0, len(message.void), MOST_ENDED)]
        over_turns(self._loop, some, partial(self._void, self._outbox.frames), 1)  # nearly all streams may be void

    def _void(self, frames: Frames[FromRelay] | None, numbers: Sequence[int]) -> None:
        """End requests that the brain can't take over. `frames`: its connection; another brain may take them over."""
        if frames is self._outbox.frames:
            self.listener.void(self._brain.void(numbers))
