"""The engine's prefix cache."""

from balanceroute.engine import PrefixCache


def test_a_prompt_finds_the_leading_blocks_that_were_computed_before() -> None:
    cache = PrefixCache(10)
    assert [cache.compute(prompt) for prompt in ("ab", "abcd", "abx", "b")] == [0, 2, 2, 1]


def test_what_was_used_longest_ago_goes_and_of_one_prompt_its_last_block_first() -> None:
    cache = PrefixCache(3)
    for prompt in ("abc", "x"):
        cache.compute(prompt)
    assert (cache.found("abc"), cache.found("x"), len(cache)) == (2, 1, 3)


def test_a_prompt_larger_than_the_cache_leaves_its_beginning() -> None:
    cache = PrefixCache(2)
    cache.compute("abcd")
    assert cache.found("abcd") == 2


def test_without_room_nothing_is_cached_and_a_cleared_cache_holds_nothing() -> None:
    assert [PrefixCache(0).compute("ab"), PrefixCache(0).found("a")] == [0, 0]
    cache = PrefixCache(2)
    cache.compute("ab")
    cache.clear()
    assert cache.found("a") == 0
