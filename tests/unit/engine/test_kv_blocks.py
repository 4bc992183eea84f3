"""KV blocks: all or nothing, released once."""

import pytest

from balanceroute.engine import KvBlocks, StepTimeModel
from balanceroute.errors import ConfigError, InvariantError


def test_growing_takes_only_what_is_missing() -> None:
    kv = KvBlocks(10, 16)
    assert kv.grow("a", 17) and kv.held_by("a") == (1, 2)
    assert kv.grow("a", 32) and kv.used == 2
    assert kv.grow("a", 33) and kv.held_by("a") == (1, 2, 3)


def test_growing_beyond_the_memory_takes_nothing() -> None:
    kv = KvBlocks(3, 16)
    kv.grow("a", 32)
    assert not kv.grow("b", 17)
    assert (kv.free, kv.holds("b")) == (1, False)


def test_usage_is_held_blocks_over_all_blocks() -> None:
    kv = KvBlocks(4, 16)
    kv.grow("a", 48)
    assert kv.usage_ratio == 0.75


def test_a_second_release_is_an_error_never_a_clamp() -> None:
    kv = KvBlocks(4, 16)
    kv.grow("a", 1)
    kv.release("a")
    with pytest.raises(InvariantError):
        kv.release("a")
    kv.check_invariants()


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0)], ids=["no blocks", "no size"])
def test_memory_without_room_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ConfigError):
        KvBlocks(blocks, size)


def test_a_group_without_load_still_pays_the_overhead() -> None:
    assert StepTimeModel(1e-6, 0.02).duration_s([0, 0]) == 0.02


def test_negative_step_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match="overhead_s"):
        StepTimeModel(1e-6, -1.0)
