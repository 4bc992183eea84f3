"""What operators do to the workers and the configuration, in any order, while requests are in every phase.

A simple model says which workers there are and which of them may get something new. What is refused changes nothing.
The next brain, told by `Changes`, has the same workers.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from starlette.applications import Starlette

from balanceroute.build import worker_specs
from balanceroute.config import Config
from balanceroute.core.types import Outcome, Phase, RequestSpec, Role, WorkerSpec
from balanceroute.errors import ConfigError
from balanceroute.proxy.admission.tickets import Ticket
from balanceroute.proxy.ops.admin import Admin
from balanceroute.proxy.ops.guard import ERROR_HANDLERS
from balanceroute.proxy.ops.steering import with_policy
from balanceroute.proxy.run_folder.changes import changes_of
from tests.unit.proxy.reloading import apply
from tests.unit.proxy.virtual_time import VirtualTimeLoop, a_config, a_router

LINEAGE = 7
SERVERS = ("a", "b", "c", "d")
POLICIES = st.sampled_from(["br_0", "level_fit", "random"])
ROLES = st.sampled_from([Role.PREFILL, Role.DECODE])
PICKS = st.integers(0, 99)


def entries(servers: set[str], slots: int) -> list[dict[str, Any]]:
    """Workers of a file, those of the last server with other slots."""
    return [{"url": f"http://{name}:1", "id": name} for name in sorted(servers)] + [
        {"url": "http://late:1", "id": "late", "max_num_seqs": slots}
    ]


class OperatorsMachine(RuleBasedStateMachine):
    """One router. `here` are the workers that stay, by id, `drained` those of them that take nothing new."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.tickets: list[Ticket] = []
        self.count = 0

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """On the router's loop."""
        return self.runner.run(work)

    def teardown(self) -> None:
        self.runner.close()

    @initialize()
    def begin(self) -> None:
        async def made() -> None:
            self.file = a_config(prefillers=2)
            self.services = a_router(self.file)

        self.do(made())
        self.app = Starlette(routes=Admin(lambda: self.services).routes(), exception_handlers=ERROR_HANDLERS)
        self.named = {spec.id: spec for spec in worker_specs(self.file)}  # by the file
        self.here, self.drained = dict(self.named), set[str]()

    # -- operators

    def picture(self) -> object:
        """All that what is refused must leave as it is."""
        services = self.services
        workers = [(worker.spec, worker.drained, worker.leaving, worker.state) for worker in services.fleet]
        return services.config, services.perimeter, services.ledger.bounds, services.ledger.scheduler.policy, workers

    def ask(self, what: str, role: Role, instance: dict[str, object]) -> bool:
        """Whether it is done."""

        async def asked() -> int:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://router") as client:
                body = {"type": role.value, "instances": instance}
                return (await client.post(f"/instances/{what}", json=body)).status_code

        before, status = self.picture(), self.do(asked())
        assert status in (200, 400, 404)
        if status != 200:
            assert self.picture() == before
        return bool(status == 200)

    @rule(role=ROLES, server=st.sampled_from(SERVERS), other_name=st.booleans(), slots=st.sampled_from([4, 64]))
    def add(self, role: Role, server: str, other_name: bool, slots: int) -> None:
        name = f"{server}-{role.value}" if other_name else server
        instance: dict[str, object] = {"url": f"{server}:1", "id": name}
        if role is Role.DECODE:
            instance["max_num_seqs"] = slots
        spec = WorkerSpec(name, role, f"http://{server}:1", slots=slots if role is Role.DECODE else 64)
        leaving = {worker.id: worker.spec for worker in self.services.fleet if worker.leaving}
        same = name in leaving and (leaving[name].role, leaving[name].slots) == (spec.role, spec.slots)
        is_free = name not in self.here and (name not in leaving or same)
        alone = all(each.url != spec.url for each in self.here.values())
        assert self.ask("add", role, instance) == (is_free and alone)
        if is_free and alone:
            found = self.services.fleet[name].spec
            assert (found.role, found.url) == (role, spec.url)
            assert role is Role.PREFILL or found.slots == slots
            self.here[name] = found
            self.drained.discard(name)

    @rule(what=st.sampled_from(["remove", "drain", "undrain"]), pick=PICKS)
    def change(self, what: str, pick: int) -> None:
        workers = list(self.services.fleet)
        if not workers:
            return
        worker = workers[pick % len(workers)]
        goes = what != "undrain" or worker.id in self.here
        assert self.ask(what, worker.spec.role, {"url": worker.spec.url, "id": worker.id}) == goes
        if worker.id not in self.here:
            return
        if what == "remove":
            del self.here[worker.id]
        if what == "drain":
            self.drained.add(worker.id)
        else:
            self.drained.discard(worker.id)

    @rule(
        prefillers=st.sets(st.sampled_from(["p0", "p1", "a"]), min_size=1),
        decoders=st.sets(st.sampled_from(["d0", "d1", "d2", "b", "c"])),
        slots=st.sampled_from([4, 64]),
        policy=POLICIES,
        restart=st.booleans(),
    )
    def reload(self, prefillers: set[str], decoders: set[str], slots: int, policy: str, restart: bool) -> None:
        named = [{"url": f"http://{name}:1", "id": name} for name in sorted(prefillers)]
        new = a_config(
            prefill={"workers": named}, decode={"workers": entries(decoders, slots)}, routing={"policy": policy}
        )
        if restart:
            new = new.model_copy(update={"connector": "nixl"})
        if not self.apply(new):
            return
        assert not restart
        wanted = {spec.id: spec for spec in worker_specs(new)}
        for name in [name for name in self.here if name in self.named and name not in wanted]:
            del self.here[name]
        for name, spec in wanted.items():
            if name not in self.here and spec != self.named.get(name):
                self.here[name] = spec
                self.drained.discard(name)
        self.drained &= self.here.keys()
        self.named, self.file = wanted, new

    def apply(self, new: Config) -> bool:
        """Whether it is taken."""

        async def applied() -> None:
            await apply(self.services, new)

        before = self.picture()
        try:
            self.do(applied())
        except ConfigError:
            assert self.picture() == before
            return False
        return True

    @rule(policy=POLICIES)
    def steer(self, policy: str) -> None:
        assert self.apply(with_policy(self.services.config, policy))

    @rule()
    def hand_over(self) -> None:
        """The next brain of the file has the same workers, the same of them drained and on their way out."""

        async def inherited() -> None:
            changes = changes_of(self.services, self.file, LINEAGE)
            successor = a_router(changes.config(self.file))
            changes.apply(successor)
            for router in (self.services, successor):
                staying = {worker.id: (worker.spec, worker.drained) for worker in router.fleet if not worker.leaving}
                assert staying == {name: (spec, name in self.drained) for name, spec in self.here.items()}
            leaving = {worker.id: worker.spec for worker in self.services.fleet if worker.leaving}
            assert leaving.items() <= {worker.id: worker.spec for worker in successor.fleet if worker.leaving}.items()
            assert changes_of(successor, self.file, LINEAGE).policy == changes.policy

        self.do(inherited())

    # -- workers and requests

    @rule()
    def answer_checks(self) -> None:
        async def answered() -> None:
            for worker in self.services.fleet:
                self.services.fleet.set_healthy(worker, True)

        self.do(answered())

    @rule()
    def sweep(self) -> None:
        async def swept() -> None:
            self.services.fleet.sweep()
            ledger = self.services.ledger
            for worker in self.services.fleet:
                if worker.leaving:
                    decodes = worker.spec.role is Role.DECODE
                    assert ledger.decoder(worker.id).active if decodes else ledger.prefiller(worker.id).held

        self.do(swept())

    def decide(self) -> None:
        """What is chosen may get something new."""
        before = {ticket.id: (ticket.prefiller_id, ticket.decoder) for ticket in self.tickets}
        self.services.ledger.dispatch()
        self.services.ledger.admit()
        for ticket in self.tickets:
            for chosen in {ticket.prefiller_id, ticket.decoder} - {"", *before[ticket.id]}:
                assert chosen in self.here and chosen not in self.drained
        self.tickets = [ticket for ticket in self.tickets if not ticket.left]

    @rule(tokens=st.integers(1, 300), more=st.integers(0, 3), is_prefilled=st.booleans())
    def submit(self, tokens: int, more: int, is_prefilled: bool) -> None:
        async def submitted() -> None:
            for _ in range(1 + more):
                self.count += 1
                ticket = self.services.tickets.submit(RequestSpec(f"r{self.count}", tokens))
                assert not ticket.prefiller_id or ticket.prefiller_id in self.here.keys() - self.drained
                self.tickets += [] if ticket.left else [ticket]
            self.decide()
            for ticket in self.tickets if is_prefilled else ():
                if ticket.phase is Phase.PREFILLING:
                    ticket.prefilled(200)
            self.decide()

        self.do(submitted())

    def some(self, *phases: Phase) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.phase in phases]

    @precondition(lambda self: self.some(Phase.PREFILLING))
    @rule(pick=PICKS, fails=st.booleans())
    def prefill(self, pick: int, fails: bool) -> None:
        event = Ticket.prefill_failed if fails else lambda ticket: ticket.prefilled(200)
        self.tell(pick, self.some(Phase.PREFILLING), event)

    @precondition(lambda self: self.some(Phase.DECODING))
    @rule(pick=PICKS, back=st.booleans())
    def decode(self, pick: int, back: bool) -> None:
        def event(ticket: Ticket) -> None:
            if back and not ticket.reported_tokens + ticket.unreported_tokens:
                ticket.put_back()
            else:
                ticket.progress(3)

        self.tell(pick, self.some(Phase.DECODING), event)

    @precondition(lambda self: self.some(Phase.DECODING))
    @rule(pick=PICKS)
    def recompute(self, pick: int) -> None:
        self.tell(pick, self.some(Phase.DECODING), Ticket.requeue)

    @precondition(lambda self: self.tickets)
    @rule(pick=PICKS)
    def finish(self, pick: int) -> None:
        self.tell(pick, self.tickets, lambda ticket: ticket.finish(Outcome.CANCELLED))

    def tell(self, pick: int, tickets: list[Ticket], event: Any) -> None:
        """Something happens to one of these requests, and decisions follow."""

        async def run() -> None:
            event(tickets[pick % len(tickets)])
            self.decide()

        self.do(run())

    # -- what always holds

    @invariant()
    def is_as_the_model_says(self) -> None:
        services = self.services
        services.ledger.settle()
        services.ledger.scheduler.snapshot.check_invariants()
        staying = {worker.id: worker.spec for worker in services.fleet if not worker.leaving}
        assert staying == self.here
        assert {worker.id for worker in services.fleet if worker.drained and not worker.leaving} == self.drained
        view = services.ledger.view()
        known = {each.id: each.state for each in view.prefillers} | {each.id: each.state for each in view.decoders}
        assert known == {worker.id: worker.state for worker in services.fleet}


TestOperators = pytest.mark.slow(OperatorsMachine.TestCase)
TestOperators.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
