"""What a relay sends to the brain: messages in their order, some deferred, and its counts of tokens.

Without a brain nothing is sent and nothing is kept, as the next `Hello` tells the state of all tickets.

Counts of tokens are written into shared memory, which a brain on the same machine reads (`token_counts.py`); to another
brain they are sent within `PROGRESS_S`.
"""

import asyncio
from collections.abc import Callable

from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.messages import PROGRESS_S, SOON_S, FromRelay, Progress
from balanceroute.proxy.link.token_counts import WrittenCounts


class Outbox:
    """The messages to the brain that has been sent `Hello`, if there is one.

    Attributes: `frames`: the connection to it. `soon_s`: how long a message is deferred at most.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.soon_s = SOON_S
        self.frames: Frames[FromRelay] | None = None
        self.token_counts = WrittenCounts()
        self._tokens_read = False  # the brain reads `token_counts`
        self._unsent_tokens: dict[int, int] = {}  # tokens to be sent, by ticket
        self._kept: list[tuple[float, Callable[[float], FromRelay]]] = []  # time and message, see `send_soon`
        self._kept_timer: asyncio.TimerHandle | None = None

    def open(self, frames: Frames[FromRelay]) -> None:
        """Send to another brain, which has been told all up to now; what was meant for the former one is forgotten."""
        self._unsent_tokens = {}
        self._forget_kept()
        self.frames = frames

    def close(self) -> None:
        """The connection is lost."""
        self.frames, self._tokens_read = None, False

    def read_tokens(self, tokens_read: bool) -> None:
        """Begin with the counts of tokens again, which the brain reads, or has to be sent."""
        self._tokens_read, self._unsent_tokens = tokens_read, {}

    def put_tokens(self, number: int, tokens: int) -> None:
        """Write the sum of a ticket's tokens to shared memory, or put it into the next message. Hot."""
        if self._tokens_read and self.token_counts.write(number, tokens):
            return
        if not self._unsent_tokens:
            self._loop.call_later(PROGRESS_S, self._send_progress)
        self._unsent_tokens[number] = tokens

    def leave(self, number: int) -> None:
        """Free the number of a ticket that has ended."""
        self._unsent_tokens.pop(number, None)
        self.token_counts.leave(number)

    def send(self, message: FromRelay) -> None:
        """Send a message, after the deferred ones."""
        if self.frames is None:
            return
        self._send_progress()
        if self._kept:
            self._send_deferred()
        self.frames.send(message)

    def send_soon(self, message: Callable[[float], FromRelay]) -> None:
        """Defer a message to the next one, by `soon_s` at most. `message`: by its age, seconds.

        Every frame wakes the brain's process, so fewer frames save CPU.
        """
        if self.frames is None:
            return
        if not self._kept:
            self._kept_timer = self._loop.call_later(self.soon_s, self._send_deferred)
        self._kept.append((self._loop.time(), message))

    def _send_deferred(self) -> None:
        """Send the deferred messages."""
        kept, now, frames = self._kept, self._loop.time(), self.frames
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
        if self._unsent_tokens and self.frames is not None:
            self.frames.send(Progress(tuple(self._unsent_tokens), tuple(self._unsent_tokens.values())))
            self._unsent_tokens = {}
