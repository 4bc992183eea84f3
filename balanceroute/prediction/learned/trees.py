"""Boosted trees of depth 3 as flat arrays, evaluated with numpy alone.

The trees are grown with scikit-learn (extra `learned`), but asking them needs neither scikit-learn nor a
pickle of it: a tree of depth 3 is 7 comparisons and 8 leaf values, so a whole ensemble is three arrays, which
a model file can hold and a reader can check.

Evaluation follows QuickScorer (Lucchese et al., SIGIR 2015): no tree is walked. A node that sends a request
right rules out the leaves to its left, which is a mask of 8 bits, one per leaf; the leaf a request ends in is
the first that no node rules out. All nodes that look at one feature are sorted by threshold, and their masks
are joined from the smallest threshold up, so one binary search per feature finds a row with the joined mask
of every tree. 200 trees and 512 requests are a dozen searches, as many gathers of rows of 200 bytes, and one
look-up of a leaf value by tree and mask: 0.7 ms on a busy machine where comparing all nodes took 3.3.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from balanceroute.arrays import FloatArray

DEPTH = 3
N_NODES = 2**DEPTH - 1
N_LEAVES = 2**DEPTH
BLOCK = 512  # requests at a time: temporaries are 8 bytes per tree and request

Float32Array = npt.NDArray[np.float32]
_ALWAYS_LEFT = np.float32(np.inf)
# by heap position: the leaves left of a node, of which a request that it sends right can end in none
_LEFT_LEAVES = (0b00001111, 0b00000011, 0b00110000, 0b00000001, 0b00000100, 0b00010000, 0b01000000)
_FIRST_LEAF = np.array([0] + [(mask & -mask).bit_length() - 1 for mask in range(1, 256)])  # no mask is 0


@dataclass(frozen=True, slots=True)
class _Feature:
    """The nodes that look at one feature: k ascending thresholds, and the joined masks beyond each, (k + 1, T)."""

    feature: int
    thresholds: Float32Array
    masks: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Trees:
    """An ensemble: `feature` and `threshold` (7, T) by heap position, `leaf` (8, T), and the `base` they add to.

    Raises: ValueError: for arrays that do not fit each other.
    """

    feature: npt.NDArray[np.int32]
    threshold: Float32Array
    leaf: Float32Array
    base: float

    _tables: "tuple[_Feature, ...]" = field(init=False, repr=False, compare=False)
    _by_mask: Float32Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shapes = (self.feature.shape, self.threshold.shape, self.leaf.shape)
        n_trees = self.feature.shape[-1]
        if shapes != ((N_NODES, n_trees), (N_NODES, n_trees), (N_LEAVES, n_trees)):
            raise ValueError(f"tree arrays of shapes {shapes} do not belong together")
        used = np.unique(self.feature[self.threshold < _ALWAYS_LEFT]).tolist()
        object.__setattr__(self, "_tables", tuple(self._table(at) for at in used))
        object.__setattr__(self, "_by_mask", self.leaf.T.take(_FIRST_LEAF, axis=1).ravel())

    def _table(self, feature: int) -> "_Feature":
        node, tree = np.nonzero((self.feature == feature) & (self.threshold < _ALWAYS_LEFT))
        order = np.argsort(self.threshold[node, tree], kind="stable")
        node, tree = node[order], tree[order]
        masks = np.full((len(node) + 1, self.feature.shape[1]), 0xFF, dtype=np.uint8)
        masks[np.arange(1, len(node) + 1), tree] = 0xFF ^ np.array(_LEFT_LEAVES, dtype=np.uint8)[node]
        return _Feature(feature, self.threshold[node, tree], np.bitwise_and.accumulate(masks, axis=0))

    def raw(self, features: Float32Array) -> FloatArray:
        """Sum the trees for features of shape (F, n); returns (n,)."""
        n = features.shape[1]
        if n <= BLOCK:
            return self._raw_block(features)
        return np.concatenate([self._raw_block(features[:, at : at + BLOCK]) for at in range(0, n, BLOCK)])

    def _raw_block(self, features: Float32Array) -> FloatArray:
        n, n_trees = features.shape[1], self.feature.shape[1]
        masks = np.full((n, n_trees), 0xFF, dtype=np.uint8)
        for table in self._tables:
            masks &= table.masks.take(table.thresholds.searchsorted(features[table.feature]), axis=0)
        at = np.add(masks, np.arange(0, 256 * n_trees, 256), dtype=np.intp)
        total: FloatArray = self._by_mask.take(at).sum(axis=1, dtype=np.float64)
        return total + self.base

    def check(self, n_features: int) -> None:
        """Raise ValueError unless only known features are named and every leaf is a number."""
        if self.feature.size and not (0 <= self.feature.min() and self.feature.max() < n_features):
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
    # a threshold rounded to 32 bits may send a value that equals it the other way: rare, never systematic; what
    # rounding does to leaves adds up, and shows where finishes are so rare that leaves get as large as a million
    rounding = float(np.finfo(np.float32).eps) * float(np.abs(leaf).max(axis=0, initial=0.0).sum(dtype=np.float64))
    if np.mean(np.abs(trees.raw(sample) - expected_raw) > 1e-3 + rounding) > 0.01:
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
