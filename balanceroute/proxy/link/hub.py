"""The brain's end of the link: relays as members, whose calls reach the ledger and whose answers go back.

A relay is a member from its Hello to the end of its connection. When that ends, for whatever reason, all that it holds
is released at once: a process that died says so by its socket, and one that was only cut off finds out by the same, and
joins anew with what it still holds.

**Taking over.** A new brain knows nothing. Until all relays that it expects have said Hello, or `Patience.grace_s` is
over, it decides nothing: what members call meanwhile waits, and is heard in order once it is `settled`. So no slot is
given away that a relay holds which has not been heard yet. A ticket that comes later and finds its slot taken is void.

Relays of other machines are connected by `far.py`. Those that a former brain of this machine knew are waited for as
well, for as long as they may take to find out that it stands still.

**Tokens** of a relay on this machine are read where the relay writes them (`token_counts.py`), by `collect`: before
each decision and several times per second. Tokens that can't be read come as messages.

**Who leads.** Hello tells the largest epoch that a relay has seen. One above ours means that another brain leads, or
that the file with the number is lost: `on_superseded` is told, and knows the number to go on under; None: it leads no
more, and nobody is a member here any more.

Members and their hub are one machine: each join, leave and message may end the wait of all, and what one member tells
of a worker all others hear.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from balanceroute.core.types import GONE, Outcome, RequestSpec
from balanceroute.core.view import ClusterView
from balanceroute.errors import InvariantError
from balanceroute.proxy.admission.decider import Answer, Refusal
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.link.far import FarMembers
from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.messages import (
    BEAT_S,
    FAR,
    MAX_EPOCH,
    SILENT_S,
    VERSION,
    Activity,
    Beat,
    Began,
    Chosen,
    Counted,
    Explained,
    Farewell,
    Finish,
    FromBrain,
    FromRelay,
    Held,
    Hello,
    Judged,
    KeysElsewhere,
    Learned,
    LinkError,
    Prefilled,
    PrefillFailed,
    Progress,
    Pushed,
    PushFailed,
    PutBack,
    Refused,
    RequestPrefill,
    Requeue,
    Seen,
    Silent,
    SilentGroup,
    Submit,
    Welcome,
    Workers,
    WorkerStanding,
    read_from_relay,
    table_of,
)
from balanceroute.proxy.link.token_counts import ReadCounts, life_of, peer_pid, place_of, same_life, tokens_of
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.telemetry.ticks import until_tick_s

log = logging.getLogger(__name__)

MAX_NAME: Final = 256  # characters
LOOK_S: Final = 0.25
ALIVE_S: Final = 2 * BEAT_S  # after its last word a member may be gone
TAKEN: Final = "a relay of this name is here; do two machines have the same identity file?"


@dataclass(frozen=True)
class Patience:
    """How long relays are waited for."""

    grace_s: float = 1.0  # all that are expected; a relay looks for a brain twenty times per second
    hello_s: float = 3.0  # from a connection to its Hello
    silent_s: float = SILENT_S  # until the next word of a member


class Reports(Protocol):
    """What is made of relays' words on workers, and what relays are told of these: `workers/relay_reports.py`."""

    def judged(self, message: Judged) -> None:
        """A request has told something about a worker."""

    def active(self, relay: str, said: Activity) -> None:
        """What a relay does."""

    def keys_used(self, relay: str, keys: tuple[KeyUse, ...]) -> None:
        """What a relay's clients have used of their keys."""

    def counted(self, relay: str, counts: bytes) -> None:
        """All that a relay's process has counted."""

    def learned(self, message: Learned) -> None:
        """A prefiller's parameters have told its connector."""

    def lost(self, relay: str) -> None:
        """A relay is gone, and all that it had under way."""

    def standings(self) -> dict[str, WorkerStanding]:
        """All workers as they are judged now, by id."""

    def silent(self) -> tuple[SilentGroup, ...]:
        """The groups of workers that fell silent together."""


class _Ticket:
    """A member's ticket: its number, its request, how many answers have been asked for, and the tokens known of."""

    __slots__ = ("number", "request_id", "tokens", "turn")

    def __init__(self, number: int, request_id: str, turn: int) -> None:
        self.number, self.request_id, self.turn = number, request_id, turn
        self.tokens = 0

    def grow(self, tokens: int) -> int:
        """How many are new, where it has generated so many; older news has none: some is said, some is read."""
        more = tokens - self.tokens
        if more <= 0:
            return 0
        self.tokens = tokens
        return more


