"""When worker and ledger disagree for long, and only then."""

from balanceroute.core.types import Role
from balanceroute.proxy.telemetry.divergence import WINDOW, Divergence


def test_a_difference_counts_once_every_poll_of_the_window_had_it() -> None:
    divergence, role = Divergence(), Role.DECODE
    for poll in range(WINDOW):
        assert divergence.lasting("w") == 0
        divergence.see("w", role, {"num_requests_running": 5.0 + poll}, held=2, orphans=0)
    assert divergence.lasting("w") == 3


def test_one_agreeing_poll_ends_a_divergence() -> None:
    divergence, role = Divergence(), Role.DECODE
    for poll in range(3 * WINDOW):
        divergence.see("w", role, {"num_requests_running": 2.0 if poll % WINDOW == 3 else 9.0}, held=2, orphans=0)
        assert divergence.lasting("w") == 0


def test_a_decode_worker_that_reports_fewer_requests_is_no_divergence() -> None:
    divergence, role = Divergence(), Role.DECODE
    for _ in range(WINDOW):
        divergence.see("w", role, {"num_requests_running": 0.0}, held=4, orphans=0)
    assert divergence.lasting("w") == 0


def test_a_prefiller_s_usage_counts_only_when_nothing_of_ours_explains_it() -> None:
    divergence, role = Divergence(), Role.PREFILL
    for held, orphans in ((1, 0), (0, 1)):
        for _ in range(WINDOW):
            divergence.see("w", role, {"kv_cache_usage_perc": 0.4}, held=held, orphans=orphans)
        assert divergence.lasting("w") == 0
    for _ in range(WINDOW):
        divergence.see("w", role, {"kv_cache_usage_perc": 0.4}, held=0, orphans=0)
    assert divergence.lasting("w") == 0.4
    divergence.forget("w")
    assert divergence.workers() == []
