"""`AnswerIdentity`: the `id` and names that all events of an answer share, and whether an event is of this answer."""

from dataclasses import dataclass
from typing import Any, Final

from balanceroute.proxy.wire.bounds import answers, shown_id
from balanceroute.proxy.wire.event_contents import is_count


@dataclass(slots=True)
class ModelName:
    """The model that the events of an answer name: what the first of them says; None until one has come."""

    told: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the stream of a worker is of the client's answer: all of it, or one choice of several.

    Attributes:
        public_id, created, index: put in place of what workers say; None: theirs stay. closing_events: False keeps back
        usage and [DONE], which are of the whole answer. model: what all choices share; None: there is one.
    """

    public_id: str | None = None
    created: int | None = None
    index: int | None = None
    closing_events: bool = True
    model: ModelName | None = None


WHOLE: Final = Part()


class AnswerIdentity:
    """`id`, `created` and `model` of an answer, which stay those of its first event whatever later workers send.

    Attributes:
        public_id, created, model: what the client sees in every event; None until an event has told it. echoed: the
        present worker's events carry the id of our request (see `expect`).
    """

    __slots__ = ("_checked", "_expected_id", "_model", "_request_id", "created", "echoed", "public_id")

    def __init__(self, part: Part = WHOLE) -> None:
        self.public_id = part.public_id
        self.created = part.created
        self._model = ModelName() if part.model is None else part.model
        self.echoed = self._checked = False
        self._expected_id = self._request_id = ""

    @property
    def model(self) -> str | None:
        """The model's name for the client."""
        return self._model.told

    def expect(self, upstream_id: str, *, checked: bool, request_id: str = "") -> None:
        """Say which request the next worker's events answer: the one that was sent with this X-Request-Id.

        Every try has an id of its own; clients see `request_id`, which all tries share, in its place.

        `checked`: this worker is known to put our id into its events. Another worker becomes known by the first event
        that has it. From then on every event must have it, in its parsed `id` or in the bytes of the template.
        """
        self._expected_id, self._checked, self.echoed = upstream_id, checked, False
        self._request_id = request_id or upstream_id

    def is_ours(self, event_id: object) -> bool:
        """Whether an event with the `id` that is `event_id` may be of this answer."""
        if not self._expected_id:
            return True
        echoed = answers(event_id, self._expected_id)
        if echoed:
            self.echoed = self._checked = True
        return echoed or not self._checked

    def put_into(self, event: dict[str, Any]) -> bool:
        """Give an event the answer's `id`, `created` and `model`; returns whether that has changed the event."""
        changed = False
        if self.public_id is None and isinstance(event_id := event.get("id"), str):
            self.public_id = str(shown_id(event_id, self._expected_id, self._request_id))
        if "id" in event and event["id"] != self.public_id:
            event["id"] = self.public_id
            changed = True
        if self.created is None and is_count(event.get("created")):
            self.created = event["created"]
        elif "created" in event and event["created"] != self.created:
            event["created"] = self.created
            changed = True
        named = self._model
        if named.told is None and isinstance(model := event.get("model"), str):
            named.told = model
        elif "model" in event and event["model"] != named.told:
            event["model"] = named.told
            changed = True
        return changed
