"""Where the answers of a client request's legs go: each an `Outlet` (`life/outlet.py`).

StreamOutlet   to the client, as it comes
PartStream     the same for one of several legs, which share a `StreamOutlet`
PartAnswer     kept until it is complete
"""

from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from balanceroute.errors import EdgeFull, InvariantError
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.wire.answers import AnswerAssembler, with_usage
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.prompt_echo import with_prompt
from balanceroute.proxy.wire.responses import SSE_HEADERS, Headers
from balanceroute.proxy.wire.usage import put_prompt_details

LARGE_BYTES: Final = 64 * 1024  # of an answer; a smaller one is not counted


@mypyc_attr(allow_interpreted_subclasses=True)
class StreamOutlet:
    """The outlet of a leg whose answer is streamed to the client as it comes."""

    __slots__ = ("_headers", "_response", "drained", "end", "ends_response", "started", "write")

    def __init__(self, response: Response, headers: Headers, end: Callable[[bytes], None] | None = None) -> None:
        """`headers`: of this response, beside those of every stream. `end`: takes the last events in its place."""
        self._response, self._headers = response, [*SSE_HEADERS, *headers]
        self.write, self.drained = response.write, response.drained
        self.end = response.end if end is None else end
        self.started, self.ends_response = False, end is None

    def start(self) -> None:
        """Begin the response with a 200: the decoder's first event has come, and is no error."""
        self.started = True
        self._response.start(200, self._headers)
        self.write = self._response.write

    def prompt_came(self, size: int) -> None:
        """What a prefiller has told is kept for a continuation.

        Raises: EdgeFull: there is no room for it. A stream that has begun goes on: decode first, or by another leg.
        """
        if size > LARGE_BYTES:
            try:
                self._response.keep(size)
            except EdgeFull:
                if not self._response.started:
                    raise

    def whole(self, body: bytes) -> None:
        """Never called for a stream. Raises: InvariantError."""
        raise InvariantError("an unstreamed answer for a client that streams")

    def forget(self) -> bool:
        """Whether the answer may start again: nothing of it has been sent."""
        return not self.started


class PartStream(StreamOutlet):
    """One leg's share of a stream that several legs make; the first of them that has bytes starts it."""

    __slots__ = ("_shared",)

    def __init__(self, shared: StreamOutlet) -> None:
        super().__init__(shared._response, (), _not_of_a_part)
        self._shared = shared

    def start(self) -> None:
        """Begin the response, unless another leg has done so."""
        if not self._shared.started:
            self._shared.start()
        self.started, self.write = True, self._response.write


def _not_of_a_part(body: bytes) -> None:
    raise InvariantError("one of several answers ends the response")


class PartAnswer:
    """The outlet of a leg whose answer is kept until it is complete."""

    __slots__ = ("_assembler", "_body", "_keep", "_prompt_bytes", "_request", "_told_bytes", "ends_response", "started")

    def __init__(self, request: ClientRequest, keep: Callable[[int], None] = lambda more_bytes: None) -> None:
        """`keep` is told how many more bytes are kept here, or fewer, if negative; it raises where there is no room."""
        self._request, self._keep = request, keep
        self._prompt_bytes = self._told_bytes = 0
        self._assembler: AnswerAssembler | None = None  # of the events, if any come
        self._body: bytes | None = None
        self.started = self.ends_response = False

    def start(self) -> None:
        """Nothing goes to the client yet."""

    def write(self, body: bytes) -> bool:
        """Take in events. Raises: EdgeFull: there is no room for them."""
        self.end(body)
        return True

    def end(self, body: bytes) -> None:
        """Take in the last events. Raises: EdgeFull."""
        self._assembled().feed(body)
        self._tell_kept()

    async def drained(self) -> None:
        """There is always room."""

    def prompt_came(self, size: int) -> None:
        """A prefiller's answer is kept, too. Raises: EdgeFull."""
        self._prompt_bytes = size
        self._tell_kept()

    def whole(self, body: bytes) -> None:
        """The answer came unstreamed. Raises: EdgeFull."""
        self._body = body
        self._tell_kept()

    def forget(self) -> bool:
        """Drop what has come; the answer may begin anew, because the client has got nothing."""
        self._assembler = self._body = None
        self._tell_kept()
        return True

    def answer(self, leg: Leg) -> bytes:
        """The complete answer, with what the prefiller said of the prompt."""
        usage = leg.answer.scanner.usage or {}
        late = bool(usage) and put_prompt_details(usage, leg.answer.prompt_details)  # since the decoder's end
        if self._body is None:
            body = self._assembled().answer(leg.answer.scanner)
        else:
            body = with_usage(self._body, usage) if late else self._body
        if leg.answer.prompt_reply is None or self._request.scores_only:
            return body
        return with_prompt(self._request, body, leg.answer.prompt_reply)

    def _tell_kept(self) -> None:
        """Tell how many bytes are kept, if the number has changed by much: small answers cost nothing."""
        assembled_bytes = 0 if self._assembler is None else self._assembler.kept_bytes
        kept_bytes = self._prompt_bytes + len(self._body or b"") + assembled_bytes
        more_bytes = kept_bytes - self._told_bytes
        if abs(more_bytes) > LARGE_BYTES:
            self._told_bytes = kept_bytes
            self._keep(more_bytes)

    def _assembled(self) -> AnswerAssembler:
        if self._assembler is None:
            self._assembler = AnswerAssembler(self._request)
        return self._assembler
