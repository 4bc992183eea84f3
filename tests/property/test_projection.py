"""The kept projection against the definition: each request adds s + a + h at every h it is expected to see."""

import math
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.projection import Projection
from balanceroute.core.types import RequestSpec
from tests.unit.core.builders import a_scheduler

HORIZON = st.sampled_from([0, 1, 2, 3, 7])
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "step", "step", "refresh", "grow", "grow", "grow", "start"]),
        st.integers(0, 50),
        st.integers(0, 500),
        st.floats(0, 9),
        st.booleans(),
    ),
    max_size=25,
)


class Model:
    """One request: its tokens, its c-hat counted down as the paper says, and whether the engine runs it."""

    def __init__(self, worker: int, tokens: int, remaining: float, running: bool, horizon: int) -> None:
        self.worker, self.tokens, self.running, self.horizon = worker, tokens, running, horizon
        self.expect(remaining)

    def expect(self, remaining: float) -> None:
        self.anchored = remaining >= self.horizon
        self.remaining = float(self.horizon) if self.anchored else remaining

    def generate(self) -> None:
        self.tokens += 1
        if not self.anchored:
            self.remaining = max(0.0, self.remaining - 1.0)

    def load_at(self, h: int) -> int:
        return self.tokens + h if h <= self.remaining else 0

    def add_to(self, projection: Projection) -> None:
        projection.add(self.worker, self.tokens, self.remaining, self.running)

    def remove_from(self, projection: Projection) -> None:
        projection.add(self.worker, self.tokens, self.remaining, self.running, -1)

    def grow(self, kept: Projection, tokens: int) -> None:
        """Generate `tokens`, and tell the projection."""
        if self.anchored:
            kept.grow(self.worker, tokens)
            self.tokens += tokens
            return
        before, held = int(self.remaining), self.tokens
        for _ in range(tokens):
            self.generate()
        kept.move(self.worker, held, tokens, before, int(self.remaining))


@settings(max_examples=250, deadline=None)
@given(HORIZON, EVENTS)
def test_projected_loads_follow_the_definition_after_any_events(
    horizon: int, events: list[tuple[str, int, int, float, bool]]
) -> None:
    kept, models = Projection(3, horizon), list[Model]()
    for event, pick, tokens, remaining, running in events:
        if event == "step":
            kept.step()
            for model in filter(attrgetter("running"), models):
                model.generate()
        elif event == "add":
            models.append(Model(pick % 3, tokens, remaining, running, horizon))
            models[-1].add_to(kept)
        elif models:
            change(models, models[pick % len(models)], kept, event, tokens, remaining)
    expected = [
        [sum(model.load_at(h) for model in models if model.worker == g) for h in range(horizon + 1)] for g in range(3)
    ]
    assert np.array_equal(kept.loads(), expected)
    afresh = Projection(3, horizon)
    for model in models:
        model.add_to(afresh)
    assert kept.equals(afresh)


def change(models: list[Model], model: Model, kept: Projection, event: str, tokens: int, remaining: float) -> None:
    """Let something happen to a request, and tell the projection."""
    if event == "grow":
        if model.running:
            model.grow(kept, tokens if model.anchored else tokens % 5)
        return
    model.remove_from(kept)
    if event == "remove":
        models.remove(model)
        return
    if event == "refresh":
        model.expect(remaining)
    elif event == "start":
        model.running = True
    model.add_to(kept)


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize(("kv_tokens", "remaining"), [(10, 2.0), (11, 1.0), (0, 2.0)])
def test_projections_that_differ_in_one_request_are_not_equal(kv_tokens: int, remaining: float, running: bool) -> None:
    one, other = Projection(2, 3), Projection(2, 3)
    for projection in (one, other):
        projection.add(0, 10, 1.0)
        projection.add(1, 10, 1.0, running=False)
    assert one.equals(other)
    other.add(1, kv_tokens, remaining, running)
    assert not one.equals(other)
    other.add(1, kv_tokens, remaining, running, -1)
    assert one.equals(other)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5_000), st.integers(1, 40), st.sampled_from([0.0, 1.0, math.inf]), st.lists(st.integers(0, 9)))
def test_a_c_hat_a_hair_beside_a_whole_number_counts_down_as_it_was_projected(
    age: int, whole: int, towards: float, tokens: list[int]
) -> None:
    scheduler = a_scheduler("br_h", workers=1, slots=1, horizon_steps=80)
    scheduler.submit_prefilled(RequestSpec("r", 100), 0.0)
    scheduler.admit(0.0)
    scheduler.progress("r", age, 1.0)
    scheduler.refresh("r", math.nextafter(whole, towards), 1.0)
    for count in tokens:
        scheduler.progress("r", count, 2.0)
        scheduler.snapshot.check_invariants()
