"""The kept projection against the definition: each request adds s + a + h at every h it is expected to see."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.projection import Projection

HORIZON = st.sampled_from([0, 1, 2, 3, 7])
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "step", "step", "refresh", "grow", "start"]),
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
        self.remaining = float(self.horizon) if self.anchored else max(1.0, remaining) if remaining > 0 else 0.0

    def generate(self) -> None:
        self.tokens += 1
        if not self.anchored:
            self.remaining = max(min(1.0, self.remaining), self.remaining - 1.0)

    def load_at(self, h: int) -> int:
        return self.tokens + h if h <= self.remaining or not self.running else 0


@settings(max_examples=2000, deadline=None)
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
