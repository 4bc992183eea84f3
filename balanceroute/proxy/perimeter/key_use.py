"""What the processes of one router tell each other of a client key."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyUse:
    """What one process has of a key: requests in flight, and those that began, with tokens, since it said so last."""

    name: str
    in_flight: int
    requests: int
    tokens: int
