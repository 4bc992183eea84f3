"""What operators have changed, between one brain and the next."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from balanceroute.build import worker_specs
from balanceroute.config import validate
from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.errors import ConnectFailed
from balanceroute.proxy.app import health_monitor
from balanceroute.proxy.link.leadership import AnotherLeads
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.ops.steering import with_policy
from balanceroute.proxy.run_folder.changes import LOOK_S, Changes, KeptChanges, changes_of
from balanceroute.proxy.workers.circuit import CircuitState
from tests.unit.proxy.virtual_time import a_config, a_router, let_pass, script, with_virtual_time

LINEAGE = 7
NEW = WorkerSpec("new", Role.DECODE, "http://new:1", slots=4)


class ALead:
    """One that is lost when told so."""

    def __init__(self, epoch: int = 1, others: int = 0) -> None:
        self.epoch, self.others, self.leads = epoch, others, True

    def take(self) -> bool:
        return True

    def renew(self) -> bool:
        return self.leads

    def raise_epoch(self, epoch: int) -> bool:
        return False

    def resign(self) -> None:
        """Nobody hears."""

    def release(self) -> None:
        """Nobody hears."""


def kept_in(path: Path, lead: ALead | None = None, number: int = 0, lineage: int = LINEAGE) -> KeptChanges:
    return KeptChanges(path, lineage, lead or ALead(epoch=0), number)


def specs(services: Services) -> dict[str, WorkerSpec]:
    return {worker.id: worker.spec for worker in services.fleet}


@with_virtual_time
async def test_changes_are_the_differences_between_router_and_configuration() -> None:
    services = a_router()
    base = services.config
    assert changes_of(services, base, LINEAGE) == Changes(LINEAGE, workers=tuple(worker_specs(base)))
    services.fleet.add(NEW, 3)
    services.fleet.leave(services.fleet["d1"])
    services.fleet.drain(services.fleet["p0"])
    found = changes_of(services, base, LINEAGE)
    assert (found.added, found.removed, found.drained) == ((NEW,), (specs(other := a_router())["d1"],), ("p0",))
    found.apply(other)
    assert changes_of(other, base, LINEAGE) == found


@with_virtual_time
async def test_the_next_brain_keeps_a_serving_worker_that_is_being_restarted() -> None:
    services = a_router()
    services.fleet.set_healthy(services.fleet.add(NEW, 1), True)
    other = a_router(a_config(lifecycle={"join_attempts": 1}))
    changes_of(services, services.config, LINEAGE).apply(other)
    assert other.fleet["new"].state is WorkerState.UP, "what runs there goes on"
    script(other, "new", ConnectFailed("refused", worker="new", tier="decode"))
    monitor = health_monitor(other)
    for _ in range(9):
        await monitor.polling.once()
        other.fleet.sweep()
    assert other.fleet["new"].state is WorkerState.DOWN and not other.fleet["new"].leaving


@with_virtual_time
async def test_the_next_brain_sends_nothing_to_a_worker_that_was_down_until_it_answers() -> None:
    services, other = a_router(), a_router()
    for name in ("p0", "d1"):
        services.fleet.set_healthy(services.fleet[name], False)
    services.fleet.add(NEW, 1)  # it has never answered
    changes_of(services, services.config, LINEAGE).apply(other)
    without = {worker.id for worker in other.fleet if worker.state is not WorkerState.UP}
    assert without == {"p0", "d1", "new"} == set(changes_of(other, other.config, LINEAGE).down)
    assert not any(worker.out for worker in other.fleet), "requests stay there until it is known whether it is frozen"
    for name in ("d1", "new"):
        script(other, name, ConnectFailed("refused", worker=name, tier="decode"))
    await health_monitor(other).polling.once()
    assert {worker.id for worker in other.fleet if worker.state is WorkerState.DOWN} == {"d1", "new"}


@with_virtual_time
async def test_the_next_brain_takes_a_worker_that_was_up_for_down_after_as_many_failed_checks() -> None:
    services, other = a_router(), a_router()
    changes_of(services, services.config, LINEAGE).apply(other)
    script(other, "d1", ConnectFailed("refused", worker="d1", tier="decode"))
    monitor = health_monitor(other)
    for _ in range(other.config.health.failure_threshold):
        assert other.fleet["d1"].state is WorkerState.UP
        await monitor.polling.once()
    assert other.fleet["d1"].state is WorkerState.DOWN


@with_virtual_time
async def test_the_next_brain_takes_a_doubted_worker_for_down_after_as_many_failed_checks() -> None:
    """It was out after one, and all requests that ran there were prefilled again."""
    services, other = a_router(), a_router()
    await health_monitor(services).polling.once()
    services.fleet.await_answer(services.fleet["d1"])
    changes_of(services, services.config, LINEAGE).apply(other)
    assert other.fleet["d1"].state is WorkerState.DRAINING, "it gets nothing before it answers"
    script(other, "d1", ConnectFailed("refused", worker="d1", tier="decode"))
    monitor = health_monitor(other)
    for _ in range(other.config.health.failure_threshold):
        assert not other.fleet["d1"].out
        await monitor.polling.once()
    assert other.fleet["d1"].out


@with_virtual_time
async def test_the_next_brain_sends_nothing_to_a_worker_that_no_brain_has_known_until_it_answers() -> None:
    services, other = a_router(a_config(1, 2)), a_router(a_config(1, 3))
    changes_of(services, services.config, LINEAGE).apply(other)
    assert {worker.id for worker in other.fleet if worker.state is not WorkerState.UP} == {"d2"}
    await health_monitor(other).polling.once()
    assert other.fleet["d2"].state is WorkerState.UP


@with_virtual_time
async def test_the_next_brain_knows_a_server_that_its_configuration_describes_otherwise() -> None:
    services = a_router()
    services.fleet["d1"].circuit.open(services.loop.time(), "it generated no tokens")
    services.fleet.set_healthy(services.fleet["d2"], False)
    found = changes_of(services, services.config, LINEAGE)
    urls = [worker.spec.url for worker in services.fleet.of(Role.DECODE)]
    other = a_router(a_config(decode={"workers": [{"url": url, "id": f"new-{n}"} for n, url in enumerate(urls)]}))
    found.apply(other)
    without = {worker.id for worker in other.fleet if worker.state is not WorkerState.UP and not worker.leaving}
    assert without == {"new-2"}, "the others have served until now"
    assert other.fleet["new-1"].circuit.state is CircuitState.HALF_OPEN


@with_virtual_time
async def test_the_next_brain_keeps_leaving_workers_whatever_its_configuration_lists() -> None:
    services = a_router()
    services.fleet.add(NEW, 3)
    for leaving in ("new", "d1"):
        services.fleet[leaving].take()  # it has something to finish
        services.fleet.leave(services.fleet[leaving])
    found = changes_of(services, services.config, LINEAGE)
    smaller = a_router(a_config(1, 2))  # without d2
    found.apply(smaller)
    assert specs(smaller) == specs(services)
    assert {worker.id for worker in smaller.fleet if worker.leaving} == {"new", "d1", "d2"}


@with_virtual_time
async def test_a_drained_server_stays_drained_in_the_next_brain_under_another_name() -> None:
    services = a_router()
    services.fleet.drain(services.fleet["d1"])
    d0, d1 = (services.fleet[name].spec.url for name in ("d0", "d1"))
    found = changes_of(services, services.config, LINEAGE)
    renamed = a_router(a_config(decode={"workers": [{"url": d0, "id": "new-0"}, {"url": d1, "id": "new-1"}]}))
    found.apply(renamed)
    assert {worker.id for worker in renamed.fleet if worker.drained} == {"new-1"}


@with_virtual_time
async def test_a_server_is_not_drained_because_it_has_the_name_of_a_drained_one_now() -> None:
    services = a_router()
    services.fleet.drain(services.fleet["d1"])
    d0, d1 = (services.fleet[name].spec.url for name in ("d0", "d1"))
    found = changes_of(services, services.config, LINEAGE)
    workers = [{"url": d0, "id": "d1"}, {"url": d1, "id": "new"}]
    renamed = a_router(a_config(decode={"workers": workers}))
    found.apply(renamed)
    assert {worker.id for worker in renamed.fleet if worker.drained} == {"new"}
    moved = a_router(a_config(decode={"workers": [{"url": d0, "id": "d0"}, {"url": "http://other:1", "id": "d1"}]}))
    found.apply(moved)
    assert {worker.id for worker in moved.fleet if worker.drained} == {"d1"}


@with_virtual_time
async def test_a_server_that_was_drained_and_removed_is_not_drained_under_another_name() -> None:
    services = a_router()
    services.fleet.drain(services.fleet["d1"])
    services.fleet.leave(services.fleet["d1"])
    workers = [{"url": services.fleet[name].spec.url, "id": f"new-{name}"} for name in ("d0", "d1")]
    renamed = a_router(a_config(decode={"workers": workers}))
    changes_of(services, services.config, LINEAGE).apply(renamed)
    assert not renamed.fleet["new-d1"].drained


@with_virtual_time
async def test_an_added_worker_is_as_a_new_configuration_describes_it_where_that_names_it() -> None:
    smaller, config = a_router(a_config(1, 1)), a_config(1, 2)
    d1 = next(spec for spec in worker_specs(config) if spec.id == "d1")
    smaller.fleet.add(replace(d1, slots=d1.slots + 1), 3)
    found = changes_of(smaller, smaller.config, LINEAGE)
    taken_over = a_router(config)
    found.apply(taken_over)
    assert specs(taken_over)["d1"] == d1
    assert changes_of(taken_over, config, LINEAGE).added == ()


@with_virtual_time
async def test_an_added_worker_that_replaces_a_configured_one_stays_until_its_description_differs() -> None:
    services = a_router()
    d1 = specs(services)["d1"]
    services.fleet.leave(services.fleet["d1"])
    services.fleet.sweep()
    services.fleet.add(by_hand := replace(d1, slots=d1.slots + 1), 3)
    found = changes_of(services, services.config, LINEAGE)
    next_brain = a_router()
    found.apply(next_brain)
    assert specs(next_brain)["d1"] == by_hand
    assert changes_of(next_brain, services.config, LINEAGE) == found
    other = a_router(a_config(decode={"max_num_seqs": d1.slots + 2}))
    found.apply(other)
    assert specs(other)["d1"].slots == d1.slots + 2


@with_virtual_time
async def test_an_added_server_that_a_new_configuration_renames_leaves_under_its_added_name() -> None:
    services = a_router(a_config(1, 1))
    config = a_config(1, 2)
    d1 = next(spec for spec in worker_specs(config) if spec.id == "d1")
    added = replace(d1, id="hand")
    services.fleet.add(added, 3)
    found = changes_of(services, services.config, LINEAGE)
    taken_over = a_router(config)
    found.apply(taken_over)
    assert specs(taken_over) == {spec.id: spec for spec in (*worker_specs(config), added)}
    assert [worker.id for worker in taken_over.fleet if worker.leaving] == ["hand"]


@with_virtual_time
async def test_no_worker_is_removed_before_requests_held_by_others_are_known() -> None:
    services = a_router()
    services.ledger.adopts = True
    services.fleet.leave(services.fleet["d1"])
    assert services.fleet.sweep() == []
    services.ledger.adopts = False
    assert services.fleet.sweep() == ["d1"]


@with_virtual_time
async def test_workers_in_use_include_leaving_and_added_ones() -> None:
    services = a_router()
    base = services.config
    known = specs(services)
    assert Changes(LINEAGE).in_use(base) == list(known.values())
    larger = replace(known["d2"], slots=known["d2"].slots + 1)
    services.fleet.leave(services.fleet["d2"])
    services.fleet.sweep()
    services.fleet.add(larger, 3)
    services.fleet.add(NEW, 3)
    services.fleet["d1"].take()  # it has something to finish
    services.fleet.leave(services.fleet["d1"])
    services.fleet.leave(services.fleet["d0"])
    services.fleet.sweep()
    found = changes_of(services, base, LINEAGE)
    assert {spec.id: spec for spec in found.in_use(base)} == specs(services)
    other = a_router()
    found.apply(other)
    assert other.fleet["d2"].spec == larger and other.fleet["d1"].leaving


def test_a_saved_policy_that_is_invalid_falls_back_to_the_configured_one() -> None:
    config = a_config()
    assert Changes(1, policy="random").config(config).routing.policy == "random"
    assert Changes(1, policy="no such policy").config(config) is config


@with_virtual_time
async def test_an_own_policy_keeps_its_options_although_the_configuration_names_it_no_longer(tmp_path: Path) -> None:
    own, path, services = "tests.unit.proxy.ops.test_steering:Patient", tmp_path / "changes", a_router()
    base = services.config
    services.config = with_policy(base, own, {"patience_s": 5})
    kept_in(path).keep(services, base)
    again = kept_in(path).last.config(base)
    assert (again.routing.policy, again.routing.options) == (own, {"patience_s": 5})


@with_virtual_time
async def test_an_unwritable_changes_file_is_logged_once_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "folder" / "changes"
    services = a_router()
    base = services.config
    watching = asyncio.get_running_loop().create_task(kept_in(path).watch(services, lambda: base))
    services.fleet.drain(services.fleet["p0"])
    await let_pass(4 * LOOK_S)
    path.parent.mkdir()
    await let_pass(4 * LOOK_S)
    assert kept_in(path).last.drained == ("p0",)
    watching.cancel()
    messages = [record.getMessage() for record in caplog.records if "operators' changes" in record.getMessage()]
    assert messages == ["operators' changes cannot be saved for the next brain", "operators' changes are saved again"]


@with_virtual_time
async def test_a_removed_changes_file_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "changes"
    services = a_router()
    base = services.config
    watching = asyncio.get_running_loop().create_task(kept_in(path).watch(services, lambda: base))
    services.fleet.drain(services.fleet["p0"])
    await let_pass(4 * LOOK_S)
    path.unlink()
    await let_pass(4 * LOOK_S)
    assert kept_in(path).last.drained == ("p0",)
    watching.cancel()


@with_virtual_time
async def test_a_change_under_way_is_not_written_by_half(tmp_path: Path) -> None:
    path = tmp_path / "changes"
    services = a_router()
    base, kept = services.config, kept_in(path)
    watching = asyncio.get_running_loop().create_task(kept.watch(services, lambda: base))
    await let_pass(4 * LOOK_S)
    async with services.changing_workers:
        services.fleet.drain(services.fleet["p0"])
        await let_pass(4 * LOOK_S)
        assert kept_in(path).last.drained == ()
        services.fleet.drain(services.fleet["d0"])
    await let_pass(4 * LOOK_S)
    assert set(kept_in(path).last.drained) == {"p0", "d0"}
    watching.cancel()


@with_virtual_time
async def test_a_former_leader_writes_nothing_and_an_operator_gets_an_error(tmp_path: Path) -> None:
    path, lead = tmp_path / "changes", ALead()
    services = a_router()
    kept = kept_in(path, lead)
    kept.keep(services, services.config)
    lead.leads, before = False, path.read_bytes()
    kept.keep(services, services.config)  # nothing has changed
    services.fleet.drain(services.fleet["p0"])
    with pytest.raises(AnotherLeads):
        kept.keep(services, services.config)
    watching = asyncio.get_running_loop().create_task(kept.watch(services, lambda: services.config))
    await let_pass(4 * LOOK_S)
    assert path.read_bytes() == before and not watching.done()
    watching.cancel()


@with_virtual_time
async def test_a_file_is_read_in_the_lineage_that_wrote_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "changes"
    services = a_router()
    services.fleet.drain(services.fleet["p0"])
    kept = kept_in(path)
    kept.keep(services, services.config)
    assert kept.last == changes_of(services, services.config, LINEAGE)
    assert kept_in(path).last.drained == ("p0",)
    assert kept_in(path, lineage=LINEAGE + 1).last == Changes(LINEAGE + 1)
    path.write_text("nonsense")
    assert kept_in(path).last == Changes(LINEAGE) and "cannot be read" in caplog.text
    path.unlink()
    path.mkdir()
    assert kept_in(path).last == Changes(LINEAGE)


@pytest.mark.parametrize("others", [0, 3, 4, 5])
@with_virtual_time
async def test_operators_changes_are_forgotten_when_another_router_has_led_since(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, others: int
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "changes"
    services = a_router()
    base = services.config
    services.fleet.add(NEW, 3)
    services.fleet.leave(services.fleet["d1"])
    services.fleet.sweep()
    services.fleet.drain(services.fleet["p0"])
    services.config = with_policy(base, "random")
    kept_in(path, ALead(epoch=4)).keep(services, base)
    led, again = kept_in(path, ALead(epoch=6, others=others)), a_router()
    led.last.apply(again)
    forgets = others > 4
    assert led.last.config(base).routing.policy == (base.routing.policy if forgets else "random")
    assert {worker.id for worker in again.fleet if worker.drained} == (set() if forgets else {"p0"})
    staying = {worker.id for worker in again.fleet if not worker.leaving}
    assert staying - set(specs(a_router())) == (set() if forgets else {"new"})
    assert ("d1" in staying) is forgets
    without = {worker.id for worker in again.fleet if worker.state is not WorkerState.UP and worker.id in staying}
    assert without == (staying if forgets else {"new", "p0"}), "any may have gone down since"
    assert "new" in again.fleet, "streams of the time when it led may be there"
    assert ("another router has led since" in caplog.text) is forgets
    led.keep(again, base)
    assert kept_in(path, ALead(epoch=7, others=others)).last.drained == led.last.drained


@pytest.mark.parametrize(
    "damage",
    [
        (b'"random"', b'"r\xffndom"'),
        (b"http://new:1", b"hutp://new:1"),
        (b'"slots":4', b'"slots":0'),
        (b'"slowdown":1.0', b'"slowdown":0'),
        (b'"policy"', b'"more":' + b"[" * 100_000 + b',"policy"'),
    ],
    ids=["no UTF-8", "no URL", "no slots", "no speed", "no end of brackets"],
)
def test_a_damaged_changes_file_does_not_prevent_leading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: tuple[bytes, bytes]
) -> None:
    added = (NEW, replace(NEW, id="small", slots=1))
    whole = msgspec.json.encode(Changes(LINEAGE, added, policy="random", workers=added))
    path = tmp_path / "changes"
    path.write_bytes(whole)
    assert kept_in(path).last.added == added
    path.write_bytes(whole.replace(*damage))
    assert kept_in(path).last == Changes(LINEAGE) and "cannot be read" in caplog.text


@with_virtual_time
async def test_a_reload_without_a_brain_restores_changed_workers_and_the_configured_policy(
    tmp_path: Path,
) -> None:
    path, services = tmp_path / "changes", a_router()
    for name in ("d1", "d2"):
        services.fleet.leave(services.fleet[name])
        services.fleet.sweep()
    under = with_policy(services.config, "random")
    base, services.config = services.config, under
    kept = kept_in(path, number=3)
    kept.keep(services, base)
    tree = base.model_dump(exclude_unset=True)
    tree["decode"]["workers"][1]["max_num_seqs"] = 99
    new = validate(tree)
    for number, config, back, policy in (
        (3, base, set(), "random"),
        (4, new, {"d1"}, None),
        (1, new, {"d1"}, "random"),
    ):
        led, next_one = kept_in(path, number=number), a_router(config)
        assert led.last.policy == policy, "a router that takes over counts from 1, and keeps it"
        led.last.apply(next_one)
        assert {worker.id for worker in next_one.fleet if not worker.leaving} & {"d1", "d2"} == back
    led = kept_in(path, number=4)
    led.keep(services, base)
    assert kept_in(path, number=4).last.policy == "random", "chosen since that reload"


@with_virtual_time
async def test_under_the_next_brain_a_worker_that_generated_no_tokens_gets_one_request_before_others() -> None:
    services, other = a_router(), a_router()
    for name, state in (("d1", CircuitState.OPEN), ("d2", CircuitState.TRIAL)):
        circuit = services.fleet[name].circuit
        circuit.open(services.loop.time(), "it generated no tokens")
        if state is CircuitState.TRIAL:
            circuit.reachable()
            circuit.used()
        assert circuit.state is state
    services.fleet["d0"].circuit.busy(services.loop.time())  # it only rests
    changes_of(services, services.config, LINEAGE).apply(other)
    await health_monitor(other).polling.once()
    found = {worker.id: worker.circuit.state for worker in other.fleet if worker.id.startswith("d")}
    assert found == {"d0": CircuitState.CLOSED, "d1": CircuitState.HALF_OPEN, "d2": CircuitState.HALF_OPEN}
    assert all(worker.state is WorkerState.UP for worker in other.fleet)
    other.fleet["d1"].circuit.used()
    assert other.fleet["d1"].state is WorkerState.DRAINING
