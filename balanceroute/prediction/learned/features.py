"""The features of the learned predictor: causal figures of a request and of the recent past.

    of the request      prompt tokens s, age a
    of the recent past  two EWMAs of output lengths; mean, deviation, median and 90th percentile of the last outputs and
                        the mean of the last prompts
    of its key          how often the key was seen, and what its last and its average output would leave at this age

Past means finished before: training puts the history through the very objects that serve (`RecentPast`,
`KeyMemory`) and pairs each training sample with their state at the sample's time, so training and serving
can't drift apart. What was cut short tells neither of them anything.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from balanceroute.arrays import FloatArray, IntArray

from ..evaluation import STEP_S
from ..observations import Observations
from ..refresh import refresh_ages

NAMES = (
    "age",
    "prompt_tokens",
    "ewma_fast",
    "ewma_slow",
    "mean",
    "deviation",
    "median",
    "p90",
    "prompt_mean",
    "key_seen",
    "key_last_left",
    "key_mean_left",
)
N_PAST = 7
MOST_WALKED = 4_000_000  # samples: a short horizon has one per token, of which long answers have billions; 0.3 GB

_WINDOW = 256
_PUBLISH_EVERY = 16  # finishes; percentiles of the window cost 60 us
_FAST, _SLOW = 0.1, 0.01
_KEY_EWMA = 0.3
_UNKNOWN = 1e6  # "left" of an unknown key: beyond every window, so that one comparison sets it apart


class RecentPast:
    """Rolling statistics of the last finished requests, renewed every few finishes."""

    def __init__(self) -> None:
        self._outputs: deque[int] = deque(maxlen=_WINDOW)
        self._prompts: deque[int] = deque(maxlen=_WINDOW)
        self._fast = self._slow = 0.0
        self._count = 0
        self.published: FloatArray = np.zeros(N_PAST)

    def observe(self, output_tokens: int, prompt_tokens: int) -> None:
        """Add a finished request."""
        if not self._count:
            self._fast = self._slow = float(output_tokens)
        self._fast += _FAST * (output_tokens - self._fast)
        self._slow += _SLOW * (output_tokens - self._slow)
        self._outputs.append(output_tokens)
        self._prompts.append(prompt_tokens)
        if self._count % _PUBLISH_EVERY == 0:
            self._publish()
        self._count += 1

    def _publish(self) -> None:
        outputs = np.array(self._outputs, dtype=np.float64)
        median, p90 = np.percentile(outputs, (50.0, 90.0))
        prompt_mean = sum(self._prompts) / len(self._prompts)
        self.published = np.array([self._fast, self._slow, outputs.mean(), outputs.std(), median, p90, prompt_mean])


class KeyMemory:
    """Per key: times seen, last output, moving average; least recently used key out first."""

    UNKNOWN = (0.0, _UNKNOWN, _UNKNOWN)

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._state: dict[int, tuple[float, float, float]] = {}
        self.get = self._state.get

    def __len__(self) -> int:
        return len(self._state)

    def observe(self, key: int, output_tokens: int) -> None:
        """Add a finished request under `key` (a `key_id`); 0: no key."""
        if not key:
            return
        seen, _, mean = self._state.pop(key, (0.0, 0.0, float(output_tokens)))
        mean += _KEY_EWMA * (output_tokens - mean)
        self._state[key] = (seen + 1.0, float(output_tokens), mean)
        if len(self._state) > self._max_keys:
            del self._state[next(iter(self._state))]


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Walked samples: features (F, n), whether r <= H, and r itself where it is known (else 0), in time order."""

    features: FloatArray
    finishes: IntArray
    remaining: IntArray


def assemble(ages: IntArray, prompt_tokens: IntArray, past: FloatArray, key_states: FloatArray) -> FloatArray:
    """Stack the features (F, n); `past` is (N_PAST, n) or (N_PAST, 1), `key_states` (3, n)."""
    features = np.empty((len(NAMES), len(ages)))
    features[0] = ages
    features[1] = prompt_tokens
    features[2 : 2 + N_PAST] = past
    features[-3:] = key_states
    known = key_states[0] > 0
    np.subtract(features[-2:], ages, out=features[-2:], where=known)
    return features


