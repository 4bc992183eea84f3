"""`Member`: a relay for the time of one connection, and the tickets of the requests that it holds."""

import logging

from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.messages import FromBrain, FromRelay, Hello
from balanceroute.proxy.link.token_counts import ReadCounts, life_of, peer_pid, place_of, same_life, tokens_of

log = logging.getLogger(__name__)


class Ticket:
    """A request of a member: its number on the link, its id, its `turn`, and how many tokens of it are known.

    `turn`: how many answers have been asked for, so that a late answer to an earlier call can be told from the present.
    """

    __slots__ = ("number", "request_id", "tokens", "turn")

    def __init__(self, number: int, request_id: str, turn: int) -> None:
        self.number, self.request_id, self.turn = number, request_id, turn
        self.tokens = 0

    def grow(self, tokens: int) -> int:
        """It has generated so many by now; returns how many of them are new.

        None are where the news is older than what is known: some tokens come in messages, others are read.
        """
        more = tokens - self.tokens
        if more <= 0:
            return 0
        self.tokens = tokens
        return more


class Member:
    """A relay, for one connection."""

    def __init__(self, number: int, relay: str, process: int, frames: Frames[FromBrain]) -> None:
        self.number, self.relay, self.process, self.frames = number, relay, process, frames
        self.tickets: dict[int, Ticket] = {}
        self.counts: ReadCounts | None = None
        self.places: list[Ticket | None] = []  # its tickets by the places in `counts`
        self.uses_keys = self.says_farewell = False
        self.waiting: list[FromRelay] = []  # what it has called before the brain was settled

    def hold(self, number: int, request_id: str, turn: int) -> None:
        """It has this ticket."""
        ticket = self.tickets[number] = Ticket(number, request_id, turn)
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


def token_counts_of(frames: Frames[FromBrain], hello: Hello) -> ReadCounts | None:
    """The token counts that a relay on this machine writes; None: it sends them as messages."""
    connection = frames.socket
    pid = None if connection is None else peer_pid(connection)
    if pid is None or hello.token_file is None:
        return None
    try:
        return ReadCounts(pid, hello.token_file)
    except OSError as error:
        log.warning("tokens of a relay are not readable", extra={"relay": hello.relay, "error": str(error)})
        return None
