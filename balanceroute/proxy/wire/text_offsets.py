"""`TextOffsets`: where each token of a completion begins in its text, over several workers."""

from typing import Any

from balanceroute.proxy.wire.event_contents import is_count


class TextOffsets:
    """Has `text_offset` of a completion's logprobs go on over all segments (see `sse.py`); a worker's begin at 0.

    Engines count the text that they have sent before the event, not the tokens: some have none of their own, such as
    special tokens and parts of a character.
    """

    __slots__ = ("_first", "_sent")

    def __init__(self) -> None:
        self._first = 0  # characters before the first token of this segment
        self._sent = 0  # characters of all events so far

    def begin_segment(self) -> None:
        """Another worker goes on."""
        self._first = self._sent

    def take(self, choice: dict[str, Any]) -> bool:
        """Count the text of a choice with logprobs, and move their offsets; returns whether that has changed them."""
        self._sent += len(choice.get("text") or "")
        logprobs = choice["logprobs"]
        offsets = logprobs.get("text_offset")
        if not self._first or not isinstance(offsets, list) or not offsets or not all(map(is_count, offsets)):
            return False
        logprobs["text_offset"] = [self._first + offset for offset in offsets]
        return True
