"""Finds workers with the same server and rank: a server with two names would get twice its share.

A place is a server and a rank. A worker without a rank stands for the whole server, so no worker with a rank may be
beside it.
"""

from collections.abc import Iterable

from balanceroute.config import place_of
from balanceroute.core.types import WorkerSpec


class Places:
    """The places of workers; the first worker keeps a place."""

    def __init__(self, workers: Iterable[WorkerSpec]) -> None:
        self._ranks: dict[str, dict[int | None, str]] = {}  # the ids at each server
        for spec in workers:
            self.take(spec)

    def whose(self, spec: WorkerSpec) -> str | None:
        """The id of the worker at the place of `spec`; None: it is free."""
        ranks = self._ranks.get(place_of(spec.url), {})
        if spec.dp_rank is None:
            return next(iter(ranks.values()), None)
        return ranks.get(spec.dp_rank, ranks.get(None))

    def take(self, spec: WorkerSpec) -> str:
        """Give a worker its place; returns the id of the worker there, which may be another one."""
        taken_by = self.whose(spec)
        if taken_by is None:
            self._ranks.setdefault(place_of(spec.url), {})[spec.dp_rank] = taken_by = spec.id
        return taken_by
