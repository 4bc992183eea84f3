"""Which workers are at one place: a server that has two names would get twice its share.

A place is a server and a rank of it. Who names no rank leaves the choice to the server, so beside it is no room for
workers that name theirs.
"""

from collections.abc import Iterable

from balanceroute.config import place_of
from balanceroute.core.types import WorkerSpec


class Places:
    """The places of workers; a worker that came first keeps its place."""

    def __init__(self, workers: Iterable[WorkerSpec] = ()) -> None:
        self._ranks: dict[str, dict[int | None, str]] = {}  # the ids at each server
        for spec in workers:
            self.take(spec)

    def whose(self, spec: WorkerSpec) -> str | None:
        """The id of the worker that has the place of `spec`; None: it is free."""
        ranks = self._ranks.get(place_of(spec.url), {})
        if spec.dp_rank is None:
            return next(iter(ranks.values()), None)
        return ranks.get(spec.dp_rank, ranks.get(None))

    def take(self, spec: WorkerSpec) -> str:
        """Give a worker its place; returns the id of the worker that has it, which may be another one."""
        taken_by = self.whose(spec)
        if taken_by is None:
            self._ranks.setdefault(place_of(spec.url), {})[spec.dp_rank] = taken_by = spec.id
        return taken_by
