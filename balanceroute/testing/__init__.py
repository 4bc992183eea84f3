"""Tests for authors of policies and predictors: the rules that these must keep.

    from balanceroute.testing import check_policy, check_predictor

    def test_my_policy_keeps_the_rules() -> None:
        check_policy(lambda: MyPolicy(patience_s=30.0))

    def test_my_predictor_keeps_the_rules() -> None:
        check_predictor(MyPredictor)

or, without a test file, `python -m balanceroute.testing my_module:MyPolicy`, and with `--predictor` of a predictor.
`policies` and `predictors` have the rules. A broken one raises `RuleBroken`.
"""

from balanceroute.testing.policies import check_policy
from balanceroute.testing.predictors import check_predictor
from balanceroute.testing.rules import RuleBroken

__all__ = ["RuleBroken", "check_policy", "check_predictor"]
