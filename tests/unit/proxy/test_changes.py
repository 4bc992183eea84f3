"""What operators have changed, between one brain and the next."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from balanceroute.build import worker_specs
from balanceroute.core.types import Role, WorkerSpec
from balanceroute.proxy.changes import LOOK_S, Changes, KeptChanges, changes_of
from tests.unit.proxy.virtual_time import a_config, a_router, in_virtual_time, let_pass

LINEAGE = 7
NEW = WorkerSpec("new", Role.DECODE, "http://new:1", slots=4)


def test_changes_are_what_a_router_has_beyond_its_configuration() -> None:
    async def test() -> None:
        services = a_router()
        base = services.config
        assert changes_of(services, base, LINEAGE) == Changes(LINEAGE)
        services.fleet.add(NEW, 3)
        services.fleet.leave(services.fleet["d1"])
        services.fleet.drain(services.fleet["p0"])
        found = changes_of(services, base, LINEAGE)
        assert (found.added, found.removed, found.drained) == ((NEW,), ("d1",), ("p0",))
        other = a_router()
        found.apply(other)
        assert changes_of(other, base, LINEAGE) == found

    in_virtual_time(test)


def test_which_workers_are_in_use_is_known_from_changes_those_as_well_that_leave_or_were_added_anew() -> None:
    async def test() -> None:
        services = a_router()
        base = services.config
        specs = {spec.id: spec for spec in worker_specs(base)}
        assert Changes(LINEAGE).in_use(base) == list(specs.values())
        larger = replace(specs["d2"], slots=specs["d2"].slots + 1)
        services.fleet.leave(services.fleet["d2"])
        services.fleet.sweep()
        services.fleet.add(larger, 3)
        services.fleet.add(NEW, 3)
        services.fleet["d1"].take()  # it has something to finish
        services.fleet.leave(services.fleet["d1"])
        services.fleet.leave(services.fleet["d0"])
        services.fleet.sweep()
        found = changes_of(services, base, LINEAGE)
        assert {spec.id: spec for spec in found.in_use(base)} == {w.id: w.spec for w in services.fleet}

    in_virtual_time(test)


def test_a_policy_that_no_longer_fits_is_the_configurations_again() -> None:
    config = a_config()
    assert Changes(1, policy="random").config(config).routing.policy == "random"
    assert Changes(1, policy="no such policy").config(config) is config


def test_a_file_that_could_not_be_written_for_a_while_is_told_once_and_written_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "folder" / "changes"

    async def test() -> None:
        services = a_router()
        base = services.config
        watching = asyncio.get_running_loop().create_task(KeptChanges(path, LINEAGE).watch(services, lambda: base))
        services.fleet.drain(services.fleet["p0"])
        await let_pass(4 * LOOK_S)
        path.parent.mkdir()
        await let_pass(4 * LOOK_S)
        assert KeptChanges(path, LINEAGE).last.drained == ("p0",)
        watching.cancel()

    in_virtual_time(test)
    told = [record.getMessage() for record in caplog.records if "operators change" in record.getMessage()]
    assert told == ["what operators change is not kept for another brain", "what operators change is kept again"]


def test_a_file_is_read_under_the_parent_that_wrote_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "changes"
    changes = Changes(LINEAGE, added=(NEW,), drained=("p0",), policy="random")
    KeptChanges(path, LINEAGE).keep(changes)
    assert KeptChanges(path, LINEAGE).last == changes
    KeptChanges(path, LINEAGE).keep(Changes(LINEAGE + 1, removed=("d0",)))
    assert KeptChanges(path, LINEAGE).last == Changes(LINEAGE)
    path.write_text("nonsense")
    assert KeptChanges(path, LINEAGE).last == Changes(LINEAGE) and "can't be read" in caplog.text
