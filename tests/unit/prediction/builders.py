"""Small histories and trackers for the predictors' tests."""

from dataclasses import dataclass

from balanceroute.prediction import FinishedRequest


def a_finish(
    output_tokens: int, *, key: str = "", reason: str = "stop", prompt_tokens: int = 100, at_s: float = 0.0
) -> FinishedRequest:
    return FinishedRequest(key, prompt_tokens, output_tokens, reason, at_s)


def finishes(*outputs: int, key: str = "") -> list[FinishedRequest]:
    return [a_finish(output, key=key, at_s=float(at)) for at, output in enumerate(outputs)]


@dataclass
class ATracker:
    age_tokens: int = 0
    prompt_tokens: int = 100
    prompt_key: str = ""
    earlier_tokens: int = 0
    max_new_tokens: int | None = None
