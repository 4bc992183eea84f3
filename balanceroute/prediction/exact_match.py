"""ExactMatch: predicts by the past output lengths of the same prompt.

Where prompts recur (templates, agents, retries) the lengths seen under the same key say far more than the
marginal distribution (arXiv:2605.06113, appendix C, "Per-prompt-class memorization"). Per key the newest
`SAMPLES` lengths are kept, sorted, as one row of a matrix; an unknown key, a row thinner than `min_samples`,
or an age that no request of the key survived fall back to the survival curve of all requests, or with
`size_buckets` of those with a prompt of like size (`sizes.py`).

A row holds lengths times two, plus one where the request was cut short, so that order and kind share one
integer. Inside a row censoring follows the life table: with n at risk at age a, d finishes and w cut short in
the window,

    p_finish = d / (n - w / 2).

Rows are updated in place when a request leaves, so a recurring prompt is known from its next appearance on
and nothing has to be re-fitted but the marginal curve. Beside each row stand its running sums, so a batch
is one dict access per request, one gather of rows, two counts along them and a few gathers of sums. Memory
is bounded: `max_keys` rows of about 0.8 KB (16 MB at 20,000 keys), least recently used key out first.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

import numpy as np

from balanceroute.arrays import BoolArray, IntArray

from .contract import FinishedRequest, TwoStage
from .observations import DEFAULT_ROWS, ObservationRing, Observations
from .sizes import SizedCurves, SizedFitter

SAMPLES = 32  # newest lengths kept per key: a batch of 512 then gathers 64 KB, which stays in the L2 cache
DEFAULT_KEYS = 20_000
_ALL_BYTES = np.uint64(0x0101010101010101)
_TOP_BYTE = np.uint64(56)
_UNIT_BITS = 6
_UNIT = 1 << _UNIT_BITS  # above SAMPLES: two sums share one integer, and one gather
_LONGEST = 2**29  # tokens; keeps the doubled length and a window inside 32 bits
_BELOW_ZERO = 2**31 - 1


class ExactMatchPredictor:
    """Lengths per prompt key in front of the marginal distribution."""

    refits_in_process = False

    def __init__(
        self,
        horizon_steps: int,
        *,
        max_keys: int = DEFAULT_KEYS,
        min_samples: int = 2,
        max_rows: int = DEFAULT_ROWS,
        max_age_s: float | None = None,
        size_buckets: int = 0,
    ) -> None:
        self._horizon = horizon_steps
        self._min_samples = max(1, min_samples)
        self._max_keys = max(1, max_keys)
        self.ring = ObservationRing(max_rows, max_age_s)
        self._fitter = SizedFitter(max(1, size_buckets))
        self._fallback = self._fitter(Observations.of([]))
        self._row_of: dict[str, int] = {}  # in order of last use, oldest first
        # row 0 stays empty and answers for every unknown key; the others are handed out in turn
        self._codes = [array("q")]  # sorted, for the search of an answer
        self._newest = [array("q")]  # the same codes as a ring in order of arrival
        self._seen = [0]
        # the same rows for batches: the codes, and sums over the first k of them, k = 0..SAMPLES; zeros cost
        # no memory before a row is written, which is why codes are stored below zero and 0 pads a row
        n_rows = self._max_keys + 1
        self._sorted = np.zeros((n_rows, SAMPLES), dtype=np.int32)
        self._usable = np.zeros(n_rows, dtype=np.int64)  # codes in the row; 0 while it is thin
        self._sums = np.zeros((n_rows, SAMPLES + 1), dtype=np.int64)  # finishes + _UNIT * their lengths
        self.key_hits = 0
        self.key_misses = 0

    @property
    def n_keys(self) -> int:
        """Keys remembered now; at most `max_keys`."""
        return len(self._row_of)

    def start(self, rows: Iterable[FinishedRequest]) -> None:
        """Load a whole history, oldest first, and fit at once."""
        for finished in rows:
            self._take_in(finished)
        for row in self._row_of.values():
            self._publish(row)  # once, not for each of its lengths
        self.adopt(self._fitter(self.ring.take()))

    def observe(self, finished: FinishedRequest) -> None:
        """Put one more length under its key, in place of the key's oldest one when its row is full."""
        row = self._take_in(finished)
        if row:
            self._publish(row)

    def _take_in(self, finished: FinishedRequest) -> int:
        """The row that has one more length, which is to be published; 0: it has no key."""
        self.ring.add(finished)
        if not finished.prompt_key:
            return 0
        row = self._touch(finished.prompt_key)
        self._insert(row, 2 * min(finished.output_tokens, _LONGEST) + finished.censored)
        return row

    def _touch(self, key: str) -> int:
        """Return the row of `key`, now the most recently used; a new one gets a free row or the oldest's."""
        row = self._row_of.pop(key, None)
        if row is None:
            if len(self._row_of) < self._max_keys:
                row = len(self._row_of) + 1
                self._codes.append(array("q"))
                self._newest.append(array("q"))
                self._seen.append(0)
            else:
                row = self._row_of.pop(next(iter(self._row_of)))
                self._codes[row], self._newest[row], self._seen[row] = array("q"), array("q"), 0
        self._row_of[key] = row
        return row

    def _insert(self, row: int, code: int) -> None:
        codes, newest = self._codes[row], self._newest[row]
        if len(codes) < SAMPLES:
            newest.append(code)
        else:
            at = self._seen[row] % SAMPLES
            del codes[bisect_left(codes, newest[at])]
            newest[at] = code
        insort(codes, code)
        self._seen[row] += 1

    def _publish(self, row: int) -> None:
        """Write the row's arrays for batches; nothing reads them past the end of the row."""
        codes = np.array(self._codes[row], dtype=np.int64)
        n = len(codes)
        done = 1 - (codes & 1)
        self._sorted[row, :n] = codes - _BELOW_ZERO
        self._sorted[row, n:] = 0
        self._usable[row] = n if n >= self._min_samples else 0
        self._sums[row, 1 : n + 1] = np.cumsum(done * (1 + _UNIT * (codes >> 1)))

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        """Answer from the key's own lengths, else from the marginal curve."""
        row = self._row_of.get(key)
        if row is not None:
            codes = self._codes[row]
            low = bisect_right(codes, 2 * age + 1)
            at_risk = len(codes) - low
            if at_risk > 0 and len(codes) >= self._min_samples:
                self.key_hits += 1
                high = bisect_right(codes, 2 * (age + self._horizon) + 1, low)
                return self._life_table(codes[low:high], at_risk, age)
        self.key_misses += 1
        return self._fallback.one(age, prompt_tokens, self._horizon)

    def _life_table(self, window: Sequence[int], at_risk: int, age: int) -> tuple[float, float]:
        done = [code for code in window if not code & 1]
        if not done:
            return 0.0, float(self._horizon)
        cut_short = len(window) - len(done)
        return len(done) / (at_risk - 0.5 * cut_short), 0.5 * sum(done) / len(done) - age

    def predict(self, ages: IntArray, prompt_tokens: IntArray, keys: Sequence[str]) -> TwoStage:
        """Answer both stages for many requests; one dict access each, the rest on arrays."""
        rows = np.fromiter(map(self._row_of.get, keys, repeat(0)), dtype=np.intp, count=len(keys))
        bound = (ages.astype(np.int32) * 2 + (1 - _BELOW_ZERO))[:, None]
        codes = self._sorted.take(rows, axis=0, mode="clip")  # no row is out of bounds, and this is not checked
        low = _true_per_row(codes <= bound)
        high = _true_per_row(codes <= bound + np.int32(2 * self._horizon))
        at_risk = self._usable.take(rows) - low

        first = rows * (SAMPLES + 1)
        sums = self._sums.take(first + high) - self._sums.take(first + low)
        finishes = sums & (_UNIT - 1)
        p_finish = finishes / np.maximum(at_risk - 0.5 * (high - low - finishes), 0.5)
        mean = (sums >> _UNIT_BITS) / np.maximum(finishes, 1) - ages
        mean[finishes == 0] = self._horizon

        unknown = np.flatnonzero(at_risk <= 0)
        self.key_hits += len(keys) - len(unknown)
        self.key_misses += len(unknown)
        if len(unknown):
            p_finish[unknown], mean[unknown] = self._fallback.many(ages[unknown], prompt_tokens[unknown], self._horizon)
        return TwoStage(p_finish, mean)

    def fitter(self) -> Callable[[Observations], SizedCurves]:
        """Return the function that fits what a miss falls back to; any thread."""
        return self._fitter

    def adopt(self, fitted: SizedCurves) -> None:
        """Fall back to `fitted` from now on."""
        self._fallback = fitted


def _true_per_row(mask: BoolArray) -> IntArray:
    """Count along rows of SAMPLES = 32 truths, a byte each, as four words of eight.

    No byte of the sum of four words exceeds 4, and the top byte of its product with 0x0101... is the sum of its bytes.
    Six passes over n words, where a product of the mask with ones converts 32 n of them.
    """
    words = mask.view(np.uint64)
    bytewise = (words[:, 0] + words[:, 1]) + (words[:, 2] + words[:, 3])
    bytewise *= _ALL_BYTES
    bytewise >>= _TOP_BYTE
    return bytewise.view(np.int64)
