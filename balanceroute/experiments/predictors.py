"""Offline accuracy of the predictors, trained on one draw of the workload and judged on another."""

from pathlib import Path

from balanceroute.experiments import paper
from balanceroute.experiments.jobs import PredictorJob, Results, Task
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table
from balanceroute.prediction import KINDS, Evaluation
from balanceroute.prediction.learned import can_grow

HORIZON_STEPS = 80
FAR_OFF_AUC = 0.05


def plan(scope: Scope) -> list[Task]:
    """Every predictor on every workload; nothing is simulated."""
    return [job_of(scope, source, kind) for source in scope.sources for kind in kinds_here()]


def job_of(scope: Scope, source: str, kind: str) -> PredictorJob:
    """One predictor on one workload."""
    return PredictorJob(scope.workload(source), kind, HORIZON_STEPS)


def files(scope: Scope) -> list[str]:
    """The files of the report."""
    return ["predictors.csv"]


def report(scope: Scope, results: Results, out: Path) -> Section:
    """One table over workloads and predictors."""
    section = Section("Predictor accuracy")
    section.text(
        f"{training(scope)}, judged at ages 0, H/2, H, ... (H = {HORIZON_STEPS}). Stage 1: ROC-AUC of"
        ' "finishes within H"; stage 2: mean absolute error of the remaining tokens where it does. `gate open` is'
        " how often p ≥ 0.5, that is, how often the router uses the prediction at all."
    )
    table = Table(
        "predictors",
        ["workload", "predictor", "AUC", "paper AUC", "MAE tokens", "paper MAE", "Brier", "gate open"],
        digits={"AUC": 3, "paper AUC": 3, "MAE tokens": 1, "paper MAE": 1, "Brier": 3, "gate open": 3},
    )
    for source in scope.sources:
        for kind in kinds_here():
            judged: Evaluation = results[job_of(scope, source, kind)]
            printed = paper.PREDICTORS.get(source, {}).get(kind, (None, None))
            table.add(
                scope.workload(source).name,
                kind,
                judged.auc,
                printed[0],
                judged.conditional_mae,
                printed[1],
                judged.brier,
                judged.gate_open_rate,
            )
    section.table(table)
    if "learned" not in kinds_here():
        section.text("`learned` is left out: it needs scikit-learn (`scripts/install learned`).")
    if scope.trace:
        return section
    section.text(paper.verdict(not_reproduced(scope, results), "figures", "paper's (AUC: 0.05)"))
    section.text(
        "On heavy tails the survival predictor is hardly ever confident, so most of what BR-H gains with it there"
        " comes from beta, not from prediction; near a cap it helps. ExactMatch knows the recurring half of"
        " `heavy_tailed` and nothing of the rest, hence between the paper's two rows."
    )
    return section


def not_reproduced(scope: Scope, results: Results) -> list[str]:
    """Accuracies that are far from the paper's: an AUC by more than 0.05, an error by more than the common factor."""
    found = []
    for source in scope.sources:
        for kind, (auc, error) in paper.PREDICTORS.get(source, {}).items():
            judged: Evaluation = results[job_of(scope, source, kind)]
            name = f"{kind} on {scope.workload(source).name}"
            if judged.auc is not None and abs(judged.auc - auc) > FAR_OFF_AUC:
                found.append(f"{name}: AUC {judged.auc:.3f} here, {auc:.3f} in the paper")
            if judged.conditional_mae is not None and paper.far_off(judged.conditional_mae, error):
                found.append(f"{name}: MAE {judged.conditional_mae:.1f} tokens here, {error:.1f} in the paper")
    return found


def training(scope: Scope) -> str:
    """On what the predictors were trained."""
    return (
        f"Your trace: {scope.split(scope.trace)}. Trained on the history"
        if scope.trace
        else "Trained on a disjoint draw"
    )


def kinds_here() -> tuple[str, ...]:
    """The predictors that this installation has: the learned one needs an extra."""
    return KINDS[1:] if can_grow() else KINDS[1:3]
