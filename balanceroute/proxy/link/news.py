"""What the brain tells its members of the cluster: workers, groups that are silent together, its view, prompts' keys.

A relay is told all of it when it joins, and what has changed later: of workers at the end of the turn of the loop, of
the rest when the hub looks.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.members import Member
from balanceroute.proxy.link.messages import FromBrain, PromptKeys, Seen, Silent, SilentGroup, Workers, WorkerStanding


class Judgement(Protocol):
    """The brain's judgement of workers: `workers/relay_reports.py`."""

    def standings(self) -> dict[str, WorkerStanding]:
        """The present state of all workers, by id."""

    def silent(self) -> tuple[SilentGroup, ...]:
        """The groups of workers that fell silent together."""


class News:
    """What all members have been told. `judged`: workers of which members have assumed a change since then."""

    def __init__(
        self,
        ledger: Ledger,
        judgement: Judgement,
        members: Mapping[str, Member],
        loop: asyncio.AbstractEventLoop,
        prompt_keys: Callable[[], PromptKeys],
    ) -> None:
        """`members`: the present ones, by relay. `prompt_keys`: those of the present predictor."""
        self._ledger, self._judgement, self._members, self._loop = ledger, judgement, members, loop
        self._make_keys, self._prompt_keys = prompt_keys, prompt_keys()
        self._standings: dict[str, WorkerStanding] = {}
        self.judged: set[str] = set()
        self._silent: tuple[str, ...] = ()
        self._seen: Seen | None = None
        self._send_scheduled = False  # whether `send_workers` is about to run

    def welcome(self, frames: Frames[FromBrain]) -> None:
        """Tell a new member all."""
        frames.send(self._prompt_keys)
        frames.send(Workers(tuple(self._standings.values()), ()))
        frames.send(Silent(self._judgement.silent()))
        frames.send(self._view())

    def look(self) -> bool:
        """Tell all members what has changed; returns whether the view has."""
        self._ledger.settle()
        seen = self._view()
        self.send_workers()
        silent = self._judgement.silent()
        if (names := tuple(group.name for group in silent)) != self._silent:
            self._silent = names
            self._send_all(Silent(silent))
        if (prompt_keys := self._make_keys()) != self._prompt_keys:
            self._prompt_keys = prompt_keys
            self._send_all(prompt_keys)
        if seen == self._seen:
            return False
        self._seen = seen
        self._send_all(seen)
        return True

    def workers_changed(self) -> None:
        """Send members the changes of workers at the end of this turn of the loop."""
        if not self._send_scheduled:
            self._send_scheduled = True
            self._loop.call_soon(self.send_workers)

    def send_workers(self) -> None:
        """Send members the changes of workers now, and the workers that they have judged."""
        self._send_scheduled = False
        standings, known = self._judgement.standings(), self._standings
        changed = tuple(each for name, each in standings.items() if known.get(name) != each or name in self.judged)
        gone = tuple(name for name in known if name not in standings)
        self._standings = standings
        self.judged.clear()
        if changed or gone:
            self._send_all(Workers(changed, gone))

    def _view(self) -> Seen:
        return Seen(self._ledger.view(), len(self._members))

    def _send_all(self, message: FromBrain) -> None:
        for member in self._members.values():
            member.frames.send(message)
