"""Whose key it is, and what it may still use."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.config import KeyEntry
from balanceroute.errors import AccessDenied, KeyLimit
from balanceroute.proxy.perimeter.key_table import KeyTable, RelayRows
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.perimeter.keys import ClientKey, ClientKeys

Headers = list[tuple[bytes, bytes]]


def entry(name: str, key: str, **limits: Any) -> KeyEntry:
    return KeyEntry.model_validate({"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **limits})


def bearer(key: str) -> Headers:
    return [(b"authorization", b"Bearer " + key.encode())]


@pytest.mark.parametrize(
    "headers",
    [
        bearer("one"),
        [(b"authorization", b"bearer  one ")],
        [(b"x-api-key", b"one")],
        [(b"x-api-key", b"two"), *bearer("one")],
    ],
    ids=["bearer", "any-case", "x-api-key", "authorization-first"],
)
def test_a_key_is_found_in_either_header(headers: Headers) -> None:
    assert ClientKeys([entry("a", "one"), entry("b", "two")]).of(headers).name == "a"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], None),
        (bearer("three"), "invalid_api_key"),
        (bearer(""), "invalid_api_key"),
        ([(b"authorization", b"Basic one")], "invalid_api_key"),
        ([(b"authorization", b"one")], "invalid_api_key"),
        ([*bearer("one"), *bearer("one")], "invalid_api_key"),
        ([(b"x-api-key", b"one"), (b"x-api-key", b"two")], "invalid_api_key"),
        ([(b"x-api-key", b"one"), *bearer("three")], "invalid_api_key"),
        ([(b"authorization", hashlib.sha256(b"one").hexdigest().encode())], "invalid_api_key"),
        (bearer(hashlib.sha256(b"one").hexdigest()), "invalid_api_key"),
    ],
    ids=["none", "unknown", "empty", "basic", "bare", "twice", "two", "hidden-behind-a-wrong-one", "hash", "its-hash"],
)
def test_any_other_credential_is_openais_401(headers: Headers, code: str | None) -> None:
    with pytest.raises(AccessDenied) as caught:
        ClientKeys([entry("a", "one"), entry("b", "two")]).of(headers)
    assert (caught.value.status, caught.value.code) == (401, code)
    assert "three" not in str(caught.value)


def test_a_key_has_its_requests_in_flight_and_no_more() -> None:
    (key,) = ClientKeys([entry("a", "one", max_in_flight=2)])
    key.enter(0.0)
    key.enter(0.0)
    with pytest.raises(KeyLimit, match="2 requests in flight"):
        key.enter(0.0)
    key.leave(0.0)
    key.enter(0.0)
    assert key.in_flight == 2


def test_a_minutes_requests_may_arrive_at_once_and_then_at_their_rate() -> None:
    (key,) = ClientKeys([entry("a", "one", requests_per_minute=60)])
    for _ in range(60):
        key.enter(100.0)
    with pytest.raises(KeyLimit) as caught:
        key.enter(100.0)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    key.enter(101.0)
    with pytest.raises(KeyLimit):
        key.enter(101.5)


def test_tokens_are_charged_at_the_end_and_delay_later_requests() -> None:
    (key,) = ClientKeys([entry("a", "one", tokens_per_minute=600)])
    key.enter(0.0)
    key.enter(0.0)
    key.leave(0.0, tokens=700)
    key.leave(0.0, tokens=0)
    with pytest.raises(KeyLimit) as caught:
        key.enter(0.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    key.enter(10.1)


def test_a_refused_request_uses_nothing() -> None:
    (key,) = ClientKeys([entry("a", "one", max_in_flight=1, requests_per_minute=2)])
    key.enter(0.0)
    for _ in range(5):
        with pytest.raises(KeyLimit, match="in flight"):
            key.enter(0.0)
    key.leave(0.0)
    key.enter(0.0)


def test_a_reload_keeps_what_was_used_under_the_same_name_and_takes_new_keys_and_limits() -> None:
    before = ClientKeys([entry("a", "one", requests_per_minute=2), entry("gone", "two")])
    key = before.of(bearer("one"))
    key.enter(0.0)
    key.enter(0.0)
    after = ClientKeys([entry("a", "rotated", requests_per_minute=3)])
    after.inherit(before)
    for old in ("one", "two"):
        with pytest.raises(AccessDenied):
            after.of(bearer(old))
    assert after.of(bearer("rotated")) is key and key.in_flight == 2
    key.enter(0.0)
    with pytest.raises(KeyLimit):
        key.enter(0.0)


@given(
    st.integers(1, 5),
    st.lists(st.floats(0, 30), min_size=20, max_size=100),
)
def test_no_minute_ever_sees_more_than_two_allowances(per_minute: int, gaps_s: list[float]) -> None:
    (key,) = ClientKeys([entry("a", "one", requests_per_minute=per_minute)])
    now, let_in = 0.0, [0.0] * per_minute
    for _ in let_in:
        key.enter(now)
    with pytest.raises(KeyLimit):
        key.enter(now)
    for gap_s in gaps_s:
        now += gap_s
        try:
            key.enter(now)
        except KeyLimit as refusal:
            assert refusal.retry_after_s is not None and 0 < refusal.retry_after_s <= 60 / per_minute + 1e-6
        else:
            let_in.append(now)
            key.leave(now)
    for at in let_in:
        assert sum(at <= other < at + 60 for other in let_in) <= 2 * per_minute


def test_requests_in_flight_at_other_processes_count() -> None:
    here = ClientKeys([entry("a", "one", max_in_flight=2)])
    there = ClientKeys([entry("a", "one", max_in_flight=2)])
    key, theirs = here.of(bearer("one")), there.of(bearer("one"))
    theirs.enter(0.0)
    key.enter(0.0)
    here.used_elsewhere("there", there.uses(), 1.0)
    with pytest.raises(KeyLimit):
        key.enter(1.0)
    theirs.leave(2.0)
    here.used_elsewhere("there", there.uses(), 2.0)
    key.enter(2.0)
    there.of(bearer("one")).enter(3.0)
    here.used_elsewhere("there", there.uses(), 3.0)
    key.leave(3.0)
    assert key.elsewhere == 1
    here.used_elsewhere("there", (), 4.0)  # that process is gone
    assert key.elsewhere == 0


def test_a_limit_of_one_is_said_in_the_singular() -> None:
    keys = ClientKeys([entry("a", "one", max_in_flight=1), entry("b", "two", requests_per_minute=1)])
    for key, words in zip(keys, ("1 request in flight at once,", "1 request per minute,"), strict=True):
        key.enter(0.0)
        with pytest.raises(KeyLimit, match=words):
            key.enter(0.0)


def test_rates_are_charged_with_what_other_processes_have_served() -> None:
    limits = {"requests_per_minute": 2, "tokens_per_minute": 100}
    here, there = ClientKeys([entry("a", "one", **limits)]), ClientKeys([entry("a", "one", **limits)])
    key, theirs = here.of(bearer("one")), there.of(bearer("one"))
    theirs.enter(0.0)
    theirs.enter(0.0)
    here.used_elsewhere("there", there.uses(), 0.0)
    with pytest.raises(KeyLimit, match="requests per minute"):
        key.enter(0.0)
    key.enter(60.0)
    theirs.leave(60.0, tokens=500)
    here.used_elsewhere("there", there.uses(), 60.0)
    with pytest.raises(KeyLimit, match="tokens per minute"):
        key.enter(61.0)


def test_reported_use_of_a_key_is_not_reported_again() -> None:
    keys = ClientKeys([entry("a", "one"), entry("b", "two")])
    key = keys.of(bearer("one"))
    assert keys.uses() == ()
    key.enter(0.0)
    assert [(use.name, use.in_flight, use.requests, use.tokens) for use in keys.uses()] == [("a", 1, 1, 0)]
    assert [(use.name, use.in_flight, use.requests, use.tokens) for use in keys.uses()] == [("a", 1, 0, 0)]
    key.leave(1.0, tokens=7)
    assert [(use.name, use.in_flight, use.requests, use.tokens) for use in keys.uses()] == [("a", 0, 0, 7)]
    assert keys.uses() == ()


def test_a_report_takes_no_look_at_keys_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays report several times per second: with 100,000 keys each report stopped the event loop for 0.17 s."""
    made, make = [], KeyUse.__init__

    def noting(use: KeyUse, name: str, *counts: int) -> None:
        made.append(name)
        make(use, name, *counts)

    keys = ClientKeys([entry(f"k{number}", f"{number}") for number in range(1000)])
    monkeypatch.setattr(KeyUse, "__init__", noting)
    keys.of(bearer("7")).enter(0.0)
    assert [use.name for use in keys.uses()] == made == ["k7"]
    keys.of(bearer("7")).leave(0.0)
    for _ in range(3):
        keys.uses()
    assert made == ["k7"] * 2


