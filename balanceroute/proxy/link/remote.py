"""A relay's end of the link: a `decider.Decider` that calls the brain in another process.

While there is no brain, nothing is lost: tickets hold their own state, and one `Hello` tells the next brain all of it.
So a call in the meantime changes the ticket, and is not sent. A ticket that no brain knows is submitted after the
`Hello`, and may be refused.

`membership.py` finds the brain and reads what it sends; `outbox.py` sends.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec
from balanceroute.core.view import ClusterView
from balanceroute.proxy.admission.decider import OnAnswer, Refusal, RefusalKind
from balanceroute.proxy.admission.tickets import Tickets
from balanceroute.proxy.link.messages import (
    Asking,
    Began,
    Chosen,
    Explained,
    Finish,
    FromRelay,
    Held,
    Prefilled,
    PrefillFailed,
    Pushed,
    PushFailed,
    PutBack,
    Refused,
    Report,
    RequestPrefill,
    Requeue,
    Submit,
)
from balanceroute.proxy.link.outbox import Outbox

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


class RemoteBrain:
    """The brain at the other end of a socket; see `decider.Decider` for its calls.

    Attributes: `leaving`: new requests are refused here. `cut_off`: the brain on this machine is a successor's of
    another version, so there will be no other. `relays`: of the whole router, as the brain said last.
    """

    at_once = True
    on_answer: OnAnswer  # set by `Tickets`, as `collect`
    collect: Callable[[], None]

    def __init__(self, loop: asyncio.AbstractEventLoop, bounds: SchedulerConfig) -> None:
        self._loop, self.bounds = loop, bounds
        self.leaving = self.cut_off = False
        self.tickets = Tickets(self, loop)
        self.outbox = Outbox(loop)
        self._view = NOBODY
        self.relays = 1
        self._open: dict[str, _Open] = {}
        self._ids: dict[int, str] = {}  # by number

    # -- what lifecycles may know

    @property
    def draining(self) -> bool:
        """Whether new requests are refused: this relay leaves, or the brain drains or is of another version."""
        return self.leaving or self.cut_off or self._view.draining

    def configure(self, config: SchedulerConfig) -> None:
        """Use other bounds for this relay's requests; the brain has its own."""
        self.bounds = config

    def view(self) -> ClusterView:
        """The brain's last view of the cluster."""
        return self._view

    # -- the calls

    def submit(self, spec: RequestSpec) -> None:
        """See `decider.Decider`."""
        number = self.outbox.token_counts.number()
        self._open[spec.id] = _Open(number, self.outbox.frames is not None)
        self._ids[number] = spec.id
        self.outbox.send(Submit(number, spec))

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
            self.outbox.send(Pushed(entry.number, prompt_tokens, cached_tokens))

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
        entry, outbox = self._open.get(request_id), self.outbox
        if outbox.frames is not None and entry is not None:
            entry.tokens += tokens
            outbox.put_tokens(entry.number, entry.tokens)

    def finish(self, request_id: str, outcome: Outcome, reason: str = "") -> None:
        """See `decider.Decider`."""
        entry = self._leave(request_id)
        number, tokens = entry.number, entry.tokens
        if tokens:
            self._send_soon(lambda age_s: Finish(number, outcome, reason, tokens, age_s))
        else:
            self.outbox.send(Finish(number, outcome, reason, tokens, 0.0))

    def began(self, request_id: str) -> None:
        """See `decider.Decider`."""
        entry = self._open.get(request_id)
        if entry is not None:
            number = entry.number
            self._send_soon(lambda age_s: Began(number, age_s))

    def report(self, message: Report | Explained) -> None:
        """Send the brain a report, mostly on workers; dropped while there is no brain."""
        self.outbox.send(message)

    def _ask(self, request_id: str, message: Callable[[int], Asking]) -> None:
        """Send a call that will be answered, unless the ticket is void. `message`: by the ticket's number."""
        entry = self._open.get(request_id)
        if entry is not None:
            entry.turn += 1
            self.outbox.send(message(entry.number))

    def _send_soon(self, message: Callable[[float], FromRelay]) -> None:
        """Send a message with the next one, or at once if a request waits for what it changes."""
        view = self._view
        if view.queued or view.asking or view.pooled:
            self.outbox.send(message(0.0))
        else:
            self.outbox.send_soon(message)

    def _leave(self, request_id: str) -> _Open:
        """Forget a ticket that has ended."""
        entry = self._open.pop(request_id)
        del self._ids[entry.number]
        self.outbox.leave(entry.number)
        return entry

    # -- for the membership

    def introduce(self) -> tuple[list[Held], list[Submit]]:
        """For the `Hello` to another brain, the state of each ticket that a brain has known; and the calls after it.

        Beyond `MAX_JOIN_HASHES`, tickets go without those of their prompts, whose cached parts are then not known.
        """
        now = self._loop.time()
        held, unknown, hashes = [], [], MAX_JOIN_HASHES
        for ticket in self.tickets.by_id.values():
            entry, standing = self._open[ticket.id], ticket.standing(now)
            entry.tokens = 0  # their state contains these tokens
            self.outbox.token_counts.write(entry.number, 0)
            if len(standing.spec.prefix) > hashes:
                standing.spec = replace(standing.spec, prefix=())
            hashes -= len(standing.spec.prefix)
            if entry.submitted:
                held.append(Held(entry.number, entry.turn, standing))
            else:  # no brain knows it, so it may still be refused
                entry.submitted = True
                unknown.append(Submit(entry.number, standing.spec))
        return held, unknown

    def welcomed(self, tokens_read: bool) -> None:
        """The brain has taken over the tickets; tell it what was generated since. `tokens_read`: it reads counts."""
        self.outbox.read_tokens(tokens_read)
        for entry in self._open.values():
            self.outbox.put_tokens(entry.number, entry.tokens)

    def see(self, view: ClusterView, relays: int) -> None:
        """Take the brain's view of the cluster, and of how many relays there are."""
        self._view, self.relays = view, relays

    def answer(self, message: Chosen | Refused) -> None:
        """Pass an answer to its ticket; a choice is dropped if the ticket has made another call since."""
        request_id = self._ids.get(message.ticket)
        if request_id is None:
            return
        if isinstance(message, Refused):
            self.refuse(request_id, Refusal(message.kind, message.text, message.retry_after_s))
        elif message.turn == self._open[request_id].turn:
            self.on_answer(request_id, message.worker)

    def void(self, numbers: Iterable[int]) -> frozenset[str]:
        """End those of these tickets that are still open: the brain can't take them over. Returns their ids."""
        ended = []
        for number in numbers:
            request_id = self._ids.get(number)
            if request_id is not None:
                self.refuse(request_id, Refusal(RefusalKind.LOST, LOST))
                ended.append(request_id)
        return frozenset(ended)

    def refuse(self, request_id: str, why: Refusal) -> int:
        """End a ticket, in any state; returns its number."""
        entry = self._leave(request_id)
        self.on_answer(request_id, why)
        return entry.number
