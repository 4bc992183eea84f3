"""Finds requests that kill their decode worker, and tells them from those that were only running there.

When an engine dies, all its requests fail. Nearly always another try elsewhere is right; but if a request was the
cause, each try costs a worker. So the loss of a worker before a request's first token is evidence against that request;
after two it goes to no third worker (`DecodersLost`, 502). A request that kills thus costs two workers at most, however
many of its kind come at once.

Two rules protect other requests:

* **By turns.** While a request with one loss waits for its first token on a worker, no other such request is sent
  there (`Suspicions.turn`). So it seldom loses a second worker to another request.
* **Explained losses.** When a request is given up, the deaths of its workers are explained. For other requests such a
loss no longer counts as a failed try, nor as one of the three below. It still counts as one of the two: if two requests
that kill share their first worker, the second looks like an innocent one. Relays tell each other of these losses
(`on_explained`).

A loss is one death of one worker, shared by all requests that were on it. A request that gets its first token has
cleared itself.

A request may also kill later: a grammar may break an engine at the hundredth token, on every worker that continues from
there. So deaths under an answer that has begun count, too (`lost_midway`). They are weaker evidence, because long
answers see them when workers are restarted: three are needed, and one expires once the answer has continued elsewhere
for `CLEARED_AFTER_S`.

The choices of one request (`n`, a list of prompts) are sent at the same time, so each could kill two workers before any
is known. So until one of them has its first token, they go to decode workers one at a time, and their losses count
against all of them (`Choices`). If the first takes long, a second one goes beside it; never are more at workers than
may be lost. After the first token each choice is judged by its own losses, so of a list of prompts each one that kills
may still cost two workers.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from balanceroute.errors import ConnectFailed, ConnectionLost, UpstreamError, UpstreamStatus
from balanceroute.proxy.workers.drainer import DrainGroup

MAX_LOSSES: Final = 2
MAX_LOSSES_MIDWAY: Final = 3  # losses of workers that had sent a token of the answer
CLEARED_AFTER_S: Final = 30.0
# Longer than a pull and a step take. A worker that is merely full must not hold up all others that were unlucky once.
TURN_S: Final = 5.0
SAME_DEATH_S: Final = 2.0  # all requests of a worker notice its death within this time
KNOWN_S: Final = 3600.0  # for this long after a death, other processes' reports on it may concern requests here
_ENGINE_DEAD: Final = (b"EngineCore", b"EngineDead")  # vLLM's error when its engine process has died


class Sign(Enum):
    """Whether a failure shows that the worker, or its engine, has died."""

    NONE = "none"
    MAYBE = "maybe"  # a connection broke: ask its /health
    DEATH = "death"


def sign_of(error: UpstreamError) -> Sign:
    """Classify a decode worker's failure.

    A connection that could not be opened never carried the request, and an error of a living engine (such as KV that
    could not be pulled) is no death: neither is evidence.
    """
    if isinstance(error, UpstreamStatus):
        dead = error.status >= 500 and any(marker in error.body for marker in _ENGINE_DEAD)
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
    """The choices of one request: those at a decode worker without a token, for which the others wait.

    `losses`: of all of them, until one has its first token.
    """

    def __init__(self) -> None:
        """Make the choices; none is at a worker yet."""
        self.losses: list[Loss] = []
        self.cleared = False
        self.drains = DrainGroup()
        self._out: set[object] = set()
        self._moved = asyncio.Event()

    async def turn(self, choice: object) -> None:
        """Wait until this choice may go: alone, or after `TURN_S` beside another one, whose worker may just be slow."""
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
        """Note a worker's death under a choice before its first token."""
        if not self.cleared and loss not in self.losses:
            self.losses.append(loss)

    def back(self, choice: object) -> None:
        """Note that a choice has left its worker. Idempotent."""
        if choice in self._out:
            self._out.discard(choice)
            self._wake()

    def clear(self) -> None:
        """End the waiting: a choice has its first token, so the request does not kill at once."""
        if not self.cleared:
            self.cleared = True
            self.losses.clear()
            self._wake()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