def test_a_reload_reports_what_is_in_flight_and_forgets_nothing_of_other_processes() -> None:
    before = ClientKeys([entry("a", "one"), entry("b", "two"), entry("gone", "three")])
    for key in before:
        key.enter(0.0)
    before.used_elsewhere("there", [KeyUse("a", 3, 0, 0), KeyUse("gone", 3, 0, 0), KeyUse("unknown", 3, 0, 0)], 0.0)
    after = ClientKeys([entry("b", "two"), entry("a", "rotated"), entry("new", "four")])
    after.inherit(before)
    assert sorted((use.name, use.in_flight, use.requests) for use in after.uses()) == [("a", 1, 1), ("b", 1, 1)]
    for secret in ("two", "four"):
        after.of(bearer(secret)).enter(0.0)
    told = sorted((use.name, use.in_flight, use.requests) for use in after.uses())
    assert told == [("a", 1, 0), ("b", 2, 1), ("new", 1, 1)]
    assert after.of(bearer("rotated")).elsewhere == 3
    after.used_elsewhere("there", (), 1.0)
    assert after.of(bearer("rotated")).elsewhere == 0


def test_requests_of_other_processes_are_forgotten_together() -> None:
    keys = ClientKeys([entry("a", "one")])
    for process in ("there", "elsewhere"):
        keys.used_elsewhere(process, [KeyUse("a", 2, 0, 0)], 0.0)
    assert keys.of(bearer("one")).elsewhere == 4
    keys.forget_elsewhere()
    assert keys.of(bearer("one")).elsewhere == 0
    keys.used_elsewhere("there", [KeyUse("a", 1, 0, 0)], 1.0)
    assert keys.of(bearer("one")).elsewhere == 1


