"""Projected loads over the horizon, kept incrementally (paper, appendix C.1, eq. wprofile-new; `L_g(k+h)`).

**What remains of a request** is kept everywhere in the core as c, the last step ahead on which it counts: it adds s + a
+ h to step k+h for h = 0..c and nothing after. Step k itself is h = 0, so with r steps to go, the present one included,
c = r - 1; and c = H is the anchor "does not finish in the window" (r > H). c falls by one per generated token, to 0 on
the last step; the anchor stays until it is renewed. Whoever says c says the same one:

    oracle       c = min(r - 1, H)                                  (`simulator.oracle`)
    predictors   p = P(r <= H) and mu = E[r | r <= H] speak of r; `prediction.refresh.gated` alone makes c of them
    documents    `expected_remaining` of a state document is c

The paper (eq. wprofile-new) counts steps ahead from 1 where we count from 0: its c-hat is r.

Summed over a worker's requests,

    L_g(k+h) = S_g(h) + h * N_g(h),   S_g(h) = sum of (s+a) over c >= h,   N_g(h) = their number,

so it suffices to keep, per worker, the tokens and the number of the requests with floor(c) = b for each bucket
b = 0..H: both are integer arrays of shape (G, H+1). Every event touches one or two cells: an admission or a departure
its bucket, a generated token the tokens of its bucket and, unless it is anchored, a move to the bucket below. A
decision reads the loads as one suffix sum over the arrays, O(G*H) whatever the number of requests.

Requests that a step-driven engine does not run yet count like all others, c of their own included, as they do where
tokens are told one by one; they stand apart (`idle`), so that a lock-step moves the running ones alone.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from balanceroute.arrays import IntArray

LoadArray = NDArray[np.int64] | NDArray[np.float64]


class Projection:
    """Tokens and numbers of active requests by worker and remaining steps.

    Args:
        n_workers: G.
        horizon_steps: H; with 0 the loads are the present ones.
    """

    def __init__(self, n_workers: int, horizon_steps: int) -> None:
        self.horizon_steps = horizon_steps
        self._width = horizon_steps + 1
        # bucket b lies in column H - b, so that the sums over c >= h are running sums along memory
        self._idle_sums = np.zeros((2, n_workers, self._width), dtype=np.int64)
        self._idle = 0
        self._hold(np.zeros_like(self._idle_sums))
        self._steps: IntArray = np.arange(horizon_steps, -1, -1, dtype=np.int64)

    def _hold(self, sums: IntArray) -> None:
        self._sums = sums
        self._tokens, self._counts = sums
        # scalar access through a memoryview costs a third of numpy's item assignment
        self._token_cells = self._tokens.reshape(-1).data
        self._count_cells = self._counts.reshape(-1).data

    def add_worker(self) -> None:
        """A worker without requests joins, as the last one. O(G*H)."""
        nothing = np.zeros((2, 1, self._width), dtype=np.int64)
        self._idle_sums = np.concatenate((self._idle_sums, nothing), axis=1)
        self._hold(np.concatenate((self._sums, nothing), axis=1))

    def remove_worker(self, worker: int) -> None:
        """A worker without requests leaves; those behind it move up. O(G*H)."""
        self._idle_sums = np.delete(self._idle_sums, worker, axis=1)
        self._hold(np.delete(self._sums, worker, axis=1))

    def add(self, worker: int, kv_tokens: int, remaining: float, running: bool = True, count: int = 1) -> None:
        """A request of `kv_tokens` (s + a) with c = `remaining` is now active on the worker; `count` -1: no longer."""
        column = self.horizon_steps - int(remaining)
        if running:
            cell = worker * self._width + column
            self._token_cells[cell] += count * kv_tokens
            self._count_cells[cell] += count
        else:
            self._idle_sums[:, worker, column] += (count * kv_tokens, count)
            self._idle += count

    def grow(self, worker: int, tokens: int) -> None:
        """An anchored running request (c = H) has generated `tokens` more: it stays in its bucket."""
        self._token_cells[worker * self._width] += tokens

    def move(self, worker: int, kv_tokens: int, tokens: int, before: int, after: int) -> None:
        """A running request of `kv_tokens` has generated `tokens` more; its bucket was `before` and is `after`."""
        last = worker * self._width + self.horizon_steps
        cells = self._token_cells
        if before == after:
            cells[last - after] += tokens
            return
        cells[last - before] -= kv_tokens
        cells[last - after] += kv_tokens + tokens
        self._count_cells[last - before] -= 1
        self._count_cells[last - after] += 1

    def step(self) -> None:
        """Every running request on every worker has generated one token (lock-step drivers)."""
        sums, horizon = self._sums, self.horizon_steps
        self._tokens += self._counts
        if horizon > 1:  # all but the anchors (column 0) and those on their last step (c = 0) move down a bucket
            sums[:, :, horizon] += sums[:, :, horizon - 1]
            sums[:, :, 2:horizon] = sums[:, :, 1 : horizon - 1]
            sums[:, :, 1] = 0

    def loads(self, request_tokens: Sequence[int] | None = None) -> IntArray:
        """L_g(k+h), shape (G, H+1), tokens; a new array. O(G*H).

        `request_tokens`: c of each worker, added for every request while it is there; None for 0.
        """
        sums = (self._sums + self._idle_sums if self._idle else self._sums).cumsum(axis=2)
        loads: IntArray = sums[0]
        counts: IntArray = sums[1]
        counts *= self._steps if request_tokens is None else self._steps + np.array(request_tokens)[:, None]
        loads += counts
        return loads[:, ::-1]

    def equals(self, other: "Projection") -> bool:
        """Whether both hold the same sums."""
        return bool(np.array_equal(self._sums, other._sums) and np.array_equal(self._idle_sums, other._idle_sums))
