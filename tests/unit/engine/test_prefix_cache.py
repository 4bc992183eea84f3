"""The engine's prefix cache."""

from balanceroute.engine import PrefixCache


def test_a_prompt_finds_the_leading_blocks_that_were_computed_before() -> None:
    cache = PrefixCache(10)
    assert [cache.compute(prompt) for prompt in ("ab", "abcd", "abx", "b")] == [0, 2, 2, 1]


def test_the_least_recently_used_blocks_are_evicted_from_the_end_of_a_prompt() -> None:
    cache = PrefixCache(3)
    for prompt in ("abc", "x"):
        cache.compute(prompt)
    assert (cache.found("abc"), cache.found("x"), len(cache)) == (2, 1, 3)


def test_a_prompt_larger_than_the_cache_keeps_its_first_blocks() -> None:
    cache = PrefixCache(2)
    cache.compute("abcd")
    assert cache.found("abcd") == 2


def test_without_room_nothing_is_cached_and_a_cleared_cache_holds_nothing() -> None:
    assert [PrefixCache(0).compute("ab"), PrefixCache(0).found("a")] == [0, 0]
    cache = PrefixCache(2)
    cache.compute("ab")
    cache.clear()
    assert cache.found("a") == 0