def at_one_table(relays: int, *entries: KeyEntry) -> tuple[KeyTable, list[ClientKey]]:
    """The table, and the key of the first entry at each relay."""
    table = KeyTable(relays, slots=4)
    table.name(each.name for each in entries)
    return table, [next(iter(ClientKeys(entries, RelayRows(table, place)))) for place in range(relays)]


def let_in(key: ClientKey, now: float, most: int = 100) -> int:
    """How many requests that come at once get in, and stay."""
    for number in range(most):
        try:
            key.enter(now)
        except KeyLimit:
            return number
    return most


def test_relays_on_one_machine_together_admit_a_keys_max_in_flight() -> None:
    _, keys = at_one_table(8, entry("a", "one", max_in_flight=4))
    assert sum(let_in(key, 0.0) for key in keys) == 4
    keys[0].leave(0.0)
    assert [let_in(key, 0.0) for key in keys] == [1, 0, 0, 0, 0, 0, 0, 0]


def test_relays_on_one_machine_together_admit_a_minutes_requests() -> None:
    _, keys = at_one_table(3, entry("a", "one", requests_per_minute=30))
    assert sum(let_in(key, 100.0, 12) for key in keys) == 30
    assert sum(let_in(key, 110.0) for key in reversed(keys)) == 5


def test_one_relays_key_use_is_known_to_another_at_its_first_check() -> None:
    _, (one, other) = at_one_table(2, entry("a", "one", requests_per_minute=60, tokens_per_minute=600))
    for now in range(100, 700):  # at its pace, beside a relay where nothing happens
        one.enter(float(now))
        one.leave(float(now), tokens=1)
    assert let_in(other, 700.0) in (59, 60)
    other.leave(700.0, tokens=900)
    with pytest.raises(KeyLimit, match="tokens per minute"):
        one.enter(700.5)


def test_a_restarted_relay_keeps_key_use_and_has_nothing_in_flight() -> None:
    limits = entry("a", "one", requests_per_minute=30, max_in_flight=20)
    table, (one, other) = at_one_table(2, limits)
    assert let_in(one, 100.0) == 20
    for _ in range(2):  # it is killed, twice in a row
        relay_rows = RelayRows(table, 0)
        table.clear(0)
        (one,) = ClientKeys([limits], relay_rows)
        assert let_in(one, 101.0) + let_in(other, 101.0) in (0, 10)
    with pytest.raises(KeyLimit, match="per minute"):
        one.enter(101.0)


