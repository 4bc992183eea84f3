"""The memory that relays on one machine share: all read all rows, each writes its own, and rows outlive relays."""

import math
import multiprocessing
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import ConfigError
from balanceroute.proxy.perimeter.key_table import (
    FAR,
    FIELDS,
    IN_FLIGHT,
    LOST,
    PER_MINUTE,
    REQUESTS,
    TOKENS,
    USED,
    KeyTable,
    RelayRows,
    Row,
    row_alone,
)

FORK = multiprocessing.get_context("fork")  # as the parent makes its relays


def rows_of(table: KeyTable, name: str) -> list[Row]:
    """Every relay's row of a key."""
    return [RelayRows(table, place).rows([name])[name] for place in range(table.relays)]


def a_table(relays: int, *names: str) -> KeyTable:
    table = KeyTable(relays, slots=8)
    table.name(names)
    return table


writes = st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, FIELDS - 1), st.floats(-1e6, 1e6))


@given(st.lists(writes, max_size=40))
def test_each_row_has_its_last_written_value_and_all_processes_see_it(
    written: Sequence[tuple[str, int, int, float]],
) -> None:
    table = a_table(3, "a", "b", "c")
    rows = {name: rows_of(table, name) for name in "abc"}
    wanted = {
        (name, place, field): rows[name][place].own(field)
        for name in "abc"
        for place in range(3)
        for field in range(FIELDS)
    }
    for name, place, field, value in written:
        rows[name][place].put(field, value)
        wanted[name, place, field] = value
    for name in "abc":
        for reader in (*rows[name], *rows_of(table, name)):
            for field in range(FIELDS):
                assert reader.all(field) == tuple(wanted[name, place, field] for place in range(3))


def test_a_rate_is_read_as_every_relay_s_four_fields_one_after_the_other() -> None:
    rows = rows_of(a_table(2, "a"), "a")
    for place, row in enumerate(rows):
        for field in range(4):
            row.put(TOKENS + field, 10.0 * field + place)
    assert rows[0].rate(TOKENS) == (0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 30.0, 31.0)
    assert rows[0].rate(REQUESTS) == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -math.inf, -math.inf)


def test_a_dead_relays_additions_are_visible_to_parent_and_other_relays() -> None:
    table = a_table(2, "a")
    (here, _), relay_rows = rows_of(table, "a"), RelayRows(table, 1)

    def relay() -> None:
        relay_rows.rows(["a"])["a"].add(REQUESTS + USED, 3.0)

    for _ in range(2):
        process = FORK.Process(target=relay)
        process.start()
        process.join()
        assert process.exitcode == 0
    assert here.all(REQUESTS + USED) == (0.0, 6.0)


def test_a_name_that_is_given_after_the_fork_has_its_slot_in_the_relay() -> None:
    table = a_table(1, "a")
    asks, answers = FORK.Pipe()

    def relay() -> None:
        relay_rows = RelayRows(table, 0)
        answers.send("looked")
        assert answers.recv() == "named"
        relay_rows.rows(["late"])["late"].put(IN_FLIGHT, 2.0)

    process = FORK.Process(target=relay)
    process.start()
    assert asks.recv() == "looked"
    table.name(["late"])
    asks.send("named")
    process.join()
    assert process.exitcode == 0 and rows_of(table, "late")[0].all(IN_FLIGHT) == (2.0,)


def test_a_dead_relay_has_nothing_in_flight_and_its_next_life_keeps_what_others_reported() -> None:
    table = a_table(2, "a")
    one, other = rows_of(table, "a")
    for row, far in ((one, 4.0), (other, 9.0)):
        row.put(IN_FLIGHT, 5.0)
        row.put(REQUESTS + USED, 7.0)
        row.put(REQUESTS + FAR, far)
        row.put(REQUESTS + PER_MINUTE, 60.0)
        row.put(REQUESTS + LOST, 1.5)
    table.clear(0)
    assert other.all(IN_FLIGHT) == (0.0, 5.0)
    assert other.rate(REQUESTS) == (7.0, 7.0, 9.0, 9.0, 60.0, 60.0, 1.5, 1.5)


def test_names_keep_their_slots_and_a_seat_its_rows() -> None:
    table = a_table(1, "a", "b")
    relay_rows = RelayRows(table, 0)
    row = relay_rows.rows(["b"])["b"]
    row.put(IN_FLIGHT, 1.0)
    table.name(["c", "b", "a", "d"])
    assert relay_rows.rows(["a", "b", "c"]).keys() == {"a", "b", "c"}
    assert relay_rows.rows(["b"])["b"] is row and rows_of(table, "b")[0].own(IN_FLIGHT) == 1.0


def test_more_names_than_slots_are_refused_and_change_no_slot() -> None:
    table = KeyTable(1, slots=3)
    table.name("abc")
    table.name("cba")
    with pytest.raises(ConfigError, match=r"auth\.client_keys: 3 names"):
        table.name("abcd")
    assert list(RelayRows(table, 0).rows("abc")) == list("abc")


def test_a_single_processes_row_starts_without_a_limit() -> None:
    row = row_alone()
    row.add(IN_FLIGHT, 1.0)
    row.add(IN_FLIGHT, 1.0)
    assert row.all(IN_FLIGHT) == (2.0,) == (row.own(IN_FLIGHT),)
    assert row.own(REQUESTS + LOST) == row.own(TOKENS + LOST) == -math.inf
