"""How many requests a decode worker is sent ahead of its slots, so that their KV moves while others run.

A slot that frees stays empty until the KV of the next request has come. A request holds a slot while the tokens of its
answer come; so of B slots one frees every t * o / B seconds, with t seconds from token to token and a mean answer o;
by Little's law

    on_way = B * transfer_s / (t * o)

requests are on their way at any time, more or fewer by about its square root. m is the least number that is enough for
all of the time but a share q:

    m = on_way + z sqrt(on_way), rounded up from one half on

z = ln((1 - q) / q) / LOGISTIC is about the quantile of the normal distribution at 1 - q.

A request sent ahead is chosen a departure too early, from loads that will have changed when it starts, so the next
choice must fill a slot with a probability that is worth it: q is what such a choice costs, in slots. Where workers wait
for each other at a barrier that is how much prompts differ (`ClusterSnapshot.early_choice_slots`), up to one half, and
then m is simply `on_way` to the nearest whole number. Where prompts are alike, or no worker waits for another, it costs
the KV memory that such a request holds: `WORTH` of all slots. `docs/results` has the simulations behind this. m is 0
where a transfer takes less than half a step, which is as finely as it is known.

*Pauses.* vLLM begins no transfer in a step that finds all slots in use. So whenever a worker has run out of requests
whose KV is there, the slots that become free stay empty until the next transfers have ended. With r = transfer_s /
(t o) that costs each slot p answers, p = r^2 / 2 for a transfer shorter than an answer and r - 1/2 for a longer one. It
happens once in B + m requests, so of all slots p / (1 + m / B + p) are lost. m is large enough that these are no more
than `PAUSED`:

    m >= B (p (1 / PAUSED - 1) - 1)

That is more than `on_way` where a transfer takes longer than .38 answers, and may then be more than B. But of what a
full pool holds for each worker B stay in the pool, so that there is something to choose from.

All of it is measured. A step takes t times the tokens that it yields of a request, which with speculative decoding are
several; the engine says how many. `transfer_s` is the time from an admission to the first token, less a step, of
requests that had a slot waiting for them. One that was sent ahead may have waited for its slot instead, so its time is
an upper bound, which may lower the estimate and never raises it. It takes less time for a smaller prompt than for the
mean one, which says nothing against the estimate: such a bound counts only below it in proportion to the prompt.
"""

import math
from dataclasses import dataclass

SHORT_STEPS = 0.5  # a transfer that takes less counts as none
WORTH = 0.002  # of a worker's slots: filling less is not worth the KV memory of a request sent ahead
MOST_COST = 0.5  # slots, of an early choice
PAUSED = 0.05  # of all slots, which may be lost to pauses
LOGISTIC = 1.702  # makes the logistic distribution's quantile that of the normal one, within .1 between .05 and .95
WEIGHT = 0.02  # of a new value in the running means, whose first 50 are averaged


@dataclass(slots=True)
class Overlap:
    """Running means of what m is made of, in seconds; 0 until something was seen."""

    transfer_s: float = 0.0
    token_s: float = 0.0
    transfers: int = 0
    answers: int = 0

    def see_first_token(self, delay_s: float, sent_ahead: bool, tokens_per_step: float, mean_prompts: float) -> None:
        """Take in the seconds from an admission to its first token. Counts nothing until a step is known.

        `mean_prompts`: the size of its prompt, in mean ones.
        """
        transfer_s = delay_s - self.token_s * tokens_per_step
        expected_s = self.transfer_s * min(1.0, mean_prompts) if sent_ahead else self.transfer_s
        if not self.answers or (sent_ahead and transfer_s >= expected_s):
            return
        self.transfers += 1
        self.transfer_s += max(WEIGHT, 1.0 / self.transfers) * (transfer_s - expected_s)

    def see_answer(self, stay_s: float, tokens: int) -> None:
        """Take in a finished answer: the seconds from its first token to its last, and how many these were.

        Where a relay's report of the first was late they may look negative.
        """
        if tokens < 2:
            return
        self.answers += 1
        self.token_s += max(WEIGHT, 1.0 / self.answers) * (max(0.0, stay_s) / (tokens - 1) - self.token_s)

    def requests(
        self,
        slots: int,
        answer_tokens: float,
        tokens_per_step: float,
        early_choice_slots: float,
        pool_share: float,
    ) -> int:
        """m of a worker with so many slots (B), for answers of so many tokens on average (o).

        `early_choice_slots`: what a choice that is made a departure too early costs, in slots. `pool_share`: how many
        requests a full pool holds for each worker.
        """
        stay_s = self.token_s * answer_tokens
        if stay_s <= 0.0 or self.transfer_s < SHORT_STEPS * self.token_s * tokens_per_step:
            return 0
        answers = self.transfer_s / stay_s  # that a transfer takes
        on_way = slots * answers
        too_few = min(MOST_COST, max(WORTH * slots, early_choice_slots))
        spare = math.log((1.0 - too_few) / too_few) / LOGISTIC * math.sqrt(on_way)
        lost = answers * answers / 2.0 if answers < 1.0 else answers - 0.5
        against_pauses = slots * (lost * (1.0 / PAUSED - 1.0) - 1.0)
        return max(min(slots, math.floor(on_way + spare + 0.5)), math.floor(min(pool_share - slots, against_pauses)))
