"""The use of a client key, as the processes of a router exchange it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A process's use of a key: requests in flight; requests that began, and tokens, since its last report."""

    name: str
    in_flight: int
    requests: int
    tokens: int
