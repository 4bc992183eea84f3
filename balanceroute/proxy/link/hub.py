"""The brain's end of the link: relays join it as members; it passes their calls on, and tells them the news (`news`).

A relay is a member from its Hello to the end of its connection. When the connection ends, all requests of the member
are released at once. The kernel closes the socket of a process that died. A relay that still runs joins again with the
requests that it still holds. `member_requests.py` records which member holds which request.

**Taking over.** A new brain knows nothing. It decides nothing until all expected relays have said Hello, or until
`Patience.grace_s` is over. Calls of members wait until then, and are handled in order once the hub is `settled`. So no
slot is given away that an expected relay still holds. A ticket that is reported later and finds its slot taken is void.

`far.py` accepts the relays of other machines. The hub also waits for those that a former brain of this machine knew,
for as long as they may take to notice that it has stopped. If another machine's brain has led before, it does not know
them, and waits until each must have tried this one's address.

**Tokens** of a relay on this machine are read by `collect` from shared memory (`token_counts.py`), before each decision
and several times per second. Tokens of other relays come as messages.

**Who leads.** A Hello says the largest epoch that the relay has seen. One above ours means that another brain leads, or
that the file with the number is lost. `on_superseded` is called with it. It returns the epoch to continue under, or
None: this brain no longer leads, and accepts no members.

**Workers.** The hub passes what one member reports of a worker on to all others.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from balanceroute.errors import InputError, InvariantError
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.link.far import FarMembers
from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.member_requests import MemberRequests
from balanceroute.proxy.link.members import Member, token_counts_of
from balanceroute.proxy.link.messages import (
    BEAT_S,
    FAR,
    MAX_EPOCH,
    SILENT_S,
    VERSION,
    Activity,
    Beat,
    Explained,
    Farewell,
    FromBrain,
    FromRelay,
    Hello,
    Judged,
    KeysElsewhere,
    LinkError,
    Progress,
    PromptKeys,
    Report,
    Submit,
    Welcome,
    read_from_relay,
    table_of,
)
from balanceroute.proxy.link.news import Judgement, News
from balanceroute.proxy.link.reach import TRY_S
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.telemetry.ticks import Looks, until_tick_s
from balanceroute.proxy.wire.prompt_blocks import block_seed

log = logging.getLogger(__name__)

MAX_NAME: Final = 256  # characters
LOOK_S: Final = 0.25
ALIVE_S: Final = 2 * BEAT_S  # after its last message a member may be gone
LEFT: Final = "it has left"
TAKEN: Final = "a relay of this name is here; do two machines have the same identity file?"


@dataclass(frozen=True)
class Patience:
    """How long the hub waits for relays."""

    grace_s: float = 1.0  # for all expected relays; a relay tries to connect twenty times per second
    unknown_s: float = TRY_S  # longer, if it is not known which far relays there are: they may try others first
    hello_s: float = 3.0  # from a connection to the Hello, and between two pieces of it
    silent_s: float = SILENT_S  # between two messages of a member


class Reports(Judgement, Protocol):
    """Takes relays' reports on workers, by which these are judged, too: `workers/relay_reports.py`."""

    def take(self, relay: str, report: Report) -> None:
        """Take a report of a relay. Raises: ValueError: it contains what cannot be."""

    def keys_used(self, relay: str, keys: tuple[KeyUse, ...]) -> None:
        """The use of client keys at a relay."""

    def lost(self, relay: str) -> None:
        """A relay is gone, with all its requests."""


