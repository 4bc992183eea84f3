"""`python -m balanceroute.testing [--predictor] MODULE:CLASS [NAME=VALUE ...]`."""

import sys
from functools import partial

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.errors import BalanceRouteError
from balanceroute.parameters import parse_options, parse_params
from balanceroute.plugins import learn_policy, make_predictor
from balanceroute.testing import RuleBroken, check_policy, check_predictor
from balanceroute.testing.costs import slow_decisions, slow_predictions

USAGE = "usage: python -m balanceroute.testing [--predictor] MODULE:CLASS [NAME=VALUE ...]"


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
            options = parse_options("option", params)
            own_predictor = partial(make_predictor, name, options=options)
            warn(name, slow_predictions(own_predictor))
            check_predictor(own_predictor)
        else:
            learn_policy(name)
            settings = parse_params(PolicySettings(policy=name), params)
            own_policy = partial(make_policy, settings)
            warn(name, slow_decisions(own_policy))
            check_policy(own_policy)
    except RuleBroken as error:
        print(f"{name}: {error}")
        return 1
    except BalanceRouteError as error:
        print(f"balanceroute.testing: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{name}: keeps the rules")
    return 0


def warn(name: str, fault: str) -> None:
    """Print what breaks no rule: how fast something is depends on the machine."""
    if fault:
        print(f"{name}: {fault}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
