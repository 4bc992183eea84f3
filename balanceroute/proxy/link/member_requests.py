"""Records which member holds which request, passes members' calls to the ledger, and the ledger's answers back.

A member and the ledger know a request by different names: the member by the number of its ticket, the ledger by its id.
"""

from collections.abc import Sequence

from balanceroute.core.types import GONE, Outcome, RequestSpec
from balanceroute.proxy.admission.decider import Answer, Refusal
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.link.members import Member, MemberTicket
from balanceroute.proxy.link.messages import (
    Asking,
    Began,
    Call,
    Chosen,
    Finish,
    Held,
    LinkError,
    Prefilled,
    PrefillFailed,
    Progress,
    Pushed,
    PushFailed,
    PutBack,
    Refused,
    RequestPrefill,
)


class MemberRequests:
    """The requests of all members. It sets the ledger's `on_answer` to `answer`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._owners: dict[str, tuple[Member, int]] = {}  # by request id: its member and ticket number
        ledger.on_answer = self.answer

    def adopt(self, member: Member, tickets: Sequence[Held]) -> tuple[int, ...]:
        """Take over the requests that a joining member holds, the longest wait first.

        Returns the numbers of the tickets that find no place here.
        """
        void = []
        for held in sorted(tickets, key=lambda held: -held.standing.waited_s):
            request_id = held.standing.spec.id
            known = request_id in self._owners or held.ticket in member.tickets
            if known or held.standing.phase is GONE:
                void.append(held.ticket)
                continue
            self._hold(member, held.ticket, request_id, held.turn)  # first: if `adopt` raises, `release` ends it
            if not self._ledger.adopt(held.standing):
                self._forget(member, held.ticket, request_id)
                void.append(held.ticket)
        return tuple(void)

    def release(self, member: Member) -> list[tuple[str, Exception]]:
        """End all requests of a member that is gone; if it still runs, it joins again with those that it still has.

        Returns the requests whose end failed by a bug: that must not keep the other requests, or the member.
        """
        tickets, member.tickets, member.places = list(member.tickets.values()), {}, []
        failed: list[tuple[str, Exception]] = []
        for each in tickets:
            del self._owners[each.request_id]
            try:
                self._ledger.finish(each.request_id, Outcome.FAILED)
            except Exception as error:
                failed.append((each.request_id, error))
        return failed

    def _hold(self, member: Member, number: int, request_id: str, turn: int) -> None:
        member.hold(number, request_id, turn)
        self._owners[request_id] = (member, number)

    def _forget(self, member: Member, number: int, request_id: str) -> None:
        member.release(number)
        del self._owners[request_id]

    def submit(self, member: Member, number: int, spec: RequestSpec) -> None:
        """Submit a member's new request. Raises: LinkError: a member has it already."""
        if spec.id in self._owners or number in member.tickets:
            raise LinkError(f"relay {member.relay} has request {spec.id} already")
        self._hold(member, number, spec.id, 1)
        self._ledger.submit(spec)

    def call(self, member: Member, message: Call) -> None:
        """A member's call on one of its requests.

        Raises: InvariantError, ValueError: the call is not allowed in the request's state.
        """
        ticket = member.tickets.get(message.ticket)
        if ticket is None:
            return  # the call has crossed the ticket's refusal
        ledger, request_id = self._ledger, ticket.request_id
        if isinstance(message, Asking):
            ticket.turn += 1
        if isinstance(message, Began):
            ledger.began(request_id, message.age_s)
        elif isinstance(message, Finish):
            self._advance(ticket, message.tokens)
            self._forget(member, message.ticket, request_id)
            ledger.finish(request_id, message.outcome, message.reason, message.age_s)
        elif isinstance(message, Pushed):
            ledger.pushed(request_id, message.prompt_tokens, message.cached_tokens)
        elif isinstance(message, Prefilled):
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
            ledger.requeue(request_id, message.prefix, message.anew)

    def progress(self, member: Member, message: Progress) -> None:
        """Take the sums of tokens that a member reports. Raises: InvariantError: a request is not decoding."""
        for number, tokens in zip(message.tickets, message.tokens, strict=True):
            ticket = member.tickets.get(number)
            if ticket is not None:
                self._advance(ticket, tokens)

    def read_tokens(self, member: Member) -> None:
        """Read the tokens that a relay has written into memory. Raises: InvariantError: a request is not decoding."""
        self._ledger.progress_all(*member.read())

    def _advance(self, ticket: MemberTicket, tokens: int) -> None:
        """Set a ticket's sum of tokens. Raises: InvariantError: it is not decoding."""
        more = ticket.grow(tokens)
        if more:
            self._ledger.progress(ticket.request_id, more)

    def answer(self, request_id: str, answer: Answer) -> None:
        """Send a decision to the member that holds the request; after a refusal the member no longer holds it."""
        member, number = self._owners[request_id]
        if isinstance(answer, Refusal):
            self._forget(member, number, request_id)
            member.frames.send(Refused(number, answer.kind, answer.text, answer.retry_after_s))
        else:
            member.frames.send(Chosen(number, member.tickets[number].turn, answer))
