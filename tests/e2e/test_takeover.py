"""A router that takes over under a fixed rate of streams, as `scripts/e2e_takeover` does for longer."""

from functools import partial
from pathlib import Path

import pytest

from scripts.e2e.harness import verdict
from scripts.e2e.takeover import check

pytestmark = pytest.mark.e2e


def test_at_a_fixed_rate_no_stream_breaks_and_no_request_fails_while_a_new_router_takes_over(tmp_path: Path) -> None:
    once = partial(check, rate_per_s=20, times=1, seconds=1.0)
    assert verdict(once, tmp_path / "logs") == 0
