import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.errors import ConfigError, InputError
from balanceroute.prediction import (
    FinishedRequest,
    LearnedPredictor,
    Model,
    Refitter,
    SurvivalPredictor,
    build_predictor,
    evaluate,
    load_model,
    save_model,
)
from balanceroute.prediction.evaluation import STEP_S, time_split
from balanceroute.prediction.learned.features import NAMES, KeyMemory, training_set
from balanceroute.prediction.learned.predictor import RECALLED, _calibrate
from balanceroute.prediction.learned.trees import Trees, flatten
from balanceroute.prediction.observations import Observations, key_id

from .builders import a_finish, finishes

H = 80


def history(n: int = 1200) -> list[FinishedRequest]:
    """Outputs near a tenth of the prompt, so that the size of a prompt says what is left; one in ten cut short."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(500, 6000, n)
    outputs = np.maximum(1, prompts // 10 + rng.integers(-5, 6, n))
    rows = [
        FinishedRequest(
            f"k{prompt}", int(prompt), int(output), "cancelled" if at % 10 == 9 else "stop", at + STEP_S * int(output)
        )
        for at, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return sorted(rows, key=lambda row: row.finished_s)


def test_a_bulk_history_gives_the_same_state_as_row_by_row() -> None:
    rows = [replace(row, finish_reason="stop") for row in history(RECALLED + 16 * 200)]
    at_once, one_by_one = LearnedPredictor(H), LearnedPredictor(H)
    at_once.start(rows)
    for row in rows:
        one_by_one.observe(row)
    assert at_once._past.published == pytest.approx(one_by_one._past.published, rel=1e-9)
    assert at_once._keys._state == one_by_one._keys._state and len(at_once.ring) == len(rows)


@pytest.fixture(scope="module")
def grown() -> LearnedPredictor:
    pytest.importorskip("sklearn")
    predictor = LearnedPredictor(H)
    predictor.start(time_split(history())[0])
    predictor.grow()
    return predictor


def test_the_learned_predictor_is_better_than_the_marginal_distribution(grown: LearnedPredictor) -> None:
    train, test = time_split(history())
    survival = SurvivalPredictor(H)
    survival.start(train)

    learned, marginal = evaluate(grown, test, H), evaluate(survival, test, H)

    assert learned.auc is not None and marginal.auc is not None
    assert learned.auc > 0.97 > marginal.auc
    assert learned.c_hat_mae < 0.5 * marginal.c_hat_mae
    assert learned.calibration_error < 0.05


def test_answers_stay_inside_the_contract(grown: LearnedPredictor) -> None:
    stages = grown.predict(np.array([0, 5, 10**6]), np.array([1, 10**6, 0]), ["", "k", "k600"])

    assert ((stages.p_finish >= 0) & (stages.p_finish <= 1)).all()
    assert ((stages.mean_if_finished > 0) & (stages.mean_if_finished <= H)).all()
    assert grown.predict_one(5, 10**6, "k") == pytest.approx((stages.p_finish[1], stages.mean_if_finished[1]))
    assert grown.predict(np.array([], dtype=np.int64), np.array([], dtype=np.int64), []).p_finish.shape == (0,)


def test_the_arrays_answer_as_scikit_learn_does() -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    rng = np.random.default_rng(0)
    features = rng.normal(size=(len(NAMES), 600)).astype(np.float32)
    labels = (features[0] + features[3] * features[5] > 0).astype(int)
    options = {"max_iter": 60, "max_depth": 3, "min_samples_leaf": 100}
    estimator = ensemble.HistGradientBoostingClassifier(**options).fit(features.T, labels)
    expected = estimator.decision_function(features.T)

    trees = flatten(estimator, features[:, :100], expected[:100])

    assert trees.raw(features) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="unknown form"):
        flatten(estimator, features[:, :100], expected[100:200])


def test_leaves_that_32_bits_round_are_no_unknown_form() -> None:
    """Where finishes are rare, leaves get large (1e6 with a horizon of 2 steps and answers of up to 4,096 tokens)."""
    kinds = [("is_leaf", "?"), ("value", "f8"), ("feature_idx", "i8"), ("num_threshold", "f8")]
    stump = np.zeros(3, dtype=[*kinds, ("left", "i8"), ("right", "i8")])
    stump["is_leaf"], stump["left"], stump["right"] = (False, True, True), 1, 2
    leaves = np.random.default_rng(0).normal(scale=1e5, size=(200, 2))
    stages = []
    for pair in leaves:
        stump["value"][1:] = pair
        stages.append([SimpleNamespace(nodes=stump.copy())])
    sample = np.array([[-1.0, -1.0, 1.0]], dtype=np.float32)
    expected = leaves.sum(axis=0)[[0, 0, 1]] - 7.5

    trees = flatten(SimpleNamespace(_predictors=stages), sample, expected)

    assert trees.raw(sample) == pytest.approx(expected, abs=1.0)
    with pytest.raises(ValueError, match="unknown form"):
        flatten(SimpleNamespace(_predictors=stages), sample, expected[::-1])


def test_with_too_little_history_the_marginal_distribution_answers() -> None:
    predictor = LearnedPredictor(H)
    predictor.start(finishes(60, 60, 500))
    predictor.grow()

    assert predictor.predict_one(0, 100, "") == pytest.approx((2 / 3, 60.0))
    assert predictor.predict(np.array([0]), np.array([100]), [""]).p_finish[0] == pytest.approx(2 / 3)


def test_growing_without_scikit_learn_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    predictor = LearnedPredictor(H)
    predictor.start(history(300))

    with pytest.raises(ConfigError, match="scripts/install learned"):
        predictor.grow()


def test_training_samples_see_only_what_had_finished_before() -> None:
    rows = [a_finish(100, key="k", at_s=100.0), a_finish(300, key="k", at_s=104.0), a_finish(90, key="k", at_s=200.0)]
    rows.append(a_finish(1, at_s=300.0))

    samples = training_set(Observations.of(rows), H, max_samples=1000)

    seen = NAMES.index("key_seen")
    last = NAMES.index("key_last_left")
    at_age = {(int(a), int(r)): (s, x) for a, r, s, x in zip(
        samples.features[0], samples.remaining, samples.features[seen], samples.features[last], strict=True
    )}  # fmt: skip
    assert at_age[0, 300] == (0, KeyMemory.UNKNOWN[1])  # started at 89 s
    assert at_age[200, 100] == (0, KeyMemory.UNKNOWN[1])  # at 99 s
    assert at_age[240, 60] == (1, 100 - 240)  # at 101 s, after the first one ended
    assert at_age[40, 50] == (2, 300 - 40)


def test_training_walks_every_age_and_what_was_cut_short_only_as_far_as_it_testifies() -> None:
    rows = [a_finish(100), a_finish(200, reason="cancelled", at_s=1.0), a_finish(79, reason="cancelled", at_s=2.0)]
    rows.append(a_finish(1, at_s=100.0))

    samples = training_set(Observations.of(rows), H, max_samples=1000)

    walked = sorted(
        zip(samples.features[0].tolist(), samples.remaining.tolist(), samples.finishes.tolist(), strict=True)
    )
    assert walked == [(0, 0, 0), (0, 100, 0), (40, 0, 0), (40, 60, 1), (80, 0, 0), (80, 20, 1), (120, 0, 0)]


def test_samples_from_the_last_horizon_of_the_history_are_not_used_for_training() -> None:
    horizon_s = H * STEP_S
    rows = [a_finish(1, at_s=100.0 - horizon_s), a_finish(1, at_s=100.1 - horizon_s), a_finish(1, at_s=100.0)]

    assert len(training_set(Observations.of(rows), H, max_samples=1000).finishes) == 1


def test_above_the_limit_a_random_part_is_trained_on() -> None:
    assert len(training_set(Observations.of(history(200)), H, max_samples=50).finishes) == 50


def test_very_long_answers_are_sampled_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk of all would take gigabytes, here terabytes, and a machine without them kills a process."""
    monkeypatch.setattr("balanceroute.prediction.learned.features.MOST_WALKED", 3_000)
    rows = [a_finish(2**32, at_s=1e9 + number) for number in range(300)]
    samples = training_set(Observations.of(rows), 1, max_samples=1_000)
    assert len(samples.finishes) == 1_000
    assert samples.features[0].min() >= 0 and samples.remaining.min() >= 1
    again = training_set(Observations.of(rows), 1, max_samples=1_000)
    assert np.array_equal(samples.features, again.features)