def test_key_use_of_far_relays_reaches_every_relay_and_is_charged_once() -> None:
    table, keys = at_one_table(2, entry("a", "one", requests_per_minute=30))
    for key in keys:
        key.used_elsewhere("relay-0@far", KeyUse("a", 0, 10, 0), 100.0)
    relay_rows = RelayRows(table, 0)
    table.clear(0)
    (keys[0],) = ClientKeys([entry("a", "one", requests_per_minute=30)], relay_rows)
    keys[0].used_elsewhere("relay-0@far", KeyUse("a", 0, 5, 0), 100.0)
    assert sum(let_in(key, 100.0) for key in keys) == 15


def test_relays_that_reload_in_sequence_carry_key_use_over_once() -> None:
    before, after = entry("a", "one", requests_per_minute=30), entry("a", "one", requests_per_minute=60)
    table, (one, other) = at_one_table(2, before)
    assert let_in(one, 1000.0, 30) == 30 and let_in(other, 1000.0) == 0
    one.change(after)
    assert let_in(one, 1000.0) == 30 and let_in(other, 1000.0) == 0
    other.change(after)
    assert let_in(other, 1000.0) == 0
    assert let_in(other, 1001.0) == 1 and let_in(one, 1001.0) == 0


def relays_at_one_table(relays: int, *entries: KeyEntry) -> list[ClientKeys]:
    """All keys at each relay, as they start."""
    table = KeyTable(relays, slots=4)
    table.name(each.name for each in entries)
    started = [ClientKeys(entries, RelayRows(table, place)) for place in range(relays)]
    for keys in started:
        keys.apply_limits(1000.0)
    return started


def reload(relays: Sequence[ClientKeys], after: KeyEntry, now: float) -> None:
    """Another entry, as one relay after the other takes it."""
    for keys in relays:
        following = ClientKeys([after])
        following.inherit(keys)
        following.apply_limits(now)


def test_a_restored_limit_starts_from_the_current_use_also_at_idle_relays() -> None:
    few, many = entry("a", "one", requests_per_minute=60), entry("a", "one", requests_per_minute=6000)
    relays = relays_at_one_table(2, few)
    (one, *_), (other, *_) = relays
    reload(relays, many, 1000.0)
    for second in range(1000, 1600, 10):
        assert let_in(one, float(second), 90) == 90
    reload(relays, few, 1600.0)
    assert let_in(other, 1600.0) + let_in(one, 1600.0) == 60
    assert let_in(other, 1630.0) == 30


@pytest.mark.parametrize("relays", [1, 2])
def test_a_limit_that_is_lowered_after_a_burst_leaves_an_empty_minute_and_no_debt(relays: int) -> None:
    routers = relays_at_one_table(relays, entry("a", "one", requests_per_minute=6000))
    keys = [next(iter(router)) for router in routers]
    assert let_in(keys[0], 1000.0, 5970) == 5970
    reload(routers, entry("a", "one", requests_per_minute=60), 1000.0)
    with pytest.raises(KeyLimit) as caught:
        keys[-1].enter(1000.0)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    assert let_in(keys[0], 1010.0) == 10


def test_token_use_beyond_a_minute_remains_owed_under_a_lower_limit() -> None:
    (key,) = ClientKeys([entry("a", "one", tokens_per_minute=6000)])
    key.enter(1000.0)
    key.leave(1000.0, tokens=6600)
    key.change(entry("a", "one", tokens_per_minute=600))
    with pytest.raises(KeyLimit) as caught:
        key.enter(1000.0)
    assert caught.value.retry_after_s == pytest.approx(60.0)


def test_a_removed_and_restored_limit_starts_fresh() -> None:
    limited, free = entry("a", "one", requests_per_minute=30), entry("a", "one")
    _, (one, other) = at_one_table(2, limited)
    assert let_in(one, 1000.0) == 30
    for key in (one, other):
        key.change(free)
    assert let_in(one, 1000.0) == 100
    for key in (one, other):
        key.change(limited)
    assert let_in(one, 1000.0, 20) == 20 and let_in(other, 1000.0) == 10


