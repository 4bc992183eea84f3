"""What relays tell each other of their connections."""

import pytest

from balanceroute.proxy.client.relay_loads import CONNECTIONS, FEW, SERVED_BYTES, SHOWN_S, Load, RelayLoads, alone


@pytest.mark.parametrize(
    ("own", "other", "most", "most_here", "ahead"),
    [
        (FEW, 0, 10_000, 10_000, False),
        (FEW + 1, 0, 10_000, 10_000, True),
        (4000, 3600, 10_000, 10_000, False),
        (4100, 3600, 10_000, 10_000, True),
        (20, 18, 40, 10_000, True),
        (18, 18, 40, 10_000, False),
        (18, 20, 40, 10_000, False),
        (5001, 4990, 10_000, 10_000, True),
        (430, 400, 10_000, 436, True),
        (430, 430, 10_000, 436, False),
    ],
    ids=[
        "few more",
        "more",
        "an eighth",
        "more than that",
        "near the bound",
        "equal",
        "fewer",
        "near a large bound",
        "near its own bound",
        "equal near its own bound",
    ],
)
def test_a_relay_with_more_connections_lets_others_accept_and_near_the_bound_at_once(
    own: int, other: int, most: int, most_here: int, ahead: bool
) -> None:
    table = RelayLoads(2)
    loads = [Load(table, place) for place in (0, 1)]
    loads[0].put(CONNECTIONS, own)
    loads[1].put(CONNECTIONS, other)
    assert loads[0].ahead(most, most_here) is ahead


def test_a_dead_relay_counts_no_connections() -> None:
    table = RelayLoads(3)
    loads = [Load(table, place) for place in range(3)]
    for load in loads:
        load.put(SERVED_BYTES, 5)
    assert loads[0].others(SERVED_BYTES) == 10
    Load(table, 1).clear()
    assert [load.others(SERVED_BYTES) for load in loads] == [5, 10, 5]


def test_a_single_relay_has_no_others() -> None:
    load = alone()
    load.put(CONNECTIONS, 100)
    assert load.others(CONNECTIONS) == 0 and not load.ahead(1, 1)


def test_the_last_accepting_relay_keeps_accepting() -> None:
    loads = RelayLoads(2)
    first, second = Load(loads, 0), Load(loads, 1)
    assert not first.step_back(100.0), "nobody else is there yet"
    second.accept(100.0)
    assert first.step_back(100.0) and not second.step_back(100.0)
    first.accept(100.0)
    assert second.step_back(100.0) and not first.step_back(100.0)


def test_a_stopped_or_dead_relay_does_not_count_as_accepting() -> None:
    loads = RelayLoads(2)
    first, second = Load(loads, 0), Load(loads, 1)
    second.accept(100.0)
    first.accept(100.0)
    assert not first.step_back(100.1 + SHOWN_S), "it has not shown for too long that it does"
    second.accept(110.0)
    second.clear()
    assert not first.step_back(110.0)
    second.accept(110.0)
    assert first.step_back(110.0 + SHOWN_S - 0.1)
