"""What follows what in a request's life: the tables that strategies run by, and their coroutines."""

import ast
import inspect
import textwrap

import pytest

from balanceroute.core.types import Phase
from balanceroute.proxy.life.layerwise import Layerwise
from balanceroute.proxy.life.leg import Event, Strategy
from balanceroute.proxy.life.pull import Pull, go_on
from balanceroute.proxy.life.scoring import Scoring

STRATEGIES = pytest.mark.parametrize("strategy", [Pull, Layerwise, Scoring])


def events_in(function: object) -> set[Event]:
    """The events that the source of a function names; those of `go_on`, too, where it ends with that."""
    tree = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))  # type: ignore[arg-type]
    found: set[Event] = set()
    for node in tree:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Event":
            found.add(Event[node.attr])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "go_on":
            found |= events_in(go_on)
    return found


@STRATEGIES
def test_every_phase_names_exactly_the_events_that_its_coroutine_returns(strategy: type[Strategy]) -> None:
    for phase, row in strategy.follows.items():
        assert events_in(getattr(strategy, phase)) == set(row), phase


@STRATEGIES
def test_every_phase_that_is_named_is_described_or_the_end(strategy: type[Strategy]) -> None:
    named = {strategy.first, *(after for row in strategy.follows.values() for after in row.values())}
    assert named == {*strategy.follows, Phase.GONE}


@STRATEGIES
def test_the_end_can_be_reached_from_every_phase(strategy: type[Strategy]) -> None:
    ends = {Phase.GONE}
    for _ in strategy.follows:
        ends |= {phase for phase, row in strategy.follows.items() if ends & set(row.values())}
    assert ends == {*strategy.follows, Phase.GONE}


@STRATEGIES
def test_a_request_that_was_cut_off_comes_by_a_slot_of_a_decode_worker_again(strategy: type[Strategy]) -> None:
    for row in strategy.follows.values():
        if Event.CUT_OFF not in row:
            continue
        phase = row[Event.CUT_OFF]
        while Event.ADMITTED not in strategy.follows[phase]:
            assert phase is not Phase.DECODING
            phase = strategy.follows[phase][Event.TAKEN if phase is Phase.QUEUED else Event.PREFILLED]


def test_kv_that_a_prefiller_may_drop_is_never_sent_to_a_decode_worker() -> None:
    assert Pull.follows[Phase.POOLED][Event.KV_AGED] is Phase.QUEUED
