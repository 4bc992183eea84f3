"""Some thousands of the inputs that `scripts/fuzz_sse` feeds by the million."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.chaos_run.fuzz_sse import one_input
from tests.examples import examples


@settings(max_examples=examples(1000), deadline=None)
@given(st.integers(0, 2**53))
def test_damaged_input_raises_only_documented_exceptions(seed: int) -> None:
    one_input(seed)
