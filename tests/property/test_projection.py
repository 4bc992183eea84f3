"""The kept projection against the definition: each request adds s + a + h at every h it is expected to see."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.projection import Projection

HORIZON = st.sampled_from([0, 1, 2, 3, 7])
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "step", "step", "refresh", "grow", "start", "generate", "generate"]),
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

    @property
    def bucket(self) -> int:
        return int(self.remaining)

    def load_at(self, h: int) -> int:
        return self.tokens + h if h <= self.remaining else 0


@settings(max_examples=500, deadline=None)
@given(HORIZON, EVENTS)
def test_projected_loads_follow_the_definition_after_any_events(
    horizon: int, events: list[tuple[str, int, int, float, bool]]
) -> None:
    kept, models = Projection(3, horizon), list[Model]()
    for event, pick, tokens, remaining, running in events:
        if event == "step":
            kept.step()
            for model in models:
                if model.running:
                    model.generate()
        elif event == "add":
            models.append(Model(pick % 3, tokens, remaining, running, horizon))
            kept.add(models[-1].worker, tokens, models[-1].remaining, running)
        elif models:
            model = models[pick % len(models)]
            if event == "grow" and model.anchored and model.running:
                kept.grow(model.worker, tokens)
                model.tokens += tokens
                continue
            if event == "generate":
                if model.running and not model.anchored:
                    before, held = model.bucket, model.tokens
                    for _ in range(tokens % 5):
                        model.generate()
                    kept.move(model.worker, held, model.tokens - held, before, model.bucket)
                continue
            kept.remove(model.worker, model.tokens, model.remaining, model.running)
            if event == "remove":
                models.remove(model)
                continue
            if event == "refresh":
                model.expect(remaining)
            elif event == "start":
                model.running = True
            kept.add(model.worker, model.tokens, model.remaining, model.running)
    expected = [
        [sum(model.load_at(h) for model in models if model.worker == g) for h in range(horizon + 1)] for g in range(3)
    ]
    assert np.array_equal(kept.loads(), expected)
    afresh = Projection(3, horizon)
    for model in models:
        afresh.add(model.worker, model.tokens, model.remaining, model.running)
    assert kept.equals(afresh)


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
    other.remove(1, kv_tokens, remaining, running)
    assert one.equals(other)
