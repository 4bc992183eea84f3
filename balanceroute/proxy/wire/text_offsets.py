"""`TextOffsets`: where each token of a completion begins in its text, over several workers."""

from typing import Any

from balanceroute.proxy.wire.event_contents import is_count


class TextOffsets:
    """Has `text_offset` of a completion's logprobs go on over all segments (see `sse.py`); a worker's begin at 0."""

    __slots__ = ("_first", "_next")

    def __init__(self) -> None:
        self._first = 0  # characters before the first token of this segment
        self._next = 0  # characters of all tokens whose logprobs have come

    def begin_segment(self) -> None:
        """Another worker goes on."""
        self._first = self._next

    def shift(self, logprobs: Any) -> bool:
        """Move the offsets in a choice's logprobs; returns whether that has changed them."""
        offsets = logprobs.get("text_offset") if isinstance(logprobs, dict) else None
        tokens = logprobs.get("tokens") if isinstance(logprobs, dict) else None
        if not isinstance(offsets, list) or not isinstance(tokens, list) or not offsets or len(offsets) != len(tokens):
            return False
        if not all(map(is_count, offsets)) or not isinstance(tokens[-1], str):
            return False
        if self._first:
            offsets = logprobs["text_offset"] = [self._first + offset for offset in offsets]
        self._next = offsets[-1] + len(tokens[-1])
        return bool(self._first)
