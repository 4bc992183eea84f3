"""`TextOffsets`: where each token of a completion begins in its text, over several workers."""

from typing import Any

from balanceroute.proxy.wire.event_contents import is_count


class TextOffsets:
    """Has `text_offset` of a completion's logprobs go on over all segments (see `sse.py`); a worker's begin at 0.

    An event's offsets begin where the tokens before it end (vLLM 0.32), or with earlier engines after the text that was
    sent before it. The two differ after tokens whose text is not their own, such as parts of a character. What an
    engine does shows in the event after such tokens; until then it counts as a newer one.
    """

    __slots__ = ("_by_text", "_first", "_scored", "_sent")

    def __init__(self) -> None:
        self._first = 0  # characters before the first token of this segment
        self._scored = 0  # where the next event's tokens begin, if the engine counts tokens
        self._sent = 0  # the same, if it counts text
        self._by_text = False  # whether it counts text

    def begin_segment(self) -> None:
        """Another worker goes on."""
        self._first = self._scored = self._sent = self._sent if self._by_text else self._scored

    def take(self, choice: dict[str, Any]) -> bool:
        """Count the text of a choice with logprobs, and move their offsets; returns whether that has changed them."""
        self._sent += len(choice.get("text") or "")
        logprobs = choice["logprobs"]
        offsets, tokens = logprobs.get("text_offset"), logprobs.get("tokens")
        if not isinstance(offsets, list) or not offsets or not all(map(is_count, offsets)):
            return False
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[-1], str):
            return False
        if self._first:
            offsets = logprobs["text_offset"] = [self._first + offset for offset in offsets]
        self._by_text |= offsets[0] != self._scored
        self._scored = offsets[-1] + len(tokens[-1])
        return bool(self._first)