class Hub:
    """All members of one leadership. `serve` listens, `close` ends it."""

    def __init__(
        self,
        ledger: Ledger,
        reports: Reports,
        loop: asyncio.AbstractEventLoop,
        epoch: int,
        relays: Collection[str],
        on_superseded: Callable[[int], int | None],
        on_bug: Callable[[str], None],
        prompt_keys: Callable[[], PromptKeys] = PromptKeys,
        far: FarMembers | None = None,
        patience: Patience | None = None,
    ) -> None:
        """Make a hub without members.

        Args:
            epoch: of this leadership.
            relays: the names of the relays of this machine that the hub waits for.
            on_superseded: see "Who leads".
            on_bug: counts bugs, by where they are.
            prompt_keys: those of the present predictor.
            far: the members of other machines; None: relays of other machines are not accepted.
            patience: how long relays are waited for.
        """
        self.patience = patience or Patience()
        self._far, self._awaited = far, {*relays, *(() if far is None else far.names)}
        self._dismissed = self._closing = False
        self._refused: set[str] = set()  # reasons for refusing a relay that have been logged
        self._reports, self._block_seed = reports, block_seed()
        self._ledger, self._loop, self.epoch = ledger, loop, epoch
        self._on_superseded, self._on_bug = on_superseded, on_bug
        self.members: dict[str, Member] = {}  # by the name of the relay
        self.news = News(ledger, reports, self.members, loop, prompt_keys)
        self._connections: dict[Frames[FromBrain], Member | None] = {}  # None: no Hello yet
        self.requests = MemberRequests(ledger)
        self._n_joined = 0
        self._server: asyncio.Server | None = None
        self.looks = Looks()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.settled = asyncio.Event()
        ledger.collect = self.collect

    async def serve(self, path: str) -> None:
        """Listen on a unix socket at this path, for our user only; replace a dead brain's. Raises: OSError."""
        self._ledger.adopts = True
        self._server = await self._loop.create_unix_server(self.connected, path)
        with suppress(FileNotFoundError):  # somebody has removed it: the server ends as soon as it looks
            os.chmod(path, 0o600)
        grace_s = self.patience.grace_s if self._awaited or self._far is not None else 0.0
        if any(FAR in relay for relay in self._awaited):
            grace_s += self.patience.silent_s  # by that alone they notice that the former brain has stopped
        elif self._far is not None and not self._far.known:
            grace_s += self.patience.unknown_s
        self._timers["grace"] = self._loop.call_later(grace_s, self._settle)
        self._look()

    def close(self) -> None:
        """End every membership; the relays then look for another brain."""
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()
        if self._server is not None:
            self._server.close()
        for frames in list(self._connections):
            frames.close("this brain ends")

    # -- members

    def connected(self) -> Frames[FromBrain]:
        """The protocol for a new connection."""
        frames: Frames[FromBrain] = Frames(self._loop, self._received, self._lost)
        self._connections[frames] = None
        self._loop.call_later(self.patience.hello_s, self._expect_hello, frames)
        return frames

    def _expect_hello(self, frames: Frames[FromBrain]) -> None:
        if frames not in self._connections or self._connections[frames] is not None:
            return
        left_s = frames.received_s + self.patience.hello_s - self._loop.time()
        if frames.incomplete and left_s > 0:  # a large Hello, which takes its time on a slow link
            frames.send(Beat())
            self._loop.call_later(left_s, self._expect_hello, frames)
        else:
            frames.abort("it has not said Hello")

    def dismiss_far(self) -> None:
        """End the memberships of far relays: they turn to the brain that leads now."""
        self._dismissed = True
        if self._far is None:
            return
        for member in self.far_members:
            member.frames.send(Farewell(0, "this brain drains"))
            member.frames.close("this brain drains")
        self._far.forget()

    @property
    def near_members(self) -> list[Member]:
        """The members of this machine."""
        return [member for member in self.members.values() if FAR not in member.relay]

    @property
    def far_members(self) -> list[Member]:
        """The members of other machines."""
        return [member for member in self.members.values() if FAR in member.relay]

    def _received(self, frames: Frames[FromBrain], body: bytes) -> None:
        for message in read_from_relay(body):
            member = self._connections.get(frames)
            if isinstance(message, Hello):
                if member is not None:
                    raise LinkError(f"relay {member.relay} has said Hello already")
                try:
                    self._join(frames, message)
                except Exception as error:
                    raise self._link_error(message.relay, error) from None
            elif member is None:
                raise LinkError("a relay speaks before its Hello")
            elif self.settled.is_set():
                self._take(member, message)
            else:
                member.waiting.append(message)

    def _join(self, frames: Frames[FromBrain], hello: Hello) -> None:
        if frames.left:  # while this brain was stopped the relay has tried again and again
            raise LinkError(LEFT)
        refusal = self._refusal(frames, hello)
        if refusal is not None:
            self._turn_away(frames, hello.relay, *refusal)
            return
        before = self.members.get(hello.relay)
        if before is not None:
            self._release(before)
            before.frames.abort("the relay has joined anew")
        self.news.send_workers()  # only changes; the new member gets all workers after its Welcome
        self._n_joined += 1
        member = self.members[hello.relay] = Member(self._n_joined, hello.relay, hello.process, frames)
        self._connections[frames] = member
        member.counts = token_counts_of(frames, hello)
        void = self.requests.adopt(member, hello.held)
        if self.settled.is_set() and hello.held:
            self._ledger.order_by_arrival()
        fields = {"relay": hello.relay, "requests": len(hello.held), "void": len(void)}
        log.info("relay joined", extra=fields)
        reads_tokens = member.counts is not None
        frames.send(Welcome(VERSION, self.epoch, member.number, void, self._block_seed, reads_tokens))
        self.news.welcome(frames)
        self._awaited.discard(hello.relay)
        self._keep_far(hello.relay)
        if not self._awaited and (self._far is None or self._far.known):
            self._settle()

    def _turn_away(self, frames: Frames[FromBrain], relay: str, farewell: Farewell, reason: str) -> None:
        if reason not in self._refused:  # the relay tries again and again
            self._refused.add(reason)
            log.warning("relay refused", extra={"relay": relay[:MAX_NAME], "reason": farewell.reason})
        frames.send(farewell)
        frames.close(reason)

    def _refusal(self, frames: Frames[FromBrain], hello: Hello) -> tuple[Farewell, str] | None:
        """Why a relay can't join: the Farewell for it, and the reason for the log. None: it can join.

        Raises: LinkError: its connection is closed without a Farewell.
        """
        if hello.version != VERSION:  # other fields may mean something else in another version
            text = f"this brain speaks version {VERSION} of the link, not {hello.version}"
            return Farewell(self.epoch, text), "version"
        if self._closing:  # relays of other machines find this brain until its process ends
            raise LinkError("this brain ends")
        far = frames.far
        if (FAR in hello.relay) is not far or not hello.relay.isprintable() or len(hello.relay) > MAX_NAME:
            raise LinkError(f"{hello.relay!r} is no name for a relay of {'another' if far else 'this'} machine")
        if far and self._dismissed:
            raise LinkError("this brain drains")
        if hello.epoch > self.epoch and not self._raise_epoch(hello):
            return Farewell(hello.epoch, "another brain leads"), "another brain leads"
        before = self.members.get(hello.relay)
        if before is not None and far and self._is_another(before, hello):
            return Farewell(0, TAKEN), "its name is taken"
        return None

    def _is_another(self, member: Member, hello: Hello) -> bool:
        """Whether the Hello comes from another process than the member, and the member is alive.

        A second relay of one name is refused; otherwise each would push the other out, again and again.
        """
        return member.process != hello.process and self._loop.time() - member.frames.received_s < ALIVE_S

    def _raise_epoch(self, hello: Hello) -> bool:
        """Continue under an epoch above the relay's, if it is certain that no other brain leads.

        Raises: LinkError: no brain can have led under so large an epoch; above it, numbers would soon run out.
        """
        if hello.epoch > MAX_EPOCH:
            log.warning("a relay names an impossible epoch", extra={"relay": hello.relay, "epoch": hello.epoch})
            raise LinkError(f"relay {hello.relay} names the impossible epoch {hello.epoch}")
        raised = self._on_superseded(hello.epoch)
        if raised is None:
            log.warning("another brain leads", extra={"epoch": self.epoch, "other": hello.epoch})
            return False
        log.warning("the epoch was lost", extra={"epoch": raised, "before": self.epoch, "relay": hello.relay})
        self.epoch = raised
        return True

    def _keep_far(self, relay: str) -> None:
        """Write down the names of far relays after one has come or gone, including those still awaited.

        If this brain dies before they join, the next one waits for them.
        """
        if self._far is not None and FAR in relay and not self._dismissed:
            self._far.keep(each for each in (*self._awaited, *self.members) if FAR in each)

    def _settle(self) -> None:
        """All relays have joined, or their time is over: decide from now on."""
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
        member = self._connections.pop(frames, None)
        if member is not None and self.members.get(member.relay) is member:
            fields = {"relay": member.relay, "requests": len(member.tickets), "reason": reason}
            if member.sent_farewell or self._closing or (self._dismissed and FAR in member.relay):
                log.info("relay left", extra=fields)
            else:
                log.warning("relay lost", extra=fields)
            del self.members[member.relay]
            self._release(member)
            if not self._closing:
                self._keep_far(member.relay)

    def _release(self, member: Member) -> None:
        """End a membership and all requests of the member."""
        member.waiting = []
        for request_id, error in self.requests.release(member):
            self._on_bug("hub")
            log.error("internal error", exc_info=error, extra={"where": "hub", "request": request_id})
        self._reports.lost(member.relay)
        self._send_keys(member, ())

    def _send_keys(self, member: Member, keys: tuple[KeyUse, ...]) -> None:
        """Send the key use of this member's clients to the other members, if it may have changed.

        Members that share the key table in memory are left out.
        """
        if not (keys or member.uses_keys):
            return
        member.uses_keys = bool(keys)
        self._reports.keys_used(member.relay, keys)
        for other in self.members.values():
            if table_of(other.relay) != table_of(member.relay):
                other.frames.send(KeysElsewhere(member.relay, keys))

    def _look(self) -> None:
        """Send members the news, or a sign of life. Drop silent members."""
        now, silent_s = self._loop.time(), self.patience.silent_s
        self._timers["look"] = self._loop.call_later(until_tick_s(now, LOOK_S), self._look)  # first: the rest may fail
        told = self.news.look()
        stood_still = self.looks.stood_still(now, LOOK_S + silent_s / 2)
        for member in list(self.members.values()):
            frames = member.frames
            if stood_still:
                frames.received_s = now
            if not told and now - frames.sent_s > BEAT_S:
                frames.send(Beat())
            if now - frames.received_s > silent_s:
                frames.abort("it is silent")

    # -- calls and answers

    def _take(self, member: Member, message: FromRelay) -> None:
        """Handle a call. Raises: LinkError: it does not fit the ticket's state, or handling it failed by a bug."""
        try:
            if isinstance(message, Submit):
                self.requests.submit(member, message.ticket, message.spec)
            elif isinstance(message, Progress):
                self.requests.progress(member, message)
            elif isinstance(message, Report):
                self._reports.take(member.relay, message)
                if isinstance(message, Judged):
                    self.news.judged.add(message.worker)  # sent again, also if all is as it was before
                elif isinstance(message, Activity):
                    self._send_keys(member, message.keys)
            elif isinstance(message, Explained):
                for other in self.members.values():
                    if other is not member:
                        other.frames.send(message)
            elif isinstance(message, Farewell):
                member.sent_farewell = True
                raise LinkError(message.reason)
            elif not isinstance(message, Beat | Hello):
                self.requests.call(member, message)
        except Exception as error:  # must not keep `_settle` from the other members
            raise self._link_error(member.relay, error) from None

    def _link_error(self, relay: str, error: Exception) -> LinkError:
        """The error that ends the connection of a relay, a message of which has failed; a bug is counted and logged."""
        if isinstance(error, LinkError):
            return error
        if isinstance(error, InvariantError | InputError | ValueError):
            return LinkError(f"a message of relay {relay} does not fit its request: {error}")
        self._on_bug("hub")
        log.error("internal error", exc_info=error, extra={"where": "hub", "relay": relay})
        return LinkError("internal error")

    def collect(self) -> None:
        """Read the tokens that relays on this machine have written. O(their tickets), cheap per ticket."""
        if not self.settled.is_set():
            return  # until then their calls wait, too
        for member in self.members.values():
            try:
                self.requests.read_tokens(member)
            except InvariantError as error:
                text = f"the token counts of relay {member.relay} are impossible: {error}"
                member.frames.abort(LEFT if member.frames.left else text)  # one that has left counts for another brain
