"""The rows of the tables: a policy with its knobs and predictor, and the paper's name for it."""

import math
from dataclasses import dataclass, replace

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.plugins import learn_policy

WAIT_CAP_S = 60.0  # the same for every row that has one; up to six times as long for prompts far above the mean

# The paper's routers as printed: greedy stage alone, no limit to waiting, workers picked by free slots.
PRINTED = PolicySettings(s_greedy=0, r_max=4, slack_placement="free_slots", max_wait_s=math.inf)


@dataclass(frozen=True, slots=True)
class Method:
    """One row. `paper` is the key of its figures in `paper.py`, `pooled` whether a wait cap means anything.

    `overlap_requests`: as in `simulator.Setting`; read by the grid alone.
    """

    key: str
    label: str
    policy: PolicySettings
    predictor: str = "none"
    paper: str = ""
    pooled: bool = True
    overlap_requests: int | None = None

    def capped(self) -> "Method":
        """The same router, but nothing waits past the common cap without going first."""
        return replace(self, policy=replace(self.policy, max_wait_s=WAIT_CAP_S))

    def seeded(self, seed: int) -> "Method":
        """The same router with another seed for its random choices."""
        return replace(self, policy=replace(self.policy, seed=seed))


def baseline(policy: str, label: str, paper: str = "") -> Method:
    """A policy without knobs that assigns at once."""
    return Method(policy, label, PolicySettings(policy=policy), paper=paper, pooled=False)


def br_h(key: str, label: str, beta: float, gamma: float, predictor: str, paper: str = "") -> Method:
    """BR-H as printed, at an operating point."""
    return Method(key, label, replace(PRINTED, policy="br_h", beta=beta, gamma=gamma), predictor, paper)


RANDOM = baseline("random", "Random", "random")
ROUND_ROBIN = baseline("round_robin", "Round-Robin", "round_robin")
POWER_OF_TWO = baseline("power_of_two", "Power-of-Two-Choices", "power_of_two")
JSQ = baseline("join_shortest_queue", "Join-Shortest-Queue", "join_shortest_queue")
LEAST_KV = baseline("least_kv", "Least KV tokens")
POOL_FIFO = Method("pool_fifo", "Pool, FIFO, to the least KV", PolicySettings(policy="pool_fifo"), pooled=False)
BR_0 = Method("br_0", "BR-0", replace(PRINTED, policy="br_0"), paper="br_0")
BR_H_ORACLE = br_h("br_h_oracle_43", "BR-H oracle (43, 0.86)", 43.0, 0.86, "oracle", "br_h_oracle_43")
BR_H_ORACLE_14 = br_h("br_h_oracle_14", "BR-H oracle (14.67, 0.64)", 14.67, 0.64, "oracle", "br_h_oracle_14")
BR_H_SURVIVAL = br_h("br_h_survival", "BR-H survival", 43.0, 0.86, "survival", "br_h_survival")
BR_H_EXACT = br_h("br_h_exact_match", "BR-H ExactMatch", 43.0, 0.86, "exact_match", "br_h_exact_match")
# Both stages: the last four slots of a decision go by the best subset of the first R_max in arrival order. Nobody waits
# for ever there, so that no cap is needed; the printed guard takes the best of these, too.
BOTH_STAGES = replace(PRINTED, s_greedy=4, guard="head")


def both_stages(policy: str, label: str, r_max: int, predictor: str = "none") -> Method:
    """A router of the paper whose stage 2 runs."""
    settings = replace(BOTH_STAGES, policy=policy, r_max=r_max)
    return Method(f"{policy}_both_r{r_max}", f"{label}, both stages, R_max {r_max}", settings, predictor, pooled=False)


BR_0_BOTH_4, BR_0_BOTH_8 = (both_stages("br_0", "BR-0", r_max) for r_max in (4, 8))
BR_H_BOTH_4, BR_H_BOTH_8 = (both_stages("br_h", "BR-H survival", r_max, "survival") for r_max in (4, 8))
TARGET_FIT = Method(
    "target_fit", "TargetFit (beyond the paper)", PolicySettings(policy="target_fit", max_wait_s=WAIT_CAP_S)
)
LEVEL_FIT = Method("level_fit", "LevelFit (ours)", PolicySettings(policy="level_fit", max_wait_s=WAIT_CAP_S))
LEVEL_FIT_SLOTS = replace(LEVEL_FIT, key="level_fit_slots", label="LevelFit, overlap_requests 0", overlap_requests=0)
BR_0_DEFAULT = Method("br_0_default", "BR-0, our defaults", PolicySettings(policy="br_0"))
BR_H_DEFAULT = Method("br_h_default", "BR-H survival, our defaults", PolicySettings(policy="br_h"), "survival")

MAIN = (
    RANDOM,
    ROUND_ROBIN,
    POWER_OF_TWO,
    JSQ,
    LEAST_KV,
    POOL_FIFO,
    BR_0,
    BR_H_ORACLE,
    BR_H_ORACLE_14,
    BR_H_SURVIVAL,
    BR_H_EXACT,
    BR_0_BOTH_4,
    BR_0_BOTH_8,
    BR_H_BOTH_4,
    BR_H_BOTH_8,
    TARGET_FIT,
    LEVEL_FIT,
)
"""Rows of the main table, in its order."""


def own(name: str) -> Method:
    """A user's own policy, without options; one that looks ahead gets the survival predictor."""
    learn_policy(name)
    settings = PolicySettings(policy=name)
    predictor = "survival" if make_policy(settings).horizon_steps else "none"
    return Method(f"own_{name}", name, settings, predictor, pooled=False)


def at_point(beta: float, gamma: float) -> Method:
    """BR-H with an oracle at any (beta, gamma), for the sensitivity sweep."""
    return br_h(f"br_h_{beta:g}_{gamma:g}", f"BR-H oracle ({beta:g}, {gamma:g})", beta, gamma, "oracle")


AS_SERVED = (JSQ, LEAST_KV, POOL_FIFO, BR_0_DEFAULT, BR_H_DEFAULT, TARGET_FIT, LEVEL_FIT)
"""Routers with the knobs that `serve` has by default."""