def after(table: KeyTable, relays: int, *entries: KeyEntry) -> list[ClientKey]:
    """The key of the first entry at each relay of a router that takes over, by the table of the one that runs."""
    following = KeyTable(relays, slots=9)
    following.name(each.name for each in entries)
    following.continue_from(table.fd)
    return [next(iter(ClientKeys(entries, RelayRows(following, place)))) for place in range(relays)]


@pytest.mark.parametrize("relays", [1, 3])
def test_a_take_over_keeps_the_rest_of_a_minutes_allowance(relays: int) -> None:
    limits = entry("a", "one", requests_per_minute=60, tokens_per_minute=6000)
    table, _ = at_one_table(2, entry("b", "two"), limits)
    one, other = (ClientKeys([limits], RelayRows(table, place)).of(bearer("one")) for place in (0, 1))
    assert let_in(one, 1000.0, 30) == 30 and let_in(other, 1000.0, 20) == 20
    other.used_elsewhere("relay-0@far", KeyUse("a", 0, 4, 0), 1000.0)
    keys = after(table, relays, limits, entry("new", "three"))
    assert sum(let_in(key, 1000.0) for key in keys) == 6
    assert let_in(keys[-1], 1010.0) == 10
    other.leave(1010.0, tokens=12_000)
    (key, *_) = after(table, relays, limits)
    with pytest.raises(KeyLimit, match="tokens per minute"):
        key.enter(1030.0)


@pytest.mark.parametrize(("then", "left"), [(30, 20), (120, 110)])
def test_a_take_over_keeps_used_allowance_under_another_limit(then: int, left: int) -> None:
    table, (one, _) = at_one_table(2, entry("a", "one", requests_per_minute=60))
    assert let_in(one, 1000.0, 10) == 10
    keys = after(table, 3, entry("a", "one", requests_per_minute=then))
    assert let_in(keys[2], 1000.0) + let_in(keys[0], 1000.0) + let_in(keys[1], 1000.0) == left


def test_a_table_of_another_version_is_refused() -> None:
    table = os.memfd_create("table")
    try:
        for content in (b"", bytes(8), bytes(800)):
            os.ftruncate(table, 0)
            os.pwrite(table, content, 0)
            with pytest.raises(ValueError, match=r"."):
                KeyTable(1, slots=1).continue_from(table)
    finally:
        os.close(table)


@given(st.integers(1, 20), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2)), min_size=1, max_size=100))
def test_several_relays_admit_as_much_as_one(per_minute: int, asked: list[tuple[float, int]]) -> None:
    limits = entry("a", "one", requests_per_minute=per_minute)
    _, keys = at_one_table(3, limits)
    (alone,) = ClientKeys([limits])
    now = 1000.0
    for gap_s, place in asked:
        now += gap_s
        assert let_in(keys[place], now, 1) == let_in(alone, now, 1)


limits_per_minute = st.sampled_from([2, 5, 20])


@given(
    limits_per_minute,
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2), st.none() | limits_per_minute), min_size=1, max_size=60),
)
def test_several_relays_admit_as_much_as_one_over_any_reloads(
    per_minute: int, asked: list[tuple[float, int, int | None]]
) -> None:
    relays = relays_at_one_table(3, entry("a", "one", requests_per_minute=per_minute))
    alone = relays_at_one_table(1, entry("a", "one", requests_per_minute=per_minute))
    now = 1000.0
    for gap_s, place, reloaded in asked:
        now += gap_s
        if reloaded is not None:
            reload([*relays, *alone], entry("a", "one", requests_per_minute=reloaded), now)
        (key,), (only,) = relays[place], alone[0]
        assert let_in(key, now, 3) == let_in(only, now, 3)


def test_a_relay_that_reloads_later_carries_over_no_use_of_the_former_limit() -> None:
    few, many = entry("a", "one", requests_per_minute=60), entry("a", "one", requests_per_minute=600)
    _, (one, other) = at_one_table(2, few)
    for key in (one, other):
        assert let_in(key, 1000.0, 1) == 1
    one.change(many)
    assert let_in(one, 1000.0, 500) == 500
    other.change(many)
    assert let_in(one, 1060.0, 100) + let_in(other, 1060.0, 1000) == 600
