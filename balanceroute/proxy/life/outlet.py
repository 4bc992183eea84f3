"""Where a leg's answer goes: the client's stream, a share of one, or memory."""

from typing import Protocol


class Outlet(Protocol):
    """Takes one answer."""

    @property
    def started(self) -> bool:
        """Whether the client has seen the status; from then on nothing can be taken back."""
        ...

    @property
    def ends_response(self) -> bool:
        """Whether the stream's [DONE] ends the client's response too."""
        ...

    def start(self) -> None:
        """The first bytes are about to come."""
        ...

    def write(self, body: bytes, /) -> bool:
        """Take whole events, not the last; False if the client's socket is full: nothing has happened."""
        ...

    def end(self, body: bytes, /) -> None:
        """Take the last events."""
        ...

    async def drained(self) -> None:
        """Wait until events may be taken."""
        ...

    def whole(self, body: bytes) -> None:
        """An unstreamed answer."""
        ...

    def forget(self) -> bool:
        """Drop what the client has not seen yet; returns whether that is everything, so that the answer may restart."""
        ...
