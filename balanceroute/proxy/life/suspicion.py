"""Requests that kill the decode worker they are sent to, and how they are told from those that were only there.

An engine that dies takes every request on it along. Nearly always one more try elsewhere is right; but where a request
itself was the cause, each try costs the cluster a worker. So a worker that is lost before a request's first token is
evidence against that request, and two such losses are enough: it goes to no third one (`DecodersLost`, 502), whoever
else was there. A request that kills takes no more than two workers along, however many of its kind come at once.

Two things protect requests that were only there:

* **By turns.** While a request with one loss waits for its first token on a worker, no other such request is sent
  there (`Suspicions.turn`). So it loses a second worker to a request that is not known yet, or by chance, and seldom.
* **Explained losses.** When a request is given up, the workers that it was on when they died are accounted for. For
  other requests such a loss is no failed try from then on, nor one of the three below. It still is one of the two:
  where two requests that kill share their first worker, the second one looks just like one that was only there.
  Relays tell each other of these losses (`on_explained`).

A loss is one death of one worker, shared by all requests that were on it. A request that gets its first token has
cleared itself.

What kills a worker need not do so at once: a grammar may break it at the hundredth token, on every worker that goes on
from there. So deaths under an answer that has begun are counted, too (`lost_midway`). They are weaker evidence, as many
long answers see one when workers are restarted: three are needed, and one does not count once the answer has gone on
elsewhere for `CLEARED_AFTER_S`.

The choices of one request (`n`, a list of prompts) are sent side by side, so each would take two workers along before
any of them is known. Until one of them has its first token they go to decode workers one at a time, and what they lose
is evidence against them all (`Choices`). Where the first one takes long a second one goes beside it; never are there
more at workers than may be lost. Once one has its first token each choice is judged by what it has lost itself, before
and after: so of a list with several prompts that kill, behind one that does not, each may take two workers along.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from balanceroute.errors import ConnectFailed, ConnectionLost, UpstreamError, UpstreamStatus
from balanceroute.proxy.workers.drainer import DrainGroup

MAX_LOSSES: Final = 2
MAX_LOSSES_MIDWAY: Final = 3  # of workers that had given a token of the answer
CLEARED_AFTER_S: Final = 30.0
# Longer than a pull and a step take. A worker that is merely full must not hold up all others that were unlucky once.
TURN_S: Final = 5.0
SAME_DEATH_S: Final = 2.0  # all requests of a worker hear of its death within this time
KNOWN_S: Final = 3600.0  # after a death, what other processes find out about it is still about requests that are here
_ENGINE_DEAD: Final = (b"EngineCore", b"EngineDead")  # vLLM's error when its engine process has died


class Sign(Enum):
    """What a failure says about whether the worker, or the engine behind it, has died."""

    NONE = "none"
    MAYBE = "maybe"  # a connection broke: its /health will tell
    DEATH = "death"


def sign_of(error: UpstreamError) -> Sign:
    """What a decode worker's failure says.

    A connection that could not be opened never carried the request, and an error of a living engine (such as KV that
    could not be pulled) is no death: neither is evidence.
    """
    if isinstance(error, UpstreamStatus):
        dead = error.status >= 500 and any(words in error.body for words in _ENGINE_DEAD)
        return Sign.DEATH if dead else Sign.NONE
    broke = isinstance(error, ConnectionLost) or (isinstance(error, ConnectFailed) and error.sent)
    return Sign.MAYBE if broke else Sign.NONE


@dataclass(slots=True, eq=False)
class Loss:
    """One death of a worker; `explained` once the request that caused it is known."""

    worker: str
    at_s: float
    explained: bool = False


class Choices:
    """The choices of one request: who of them is at a decode worker without a token, which the others wait for.

    `losses`: of all of them, until one has its first token.
    """

    def __init__(self) -> None:
        """None has gone yet."""
        self.losses: list[Loss] = []
        self.cleared = False
        self.drains = DrainGroup()
        self._out: set[object] = set()
        self._moved = asyncio.Event()

    async def turn(self, choice: object) -> None:
        """Wait until this choice may go: alone, or after `TURN_S`, as a worker may just be slow, beside another."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._until_beside(choice, 0)
        except TimeoutError:
            await self._until_beside(choice, MAX_LOSSES - 1)
        self._out.add(choice)

    async def _until_beside(self, choice: object, most: int) -> None:
        """Wait until no choice is out, or at most so many, with the losses that there were."""
        while not self.cleared and (others := len(self._out - {choice})) and others + len(self.losses) > most:
            await self._moved.wait()

    def lost(self, loss: Loss) -> None:
        """A worker died under a choice before its first token."""
        if not self.cleared and loss not in self.losses:
            self.losses.append(loss)

    def back(self, choice: object) -> None:
        """The choice has left its worker. Idempotent."""
        if choice in self._out:
            self._out.discard(choice)
            self._wake()

    def clear(self) -> None:
        """A choice has its first token: no worker dies of this request at once."""
        if not self.cleared:
            self.cleared = True
            self.losses.clear()
            self._wake()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


