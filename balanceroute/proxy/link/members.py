"""`Member`: a relay during one connection, with the tickets of its requests."""

import logging

from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.messages import FromBrain, FromRelay, Hello
from balanceroute.proxy.link.token_counts import ReadCounts, peer_pid, place_of, same_serial, serial_of, tokens_of

log = logging.getLogger(__name__)


class MemberTicket:
    """A request of a member: its number on the link, its id, its `turn`, and how many tokens of it are known.

    `turn`: the number of calls so far that ask for an answer; it tells a late answer to an earlier call from the
    present one's.
    """

    __slots__ = ("number", "request_id", "tokens", "turn")

    def __init__(self, number: int, request_id: str, turn: int) -> None:
        self.number, self.request_id, self.turn = number, request_id, turn
        self.tokens = 0

    def grow(self, tokens: int) -> int:
        """Set the sum of generated tokens; returns how many are new.

        0 for an older sum: some sums come in messages, others are read from memory.
        """
        more = tokens - self.tokens
        if more <= 0:
            return 0
        self.tokens = tokens
        return more


class Member:
    """A relay during one connection."""

    def __init__(self, number: int, relay: str, process: int, frames: Frames[FromBrain]) -> None:
        self.number, self.relay, self.process, self.frames = number, relay, process, frames
        self.tickets: dict[int, MemberTicket] = {}
        self.counts: ReadCounts | None = None
        self.places: list[MemberTicket | None] = []  # tickets by their places in `counts`
        self.uses_keys = self.sent_farewell = False
        self.waiting: list[FromRelay] = []  # its calls from before the brain was settled

    def hold(self, number: int, request_id: str, turn: int) -> None:
        """Add a ticket."""
        ticket = self.tickets[number] = MemberTicket(number, request_id, turn)
        place = place_of(number)
        while len(self.places) <= place:
            self.places.append(None)
        self.places[place] = ticket

    def release(self, number: int) -> None:
        """Remove a ticket."""
        ticket, place = self.tickets.pop(number), place_of(number)
        if self.places[place] is ticket:
            self.places[place] = None

    def read(self) -> tuple[list[str], list[int]]:
        """Read shared memory: the requests with new tokens, and the number of these. O(its tickets)."""
        requests: list[str] = []
        grown: list[int] = []
        if self.counts is None:
            return requests, grown
        places = self.places
        changed = self.counts.changed(len(places))
        for index in range(0, len(changed), 2):
            ticket, value = places[changed[index]], changed[index + 1]
            if ticket is not None and same_serial(ticket.number, serial_of(value)):
                more = ticket.grow(tokens_of(value))
                if more:
                    requests.append(ticket.request_id)
                    grown.append(more)
        return requests, grown


def token_counts_of(frames: Frames[FromBrain], hello: Hello) -> ReadCounts | None:
    """The shared memory with the relay's token counts; None: the relay sends them as messages."""
    connection = frames.socket
    pid = None if connection is None else peer_pid(connection)
    if pid is None or hello.token_file is None:
        return None
    try:
        return ReadCounts(pid, hello.token_file)
    except OSError as error:
        log.warning("token counts of a relay cannot be read", extra={"relay": hello.relay, "error": str(error)})
        return None
