"""No test sleeps: it waits for a condition, or lets virtual time pass."""

import ast
import asyncio
from pathlib import Path

import pytest

from tests.waiting import MOST_PACE_S, block_until, pace, until

TESTS = Path(__file__).parents[1]
ALLOWED = {
    "waiting.py": "the helpers that poll, and the pace of peers that are slow on purpose",
    "unit/proxy/virtual_time.py": "lets virtual time pass",
    "curl.py": "waits between its tries as its option says",
}


def sleeps_in(source: str) -> list[int]:
    """Lines that call or take over a `sleep`, but for `sleep(0)`, which gives way to others."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep"), args=[ast.Constant(value=0)]):
                pass
            case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep")):
                found.append(node.lineno)
            case ast.ImportFrom(module="time" | "asyncio" | "anyio", names=names):
                found += [node.lineno for name in names if name.name == "sleep"]
            case _:
                pass
    return found


def test_tests_wait_for_conditions_and_not_for_times() -> None:
    allowed = {TESTS / path for path in ALLOWED}
    sources = {path: path.read_text() for path in TESTS.rglob("*.py") if path not in allowed}
    found = {path: sleeps_in(source) for path, source in sources.items() if "sleep" in source}
    advice = "use tests.waiting.until, or the virtual clock of tests.unit.proxy.virtual_time"
    assert {path: lines for path, lines in found.items() if lines} == {}, advice


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("await asyncio.sleep(0)", []),
        ("await asyncio.sleep(0.1)", [1]),
        ("import time as t\nt.sleep(n)", [2]),
        ("from time import sleep", [1]),
        ("from asyncio import sleep as nap", [1]),
        ("sleep(delay=1)", [1]),
    ],
)
def test_every_way_to_sleep_is_found(source: str, found: list[int]) -> None:
    assert sleeps_in(source) == found


def test_a_condition_that_never_holds_fails_with_its_description() -> None:
    never = False
    with pytest.raises(AssertionError, match="never"):
        block_until(lambda: never, within_s=0.01)
    with pytest.raises(AssertionError, match="the moon"):
        asyncio.run(until(lambda: never, "the moon", within_s=0.01))


def test_a_pace_is_short() -> None:
    with pytest.raises(AssertionError):
        asyncio.run(pace(2 * MOST_PACE_S))


def test_a_condition_may_be_a_coroutine() -> None:
    asked = []

    async def third_time() -> bool:
        asked.append(True)
        return len(asked) == 3

    asyncio.run(until(third_time))
    assert len(asked) == 3
