"""The rules for users' own predictors (`balanceroute.Predictor`).

The predictor learns random histories, is asked after every few requests, and is compared with another of the same
making that learned the same.

1. It has `predict`, `predict_one` and `observe`.
2. p_finish is from 0 to 1 and mean_if_finished from 0 to the horizon, for every age and prompt, also before it has
   learned anything, and for keys that it never saw.
3. `predict` answers an array entry for each request, none for none, and what `predict_one` answers for it.
4. Asking changes nothing: equal questions have equal answers until it observes something, and what it is given stays
   as it is.
5. Two that observed the same answer the same: no clock, no random state of its own.
6. It observes whatever leaves: of any length, with or without a key, also cut short.
"""

import copy
from collections.abc import Callable
from random import Random

import numpy as np

from balanceroute.core.knobs import DEFAULTS
from balanceroute.errors import ConfigError
from balanceroute.plugins import NEEDED_OF_PREDICTORS
from balanceroute.prediction import FinishedRequest, OwnPredictor, Predictor, TwoStage
from balanceroute.testing.rules import RuleBroken, require

KEYS = ("", "a", "b", "c")
REASONS = ("stop", "length", "cancelled", "failed")
LONGEST_TOKENS = 100_000
TOLERANCE = 1e-9  # what the order of additions may change


def check_predictor(
    make: Callable[[int], Predictor], *, rounds: int = 20, horizon_steps: int = DEFAULTS["horizon_steps"], seed: int = 0
) -> None:
    """Drive predictors that `make(horizon_steps)` returns through random histories. Raises: RuleBroken."""
    missing = [name for name in NEEDED_OF_PREDICTORS if not callable(getattr(make(horizon_steps), name, None))]
    require(not missing, f"rule 1: it lacks {', '.join(missing)}")
    for number in range(rounds):
        try:
            _Round(make, horizon_steps, Random(f"{seed}/{number}")).run()
        except RuleBroken as error:
            raise RuleBroken(f"round {number}: {error}") from error


class _Round:
    """A random history, learned by two predictors."""

    def __init__(self, make: Callable[[int], Predictor], horizon_steps: int, random: Random) -> None:
        self.predictors = [OwnPredictor("of the round", make(horizon_steps), horizon_steps) for _ in range(2)]
        self.random = random

    def run(self) -> None:
        """Ask, learn a little, ask again."""
        self.ask()
        for _ in range(8):
            for _ in range(self.random.randint(1, 30)):
                self.learn()
            self.ask()

    def learn(self) -> None:
        """Have both learn from a finished request: rule 6."""
        row = FinishedRequest(
            self.random.choice(KEYS), self.length(), self.length(), self.random.choice(REASONS), self.random.random()
        )
        for predictor in self.predictors:
            observed = copy.copy(row)
            try:
                predictor.observe(observed)
            except (Exception, SystemExit) as error:
                raise RuleBroken(f"rule 6: {row} raises {error!r}") from error
            require(observed == row, f"rule 4: observing changed {row} to {observed}")

    def ask(self) -> None:
        """Rules 2 to 5."""
        n = self.random.choice((0, 1, 7))
        ages = np.array([self.random.choice((0, self.length())) for _ in range(n)], dtype=np.int64)
        prompts = np.array([self.length() for _ in range(n)], dtype=np.int64)
        keys = [self.random.choice((*KEYS, "never seen")) for _ in range(n)]
        first, second = self.predictors
        answers = self.answers(first, ages, prompts, keys)
        again = self.answers(first, ages, prompts, keys)
        require(same(answers, again), "rule 4: equal questions had different answers")
        require(same(answers, self.answers(second, ages, prompts, keys)), "rule 5: equal histories, different answers")

    def answers(self, predictor: OwnPredictor, ages: np.ndarray, prompts: np.ndarray, keys: list[str]) -> TwoStage:
        """What it says of all together, compared with one by one."""
        given = (ages.copy(), prompts.copy(), list(keys))
        questions = list(zip(ages.tolist(), prompts.tolist(), keys, strict=True))
        try:
            found = predictor.predict(*given)
            singly = [predictor.predict_one(*question) for question in questions]
        except ConfigError as error:
            raise RuleBroken(f"rule 2 or 3: {error}") from error
        except (Exception, SystemExit) as error:
            raise RuleBroken(f"rule 2: {questions} raises {error!r}") from error
        untouched = (given[0] == ages).all() and (given[1] == prompts).all() and given[2] == keys
        require(bool(untouched), "rule 4: asking changed what it was given")
        alone = TwoStage(*np.array(singly, dtype=np.float64).reshape(-1, 2).T)
        require(same(found, alone), f"rule 3: predict and predict_one differ on {questions}: {found} and {alone}")
        return found

    def length(self) -> int:
        """Tokens, short as often as long."""
        return int(np.exp(self.random.uniform(0, np.log(LONGEST_TOKENS))))


def same(one: TwoStage, other: TwoStage) -> bool:
    """Whether the answers are the same."""
    pairs = zip(one, other, strict=True)
    return all(np.allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE) for first, second in pairs)