class Member:
    """A relay, for one connection."""

    def __init__(self, number: int, relay: str, process: int, frames: Frames[FromBrain]) -> None:
        self.number, self.relay, self.process, self.frames = number, relay, process, frames
        self.tickets: dict[int, _Ticket] = {}
        self.counts: ReadCounts | None = None
        self.places: list[_Ticket | None] = []  # its tickets by the places in `counts`
        self.uses_keys = self.says_farewell = False
        self.waiting: list[FromRelay] = []  # what it has called before the brain was settled

    def hold(self, number: int, request_id: str, turn: int) -> None:
        """It has this ticket."""
        ticket = self.tickets[number] = _Ticket(number, request_id, turn)
        place = place_of(number)
        while len(self.places) <= place:
            self.places.append(None)
        self.places[place] = ticket

    def release(self, number: int) -> None:
        """The ticket has left."""
        ticket, place = self.tickets.pop(number), place_of(number)
        if self.places[place] is ticket:
            self.places[place] = None

    def read(self) -> tuple[list[str], list[int]]:
        """The requests that have generated more, by what it has written, and how many tokens each. O(its tickets)."""
        requests: list[str] = []
        grown: list[int] = []
        if self.counts is None:
            return requests, grown
        places = self.places
        news = self.counts.news(len(places))
        for index in range(0, len(news), 2):
            ticket, said = places[news[index]], news[index + 1]
            if ticket is not None and same_life(ticket.number, life_of(said)):
                more = ticket.grow(tokens_of(said))
                if more:
                    requests.append(ticket.request_id)
                    grown.append(more)
        return requests, grown


