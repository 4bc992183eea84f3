"""One worker's circuit as a dialogue of what requests find and time."""

import pytest

from balanceroute.proxy.workers.circuit import MAX_REST_S, REST_S, Circuit, CircuitConfig, CircuitState


class RecordedCircuit:
    """A circuit with everything it said."""

    def __init__(self, threshold: int = 3, open_for_s: float = 10.0) -> None:
        self.wakes: list[float | None] = []
        self.circuit = Circuit(CircuitConfig(threshold, open_for_s), self.wakes.append)

    @property
    def state(self) -> CircuitState:
        return self.circuit.state


def test_a_first_fault_rests_the_worker_just_long_enough_for_a_retry_elsewhere() -> None:
    recorded = RecordedCircuit()
    recorded.circuit.fault(0.0, "status 500")
    assert recorded.state is CircuitState.RESTING and recorded.wakes == [REST_S]
    recorded.circuit.tick(REST_S / 2)
    assert recorded.state is CircuitState.RESTING
    recorded.circuit.tick(REST_S)
    assert recorded.state is CircuitState.CLOSED


def test_a_changed_configuration_applies_from_the_next_fault() -> None:
    recorded = RecordedCircuit(threshold=3, open_for_s=10.0)
    recorded.circuit.fault(0.0, "status 500")
    recorded.circuit.configure(CircuitConfig(2, 5.0))
    recorded.circuit.fault(1.0, "status 500")
    assert recorded.state is CircuitState.OPEN and recorded.wakes[-1] == 5.0


def test_rests_grow_with_consecutive_faults_and_a_success_resets_them() -> None:
    recorded = RecordedCircuit(threshold=9)
    for expected in (REST_S, 2 * REST_S, 4 * REST_S):
        recorded.circuit.fault(0.0, "status 500")
        assert recorded.wakes[-1] == expected
    recorded.circuit.success()
    assert recorded.circuit.failures == 0
    recorded.circuit.fault(0.0, "status 500")
    assert recorded.wakes[-1] == REST_S


def test_consecutive_faults_open_the_circuit_and_a_timeout_allows_one_trial() -> None:
    recorded = RecordedCircuit(threshold=2)
    recorded.circuit.fault(0.0, "status 500")
    recorded.circuit.fault(1.0, "status 500")
    assert recorded.state is CircuitState.OPEN and recorded.wakes[-1] == 10.0
    recorded.circuit.tick(10.9)
    assert recorded.state is CircuitState.OPEN
    recorded.circuit.tick(11.0)
    assert recorded.state is CircuitState.HALF_OPEN
    recorded.circuit.used()
    assert recorded.state is CircuitState.TRIAL


@pytest.mark.parametrize(
    ("found", "after"),
    [("success", CircuitState.CLOSED), ("fault", CircuitState.OPEN), ("inconclusive", CircuitState.HALF_OPEN)],
)
def test_a_trial_closes_or_reopens_the_circuit(found: str, after: CircuitState) -> None:
    recorded = RecordedCircuit(threshold=1)
    recorded.circuit.fault(0.0, "status 500")
    recorded.circuit.tick(10.0)
    recorded.circuit.used()
    getattr(recorded.circuit, found)(*([11.0, "status 500"] if found == "fault" else []))
    assert recorded.state is after


def test_a_busy_worker_rests_for_its_retry_after_but_never_opens_the_circuit() -> None:
    recorded = RecordedCircuit(threshold=2)
    for minute in range(20):
        recorded.circuit.busy(60.0 * minute, 5.0)
        assert recorded.state is CircuitState.RESTING
        recorded.circuit.tick(60.0 * minute + 30)
        recorded.circuit.used()
    assert max(wake or 0 for wake in recorded.wakes) == MAX_REST_S
    assert recorded.wakes[0] == 5.0


