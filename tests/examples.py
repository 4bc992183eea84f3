"""How many examples a property test draws."""

from hypothesis import settings

USUAL = 100  # what a test draws that sets no number


def examples(count: int) -> int:
    """So many; in a run with a profile that draws fewer, such as CI's second one, fewer by the same factor."""
    return max(1, count * settings().max_examples // USUAL)
