"""`WorkloadMeans`: running means of the requests so far."""

import math
from dataclasses import dataclass, field

PROMPT_WEIGHT, WAIT_WEIGHT, ANSWER_WEIGHT = 0.02, 0.01, 0.01  # of a new value in the running means
USUAL_WEIGHT, MOST_USUAL = 0.005, 20.0  # the same of the mean that rare huge prompts are held against, and its bound
PLAIN_MEAN_OF = 100  # values: from there on a new one weighs as much as in the EWMA
START_PROMPTS = 50  # whose mean the EWMA of prompt sizes starts from
PATIENCE_PROMPTS = 10.0  # mean prompts for which patience grows by once that of a small prompt,
MOST_MORE_PATIENCE = 5.0  # at most by so many times
SLOPE_WEIGHT = 0.002  # of a finished request in what answers have to do with prompts
MOST_CLASSES = 64  # whose waits are kept; clients may name any number of priorities
CLEAR_SLOPE = 0.3  # mean answers by which answers differ from one sigma of prompts to the next; less may be chance


@dataclass(slots=True)
class WorkloadMeans:
    """Running means that patience and TargetFit's ageing are measured by.

    The prompt mean is an EWMA (0.02) over all arrivals whose start value is the mean of the first 50; until the 50th
    has arrived that start is refined, with the weight that it still has. `deviation_tokens` is the mean absolute
    deviation from it, an EWMA of the same weight and the plain mean of the first 50. Waits at admission are an EWMA
    (0.01), in seconds; so are those of each priority class, which start from that of all. Answers are an EWMA (0.01) of
    the tokens of finished requests, and the plain mean of the first hundred; `prefill_tokens` the same of the work of
    prompts (`core.prefill_work`). In `usual_tokens` (0.005, and the plain mean of the first 200) no prompt counts for
    more than 20 times the mean so far, so that huge ones do not hide themselves.

    `log_prompt` and `log_variance` are mean and variance of the logarithm of the prompts of finished requests, and
    `log_covariance` is that of their answers with it (0.002, and those of the first 500).
    """

    prompt_tokens: float = 0.0
    deviation_tokens: float = 0.0
    usual_tokens: float = 0.0
    start_tokens: float = 0.0
    wait_s: float = 0.0
    answer_tokens: float = 0.0
    prefill_tokens: float = 0.0
    log_prompt: float = 0.0
    log_variance: float = 0.0
    log_covariance: float = 0.0
    prompts: int = 0
    answers: int = 0
    prefills: int = 0
    class_wait_s: dict[int, float] = field(default_factory=dict)  # by priority

    def see_prompt(self, tokens: int) -> None:
        """Take in the prompt size of a request that became ready."""
        self.prompts += 1
        usual = self.usual_tokens or float(tokens)
        self.usual_tokens = usual + max(USUAL_WEIGHT, 1.0 / self.prompts) * (min(tokens, MOST_USUAL * usual) - usual)
        self.prompt_tokens += PROMPT_WEIGHT * (tokens - self.prompt_tokens)
        if self.prompts <= START_PROMPTS:
            shift = (tokens - self.start_tokens) / self.prompts
            self.start_tokens += shift
            self.prompt_tokens += (1.0 - PROMPT_WEIGHT) ** self.prompts * shift
        deviation = abs(tokens - self.prompt_tokens)
        self.deviation_tokens += max(PROMPT_WEIGHT, 1.0 / self.prompts) * (deviation - self.deviation_tokens)

    def see_wait(self, wait_s: float, priority: int) -> None:
        """Take in the wait of a request of this class at its admission."""
        before_s = self.class_wait_s.pop(priority, self.wait_s)  # the class comes last: the first is long unused
        self.class_wait_s[priority] = before_s + WAIT_WEIGHT * (wait_s - before_s)
        if len(self.class_wait_s) > MOST_CLASSES:
            del self.class_wait_s[next(iter(self.class_wait_s))]
        self.wait_s += WAIT_WEIGHT * (wait_s - self.wait_s)

    def wait_of(self, priority: int) -> float:
        """The mean wait of this class, seconds; that of all before the first of it is admitted."""
        return self.class_wait_s.get(priority, self.wait_s)

    def see_answer(self, tokens: int, prompt_tokens: int) -> None:
        """Take in the length of an answer that is complete, and that of its prompt."""
        self.answers += 1
        weight = max(SLOPE_WEIGHT, 1.0 / self.answers)
        distance = math.log(max(1, prompt_tokens)) - self.log_prompt
        self.log_prompt += weight * distance
        self.log_variance = (1.0 - weight) * (self.log_variance + weight * distance * distance)
        more_tokens = tokens - self.answer_tokens
        self.log_covariance = (1.0 - weight) * (self.log_covariance + weight * distance * more_tokens)
        self.answer_tokens += max(ANSWER_WEIGHT, 1.0 / self.answers) * (tokens - self.answer_tokens)

    def see_prefill(self, work: float) -> None:
        """Take in the work of a prompt that is sent to a prefiller, tokens."""
        self.prefills += 1
        self.prefill_tokens += max(ANSWER_WEIGHT, 1.0 / self.prefills) * (work - self.prefill_tokens)

    def answer_slope(self) -> float:
        """By how many tokens the mean answer changes where the prompt is e times as large.

        0 unless small prompts clearly have the longer answers.
        """
        if self.answers < PLAIN_MEAN_OF or self.log_variance <= 0.0:
            return 0.0
        by_sigma_tokens = self.log_covariance / math.sqrt(self.log_variance)
        return self.log_covariance / self.log_variance if by_sigma_tokens < -CLEAR_SLOPE * self.answer_tokens else 0.0

    def patience_factor(self, prompt_tokens: int) -> float:
        """How much longer than most a prompt of this size may wait: 1 to 6 (6 from 50 times the mean on)."""
        if self.prompt_tokens <= 0:
            return 1.0
        return 1.0 + min(MOST_MORE_PATIENCE, prompt_tokens / (PATIENCE_PROMPTS * self.prompt_tokens))
