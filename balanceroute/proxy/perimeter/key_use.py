"""The use of a client key, as the processes of a router exchange it."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**40)]


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A process's use of a key: requests in flight; requests that began, and tokens, since its last report."""

    name: str
    in_flight: Count
    requests: Count
    tokens: Count
