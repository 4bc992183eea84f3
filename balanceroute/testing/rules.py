"""A rule that is broken."""


class RuleBroken(AssertionError):
    """The policy or predictor breaks a rule."""


def require(holds: bool, text: str) -> None:
    """Raises: RuleBroken with the text."""
    if not holds:
        raise RuleBroken(text)