class Hub:
    """All members of one leadership. `serve` listens, `close` ends it."""

    def __init__(
        self,
        ledger: Ledger,
        reports: Reports,
        loop: asyncio.AbstractEventLoop,
        epoch: int,
        relays: int,
        on_superseded: Callable[[int], int | None] = lambda epoch: None,
        salt: Callable[[], bytes | None] = lambda: None,
        far: FarMembers | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`relays`: how many of this machine are expected to join; 0: nothing is waited for. `salt`: as in `Welcome`.
        `far`: the members of other machines, where they are let in. `on_superseded`: told an epoch that a relay has
        seen.
        """
        self.patience = patience or Patience()
        self._far, self._awaited = far, set() if far is None else set(far.names)
        self._dismissed = self._closing = False
        self._reports, self._salt = reports, salt
        self._standings: dict[str, WorkerStanding] = {}  # as members know them
        self._silent: tuple[str, ...] = ()
        self._telling = False
        self._ledger, self._loop, self.epoch, self._relays = ledger, loop, epoch, relays
        self._on_superseded = on_superseded
        self.members: dict[str, Member] = {}  # by the name of the relay
        self._at: dict[Frames[FromBrain], Member | None] = {}
        self._owners: dict[str, tuple[Member, int]] = {}  # by request
        self._count = 0
        self._seen: ClusterView | None = None
        self._server: asyncio.Server | None = None
        self._looked_s = loop.time()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.settled = asyncio.Event()
        self.stale_messages = 0  # about tickets that are no more: they have crossed a refusal
        ledger.tell, ledger.collect = self._tell, self.collect

    async def serve(self, path: str) -> None:
        """Listen on this socket, which belongs to our user alone; one that a dead brain has left is replaced."""
        self._ledger.adopts = True
        self._server = await self._loop.create_unix_server(self.connected, path)
        os.chmod(path, 0o600)
        grace_s = self.patience.grace_s if self._relays or self._far is not None else 0.0
        if self._awaited:  # they see by its silence alone that the former brain stands still
            grace_s += self.patience.silent_s
        self._timers["grace"] = self._loop.call_later(grace_s, self._settle)
        self._look()

    def close(self) -> None:
        """End every membership; the relays look for another brain."""
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()
        if self._server is not None:
            self._server.close()
        for frames in list(self._at):
            frames.close("this brain ends")

    # -- members

    def connected(self) -> Frames[FromBrain]:
        """The protocol of one more connection."""
        frames: Frames[FromBrain] = Frames(self._loop, self._heard, self._lost)
        self._at[frames] = None
        self._loop.call_later(self.patience.hello_s, self._expect_hello, frames)
        return frames

    def _expect_hello(self, frames: Frames[FromBrain]) -> None:
        if frames in self._at and self._at[frames] is None:
            frames.abort("it has not said Hello")

    def dismiss_far(self) -> None:
        """Others may lead: relays of other machines turn to them, and are members here no more."""
        self._dismissed = True
        if self._far is None:
            return
        for member in self.far_members:
            member.frames.say(Farewell(0, "this brain drains"))
            member.frames.close("this brain drains")
        self._far.forget()

    @property
    def near_members(self) -> list[Member]:
        """Those of this machine."""
        return [member for member in self.members.values() if FAR not in member.relay]

    @property
    def far_members(self) -> list[Member]:
        """Those of other machines."""
        return [member for member in self.members.values() if FAR in member.relay]

    def _heard(self, frames: Frames[FromBrain], body: bytes) -> None:
        for message in read_from_relay(body):
            member = self._at.get(frames)
            if isinstance(message, Hello):
                if member is not None:
                    raise LinkError(f"relay {member.relay} has said Hello already")
                self._join(frames, message)
            elif member is None:
                raise LinkError("a relay speaks before its Hello")
            elif self.settled.is_set():
                self._take(member, message)
            else:
                member.waiting.append(message)

    def _join(self, frames: Frames[FromBrain], hello: Hello) -> None:
        refusal = self._refusal(frames, hello)
        if refusal is not None:
            farewell, reason = refusal
            frames.say(farewell)
            frames.close(reason)
            return
        before = self.members.get(hello.relay)
        if before is not None:
            self._release(before)
            before.frames.abort("the relay has joined anew")
        self.tell_workers()  # what has changed; the new member gets all of them after its Welcome
        self._count += 1
        member = self.members[hello.relay] = Member(self._count, hello.relay, hello.process, frames)
        self._at[frames] = member
        member.counts = _counts(frames, hello)
        void = self._adopt(member, hello.held)
        fields = {"relay": hello.relay, "pid": hello.process, "requests": len(hello.held), "void": len(void)}
        log.info("relay joined", extra=fields)
        frames.say(Welcome(VERSION, self.epoch, member.number, void, self._salt(), member.counts is not None))
        frames.say(Workers(tuple(self._standings.values()), ()))
        frames.say(Silent(self._reports.silent()))
        frames.say(Seen(self._ledger.view()))
        self._awaited.discard(hello.relay)
        self._keep_far(hello.relay)
        if len(self.near_members) >= self._relays and not self._awaited and (self._far is None or self._far.known):
            self._settle()

    def _refusal(self, frames: Frames[FromBrain], hello: Hello) -> tuple[Farewell, str] | None:
        """What a relay is told that can be no member here, and why its connection is closed; None: it can be one.

        Raises: LinkError: it is told nothing.
        """
        if hello.version != VERSION:  # what else it says may mean something else
            text = f"this brain speaks version {VERSION} of the link, not {hello.version}"
            return Farewell(self.epoch, text), "version"
        far = frames.far
        if (FAR in hello.relay) is not far or not hello.relay.isprintable() or len(hello.relay) > MAX_NAME:
            raise LinkError(f"{hello.relay!r} is no name for a relay of {'another' if far else 'this'} machine")
        if far and self._dismissed:
            raise LinkError("this brain drains")
        if hello.epoch > self.epoch and not self._outranks(hello):
            return Farewell(hello.epoch, "another brain leads"), "another brain leads"
        before = self.members.get(hello.relay)
        if before is not None and far and self._is_another(before, hello):
            return Farewell(0, TAKEN), "its name is taken"
        return None

    def _adopt(self, member: Member, tickets: Sequence[Held]) -> tuple[int, ...]:
        """Take in what it holds already, the longest wait first; returns the tickets that find no place here."""
        void = []
        for held in sorted(tickets, key=lambda held: -held.standing.waited_s):
            request_id = held.standing.spec.id
            known = request_id in self._owners or held.ticket in member.tickets
            if not known and held.standing.phase is not GONE and self._ledger.adopt(held.standing):
                member.hold(held.ticket, request_id, held.turn)
                self._owners[request_id] = (member, held.ticket)
            else:
                void.append(held.ticket)
        if self.settled.is_set() and tickets:
            self._ledger.order_by_arrival()
        return tuple(void)

    def _is_another(self, member: Member, hello: Hello) -> bool:
        """Whether the member lives, and this is not the same relay that has lost its connection.

        Each of two would come back as soon as the other has pushed it out.
        """
        return member.process != hello.process and self._loop.time() - member.frames.heard_s < ALIVE_S

    def _outranks(self, hello: Hello) -> bool:
        """Go on under an epoch above the relay's, if it is certain that nobody else leads.

        Raises: LinkError: no brain has led under that one, and to count above it would soon leave no number.
        """
        if hello.epoch > MAX_EPOCH:
            log.warning("an epoch that cannot be", extra={"relay": hello.relay, "epoch": hello.epoch})
            raise LinkError(f"relay {hello.relay} has seen an epoch that cannot be")
        raised = self._on_superseded(hello.epoch)
        if raised is None:
            log.warning("another brain leads", extra={"epoch": self.epoch, "other": hello.epoch})
            return False
        log.warning("the epoch was lost", extra={"epoch": raised, "before": self.epoch, "relay": hello.relay})
        self.epoch = raised
        return True

    def _keep_far(self, relay: str) -> None:
        """A relay has come or gone; who is still awaited is not forgotten, should this brain die before it comes."""
        if self._far is not None and FAR in relay and not self._dismissed:
            self._far.keep([*self._awaited, *(member.relay for member in self.far_members)])

    def _settle(self) -> None:
        """Every relay that is coming has been heard: decide from now on."""
        if self.settled.is_set():
            return
        self.settled.set()
        self._ledger.adopts = False
        self._ledger.order_by_arrival()
        self._awaited.clear()
        log.info("the brain decides", extra={"epoch": self.epoch, "relays": len(self.members)})
        for member in list(self.members.values()):
            waiting, member.waiting = member.waiting, []
            try:
                for message in waiting:
                    self._take(member, message)
            except LinkError as error:
                member.frames.abort(str(error))
        self._ledger.capacity_changed()

    def _lost(self, frames: Frames[FromBrain], reason: str) -> None:
        member = self._at.pop(frames, None)
        if member is not None and self.members.get(member.relay) is member:
            told = {"relay": member.relay, "requests": len(member.tickets), "reason": reason}
            if member.says_farewell:
                log.info("relay left", extra=told)
            else:
                log.warning("relay lost", extra=told)
            del self.members[member.relay]
            self._release(member)
            if not self._closing:
                self._keep_far(member.relay)

    def _release(self, member: Member) -> None:
        """What it holds is free: its clients are gone with it, or it comes back with what it still has."""
        tickets, member.tickets, member.places = list(member.tickets.values()), {}, []
        member.waiting = []
        for each in tickets:
            del self._owners[each.request_id]
            try:
                self._ledger.finish(each.request_id, Outcome.FAILED)
            except Exception as error:  # a bug of ours must not keep what else it holds, and the relay from coming back
                log.error("internal error", exc_info=error, extra={"where": "hub", "request": each.request_id})
        self._reports.lost(member.relay)
        self._tell_keys(member, ())

    # -- workers

    def tell_workers(self) -> None:
        """Tell members what has changed about workers, now."""
        standings, known = self._reports.standings(), self._standings
        changed = tuple(each for name, each in standings.items() if known.get(name) != each)
        gone = tuple(name for name in known if name not in standings)
        self._standings = standings
        if changed or gone:
            self._tell_all(Workers(changed, gone))

    def workers_changed(self) -> None:
        """Tell members at the end of this turn of the loop."""
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell_changes)

    def _tell_changes(self) -> None:
        self._telling = False
        self.tell_workers()

    def _tell_keys(self, member: Member, keys: tuple[KeyUse, ...]) -> None:
        """Tell the others what a member's clients have used of their keys, if that may have changed; those that share
        it in memory know it.
        """
        if not (keys or member.uses_keys):
            return
        member.uses_keys = bool(keys)
        self._reports.keys_used(member.relay, keys)
        for other in self.members.values():
            if table_of(other.relay) != table_of(member.relay):
                other.frames.say(KeysElsewhere(member.relay, keys))

    def _tell_others(self, member: Member, message: FromBrain) -> None:
        for other in self.members.values():
            if other is not member:
                other.frames.say(message)

    def _tell_all(self, message: FromBrain) -> None:
        for member in self.members.values():
            member.frames.say(message)

    def _look(self) -> None:
        """Tell members what is to be seen, and give up the silent ones."""
        now, silent_s = self._loop.time(), self.patience.silent_s
        self._timers["look"] = self._loop.call_later(until_tick_s(now, LOOK_S), self._look)  # first: it may fail below
        self._ledger.settle()
        view = self._ledger.view()
        self.tell_workers()
        silent = self._reports.silent()
        if (names := tuple(group.name for group in silent)) != self._silent:
            self._silent = names
            self._tell_all(Silent(silent))
        paused, self._looked_s = now - self._looked_s > LOOK_S + silent_s / 2, now
        for member in list(self.members.values()):
            frames = member.frames
            if paused:  # it was us who did not listen
                frames.heard_s = now
            if view != self._seen:
                frames.say(Seen(view))
            elif now - frames.said_s > BEAT_S:
                frames.say(Beat())
            if now - frames.heard_s > silent_s:
                frames.abort("it is silent")
        self._seen = view

    # -- calls and answers

    def _take(self, member: Member, message: FromRelay) -> None:
        """Hand a call on. Raises: LinkError: it does not fit what is known of the ticket."""
        try:
            if isinstance(message, Submit):
                self._submit(member, message.ticket, message.spec)
            elif isinstance(message, Progress):
                for number, tokens in zip(message.tickets, message.tokens, strict=True):
                    ticket = member.tickets.get(number)
                    if ticket is not None:
                        self._advance(ticket, tokens)
            elif isinstance(message, Judged):
                self._reports.judged(message)
            elif isinstance(message, Activity):
                self._reports.active(member.relay, message)
                self._tell_keys(member, message.keys)
            elif isinstance(message, Counted):
                self._reports.counted(member.relay, message.counts)
            elif isinstance(message, Learned):
                self._reports.learned(message)
            elif isinstance(message, Explained):
                self._tell_others(member, message)
            elif isinstance(message, Farewell):
                member.says_farewell = True
                raise LinkError(message.reason)
            elif not isinstance(message, Beat | Hello):
                ticket = member.tickets.get(message.ticket)
                if ticket is None:
                    self.stale_messages += 1
                else:
                    self._call(member, ticket, message)
        except (InvariantError, ValueError) as error:
            raise LinkError(f"relay {member.relay} says what can't be: {error}") from error

    def _submit(self, member: Member, number: int, spec: RequestSpec) -> None:
        if spec.id in self._owners or number in member.tickets:
            raise LinkError(f"relay {member.relay} has request {spec.id} already")
        member.hold(number, spec.id, 1)
        self._owners[spec.id] = (member, number)
        self._ledger.submit(spec)

    def _call(
        self,
        member: Member,
        ticket: _Ticket,
        message: Prefilled | PrefillFailed | RequestPrefill | Pushed | PushFailed | PutBack | Requeue | Finish | Began,
    ) -> None:
        ledger, request_id = self._ledger, ticket.request_id
        if isinstance(message, Began):
            ledger.began(request_id, message.age_s)
            return
        if isinstance(message, Finish):
            self._advance(ticket, message.tokens)
            member.release(message.ticket)
            del self._owners[request_id]
            ledger.finish(request_id, message.outcome, message.reason, message.age_s)
            return
        if isinstance(message, Pushed):
            ledger.pushed(request_id, message.prompt_tokens, message.cached_tokens)
            return
        ticket.turn += 1
        if isinstance(message, Prefilled):
            ledger.prefilled(request_id, message.prompt_tokens, message.cached_tokens)
        elif isinstance(message, PrefillFailed):
            ledger.prefill_failed(request_id)
        elif isinstance(message, RequestPrefill):
            ledger.request_prefill(request_id)
        elif isinstance(message, PushFailed):
            ledger.push_failed(request_id)
        elif isinstance(message, PutBack):
            ledger.put_back(request_id)
        else:
            self._advance(ticket, message.tokens)
            ledger.requeue(request_id, message.prefix)

    def collect(self) -> None:
        """Read what relays on this machine have written. O(their tickets), little each."""
        if not self.settled.is_set():
            return  # what they have called waits as well
        for member in self.members.values():
            try:
                self._ledger.progress_all(*member.read())
            except InvariantError as error:
                member.frames.abort(f"relay {member.relay} counts what can't be: {error}")

    def _advance(self, ticket: _Ticket, tokens: int) -> None:
        """A ticket has generated so many by now. Raises: InvariantError: it generates nothing."""
        more = ticket.grow(tokens)
        if more:
            self._ledger.progress(ticket.request_id, more)

    def _tell(self, request_id: str, answer: Answer) -> None:
        member, number = self._owners[request_id]
        if isinstance(answer, Refusal):
            member.release(number)
            del self._owners[request_id]
            member.frames.say(Refused(number, answer.kind, answer.text, answer.retry_after_s))
        else:
            member.frames.say(Chosen(number, member.tickets[number].turn, answer))


def _counts(frames: Frames[FromBrain], hello: Hello) -> ReadCounts | None:
    """What a relay on this machine writes; None: it says it."""
    connection = frames.socket
    pid = None if connection is None else peer_pid(connection)
    if pid is None or hello.token_file is None:
        return None
    try:
        return ReadCounts(pid, hello.token_file)
    except OSError as error:
        log.warning("tokens of a relay are not readable", extra={"relay": hello.relay, "error": str(error)})
        return None
