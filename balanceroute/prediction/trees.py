"""Boosted trees of depth 3 as flat arrays, evaluated with numpy alone.

The trees are grown with scikit-learn (extra `learned`), but asking them needs neither scikit-learn nor a
pickle of it: a tree of depth 3 is 7 comparisons and 8 leaf values, so a whole ensemble is three arrays, which
a model file can hold and a reader can check. All comparisons of a level are one array operation over (trees,
requests); 200 trees and 512 requests take about 1 ms.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .contract import FloatArray

DEPTH = 3
N_NODES = 2**DEPTH - 1
N_LEAVES = 2**DEPTH
BLOCK = 256  # requests at a time: temporaries stay in the cache, half the time of 512 at once

Float32Array = npt.NDArray[np.float32]
_ALWAYS_LEFT = np.float32(np.inf)


@dataclass(frozen=True, slots=True)
class Trees:
    """An ensemble: `feature` and `threshold` (7, T) by heap position, `leaf` (8, T), and the `base` they add to."""

    feature: npt.NDArray[np.int32]
    threshold: Float32Array
    leaf: Float32Array
    base: float

    def raw(self, features: Float32Array) -> FloatArray:
        """Sum the trees for features of shape (F, n); returns (n,)."""
        n = features.shape[1]
        if n <= BLOCK:
            return self._raw_block(features)
        return np.concatenate([self._raw_block(features[:, at : at + BLOCK]) for at in range(0, n, BLOCK)])

    def _raw_block(self, features: Float32Array) -> FloatArray:
        right = [features[self.feature[node]] > self.threshold[node][:, None] for node in range(N_NODES)]  # each (T, n)
        second = np.where(right[0], right[2], right[1])
        third = np.where(right[0], np.where(second, right[6], right[5]), np.where(second, right[4], right[3]))
        leaf = (right[0].view(np.int8) << 2) | (second.view(np.int8) << 1) | third.view(np.int8)
        n_trees = self.leaf.shape[1]
        at = leaf.astype(np.intp) * n_trees + np.arange(n_trees)[:, None]
        total: FloatArray = self.leaf.ravel().take(at).sum(axis=0, dtype=np.float64)
        return total + self.base

    def check(self, n_features: int) -> None:
        """Raise ValueError unless the arrays fit each other and only name known features."""
        n_trees = self.feature.shape[-1]
        shapes = (self.feature.shape, self.threshold.shape, self.leaf.shape)
        if shapes != ((N_NODES, n_trees), (N_NODES, n_trees), (N_LEAVES, n_trees)):
            raise ValueError(f"tree arrays of shapes {shapes} do not belong together")
        if n_trees and not (0 <= self.feature.min() and self.feature.max() < n_features):
            raise ValueError("a tree asks for an unknown feature")
        if not (np.isfinite(self.leaf).all() and np.isfinite(self.base)):
            raise ValueError("a leaf is not a finite number")


def flatten(estimator: Any, sample: Float32Array, expected_raw: FloatArray) -> Trees:
    """Turn a fitted HistGradientBoosting estimator into arrays.

    scikit-learn keeps its trees in a private attribute, so the result is checked: on `sample` (F, n) it must
    give `expected_raw`, the estimator's own answers. Raises: ValueError when it does not.
    """
    grown = [stage[0].nodes for stage in estimator._predictors]
    feature = np.zeros((N_NODES, len(grown)), dtype=np.int32)
    threshold = np.full((N_NODES, len(grown)), _ALWAYS_LEFT, dtype=np.float32)
    leaf = np.zeros((N_LEAVES, len(grown)), dtype=np.float32)
    for tree, nodes in enumerate(grown):
        _place(nodes, 0, 0, feature[:, tree], threshold[:, tree], leaf[:, tree])
    unbased = Trees(feature, threshold, leaf, 0.0)
    base = float(np.median(expected_raw - unbased.raw(sample)))
    trees = Trees(feature, threshold, leaf, base)
    # a threshold rounded to 32 bits may send a value that equals it the other way: rare, never systematic
    if np.mean(np.abs(trees.raw(sample) - expected_raw) > 1e-3) > 0.01:
        raise ValueError("this version of scikit-learn keeps its trees in an unknown form")
    return trees


def _place(
    nodes: Any,
    node: int,
    position: int,
    feature: npt.NDArray[np.int32],
    threshold: Float32Array,
    leaf: Float32Array,
) -> None:
    """Write the subtree below `node` at heap `position`; a leaf above the last level stands for all leaves below it."""
    if nodes[node]["is_leaf"]:
        first, last = position, position
        while first < N_NODES:
            first, last = 2 * first + 1, 2 * last + 2
        leaf[first - N_NODES : last - N_NODES + 1] = nodes[node]["value"]
        return
    feature[position] = nodes[node]["feature_idx"]
    threshold[position] = nodes[node]["num_threshold"]
    for side, child in ((1, "left"), (2, "right")):
        _place(nodes, int(nodes[node][child]), 2 * position + side, feature, threshold, leaf)
