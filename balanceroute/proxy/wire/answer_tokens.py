"""`AnswerTokens`: how many tokens of one answer have been generated, and their ids.

A worker is counted by the token ids that it sends. One that sends none is counted by its cumulative usage, and one that
sends no usage either by its events with text or logprobs: one token each, the least that it can be.
"""

from array import array
from typing import Any

from balanceroute.proxy.hotpath import EventMatcher
from balanceroute.proxy.wire.event_contents import is_count


class AnswerTokens:
    """The tokens of an answer over all its segments (see `sse.py`).

    Attributes:
        exact: `ids` holds all of `tokens`. prompt_ids: the prompt's ids from the first worker that sent them; of one
        that has left no token they are forgotten. earlier: tokens generated in earlier segments. is_later_segment:
        there are such, though maybe without tokens. by_ids: a list of token ids has come in this segment.
    """

    __slots__ = (
        "_matcher",
        "_prompt_ids_sent",
        "_want_ids",
        "by_ids",
        "earlier",
        "exact",
        "is_later_segment",
        "prompt_ids",
    )

    def __init__(self, matcher: EventMatcher, want_ids: bool) -> None:
        """`matcher` keeps the count and the ids, as it takes most events. `want_ids`: the client gets the ids."""
        self._matcher = matcher
        self._want_ids = want_ids
        self.exact = True
        self.prompt_ids: array[int] | None = None
        self._prompt_ids_sent = False  # to a client that wants ids
        self.is_later_segment = False
        self._begin_segment()

    def _begin_segment(self) -> None:
        self.earlier = self.tokens
        self.by_ids = False
        if not self.earlier:
            self.prompt_ids = None  # the next worker's own are checked

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return self._matcher.tokens

    @property
    def ids(self) -> "array[int]":
        """The ids of those tokens, in order."""
        return self._matcher.ids

    @property
    def in_segment(self) -> int:
        """Tokens that the present worker has generated."""
        return self.tokens - self.earlier

    @property
    def lasting(self) -> int:
        """How many of the tokens a segment after this one goes on from; the others are generated again."""
        return self._matcher.printed if self._gives_back else self.tokens

    @property
    def _gives_back(self) -> bool:
        return not self._want_ids and (self.exact or not self._matcher.printed)

    @property
    def kept_ids(self) -> "array[int]":
        """The ids that a segment after this one goes on from: all if the client has them, else those with text."""
        return self.ids if self._want_ids else self.ids[: self._matcher.printed]

    def resume(self, broken: int) -> None:
        """Begin another segment, with fewer tokens if some are given back (see `EventScanner.resume`)."""
        matcher = self._matcher
        if self._gives_back:
            matcher.printed -= broken
            del matcher.ids[matcher.printed :]
            matcher.tokens = matcher.printed
            self.exact = True
        self.is_later_segment = True
        self._begin_segment()

    def take_ids(self, holder: dict[str, Any]) -> int:
        """Count the `token_ids` of an event or a choice; null them there unless the client wants them.

        Returns lists nulled: 0 or 1.
        """
        ids = holder.get("token_ids")
        if not isinstance(ids, list):
            return 0
        self.by_ids = True
        self._matcher.tokens += len(ids)
        if (taken := _as_ids(ids)) is None:
            self.exact = False
        else:
            self.ids.extend(taken)
        return 0 if self._want_ids else _null(holder, "token_ids")

    def take_prompt_ids(self, holder: dict[str, Any]) -> int:
        """Keep the `prompt_token_ids` of an event or a choice; null them there unless the client is to get them.

        Those of a later segment are sent if those of no earlier one were, unless they end with the answer so far.
        Returns lists nulled: 0 or 1.
        """
        ids = holder.get("prompt_token_ids")
        if not isinstance(ids, list):
            return 0
        if self.prompt_ids is None:
            self.prompt_ids = _as_ids(ids)
        sent_already = self.is_later_segment and (self._prompt_ids_sent or self.earlier)
        return 0 if self._want_ids and not sent_already else _null(holder, "prompt_token_ids")

    def relayed(self) -> None:
        """The client gets the event whose ids were just taken."""
        self._prompt_ids_sent = self._prompt_ids_sent or self.prompt_ids is not None

    def printed(self) -> None:
        """The client has been shown every token so far, by text or by its logprobs."""
        self._matcher.printed = self._matcher.tokens

    def count_by_usage(self, usage: dict[str, Any]) -> None:
        """Where a worker sends no ids, its cumulative usage counts."""
        generated = usage.get("completion_tokens")
        if self.by_ids or not is_count(generated):
            return
        if self.earlier + generated > self.tokens:
            self._matcher.tokens = self.earlier + generated
            self.exact = False

    def count_by_event(self, usage: object) -> None:
        """Count one token for an event with text or logprobs, of a worker that sends no ids and here no `usage` that
        counts.

        So it is known that the client has seen a token, which must not come again from another worker.
        """
        if self.by_ids or (isinstance(usage, dict) and usage.get("completion_tokens")):
            return
        self._matcher.tokens += 1
        self.exact = False

    def ends_twice(self, ids: list[Any]) -> bool:
        """Whether the answer, with these ids at its end, ends with the same id of this segment twice."""
        last = ids[-2:] if not self.in_segment or not self.ids else [self.ids[-1], *ids][-2:]
        return len(last) == 2 and last[0] == last[1]


def _as_ids(ids: list[Any]) -> "array[int] | None":
    """None where they are no token ids."""
    try:
        return array("I", ids)
    except (TypeError, OverflowError):
        return None


def _null(holder: dict[str, Any], name: str) -> int:
    holder[name] = None
    return 1
