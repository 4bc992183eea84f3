"""`AnswerUsage`: makes the usages that workers send those of the whole answer."""

from typing import Any

from balanceroute.proxy.wire.answer_tokens import AnswerTokens
from balanceroute.proxy.wire.closing import usage_of
from balanceroute.proxy.wire.event_contents import is_count
from balanceroute.proxy.wire.usage import put_prompt_details


class AnswerUsage:
    """The usages of an answer over all its segments (see `sse.py`): of all its tokens, with the prefiller's details."""

    __slots__ = ("_generated", "_passes_continuous", "_prompt_details", "_prompt_tokens", "_told_tokens")

    def __init__(
        self,
        generated: AnswerTokens,
        passes_continuous: bool,
        prompt_tokens: int | None,
        prompt_details: dict[str, Any] | None,
    ) -> None:
        """`passes_continuous`: the client gets usages in events with choices. The others as in `EventScanner`."""
        self._generated = generated
        self._passes_continuous = passes_continuous
        self._prompt_tokens = prompt_tokens
        self._prompt_details = prompt_details
        self._told_tokens = 0  # of the last usage in an event with choices, as the client got it

    def prefilled(self, prompt_tokens: int, prompt_details: dict[str, Any] | None) -> None:
        """See `EventScanner.prefilled`."""
        self._prompt_tokens, self._prompt_details = prompt_tokens, prompt_details

    @property
    def prompt_tokens(self) -> int | None:
        """The prompt's tokens, from the prefiller, else from the decode worker's ids; None: not known yet."""
        if self._prompt_tokens is None and self._generated.prompt_ids is not None:
            return len(self._generated.prompt_ids)
        return self._prompt_tokens

    def counted(self) -> dict[str, Any]:
        """The usage by the router's own count."""
        usage: dict[str, Any] = {**usage_of(self.prompt_tokens or 0, self._generated.tokens)}
        put_prompt_details(usage, self._prompt_details)
        return usage

    def complete(self, usage: dict[str, Any]) -> bool:
        """Make a worker's final usage that of the whole answer; returns whether that has changed it."""
        changed = put_prompt_details(usage, self._prompt_details)
        return self._rewrite(usage, 0) | changed

    def take(self, event: dict[str, Any], usage: dict[str, Any]) -> bool:
        """Count by the usage in an event with choices, and take the usage out unless the client gets it there.

        Returns whether that has changed the event.
        """
        self._generated.count_by_usage(usage)
        if self._passes_continuous:
            # engines send details of the prompt at the end only; those that are sent here give way to the prefiller's
            changed = bool(usage.get("prompt_tokens_details")) and put_prompt_details(usage, self._prompt_details)
            changed |= self._rewrite(usage, self._told_tokens)
            self._told_tokens = usage.get("completion_tokens") or 0
            return changed
        del event["usage"]
        return True

    def _rewrite(self, usage: dict[str, Any], told_tokens: int) -> bool:
        """Make a worker's counts those of the whole answer; returns whether that has changed them.

        `told_tokens`: what the client was told last; tokens that were given back must not make a usage fall.
        """
        if not self._generated.is_later_segment:
            return False
        prompt_tokens = self._prompt_tokens
        if prompt_tokens is None:
            reported = usage.get("prompt_tokens")
            prompt_tokens = max(0, reported - self._generated.earlier) if is_count(reported) else 0
        usage |= usage_of(prompt_tokens, max(self._generated.tokens, told_tokens))
        if self._generated.earlier and usage.get("completion_tokens_details"):
            del usage["completion_tokens_details"]  # of the last segment alone: too few tokens of reasoning
        return True
