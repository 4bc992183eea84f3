"""One replay from its parameters: trace, cluster, policy, predictor, seed. Picklable, so that many run in parallel."""

from contextlib import nullcontext
from dataclasses import dataclass, field

from balanceroute.core.knobs import Option, PolicySettings
from balanceroute.core.policies import BUILT_IN, make_policy
from balanceroute.core.policy import AdmissionPolicy, StageTimer
from balanceroute.errors import InputError
from balanceroute.plugins import check_predictor, check_predictor_name, learn_policy, while_it_runs
from balanceroute.prediction import KINDS, Forecaster, OwnPredictor, Predictor, build_predictor
from balanceroute.prediction.build import BuiltPredictor
from balanceroute.simulator.history import fitted
from balanceroute.simulator.oracle import Forecast, OracleForecast, PredictorForecast, TrueLengths
from balanceroute.simulator.result import Outcome
from balanceroute.simulator.setting import Setting
from balanceroute.simulator.simulation import Progress, Simulation
from balanceroute.traces import Trace

PREDICTORS = ("none", "oracle", *KINDS[1:])


@dataclass(frozen=True, slots=True)
class Replay:
    """What to simulate. `own_policy`: the policy itself, in place of the one that `policy` makes.

    `predictor`: of `PREDICTORS`, one of your own by name, made with `predictor_options`, or itself. `train` is the
    history that a predictor by name is fitted on, once and for all. Without it all but learned start cold and learn
    from what finishes during the run.
    """

    trace: Trace
    policy: PolicySettings
    setting: Setting = field(default_factory=Setting)
    predictor: str | Predictor = "none"
    train: Trace | None = None
    with_loads: bool = False
    check_invariants: bool = False
    own_policy: AdmissionPolicy | None = None
    predictor_options: tuple[tuple[str, Option], ...] = ()

    def checked(self) -> "Replay":
        """The replay itself. Raises: InputError or ConfigError that names the first option which nothing would read."""
        learn_policy(self.policy.policy)
        policy = self.own_policy or make_policy(self.policy)
        predictor = self.predictor if isinstance(self.predictor, str) else type(self.predictor).__name__
        if isinstance(self.predictor, str):
            check_predictor_name(self.predictor, PREDICTORS)
        if predictor != "none" and not policy.horizon_steps and self.policy.policy != "br_h":
            raise InputError(f"predictor {predictor}: changes nothing; {policy.name} does not look ahead, br_h does")
        if self.train is not None and (not isinstance(self.predictor, str) or self.predictor in ("none", "oracle")):
            raise InputError(f"train: changes nothing; predictor {predictor} is not fitted here")
        if self.setting.prefix_cache_tokens > 0 < self.setting.prefillers and not any(self.trace.prefix):
            raise InputError(
                f"prefix cache {self.setting.prefix_cache_tokens}: changes nothing; the trace does not say which "
                "prompts begin alike (prefix_blocks)"
            )
        if self.setting.overlap_requests and not policy.waits_for_slots:
            raise InputError(
                f"overlap requests: changes nothing; {policy.name} assigns at once, even if no slot is free"
            )
        return self

    def run(self, on_progress: Progress | None = None, stage_timer: StageTimer | None = None) -> Outcome:
        """Simulate; `stage_timer` is told "begin" before each decision, then each stage by the policy.

        Raises: InputError for a predictor that lacks its history, or settings that make no sense.
        """
        learn_policy(self.policy.policy)  # as this may be another process than the one that named it
        of_ones_own = self._of_ones_own()
        with while_it_runs(of_ones_own) if of_ones_own else nullcontext():
            return self._run(on_progress, stage_timer)

    def _run(self, on_progress: Progress | None, stage_timer: StageTimer | None) -> Outcome:
        lengths = TrueLengths(self.trace)
        simulation = Simulation(
            self.trace,
            self.setting,
            self.own_policy or make_policy(self.policy, stage_timer),
            lengths,
            self.forecast(lengths),
            with_loads=self.with_loads,
            stage_timer=stage_timer,
            check_invariants=self.check_invariants,
        )
        return simulation.run(on_progress)

    def _of_ones_own(self) -> str:
        """The name of a user's own policy or predictor, whose code may raise any error; "": both are built in."""
        policy, predictor = self.policy.policy, self.predictor
        found = []
        if self.own_policy is not None:
            found.append(f"policy {type(self.own_policy).__name__}")
        elif policy not in BUILT_IN:
            found.append(f"policy {policy}")
        if isinstance(predictor, str) and predictor not in PREDICTORS:
            found.append(f"predictor {predictor}")
        elif not isinstance(predictor, str | BuiltPredictor):
            found.append(f"predictor {type(predictor).__name__}")
        return " and ".join(found)

    @staticmethod
    def _answering(predictor: Predictor, horizon: int) -> Predictor:
        """The predictor; each answer of a user's own one is checked."""
        if isinstance(predictor, BuiltPredictor):
            return predictor
        name = type(predictor).__name__
        return OwnPredictor(name, check_predictor(predictor, name), horizon)

    def forecast(self, lengths: TrueLengths) -> Forecast:
        """The source of c-hat that `predictor` names."""
        horizon = self.policy.horizon_steps
        if not isinstance(self.predictor, str):
            return PredictorForecast(Forecaster(self._answering(self.predictor, horizon), horizon), learns=True)
        check_predictor_name(self.predictor, PREDICTORS)
        options = dict(self.predictor_options)
        if options and self.predictor in PREDICTORS:
            raise InputError(f"predictor {self.predictor}: it takes no options, and {', '.join(options)} are given")
        if self.predictor == "none":
            return Forecast()
        if self.predictor == "oracle":
            if self.setting.barrier_groups > 1 or self.setting.draft_tokens:
                raise InputError("predictor oracle: it is not modelled together with barrier groups or draft tokens")
            return OracleForecast(lengths, horizon)
        if self.train is not None:
            return PredictorForecast(Forecaster(fitted(self.predictor, self.train, horizon, options), horizon))
        if self.predictor == "learned":
            raise InputError(f"train: predictor {self.predictor} needs a trace of the past")
        learner = build_predictor(self.predictor, horizon, options=options)
        return PredictorForecast(Forecaster(learner, horizon), learns=True)


def usual_predictor(policy: str) -> str:
    """The default predictor of a policy: survival for br_h, which needs one."""
    return "survival" if policy == "br_h" else "none"