def test_a_poorly_calibrated_score_is_corrected() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=5000)
    labels = (rng.random(5000) < 1 / (1 + np.exp(-truth))).astype(np.int64)

    slope, shift, error = _calibrate(4.0 * truth + 2.0, labels)

    assert (slope, shift) == (pytest.approx(0.25, abs=0.03), pytest.approx(-0.5, abs=0.1))
    assert error < 0.03
    assert _calibrate(truth, labels)[:2] == (1.0, 0.0)


def test_the_memory_of_keys_is_bounded_and_drops_the_longest_unseen() -> None:
    memory = KeyMemory(max_keys=2)

    for key, output in [(1, 10), (2, 20), (1, 20), (3, 30), (0, 40)]:
        memory.observe(key, output)

    assert len(memory) == 2
    assert memory.get(2) is None
    assert memory.get(1) == (2.0, 20.0, pytest.approx(13.0))


def test_a_refit_grows_in_its_own_process_and_is_adopted() -> None:
    pytest.importorskip("sklearn")

    async def scenario() -> LearnedPredictor:
        predictor = LearnedPredictor(H)
        predictor.start(history(400))
        refitter = Refitter(predictor)
        assert await refitter.refit()
        running = asyncio.ensure_future(refitter.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return predictor

    predictor = asyncio.run(scenario())

    assert predictor.fitted.classifier is not None
    assert predictor.predict_one(0, 600, "k600")[0] > 0.5 > predictor.predict_one(0, 5000, "k5000")[0]


def test_a_model_file_answers_as_the_predictor_that_was_saved(grown: LearnedPredictor, tmp_path: Path) -> None:
    rows = time_split(history())[0]
    save_model(tmp_path / "m.npz", Model("learned", H, rows, grown.fitted))

    loaded = build_predictor("learned", H, model=tmp_path / "m.npz")

    ages, prompts, keys = np.arange(0, 400, 10), np.full(40, 2000), ["k700"] * 40
    for found, expected in zip(loaded.predict(ages, prompts, keys), grown.predict(ages, prompts, keys), strict=True):
        assert found == pytest.approx(expected)
    assert key_id("") == 0


def test_trees_stay_until_the_history_suffices_for_others(grown: LearnedPredictor, tmp_path: Path) -> None:
    """A model file of a trace: its requests are too old, and of those since then there are few."""
    save_model(tmp_path / "m.npz", Model("learned", H, history(), grown.fitted))
    loaded = build_predictor("learned", H, model=tmp_path / "m.npz", max_age_s=1000.0)
    assert isinstance(loaded, LearnedPredictor)
    before = loaded.predict_one(0, 600, "k600")

    loaded.ring.add(a_finish(5, at_s=1e9))
    loaded.adopt(loaded.fitter()(loaded.ring.take()))

    assert loaded.fitted.curve.n_rows == 1
    assert loaded.predict_one(0, 600, "k600") == before


def change(path: Path, name: str, of: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change an array of a model's file."""
    with np.load(path) as arrays:
        content = dict(arrays)
    np.savez(path, **(content | {name: of(content[name])}))


def test_a_model_whose_trees_ask_for_unknown_features_is_refused(grown: LearnedPredictor, tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    save_model(path, Model("learned", H, [], grown.fitted))
    change(path, "classifier_feature", lambda feature: feature + len(NAMES))

    with pytest.raises(InputError, match="unknown feature"):
        load_model(path)


def test_a_learned_model_of_another_horizon_is_refused(grown: LearnedPredictor, tmp_path: Path) -> None:
    save_model(tmp_path / "m.npz", Model("learned", H, [], grown.fitted))

    with pytest.raises(ConfigError, match="fitted for horizon_steps 80, not 40"):
        build_predictor("learned", 40, model=tmp_path / "m.npz")


@pytest.mark.parametrize(
    ("name", "of", "reason"),
    [
        ("classifier_leaf", lambda leaf: leaf[:, :-1], "do not belong together"),
        ("regressor_leaf", lambda leaf: leaf * np.nan, "not a finite number"),
    ],
    ids=["shapes", "not finite"],
)
def test_trees_that_contradict_themselves_are_refused(
    name: str, of: Callable[[np.ndarray], np.ndarray], reason: str, grown: LearnedPredictor, tmp_path: Path
) -> None:
    path = tmp_path / "m.npz"
    save_model(path, Model("learned", H, [], grown.fitted))
    change(path, name, of)

    with pytest.raises(InputError, match=reason):
        load_model(path)


@pytest.mark.parametrize("content", [b"arrival_s,prompt_tokens\n", None], ids=["no archive", "words for numbers"])
def test_an_invalid_model_file_is_refused_with_a_clear_message(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    save_model(path, Model("survival", H, finishes(5)))
    change(path, "output_tokens", lambda _: np.array(["words"]))
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InputError, match="not a predictor file, or a damaged one") as refused:
        load_model(path)
    assert "pickle" not in str(refused.value)


@pytest.mark.parametrize(
    ("column", "value"),
    [("output_tokens", -1), ("prompt_tokens", np.nan), ("finished_s", np.nan)],
    ids=["fewer than 0", "no number", "at no time"],
)
def test_a_model_with_an_impossible_request_is_refused(column: str, value: float, tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    save_model(path, Model("survival", H, finishes(5)))
    change(path, column, lambda _: np.array([value]))

    with pytest.raises(InputError, match="not a predictor file, or a damaged one"):
        load_model(path)


def test_without_a_finish_in_the_window_no_trees_are_grown() -> None:
    pytest.importorskip("sklearn")
    predictor = LearnedPredictor(H)
    predictor.start([a_finish(500, reason="cancelled", at_s=float(at)) for at in range(300)])

    predictor.grow()

    assert predictor.fitted.classifier is None
    assert predictor.predict_one(0, 100, "") == (0.0, 80.0)


@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_the_leaf_masks_end_where_walking_each_tree_ends(seed: int, n_trees: int, n: int) -> None:
    draw = np.random.default_rng(seed)
    feature = draw.integers(0, 4, (7, n_trees)).astype(np.int32)
    values = draw.integers(-3, 4, (4, n)).astype(np.float32)  # few distinct ones: many equal their threshold
    threshold = draw.choice(np.array([-2, -1, 0, 1, 2, np.inf], dtype=np.float32), (7, n_trees))
    leaf = draw.normal(size=(8, n_trees)).astype(np.float32)

    expected = np.full(n, 0.5)
    for request in range(n):
        for tree in range(n_trees):
            node = 0
            while node < 7:
                right = values[feature[node, tree], request] > threshold[node, tree]
                node = 2 * node + (2 if right else 1)
            expected[request] += leaf[node - 7, tree]
    assert Trees(feature, threshold, leaf, 0.5).raw(values) == pytest.approx(expected)
