"""What a reload, or a takeover, may change in a running router.

What needs a restart: the listening sockets, whether they speak TLS, the connector and its callback address, and what a
`WorkerSpec` says of a worker that is in use.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Final

from balanceroute.build import predicts, worker_specs
from balanceroute.config import Config
from balanceroute.core.types import WorkerSpec
from balanceroute.errors import ConfigError
from balanceroute.proxy.workers.places import Places

_IN_YAML: Final = {"slots": "max_num_seqs"}  # fields of a `WorkerSpec` whose setting has another name


def check_fixed(old: Config, new: Config) -> None:
    """Check fixed settings. Raises: ConfigError: one has changed that needs a restart."""
    now = _fixed(new)
    if changed := [key for key, value in _fixed(old).items() if now[key] != value]:
        raise ConfigError(f"{', '.join(changed)}: cannot change while the router runs; restart it")


def _fixed(config: Config) -> dict[str, object]:
    """The settings that need a restart, by their paths."""
    sections = {"listen": config.listen, "layerwise": config.layerwise}
    values = {f"{name}.{key}": value for name, section in sections.items() for key, value in section}
    return {"connector": config.connector, **values, "lifecycle.pins_file": config.lifecycle.pins_file}


def check_workers(in_use: Iterable[WorkerSpec], old: Config, new: Config) -> None:
    """Check workers' names. Raises: ConfigError: `new` gives the id of a worker in use to another worker.

    Allowed: `new` repeats a worker of `old` that an operator has replaced by another one of that id, which stays.
    """
    wanted = _new_workers(old, new)
    for used in in_use:
        spec = wanted.get(used.id)
        if spec is not None and spec != used:
            changes = [
                f"{_IN_YAML.get(field.name, field.name)} from {before or repr(before)} to {now or repr(now)}"
                for field in fields(spec)
                if (before := getattr(used, field.name)) != (now := getattr(spec, field.name))
            ]
            raise ConfigError(
                f"worker {used.id}: {', '.join(changes)}: cannot change while it is in use; "
                "remove it first, or restart the router"
            )


def check_added(added: Iterable[WorkerSpec], old: Config, new: Config) -> None:
    """Check added workers. Raises: ConfigError: `new` names the server of one under another id.

    That server would get twice its share. `added` may contain workers of `old`.
    """
    named = {spec.id for spec in worker_specs(old)}
    brought = Places(_new_workers(old, new).values())
    for spec in added:
        name = brought.whose(spec) or spec.id
        if name != spec.id and spec.id not in named:
            raise ConfigError(
                f"worker {name}: is the server of worker {spec.id}, which was added at run time; give it that id, or "
                "remove that one first"
            )


def check_taken_over(in_use: Iterable[WorkerSpec], new: Config) -> None:
    """Check ids over a takeover. Raises: ConfigError: `new` moves one to the other tier, or to the server of another.

    Requests that the former relays still have would end, or count on the wrong server.
    """
    former = {spec.id: spec for spec in in_use}
    places = Places(former.values())
    for spec in worker_specs(new):
        known, here = former.get(spec.id), places.whose(spec)
        if known is None:
            continue
        moved = here is not None and Places((known,)).whose(spec) is None
        if moved or known.role is not spec.role:
            was = f"{here} is the worker" if moved else f"it is a {known.role} worker"
            raise ConfigError(
                f"worker {spec.id}: {was} at {spec.url} in the router that runs: cannot change with --take-over; give "
                "it a new id, or remove it there first"
            )


def _new_workers(old: Config, new: Config) -> dict[str, WorkerSpec]:
    """The workers of `new`, by id, that `old` does not have, or describes differently."""
    named = {spec.id: spec for spec in worker_specs(old)}
    return {spec.id: spec for spec in worker_specs(new) if spec != named.get(spec.id)}


def asks_another_predictor(old: Config, new: Config) -> bool:
    """Whether the predictor's settings have changed."""
    horizons = [config.routing.horizon_steps if predicts(config) else None for config in (old, new)]
    return horizons[0] != horizons[1] or old.predictor != new.predictor
