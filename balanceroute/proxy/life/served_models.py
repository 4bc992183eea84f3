"""`ServedModels`: which prefiller has last served each model.

A prefiller that does not know a model, or the router's key, refuses at once, so it is the least loaded one. Whether
that is its own fault or the client's shows only where another prefiller serves requests for this model.
"""

from typing import Final

MAX_MODELS: Final = 256  # some servers take any name; vLLM's are its model, aliases and adapters
MAX_NAME: Final = 256  # characters; a longer name is not kept


class ServedModels:
    """The last prefiller of each model, by the name that requests have for it; None: they name none."""

    __slots__ = ("_by_model",)

    def __init__(self) -> None:
        self._by_model: dict[str | None, str] = {}

    def note(self, model: str | None, prefiller_id: str) -> None:
        """The prefiller has served a request for this model."""
        if model not in self._by_model:
            if model is not None and len(model) > MAX_NAME:
                return
            if len(self._by_model) >= MAX_MODELS:
                self._by_model.clear()  # those in use return with the next requests
        self._by_model[model] = prefiller_id

    def refused(self, model: str | None, prefiller_id: str) -> str | None:
        """Note that the prefiller does not know this model; returns another one that has served it last, if any."""
        last = self._by_model.get(model)
        if last == prefiller_id:
            del self._by_model[model]
            return None
        return last