@dataclass(slots=True, eq=False)
class Suspect:
    """The evidence against one request: workers lost before its first token there, and after (`midway`).

    `choices`: those that it is one of.
    """

    choices: Choices | None = None
    losses: list[Loss] = field(default_factory=list)
    midway: list[Loss] = field(default_factory=list)

    @property
    def all_losses(self) -> list[Loss]:
        """Its own before its first token, and those of other choices that count against it."""
        others = [] if self.choices is None else self.choices.losses
        return [loss for loss in others if loss not in self.losses] + self.losses

    @property
    def explained(self) -> int:
        """Losses before its first token that another request has been found to have caused."""
        return sum(loss.explained for loss in self.losses)

    @property
    def given_up(self) -> bool:
        """Whether the request goes to no further decode worker."""
        lost_midway = sum(not loss.explained for loss in self.midway)
        return len(self.all_losses) >= MAX_LOSSES or lost_midway >= MAX_LOSSES_MIDWAY

    @property
    def workers(self) -> list[str]:
        """The ids of the workers that were lost under it."""
        return [loss.worker for loss in self.midway + self.all_losses]


class Suspicions:
    """All requests of a router that have lost a worker before their first token."""

    def __init__(self) -> None:
        """Nobody is suspected."""
        self._losses: dict[str, Loss] = {}  # the last one of each worker
        self._alone: dict[str, tuple[Suspect, asyncio.Event]] = {}  # who is alone with a worker, and when that ends
        self.on_explained: Callable[[list[Loss]], None] = lambda losses: None

    def lost(self, suspect: Suspect, worker_id: str, now: float) -> bool:
        """The worker died under this request before its first token; returns whether the request is given up.

        If so, its losses are explained.
        """
        loss = self._loss(worker_id, now, suspect.losses)
        suspect.losses.append(loss)
        if suspect.choices is not None:
            suspect.choices.lost(loss)
        return self._explain(suspect)

    def lost_midway(self, suspect: Suspect, worker_id: str, now: float, lived_s: float) -> bool:
        """As `lost`, of a worker that had given tokens of the answer for `lived_s`."""
        if lived_s >= CLEARED_AFTER_S:
            suspect.midway.clear()
        suspect.midway.append(self._loss(worker_id, now, suspect.midway))
        return self._explain(suspect)

    def _loss(self, worker_id: str, now: float, known: list[Loss]) -> Loss:
        """The death that others may have reported already, or a new one."""
        loss = self._losses.get(worker_id)
        if loss is None or now - loss.at_s > SAME_DEATH_S or loss in known:
            loss = self._new_loss(worker_id, now)
        return loss

    def _new_loss(self, worker_id: str, at_s: float) -> Loss:
        """The last one of this worker; those of long ago are forgotten: workers come under ever new names. O(losses)"""
        self._losses = {name: loss for name, loss in self._losses.items() if at_s - loss.at_s < KNOWN_S}
        loss = self._losses[worker_id] = Loss(worker_id, at_s)
        return loss

    def _explain(self, suspect: Suspect) -> bool:
        if not suspect.given_up:
            return False
        losses = suspect.all_losses + suspect.midway
        for each in losses:
            each.explained = True
        self.on_explained(losses)
        return True

    def explained_since(self, since_s: float) -> list[Loss]:
        """The last death of each worker, where it is explained and came later than that."""
        return [loss for loss in self._losses.values() if loss.explained and loss.at_s > since_s]

    def explained_elsewhere(self, worker_id: str, at_s: float) -> None:
        """A request of another process has caused the death of this worker at that time, heard of here or not yet."""
        loss = self._losses.get(worker_id)
        if loss is None or at_s - loss.at_s > SAME_DEATH_S:
            loss = self._new_loss(worker_id, at_s)
        if abs(loss.at_s - at_s) <= SAME_DEATH_S:
            loss.explained = True

    def cleared(self, suspect: Suspect) -> None:
        """The request has got its first token: it is no suspect."""
        suspect.losses.clear()
        self.end_turn(suspect)

    async def turn(self, suspect: Suspect, worker_id: str) -> None:
        """Wait, for `TURN_S` at most, until no other suspect is without its first token on this worker."""
        self.end_turn(suspect)  # of a worker that it was not sent to after all
        try:
            async with asyncio.timeout(TURN_S):
                while (other := self._alone.get(worker_id)) is not None:
                    await other[1].wait()
        except TimeoutError:
            return
        self._alone[worker_id] = (suspect, asyncio.Event())

    def end_turn(self, suspect: Suspect) -> None:
        """The request has its first token, or has left its worker. Idempotent."""
        for worker_id, (who, over) in list(self._alone.items()):
            if who is suspect:
                del self._alone[worker_id]
                over.set()
