"""The destination of a leg's answer: the client's stream, a part of it, or memory."""

from typing import Protocol

from balanceroute.proxy.life.streaming import BodyWriter, write_part


class Outlet(BodyWriter, Protocol):
    """Takes one answer; `write` takes whole events."""

    @property
    def started(self) -> bool:
        """Whether the client has got the status; after that the answer can't start again."""

    @property
    def ends_response(self) -> bool:
        """Whether the stream's [DONE] ends the client's response too."""

    def start(self) -> None:
        """The first bytes are about to come."""

    def prompt_came(self, size: int) -> None:
        """What a prefiller has told of prompt and KV, in `size` bytes, is kept until the answer is complete.

        Raises: EdgeFull: there is no room for it.
        """

    def whole(self, body: bytes) -> None:
        """An unstreamed answer."""

    def forget(self) -> bool:
        """Drop what the client has not got yet; True: it had got nothing, so the answer may start again."""


async def write_last(outlet: Outlet, events: bytes) -> None:
    """Write the last events of an answer as soon as the client takes them, or with the response's end."""
    if outlet.ends_response:
        outlet.end(events)
    else:
        await write_part(outlet, events)
