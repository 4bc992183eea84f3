"""Workloads drawn at random, for which no policy was tuned.

Public traces are few, and whoever tunes a policy has seen them. Here the sizes of prompts and answers, how they are
distributed, whether long answers follow long prompts and whether arrivals come in waves are drawn from the workload's
number, so that any number of workloads can be made that no constant was fitted to. No row is anybody's request.

From `RARE_FROM` on all are chats with rare huge prompts, a book among questions, where a short bound on every request's
wait costs most.
"""

from dataclasses import dataclass

import numpy as np

from balanceroute.arrays import FloatArray
from balanceroute.traces.generate import Lengths
from balanceroute.traces.trace import Trace

SEED = 20_261_125
PROMPTS = ("lognormal", "two sizes", "pareto", "uniform")
RARE = "rare sizes"
RARE_FROM = 100
MEAN_PROMPT = (150.0, 12_000.0)  # tokens; drawn evenly on a logarithmic scale, as the mean answer is
MEAN_ANSWER = (15.0, 2_500.0)
MEAN_RARE_PROMPT = (150.0, 1_500.0)  # so that the large ones are within the bound
MAX_PROMPT, MAX_ANSWER = 130_000, 20_000
WAVES = (100, 400, 1_500)  # requests that arrive fast, and then as many slowly
FAST, SLOW = 0.5, 1.5  # of the mean gap


@dataclass(frozen=True, slots=True)
class DrawnWorkload:
    """The workload drawn for a number.

    `spread`: of prompts: the sigma of the lognormal, how many times larger the large ones are, or the tail index;
    `large_ratio`: the part of two sizes that is large. `answer_sigma`: of the lognormal of answers, 0 for geometric
    ones. `answers_follow`: whether prompts above the median have answers three times as long. `wave_requests`: 0 for
    Poisson arrivals.
    """

    number: int
    prompts: str
    prompt_tokens: float
    spread: float
    large_ratio: float
    answer_tokens: float
    answer_sigma: float
    answers_follow: bool
    wave_requests: int

    def trace(self, rows: int, seed: int = 0) -> Trace:
        """So many requests of the workload, one per second on average."""
        rng = np.random.default_rng((SEED, self.number, 1, seed))
        prompts = Lengths(self.prompt_tokens, 0.0, 1, MAX_PROMPT).fit(self._prompts(rng, rows) * self.prompt_tokens)
        answers = self._answers(rng, rows)
        if self.answers_follow:
            answers *= np.where(prompts > np.median(prompts), 1.5, 0.5)
        gaps = rng.exponential(1.0, rows)
        if self.wave_requests:
            gaps *= np.where((np.arange(rows) // self.wave_requests) % 2, SLOW, FAST)
        return Trace(
            np.asarray(np.round(np.cumsum(gaps), 6), dtype=np.float64),
            prompts,
            Lengths(self.answer_tokens, 0.0, 1, MAX_ANSWER).fit(answers * self.answer_tokens),
            np.full(rows, ""),
        )

    def _prompts(self, rng: np.random.Generator, rows: int) -> FloatArray:
        """Sizes with a mean of 1."""
        if self.prompts == "lognormal":
            sizes = rng.lognormal(0.0, self.spread, rows)
        elif self.prompts in ("two sizes", RARE):
            sizes = np.where(rng.random(rows) < self.large_ratio, self.spread, 1.0) * rng.lognormal(0.0, 0.5, rows)
        elif self.prompts == "pareto":
            sizes = 1.0 + rng.pareto(self.spread, rows)
        else:
            sizes = rng.uniform(0.2, 1.8, rows)
        return np.asarray(sizes / sizes.mean(), dtype=np.float64)

    def _answers(self, rng: np.random.Generator, rows: int) -> FloatArray:
        """Lengths with a mean of about 1."""
        if self.answer_sigma:
            lengths = rng.lognormal(0.0, self.answer_sigma, rows)
            return np.asarray(lengths / lengths.mean(), dtype=np.float64)
        return rng.geometric(1.0 / self.answer_tokens, rows) / self.answer_tokens

    def __str__(self) -> str:
        prompts = {
            "two sizes": f"{self.large_ratio:.0%} of them {self.spread:.0f} times the others",
            RARE: f"{self.large_ratio:.1%} of them {self.spread:.0f} times the others",
            "uniform": "uniform",
        }.get(self.prompts, f"{self.prompts} {self.spread:.1f}")
        answers = f"lognormal {self.answer_sigma:.1f}" if self.answer_sigma else "geometric"
        answers += ", longer behind long prompts" if self.answers_follow else ""
        waves = f", waves of {self.wave_requests}" if self.wave_requests else ""
        return f"prompts {self.prompt_tokens:,.0f} ({prompts}), answers {self.answer_tokens:,.0f} ({answers}){waves}"


def drawn_workload(number: int) -> DrawnWorkload:
    """The workload of that number, always the same one."""
    rng = np.random.default_rng((SEED, number, 0))
    prompts = RARE if number >= RARE_FROM else str(rng.choice(PROMPTS, p=(0.4, 0.2, 0.2, 0.2)))
    spread = {
        "lognormal": (0.3, 1.8),
        "two sizes": (5.0, 60.0),
        "pareto": (1.1, 2.5),
        "uniform": (0.0, 0.0),
        RARE: (60.0, 300.0),
    }[prompts]
    mean_prompt = MEAN_RARE_PROMPT if prompts == RARE else MEAN_PROMPT
    large_ratio = (0.001, 0.01) if prompts == RARE else (0.02, 0.3)
    return DrawnWorkload(
        number=number,
        prompts=prompts,
        prompt_tokens=float(np.exp(rng.uniform(*np.log(mean_prompt)))),
        spread=float(rng.uniform(*spread)),
        large_ratio=float(rng.uniform(*large_ratio)),
        answer_tokens=float(np.exp(rng.uniform(*np.log(MEAN_ANSWER)))),
        answer_sigma=0.0 if rng.random() < 0.3 else float(rng.uniform(0.2, 1.4)),
        answers_follow=bool(rng.random() < 0.25),
        wave_requests=int(rng.choice(WAVES)) if rng.random() < 0.25 else 0,
    )
