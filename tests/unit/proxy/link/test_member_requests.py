"""Which member holds which request: what it may claim when it joins, and what is free when it is gone."""

from collections.abc import Iterator

import pytest

from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.types import Outcome, Phase, RequestSpec, Standing
from balanceroute.proxy.link.messages import Held, Requeue, Submit, Welcome
from tests.unit.proxy.link.brains import RawRelay, Stage, on, stream, with_stage
from tests.waiting import until


@with_stage
async def test_a_request_that_another_relay_holds_is_void(stage: Stage) -> None:
    brain = await stage.brain()
    one, two = await RawRelay().connect(stage), await RawRelay().connect(stage)
    one.hello(stream(1, "a"), relay="one")
    await until(lambda: brain.active == ["a"])
    two.hello(stream(5, "a"), stream(6, "b"), relay="two")
    await until(lambda: any(isinstance(message, Welcome) for message in two.received))
    assert next(message.void for message in two.received if isinstance(message, Welcome)) == (5,)
    assert brain.active == ["a", "b"]


@with_stage
async def test_invalid_tickets_are_void(stage: Stage) -> None:
    brain, relay = await stage.brain(), await RawRelay().connect(stage)
    gone = Held(1, 1, Standing(RequestSpec("gone", 10), Phase.GONE, 10))
    relay.hello(gone, stream(2, "a"), stream(2, "b"))
    await until(lambda: bool(relay.received))
    assert next(message.void for message in relay.received if isinstance(message, Welcome)) == (1, 2)
    relay.frames.abort("its process is killed")
    await until(lambda: not brain.hub.members and not brain.scheduler.snapshot.requests)


def test_a_relay_rejoins_although_a_request_of_its_former_membership_is_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(stage: Stage) -> None:
        brain = await stage.brain()
        before, anew = await RawRelay().connect(stage), await RawRelay().connect(stage)
        before.hello(stream(1, "a"), stream(2, "b"))
        await until(lambda: brain.active == ["a", "b"])
        brain.scheduler.finish("a", Outcome.FAILED, brain.ledger.now())
        anew.hello(stream(3, "c"))
        await until(lambda: brain.active == ["c"])
        anew.frames.abort("its process is killed")
        await until(lambda: not brain.hub.members and not brain.active)
        assert brain.bugs == ["hub"]

    on(test)
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert error.message == "internal error" and error.__dict__["request"] == "a"


class FailsAtPatience(AdmissionPolicy):
    name = "fails"

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        yield from ()

    def patience_s(self, prompt_tokens: int, snapshot: ClusterSnapshot) -> float:
        raise RuntimeError("a bug of a user's own policy")


@with_stage
async def test_a_request_that_the_brain_fails_to_take_over_is_not_left_behind(stage: Stage) -> None:
    brain, relay = await stage.brain(), await RawRelay().connect(stage)
    brain.scheduler.policy = FailsAtPatience()
    relay.hello(Held(1, 1, Standing(RequestSpec("a", 10), Phase.POOLED, 10, prefiller="p0")))
    await until(lambda: not relay.frames.open)
    await until(lambda: not brain.hub.members)
    assert not brain.scheduler.snapshot.requests and not brain.scheduler.snapshot.prefillers[0].pinned
    assert brain.bugs == ["hub"]


@with_stage
async def test_a_call_that_crossed_a_refusal_is_dropped(stage: Stage) -> None:
    brain = await stage.brain()
    relay = await RawRelay().connect(stage)
    relay.hello()
    relay.frames.send(Requeue(17, 0))
    relay.frames.send(Submit(18, RequestSpec("a", 10)))
    await until(lambda: "a" in brain.scheduler.snapshot.requests)
    assert relay.frames.open
