"""`python -m balanceroute.testing [--predictor] MODULE:CLASS [NAME=VALUE ...]`."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.errors import BalanceRouteError
from balanceroute.parameters import parse_options, parse_params
from balanceroute.plugins import learn_policy, make_predictor, place
from balanceroute.testing import RuleBroken, check_policy, check_predictor
from balanceroute.testing.costs import slow_decisions, slow_predictions

USAGE = "usage: python -m balanceroute.testing [--predictor] MODULE:CLASS [NAME=VALUE ...]"
P = ParamSpec("P")
T = TypeVar("T")
MOST_S: Final = 60.0  # from one policy that is made to the next, which is one decision; each call of a predictor


class TooLong(BaseException):
    """The policy or predictor has not answered for `MOST_S`; no error that a check would take for the user's own."""


def main(arguments: list[str]) -> int:
    """Exit code 0 if it keeps the rules, 1 if not, 2 where it cannot be made, 130 on Ctrl-C."""
    of_predictor = arguments[:1] == ["--predictor"]
    named = arguments[1:] if of_predictor else arguments
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if not named or named[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    name, *params = named
    try:
        if of_predictor:
            try_predictor(name, params)
        else:
            try_policy(name, params)
    except RuleBroken as error:
        print(f"{name}: {error}")
        return 1
    except TooLong as error:
        print(f"{name}: it has not answered for {MOST_S:g} s{place(error)}")
        return 1
    except BalanceRouteError as error:
        print(f"balanceroute.testing: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{name}: keeps the rules")
    return 0


def try_predictor(name: str, params: list[str]) -> None:
    """Raises: RuleBroken; TooLong; BalanceRouteError: it cannot be made."""
    options = parse_options("option", params)
    with time_limit():
        make_own = in_time(partial(make_predictor, name, options=options))

        def own_predictor(horizon_steps: int) -> Any:
            return EachInTime(make_own(horizon_steps))

        warn(name, slow_predictions(own_predictor))
        check_predictor(own_predictor)


def try_policy(name: str, params: list[str]) -> None:
    """Raises: as `try_predictor`."""
    learn_policy(name)
    settings = parse_params(PolicySettings(policy=name), params)
    with time_limit():
        own_policy = in_time(partial(make_policy, settings))
        warn(name, slow_decisions(own_policy))
        check_policy(own_policy)


@contextmanager
def time_limit() -> Iterator[None]:
    """From the first call (`in_time`) to the end, `TooLong` is raised wherever the code is that does not end."""
    before = signal.signal(signal.SIGALRM, _raise_too_long)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class EachInTime:
    """A predictor of which each call begins `MOST_S` anew: one is asked, and learns, hundreds of times."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return in_time(found) if callable(found := getattr(self._own, name)) else found


def in_time(call: Callable[P, T]) -> Callable[P, T]:
    """The same, which begins `MOST_S` anew."""

    def begun(*args: P.args, **kwargs: P.kwargs) -> T:
        signal.setitimer(signal.ITIMER_REAL, MOST_S)
        return call(*args, **kwargs)

    return begun


def _raise_too_long(*_: object) -> None:
    raise TooLong


def warn(name: str, fault: str) -> None:
    """Print what breaks no rule: how fast something is depends on the machine."""
    if fault:
        print(f"{name}: {fault}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
