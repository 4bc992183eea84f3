"""A relay's end of the link: a `decider.Decider` that calls the brain in another process.

While there is no brain, nothing is lost: tickets hold their own state, and one `Hello` tells the next brain all of it.
So a call in the meantime changes the ticket, and is not sent. A ticket that no brain knows is submitted after the
`Hello`, and may be refused; one that waits for longer than the queue's deadline is ended here.

    looking for a brain --connected--> Hello --Welcome--> member --lost--> looking for a brain
                                         '----Farewell----'          (tickets go on; new ones wait)

Counts of tokens are written into shared memory, which a brain on the same machine reads (`token_counts.py`); to another
brain they are sent within `PROGRESS_S`.

A relay joins no brain whose epoch is smaller than one seen before. A brain that has stopped may have a successor: on
the same machine that replaces the former's socket, so a member checks whether the socket is still the same
(`reach.py`). Tickets that a brain can't take over are void: each is refused, and the listener ends the stream of
its request.

`RemoteBrain` is one class with many short methods: each is a call of `decider.Decider` or a message of the brain, and
what any of them does depends on whether there is a brain.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import POOLED, QUEUED, Outcome, RejectReason, RequestSpec
from balanceroute.core.view import ClusterView
from balanceroute.proxy.admission.decider import MOST_ENDED, OnAnswer, Refusal, RefusalKind, refusal
from balanceroute.proxy.admission.tickets import Ticket, Tickets
from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.messages import (
    BEAT_S,
    PROGRESS_S,
    SILENT_S,
    SOON_S,
    VERSION,
    Asking,
    Beat,
    Began,
    Chosen,
    Explained,
    Farewell,
    Finish,
    FromRelay,
    Held,
    Hello,
    KeysElsewhere,
    LinkError,
    Prefilled,
    PrefillFailed,
    Progress,
    PromptKeys,
    Pushed,
    PushFailed,
    PutBack,
    Refused,
    Report,
    RequestPrefill,
    Requeue,
    Seen,
    Silent,
    Submit,
    Welcome,
    Workers,
    read_from_brain,
)
from balanceroute.proxy.link.reach import RETRY_S, Moved, Pauses, Reach, UntrustedBrain
from balanceroute.proxy.link.token_counts import WrittenCounts
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.telemetry.ticks import Looks, until_tick_s
from balanceroute.proxy.telemetry.turns import over_turns

log = logging.getLogger(__name__)

ENDS: Final = "this relay ends"
FROZEN_S: Final = 2 * BEAT_S  # after this silence the relay itself ends requests that have waited too long
LOOK_S: Final = 0.25  # between two checks whether the connected brain runs, and is still the one that listens
NO_BRAIN: Final = "The request waited too long: what decides on it is not there."
MAX_JOIN_HASHES: Final = 2**21  # of prompts' blocks, 9 bytes each: so that what a relay sends on joining fits a frame
LOST: Final = "The router has lost its hold on the request; send it again."
NOBODY: Final = ClusterView((), (), 0, 0, 0, 0, draining=False)


class _Open:
    """A ticket as the link knows it.

    Attributes: `number`: its name on the link. `turn`: the number of its calls that ask for an answer. `submitted`: a
    brain knows it. `tokens`: generated since the present brain knows it.
    """

    __slots__ = ("number", "submitted", "tokens", "turn")

    def __init__(self, number: int, submitted: bool) -> None:
        self.number, self.turn, self.submitted = number, 1, submitted
        self.tokens = 0


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


class RemoteBrain:
    """The brain at the other end of a socket; see `decider.Decider` for its calls. `run` keeps it connected."""

    at_once = True
    on_answer: OnAnswer  # set by `Tickets`, as `collect`
    collect: Callable[[], None]
    listener: BrainListener  # set by `run`

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reach: Reach,
        relay: str,
        bounds: SchedulerConfig,
        on_bug: Callable[[str], None],
    ) -> None:
        """`reach`: the way to the brain. `relay`: this relay's name. `on_bug`: counts bugs, by where they are."""
        self._loop, self._reach, self._relay, self._on_bug = loop, reach, relay, on_bug
        self._process = secrets.randbits(48)  # no process id: relays in containers of a cloned machine have the same
        self.bounds = bounds
        self.soon_s, self.silent_s, self.frozen_s = SOON_S, SILENT_S, FROZEN_S
        self.leaving = False  # new requests are refused here
        self._cut_off = False  # the brain on this machine is a successor's of another version: there will be no other
        self.tickets = Tickets(self, loop)
        self.epoch = 0
        self.member: int | None = None  # the number of the membership; None: not a member
        self._view = NOBODY
        self.relays = 1  # of the whole router, as the brain said last
        self._frames: Frames[FromRelay] | None = None  # the connection to a brain that has been sent Hello
        self._open: dict[str, _Open] = {}
        self._ids: dict[int, str] = {}  # by number
        self.token_counts = WrittenCounts()
        self._tokens_read = False  # the brain reads `token_counts`
        self._unsent_tokens: dict[int, int] = {}  # tokens to be sent, by ticket
        self._kept: list[tuple[float, Callable[[float], FromRelay]]] = []  # time and message, see `_send_soon`
        self._kept_timer: asyncio.TimerHandle | None = None
        self._looks = Looks()
        self._expires: asyncio.Handle | None = None  # the next turn of the loop goes on with it
        self._knows_workers = False
        self._lost = asyncio.Event()
        self._troubles: set[str] = set()  # reasons for finding no brain that have been logged
        self._pauses = Pauses()
        self._bugs: set[str] = set()  # errors that have been logged since the last steady membership

    # -- what lifecycles may know

    @property
    def draining(self) -> bool:
        """Whether new requests are refused: this relay leaves, or the brain drains or is of another version."""
        return self.leaving or self._cut_off or self._view.draining

    def configure(self, config: SchedulerConfig) -> None:
        """Use other bounds for this relay's requests; the brain has its own."""
        self.bounds = config

    def view(self) -> ClusterView:
        """The brain's last view of the cluster."""
        return self._view

    # -- the calls

    def submit(self, spec: RequestSpec) -> None:
        """See `decider.Decider`."""
        number = self.token_counts.number()
        self._open[spec.id] = _Open(number, self._frames is not None)
        self._ids[number] = spec.id
        self._send(Submit(number, spec))

    def prefilled(self, request_id: str, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """See `decider.Decider`."""
        self._ask(request_id, lambda number: Prefilled(number, prompt_tokens, cached_tokens))

    def prefill_failed(self, request_id: str) -> None:
        """See `decider.Decider`."""
        self._ask(request_id, PrefillFailed)

    def request_prefill(self, request_id: str) -> None:
        """See `decider.Decider`."""
        self._ask(request_id, RequestPrefill)

    def pushed(self, request_id: str, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """See `decider.Decider`."""
        entry = self._open.get(request_id)
        if entry is not None:
            self._send(Pushed(entry.number, prompt_tokens, cached_tokens))

    def push_failed(self, request_id: str) -> None:
        """See `decider.Decider`."""
        self._ask(request_id, PushFailed)

    def put_back(self, request_id: str) -> None:
        """See `decider.Decider`."""
        self._ask(request_id, PutBack)

    def requeue(self, request_id: str, *, anew: bool = False) -> None:
        """See `decider.Decider`."""
        entry = self._open.get(request_id)
        if entry is not None:
            tokens, prefix = entry.tokens, self.tickets.by_id[request_id].spec.prefix
            self._ask(request_id, lambda number: Requeue(number, tokens, prefix, anew))

    def progress(self, request_id: str, tokens: int) -> None:
        """See `decider.Decider`. Hot: called for every read of a stream."""
        entry = self._open.get(request_id)
        if self._frames is not None and entry is not None:
            entry.tokens += tokens
            self._put(entry)

    def finish(self, request_id: str, outcome: Outcome, reason: str = "") -> None:
        """See `decider.Decider`."""
        entry = self._leave(request_id)
        number, tokens = entry.number, entry.tokens
        if tokens:
            self._send_soon(lambda age_s: Finish(number, outcome, reason, tokens, age_s))
        else:
            self._send(Finish(number, outcome, reason, tokens, 0.0))

    def began(self, request_id: str) -> None:
        """See `decider.Decider`."""
        entry = self._open.get(request_id)
        if entry is not None:
            number = entry.number
            self._send_soon(lambda age_s: Began(number, age_s))

    def report(self, message: Report | Explained) -> None:
        """Send the brain a report, mostly on workers; dropped while there is no brain."""
        self._send(message)

    def _ask(self, request_id: str, message: Callable[[int], Asking]) -> None:
        """Send a call that will be answered, unless the ticket is void. `message`: by the ticket's number."""
        entry = self._open.get(request_id)
        if entry is not None:
            entry.turn += 1
            self._send(message(entry.number))

    def _leave(self, request_id: str) -> _Open:
        """Forget a ticket that has ended."""
        entry = self._open.pop(request_id)
        del self._ids[entry.number]
        self._unsent_tokens.pop(entry.number, None)
        self.token_counts.leave(entry.number)
        return entry

    def _put(self, entry: _Open) -> None:
        """Write a ticket's tokens to shared memory, or put them into the next message."""
        if self._tokens_read and self.token_counts.write(entry.number, entry.tokens):
            return
        if not self._unsent_tokens:
            self._loop.call_later(PROGRESS_S, self._send_progress)
        self._unsent_tokens[entry.number] = entry.tokens

    def _send(self, message: FromRelay) -> None:
        """Send a message, after the deferred ones."""
        if self._frames is None:
            return  # the next Hello contains it
        self._send_progress()
        if self._kept:
            self._send_deferred()
        self._frames.send(message)

    def _send_soon(self, message: Callable[[float], FromRelay]) -> None:
        """Defer a message to the next one, by `soon_s` at most, unless a request waits for what it changes.

        Every frame wakes the brain's process, so fewer frames save CPU. `message`: by its age, seconds.
        """
        view = self._view
        if view.queued or view.asking or view.pooled:
            self._send(message(0.0))
        elif self._frames is not None:
            if not self._kept:
                self._kept_timer = self._loop.call_later(self.soon_s, self._send_deferred)
            self._kept.append((self._loop.time(), message))

    def _send_deferred(self) -> None:
        """Send the deferred messages."""
        kept, now, frames = self._kept, self._loop.time(), self._frames
        self._forget_kept()
        if frames is not None:
            for at_s, message in kept:
                frames.send(message(now - at_s))

    def _forget_kept(self) -> None:
        self._kept = []
        if self._kept_timer is not None:
            self._kept_timer.cancel()
            self._kept_timer = None

    def _send_progress(self) -> None:
        if self._unsent_tokens and self._frames is not None:
            self._frames.send(Progress(tuple(self._unsent_tokens), tuple(self._unsent_tokens.values())))
            self._unsent_tokens = {}

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

    # -- the membership

    async def run(self, listener: BrainListener) -> None:
        """Find a brain, stay its member, then find the next one; until cancelled. `listener`: gets what they send."""
        self.listener = listener
        try:
            while True:
                pause_s = await self._try()
                await asyncio.sleep(pause_s)
        finally:
            if self._frames is not None:
                if self.member is not None:
                    self._send(Farewell(self.epoch, ENDS))
                self._frames.close(ENDS)

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
            if self.member is None and self._loop.time() > deadline_s:
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

    def _connection(self) -> Frames[FromRelay]:
        return Frames(self._loop, self._received, self._closed)

    def _log_trouble(self, reason: str) -> None:
        """Log each reason for finding no brain once: somebody may have to act."""
        if reason not in self._troubles:
            self._troubles.add(reason)
            log.warning("this relay cannot join a brain", extra={"relay": self._relay, "reason": reason})

    def _hello(self, frames: Frames[FromRelay]) -> None:
        """Send a brain the relay's name and the state of each of its tickets.

        Beyond `MAX_JOIN_HASHES`, tickets go without those of their prompts, whose cached parts are then not known.
        """
        self._unsent_tokens = {}  # the tickets' states in Hello contain these tokens
        self._forget_kept()  # meant for the former brain; this one gets the present state only
        for entry in self._open.values():
            entry.tokens = 0
            self.token_counts.write(entry.number, 0)
        now = self._loop.time()
        held, unknown, hashes = [], [], MAX_JOIN_HASHES
        for ticket in self.tickets.by_id.values():
            entry, standing = self._open[ticket.id], ticket.standing(now)
            if len(standing.spec.prefix) > hashes:
                standing.spec = replace(standing.spec, prefix=())
            hashes -= len(standing.spec.prefix)
            if entry.submitted:
                held.append(Held(entry.number, entry.turn, standing))
            else:  # no brain knows it, so it may still be refused
                entry.submitted = True
                unknown.append(Submit(entry.number, standing.spec))
        frames.send(Hello(VERSION, self._relay, self._process, self.epoch, tuple(held), self.token_counts.fd))
        self._frames, self._knows_workers = frames, False
        for message in unknown:
            self._send(message)

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
            number = self._refuse(ticket.id, why)
            self._send(Finish(number, Outcome.EXPIRED, "", 0, 0.0))
            refused += 1

    def _too_late(self) -> Iterator[tuple[Ticket, Refusal]]:
        now = self._loop.time()
        queue_limit, pool_limit = now - self.bounds.queue_deadline_s, now - self.bounds.pool_ttl_s
        for ticket in list(self.tickets.by_id.values()):
            late = ticket.phase is QUEUED and not ticket.requeues and ticket.arrived_s < queue_limit
            if self._cut_off and (ticket.asking or ticket.phase in (QUEUED, POOLED)):
                yield ticket, refusal(RejectReason.DRAINING, self.view)
            elif late or (ticket.phase is POOLED and ticket.pooled_s < pool_limit):
                yield ticket, Refusal(RefusalKind.EXPIRED, NO_BRAIN)

    def _closed(self, frames: Frames[FromRelay], reason: str) -> None:
        """The connection is lost."""
        if frames is not self._frames:
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
        self._frames, self.member, self._tokens_read = None, None, False
        self._lost.set()

    def _refusal(self, frames: Frames[FromRelay], reason: str) -> str:
        """What to log of a brain that has not welcomed this relay.

        A far one that does not accept the relay's certificate just closes the connection.
        """
        if self._reach.near:
            return reason
        hint = "" if frames.ended_here else "; the brain's log says why if it has refused this relay"
        return f"{self._reach.name}: {reason}{hint}"

    # -- the answers

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
                self._cut_off = self._pauses.has_joined and self._reach.near and message.version != VERSION
                raise LinkError(message.reason)
            elif self.member is None:
                raise LinkError("the brain has sent a message before its Welcome")
            elif isinstance(message, Chosen | Refused):
                self._answer(message)
            elif isinstance(message, Seen):
                self._view, self.relays = message.view, message.relays
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
        self.epoch, self.member, self._cut_off = message.epoch, message.member, False
        self._troubles.clear()
        if not self._pauses.growing:
            log.info("brain found", extra={"relay": self._relay, "epoch": self.epoch, "member": self.member})
        self._tokens_read, self._unsent_tokens = message.reads_tokens, {}
        for entry in self._open.values():
            self._put(entry)
        self.listener.joined(message)
        void = [self._ids[number] for number in message.void if number in self._ids]
        some = [void[at : at + MOST_ENDED] for at in range(0, len(void), MOST_ENDED)]
        over_turns(self._loop, some, partial(self._void, self._frames), 1)  # nearly all streams may be void

    def _void(self, frames: Frames[FromRelay] | None, request_ids: list[str]) -> None:
        """End requests that the brain can't take over. `frames`: its connection; another brain may take them over."""
        if frames is not self._frames:
            return
        for request_id in request_ids:
            if request_id in self._open:
                self._refuse(request_id, Refusal(RefusalKind.LOST, LOST))
        self.listener.void(frozenset(request_ids))

    def _answer(self, message: Chosen | Refused) -> None:
        """Pass an answer to its ticket; a choice is dropped if the ticket has made another call since."""
        request_id = self._ids.get(message.ticket)
        if request_id is None:
            return
        if isinstance(message, Refused):
            self._refuse(request_id, Refusal(message.kind, message.text, message.retry_after_s))
        elif message.turn == self._open[request_id].turn:
            self.on_answer(request_id, message.worker)

    def _refuse(self, request_id: str, why: Refusal) -> int:
        """End a ticket, in any state; returns its number."""
        entry = self._leave(request_id)
        self.on_answer(request_id, why)
        return entry.number