def training_set(history: Observations, horizon_steps: int, max_samples: int) -> TrainingSet:
    """Walk the history at ages 0, dT, 2 dT, ... (paper, "Training protocol") and attach the past as it was then.

    A request cut short at c still testifies that it did not finish within H at every age up to c - H; later
    ages say nothing and are left out. So are samples from the last H steps of the history, of which only those that
    finished are known. Above `max_samples` a random part is kept, the same every time.
    """
    order = np.argsort(history.finished_s, kind="stable")
    length, censored = history.output_tokens[order], history.censored[order]
    prompts, finished_s, keys = history.prompt_tokens[order], history.finished_s[order], history.key_ids[order]
    end = np.where(censored, np.maximum(length - horizon_steps + 1, 0), length)
    row, age = refresh_ages(end, horizon_steps, MOST_WALKED)
    at_s = finished_s[row] - (length[row] - age) * STEP_S
    settled = np.flatnonzero(at_s <= finished_s[-1:] - horizon_steps * STEP_S)
    if len(settled) > max_samples:
        settled = np.sort(np.random.default_rng(0).choice(settled, max_samples, replace=False))
    row, age, at_s = row[settled], age[settled], at_s[settled]
    by_time = np.argsort(at_s, kind="stable")
    row, age, at_s = row[by_time], age[by_time], at_s[by_time]
    known = ~censored
    past = _past_at(length[known], prompts[known], finished_s[known], at_s)
    states = _key_states_at(keys[known], length[known], finished_s[known], keys[row], at_s)
    remaining = np.where(censored[row], 0, length[row] - age)
    finishes = ((remaining > 0) & (remaining <= horizon_steps)).astype(np.int64)
    return TrainingSet(assemble(age, prompts[row], past, states), finishes, remaining)


def _past_at(outputs: IntArray, prompts: IntArray, finished_s: FloatArray, at_s: FloatArray) -> FloatArray:
    """Go through the finishes and return what `RecentPast` published before each moment, (N_PAST, n)."""
    past = RecentPast()
    published = [past.published]
    for output, prompt in zip(outputs.tolist(), prompts.tolist(), strict=True):
        past.observe(output, prompt)
        published.append(past.published)
    table: FloatArray = np.array(published)
    return table[finished_s.searchsorted(at_s, side="right")].T


def _key_states_at(
    keys: IntArray, outputs: IntArray, finished_s: FloatArray, asked: IntArray, at_s: FloatArray
) -> FloatArray:
    """Go through the finishes and return what `KeyMemory` held for each asked key at its moment, (3, n)."""
    memory = KeyMemory(max_keys=len(keys) + 1)
    after = np.empty((len(keys) + 1, 3))
    after[-1] = KeyMemory.UNKNOWN
    for at, (key, output) in enumerate(zip(keys.tolist(), outputs.tolist(), strict=True)):
        memory.observe(key, output)
        after[at] = memory.get(key, KeyMemory.UNKNOWN)
    # the last finish of this key before this moment: search in (key, time) order
    distinct, rank = np.unique(keys, return_inverse=True)
    place = finished_s.searchsorted(at_s, side="right")  # finishes known at that moment
    order = np.lexsort((np.arange(len(keys)), rank))
    composite = rank[order] * (len(keys) + 1) + order
    asked_rank = np.minimum(distinct.searchsorted(asked), max(0, len(distinct) - 1))
    found = composite.searchsorted(asked_rank * (len(keys) + 1) + place, side="left") - 1
    index = np.full(len(asked), len(keys))
    if len(keys):
        candidate = order[np.maximum(found, 0)]
        same = (found >= 0) & (keys[candidate] == asked) & (asked != 0)
        index[same] = candidate[same]
    states: FloatArray = after[index].T
    return states
