"""One worker's circuit as a dialogue of what requests find and time."""

import pytest

from balanceroute.proxy.workers.circuit import MAX_REST_S, REST_S, Circuit, CircuitConfig, CircuitState


class Told:
    """A circuit with everything it said."""

    def __init__(self, threshold: int = 3, open_for_s: float = 10.0) -> None:
        self.wakes: list[float | None] = []
        self.circuit = Circuit(CircuitConfig(threshold, open_for_s), self.wakes.append)

    @property
    def state(self) -> CircuitState:
        return self.circuit.state


def test_a_first_fault_rests_the_worker_just_long_enough_for_a_retry_elsewhere() -> None:
    told = Told()
    told.circuit.fault(0.0)
    assert told.state is CircuitState.RESTING and told.wakes == [REST_S]
    told.circuit.tick(REST_S / 2)
    assert told.state is CircuitState.RESTING
    told.circuit.tick(REST_S)
    assert told.state is CircuitState.CLOSED


def test_a_changed_configuration_applies_from_the_next_fault() -> None:
    told = Told(threshold=3, open_for_s=10.0)
    told.circuit.fault(0.0)
    told.circuit.configure(CircuitConfig(2, 5.0))
    told.circuit.fault(1.0)
    assert told.state is CircuitState.OPEN and told.wakes[-1] == 5.0


def test_rests_grow_with_consecutive_faults_and_a_success_resets_them() -> None:
    told = Told(threshold=9)
    for expected in (REST_S, 2 * REST_S, 4 * REST_S):
        told.circuit.fault(0.0)
        assert told.wakes[-1] == expected
    told.circuit.success()
    assert told.circuit.failures == 0
    told.circuit.fault(0.0)
    assert told.wakes[-1] == REST_S


def test_consecutive_faults_open_the_circuit_and_a_timeout_allows_one_trial() -> None:
    told = Told(threshold=2)
    told.circuit.fault(0.0)
    told.circuit.fault(1.0)
    assert told.state is CircuitState.OPEN and told.wakes[-1] == 10.0
    told.circuit.tick(10.9)
    assert told.state is CircuitState.OPEN
    told.circuit.tick(11.0)
    assert told.state is CircuitState.HALF_OPEN
    told.circuit.used()
    assert told.state is CircuitState.TRIAL


@pytest.mark.parametrize(
    ("found", "after"),
    [("success", CircuitState.CLOSED), ("fault", CircuitState.OPEN), ("inconclusive", CircuitState.HALF_OPEN)],
)
def test_a_trial_closes_or_reopens_the_circuit(found: str, after: CircuitState) -> None:
    told = Told(threshold=1)
    told.circuit.fault(0.0)
    told.circuit.tick(10.0)
    told.circuit.used()
    getattr(told.circuit, found)(*([11.0] if found == "fault" else []))
    assert told.state is after


def test_a_busy_worker_rests_for_its_retry_after_but_never_opens_the_circuit() -> None:
    told = Told(threshold=2)
    for minute in range(20):
        told.circuit.busy(60.0 * minute, 5.0)
        assert told.state is CircuitState.RESTING
        told.circuit.tick(60.0 * minute + 30)
        told.circuit.used()
    assert max(wake or 0 for wake in told.wakes) == MAX_REST_S
    assert told.wakes[0] == 5.0


def test_after_its_rest_a_busy_worker_gets_one_request_first() -> None:
    told = Told()
    told.circuit.busy(0.0)
    told.circuit.tick(REST_S)
    assert told.state is CircuitState.HALF_OPEN
    told.circuit.used()
    assert told.state is CircuitState.TRIAL
    told.circuit.busy(REST_S + 0.1)
    assert told.state is CircuitState.RESTING and told.wakes[-1] == pytest.approx(2 * REST_S)
    told.circuit.tick(REST_S + 0.1 + 2 * REST_S)
    told.circuit.used()
    told.circuit.success()
    assert told.state is CircuitState.CLOSED


def test_concurrent_refusals_count_as_one() -> None:
    told = Told()
    for _ in range(50):
        told.circuit.busy(1.0)
    told.circuit.tick(1.0 + REST_S)
    assert told.state is CircuitState.HALF_OPEN


def test_a_short_refusal_does_not_shorten_the_rest_that_an_earlier_one_asked_for() -> None:
    told = Told()
    told.circuit.busy(0.0, 5.0)
    told.circuit.busy(0.1)
    told.circuit.tick(4.0)
    assert told.state is CircuitState.RESTING
    told.circuit.tick(5.0)
    assert told.state is CircuitState.HALF_OPEN


def test_a_timer_that_fires_slightly_early_still_ends_the_rest() -> None:
    told = Told()
    told.circuit.fault(0.1 + 0.2)
    told.circuit.tick(0.3 + REST_S - 0.001)  # nobody would call again
    assert told.state is CircuitState.CLOSED


def test_busy_answers_do_not_count_as_faults() -> None:
    told = Told(threshold=2)
    for _ in range(5):
        told.circuit.busy(0.0)
    told.circuit.fault(0.0)
    assert told.state is CircuitState.RESTING
    told.circuit.fault(0.0)
    assert told.state is CircuitState.OPEN


def test_an_answered_health_check_brings_the_trial_forward() -> None:
    told = Told(threshold=1)
    told.circuit.fault(0.0)
    told.circuit.reachable()
    assert told.state is CircuitState.HALF_OPEN
    told.circuit.success()
    told.circuit.reachable()
    assert told.state is CircuitState.CLOSED


def test_late_failures_of_requests_sent_before_do_not_close_an_open_circuit() -> None:
    told = Told(threshold=1)
    told.circuit.fault(0.0)
    told.circuit.busy(1.0)
    told.circuit.inconclusive()
    assert told.state is CircuitState.OPEN


def test_a_success_is_needed_only_while_the_circuit_is_doubtful() -> None:
    told = Told(threshold=2)
    assert not told.circuit.doubtful
    told.circuit.fault(0.0)
    told.circuit.tick(REST_S)
    assert told.state is CircuitState.CLOSED and told.circuit.doubtful  # its next fault would be the second in a row
    told.circuit.success()
    assert not told.circuit.doubtful
    told.circuit.busy(1.0)
    told.circuit.tick(1.0 + REST_S)
    assert told.state is CircuitState.HALF_OPEN and told.circuit.doubtful


def test_a_request_to_an_undoubted_worker_is_no_trial() -> None:
    told = Told()
    told.circuit.used()
    assert told.state is CircuitState.CLOSED
    told.circuit.tick(100.0)
    assert told.state is CircuitState.CLOSED


def test_a_running_trial_stays_the_only_request() -> None:
    told = Told(threshold=1)
    told.circuit.fault(0.0)
    told.circuit.reachable()
    told.circuit.used()
    told.circuit.tick(100.0)
    assert told.state is CircuitState.TRIAL