def test_after_its_rest_a_busy_worker_gets_one_request_first() -> None:
    recorded = RecordedCircuit()
    recorded.circuit.busy(0.0)
    recorded.circuit.tick(REST_S)
    assert recorded.state is CircuitState.HALF_OPEN
    recorded.circuit.used()
    assert recorded.state is CircuitState.TRIAL
    recorded.circuit.busy(REST_S + 0.1)
    assert recorded.state is CircuitState.RESTING and recorded.wakes[-1] == pytest.approx(2 * REST_S)
    recorded.circuit.tick(REST_S + 0.1 + 2 * REST_S)
    recorded.circuit.used()
    recorded.circuit.success()
    assert recorded.state is CircuitState.CLOSED


def test_concurrent_refusals_count_as_one() -> None:
    recorded = RecordedCircuit()
    for _ in range(50):
        recorded.circuit.busy(1.0)
    recorded.circuit.tick(1.0 + REST_S)
    assert recorded.state is CircuitState.HALF_OPEN


def test_a_short_refusal_does_not_shorten_the_rest_that_an_earlier_one_asked_for() -> None:
    recorded = RecordedCircuit()
    recorded.circuit.busy(0.0, 5.0)
    recorded.circuit.busy(0.1)
    recorded.circuit.tick(4.0)
    assert recorded.state is CircuitState.RESTING
    recorded.circuit.tick(5.0)
    assert recorded.state is CircuitState.HALF_OPEN


def test_a_timer_that_fires_slightly_early_still_ends_the_rest() -> None:
    recorded = RecordedCircuit()
    recorded.circuit.fault(0.1 + 0.2, "status 500")
    recorded.circuit.tick(0.3 + REST_S - 0.001)  # nobody would call again
    assert recorded.state is CircuitState.CLOSED


def test_busy_answers_do_not_count_as_faults() -> None:
    recorded = RecordedCircuit(threshold=2)
    for _ in range(5):
        recorded.circuit.busy(0.0)
    recorded.circuit.fault(0.0, "status 500")
    assert recorded.state is CircuitState.RESTING
    recorded.circuit.fault(0.0, "status 500")
    assert recorded.state is CircuitState.OPEN


def test_an_answered_health_check_brings_the_trial_forward() -> None:
    recorded = RecordedCircuit(threshold=1)
    recorded.circuit.fault(0.0, "status 500")
    recorded.circuit.reachable()
    assert recorded.state is CircuitState.HALF_OPEN
    recorded.circuit.success()
    recorded.circuit.reachable()
    assert recorded.state is CircuitState.CLOSED


def test_late_failures_of_requests_sent_before_do_not_close_an_open_circuit() -> None:
    recorded = RecordedCircuit(threshold=1)
    recorded.circuit.fault(0.0, "status 500")
    recorded.circuit.busy(1.0)
    recorded.circuit.inconclusive()
    assert recorded.state is CircuitState.OPEN


def test_a_success_is_needed_only_while_the_circuit_is_doubtful() -> None:
    recorded = RecordedCircuit(threshold=2)
    assert not recorded.circuit.doubtful
    recorded.circuit.fault(0.0, "status 500")
    recorded.circuit.tick(REST_S)
    assert (
        recorded.state is CircuitState.CLOSED and recorded.circuit.doubtful
    )  # its next fault would be the second in a row
    recorded.circuit.success()
    assert not recorded.circuit.doubtful
    recorded.circuit.busy(1.0)
    recorded.circuit.tick(1.0 + REST_S)
    assert recorded.state is CircuitState.HALF_OPEN and recorded.circuit.doubtful


def test_a_request_to_an_undoubted_worker_is_no_trial() -> None:
    recorded = RecordedCircuit()
    recorded.circuit.used()
    assert recorded.state is CircuitState.CLOSED
    recorded.circuit.tick(100.0)
    assert recorded.state is CircuitState.CLOSED


def test_a_running_trial_stays_the_only_request() -> None:
    recorded = RecordedCircuit(threshold=1)
    recorded.circuit.fault(0.0, "status 500")
    recorded.circuit.reachable()
    recorded.circuit.used()
    recorded.circuit.tick(100.0)
    assert recorded.state is CircuitState.TRIAL