@dataclass(slots=True, eq=False)
class Suspect:
    """The evidence against a request: workers lost before its first token there, and after it (`midway`).

    `choices`: of its client request.
    """

    choices: Choices | None = None
    losses: list[Loss] = field(default_factory=list)
    midway: list[Loss] = field(default_factory=list)

    @property
    def all_losses(self) -> list[Loss]:
        """Losses before the first token: its own, and those of other choices that count against it."""
        others = [] if self.choices is None else self.choices.losses
        return [loss for loss in others if loss not in self.losses] + self.losses

    @property
    def explained(self) -> int:
        """Losses before its first token that another request has caused."""
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

    def __init__(self, on_explained: Callable[[list[Loss]], None] = lambda losses: None) -> None:
        """Make an empty record. `on_explained`: told of the losses of each request that is given up here."""
        self._on_explained = on_explained
        self._losses: dict[str, Loss] = {}  # the last death of each worker
        self._alone: dict[str, tuple[Suspect, asyncio.Event]] = {}  # the suspect alone at a worker, and until when

    def lost(self, suspect: Suspect, worker_id: str, now: float) -> bool:
        """Record a worker's death before this request's first token; returns whether the request is given up.

        If so, its losses are explained.
        """
        loss = self._loss(worker_id, now, suspect.losses)
        suspect.losses.append(loss)
        if suspect.choices is not None:
            suspect.choices.lost(loss)
        return self._explain(suspect)

    def lost_midway(self, suspect: Suspect, worker_id: str, now: float, lived_s: float) -> bool:
        """As `lost`, for a worker that had sent tokens of the answer for `lived_s`."""
        if lived_s >= CLEARED_AFTER_S:
            suspect.midway.clear()
        suspect.midway.append(self._loss(worker_id, now, suspect.midway))
        return self._explain(suspect)

    def _loss(self, worker_id: str, now: float, known: list[Loss]) -> Loss:
        """The death, if another request has reported it already, or a new one."""
        loss = self._losses.get(worker_id)
        if loss is None or now - loss.at_s > SAME_DEATH_S or loss in known:
            loss = self._new_loss(worker_id, now)
        return loss

    def _new_loss(self, worker_id: str, at_s: float) -> Loss:
        """A new death of this worker; old ones are dropped, because workers get ever new names. O(losses)"""
        self._losses = {name: loss for name, loss in self._losses.items() if at_s - loss.at_s < KNOWN_S}
        loss = self._losses[worker_id] = Loss(worker_id, at_s)
        return loss

    def _explain(self, suspect: Suspect) -> bool:
        if not suspect.given_up:
            return False
        losses = suspect.all_losses + suspect.midway
        for each in losses:
            each.explained = True
        self._on_explained(losses)
        return True

    def explained_since(self, since_s: float) -> list[Loss]:
        """The last death of each worker that is explained and later than the given time."""
        return [loss for loss in self._losses.values() if loss.explained and loss.at_s > since_s]

    def explained_elsewhere(self, worker_id: str, at_s: float) -> None:
        """Note that another process's request caused the death of this worker at that time, known here or not yet."""
        loss = self._losses.get(worker_id)
        if loss is None or at_s - loss.at_s > SAME_DEATH_S:
            loss = self._new_loss(worker_id, at_s)
        if abs(loss.at_s - at_s) <= SAME_DEATH_S:
            loss.explained = True

    def cleared(self, suspect: Suspect) -> None:
        """Clear a request: it has its first token."""
        suspect.losses.clear()
        self.end_turn(suspect)

    async def turn(self, suspect: Suspect, worker_id: str) -> None:
        """Wait, for `TURN_S` at most, until no other suspect is without its first token on this worker."""
        self.end_turn(suspect)  # a turn at a worker that it was not sent to after all
        try:
            async with asyncio.timeout(TURN_S):
                while (other := self._alone.get(worker_id)) is not None:
                    await other[1].wait()
        except TimeoutError:
            return
        self._alone[worker_id] = (suspect, asyncio.Event())

    def end_turn(self, suspect: Suspect) -> None:
        """End a request's turn: it has its first token, or has left its worker. Idempotent."""
        for worker_id, (occupant, over) in list(self._alone.items()):
            if occupant is suspect:
                del self._alone[worker_id]
                over.set()
