"""Reads step logs: the spread of the ranks' loads, and a step's cost per token and per request.

Each file is one rank. Which ranks wait for each other is found in the files: the steps of one barrier end together, so
the ends of one rank's steps fall on one phase of the other's; the steps of separate servers drift through all phases.
Two files of one rank number are separate servers in any case, and too few steps to tell count as one barrier. Where the
clocks of two machines differ, or one was set back, the costs of the steps tell (`clocks`).

A prefiller is not a decode rank: the plugin names its file so, and a file in which no request stays for a second step,
and a token costs what it costs to compute, is one, too. It is listed and left out of all else. So is a file with too
few steps beside one with enough (a rank that has just been started, or has failed): it says nothing of its barrier, and
the others would be compared over its short span only.

A rank's load at a time is that of its last step before it, or of one that is about to end, so the ranks of a barrier
are compared at the ends of all their steps, over the span that all of them cover. `load_spread` is max - min over the
ranks, in KV tokens; its mean is weighted by the time until the next step's end.

What a step costs is fitted (`step_fit`) to the decode steps: those with a request in them and none that has just
joined, whose prompt or transfer they would count. Behind a barrier the tokens and requests are those of the rank with
the largest L + c * n, for which the others wait (c from the fit before, until it stays).

Behind a barrier every rank's steps take as long as the slowest one's, so its ranks have one slowdown. Ranks and groups
that step independently have the a of their own fits: relative to the middle one, that is their slowdown.
"""

import gzip
import math
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from balanceroute.errors import InputError
from balanceroute.instrumentation.clocks import clock_offset, in_order, with_times
from balanceroute.instrumentation.step_fit import ENOUGH_STEPS, Fit, Floats, fit_steps
from balanceroute.instrumentation.step_log import COLUMNS, PREFILL_NAME

MUCH_BETTER_R2 = 0.1  # by which one rank's own load must surpass the largest one to be the cause of the steps
TOGETHER = 0.7  # mean resultant length of the phases: 1 in lock-step, near 0 for steps that drift past each other
COMPUTED_US = 5.0  # per token: no engine reads a token's KV that slowly, and none computes a prompt as fast
COMPUTED_FAST_US = 0.5  # the same for a log in which no step has anything of the step before
UNRELATED = 0.8  # of the difference between steps far apart: 1 where all requests are new, near 0 where most stay
SAME_SLOWDOWN = 0.05  # slopes that differ by less are the same engine's on two days
LONGEST_LINE = 1_000_000  # characters; what goes on after that is another line, as a device would go on for ever
LARGEST = 1e15  # of any field; squares of what is larger would leave the range of a float
SLOWDOWNS = (0.01, 100.0)  # the least and the most that a configuration accepts
ROUNDS = 8  # of c; it settles in two or three


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One file: its steps, their cost, the load in them. `too_few`: of its steps, so it is left out."""

    file: str
    steps: int
    span_s: float
    step_ms_p50: float
    step_ms_p99: float
    mean_running: float
    mean_tokens: float
    max_waiting: int
    max_kv_cache_usage: float
    prefiller: bool
    fit: Fit | None
    too_few: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Decode ranks that step together, or one alone; the spread is None for one alone.

    `slowdown`: seconds per token relative to the other groups, None where the fits do not say.
    """

    files: tuple[str, ...]
    overlap_s: float
    load_spread_mean: float | None
    load_spread_p99: float | None
    load_spread_of_mean_ratio: float | None
    fit: Fit | None
    slowdown: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """All files together; what is said of the ranks of one barrier is None unless there is exactly one.

    `notes`: what was wrong with a file's clock, and was put right.
    """

    ranks: list[RankSummary]
    groups: list[Group]
    overlap_s: float
    load_spread_mean: float | None = None
    load_spread_p99: float | None = None
    load_spread_of_mean_ratio: float | None = None
    envelope_fit: Fit | None = None
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> list[Fit]:
        """The groups' fits that mean something."""
        return [group.fit for group in self.groups if group.fit is not None and group.fit.doubt is None]

    @property
    def request_tokens(self) -> int | None:
        """c for the configuration: the middle one of the groups'; None where no fit means anything."""
        return round(median(fit.c_tokens for fit in self.usable)) if self.usable else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "request_tokens": self.request_tokens}


def read(path: Path) -> Floats:
    """A step log, possibly .gz, as an array: one row per step, columns as in `COLUMNS`. Half a last line is forgiven.

    Raises: InputError that names the file, and the line of a bad row.
    """
    try:
        return _rows(path)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _text(path: Path) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace")
    return path.open(encoding="utf-8-sig", errors="replace")


def _rows(path: Path) -> Floats:
    rows: list[list[float]] = []
    # line by line: an unclosed quote would swallow the rest of the file
    with _text(path) as file:
        lines = iter(partial(file.readline, LONGEST_LINE), "")
        if tuple(next(lines, "").rstrip("\n").split(",")) != COLUMNS:
            raise InputError(f"{path}: line 1: expected the columns {','.join(COLUMNS)}")
        broken: int | None = None
        for number, line in enumerate(lines, start=2):
            if broken is not None:
                raise InputError(f"{path}: line {broken}: expected {len(COLUMNS)} numbers")
            values = numbers(line)
            if values:
                rows.append(values)
            else:
                broken = number
    return np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS))


def numbers(line: str) -> list[float]:
    """The fields of a line; none where it is no line of a step log."""
    try:
        values = [float(value) for value in line.split(",")]
    except ValueError:
        return []
    sensible = len(values) == len(COLUMNS) and all(abs(value) <= LARGEST for value in values)
    return values if sensible and min(values[2:]) >= 0 else []


def summarise(paths: Sequence[Path]) -> Summary:
    """Read and compare. Raises: InputError, for a file that is there twice, too."""
    logs, notes = list[Log](), list[str]()
    seen = set[str]()
    for path in paths:
        file = os.path.realpath(path)
        if file in seen:
            raise InputError(f"{path}: is given twice; accepted is one file per DP rank")
        seen.add(file)
        steps, repaired = in_order(read(path))
        logs.append((path, steps))
        notes += [f"{path.name}: {repaired}"] if repaired else []
    ranks = without_short([_rank(path, steps) for path, steps in logs])
    decoding = [log for log, rank in zip(logs, ranks, strict=True) if not (rank.prefiller or rank.too_few)]
    members, moved = in_groups(decoding)
    return replace(_summary(ranks, with_slowdowns([_group(group) for group in members])), notes=(*notes, *moved))


def without_short(ranks: list[RankSummary]) -> list[RankSummary]:
    """The files, with those marked that have too few steps: less than enough where another decode rank has enough."""
    enough = any(rank.steps >= ENOUGH_STEPS and not rank.prefiller for rank in ranks)
    return [replace(rank, too_few=rank.steps < (ENOUGH_STEPS if enough else 1)) for rank in ranks]


def _summary(ranks: list[RankSummary], groups: list[Group]) -> Summary:
    several = [group for group in groups if len(group.files) > 1]
    if len(groups) > 1 or not several:
        return Summary(ranks, groups, max((group.overlap_s for group in groups), default=0.0))
    (group,) = several
    return Summary(
        ranks,
        groups,
        group.overlap_s,
        load_spread_mean=group.load_spread_mean,
        load_spread_p99=group.load_spread_p99,
        load_spread_of_mean_ratio=group.load_spread_of_mean_ratio,
        envelope_fit=group.fit,
    )


Log = tuple[Path, Floats]


def in_groups(logs: Sequence[Log]) -> tuple[list[list[Log]], list[str]]:
    """The ranks that step together, in the order of the files, and whose clock had to be moved for it."""
    groups: list[list[Log]] = []
    notes: list[str] = []
    for log in logs:
        home = next((group for group in groups if all(step_together(log, member) for member in group)), None)
        if home is None:
            home, log, note = by_cost(log, groups)
            notes += note
        if home is None:
            groups.append([log])
        else:
            home.append(log)
    return groups, notes


def by_cost(log: Log, groups: Sequence[list[Log]]) -> tuple[list[Log] | None, Log, list[str]]:
    """The group whose steps take equally long, and the log by that group's clock; None where there is none."""
    path, steps = log
    for group in groups:
        if any(rank_number(path) is not None and rank_number(path) == rank_number(other) for other, _ in group):
            continue
        offset = clock_offset(group[0][1], steps)
        if offset is None:
            continue
        moved = with_times(steps, steps[:, 0] - offset)
        start, stop = common_span([moved, *(member for _, member in group)])
        if start < stop:
            note = (
                f"{path.name}: steps take as long as those of {group[0][0].name}, {offset:+.3f} s apart: one barrier,"
                " by two clocks"
            )
            return group, (path, moved), [note]
    return None, log, []


def step_together(one: Log, other: Log) -> bool:
    """Whether two ranks share a barrier, as far as their files tell."""
    if rank_number(one[0]) is not None and rank_number(one[0]) == rank_number(other[0]):
        return False
    start, stop = common_span([one[1], other[1]])
    if stop <= start:
        return False
    ends, others = (np.unique(log[1][:, 0]) for log in (one, other))
    ends = ends[(ends > others[0]) & (ends < others[-1])]
    after = np.searchsorted(others, ends, side="right")
    before, period = others[after - 1], others[after] - others[after - 1] if len(ends) else np.empty(0)
    stepping = period < 5 * np.median(np.diff(others)) if len(ends) else np.empty(0, dtype=np.bool_)
    if np.count_nonzero(stepping) < ENOUGH_STEPS:
        return True
    phases = np.exp(2j * np.pi * ((ends - before) / period)[stepping])
    return bool(abs(phases.mean()) >= TOGETHER)


def common_span(logs: Sequence[Floats]) -> tuple[float, float]:
    """From when to when all of them have steps; the end is not after the start where there is no such time."""
    return max(steps[0, 0] for steps in logs), min(steps[-1, 0] for steps in logs)


def rank_number(path: Path) -> str | None:
    """The DP rank that the file's name says."""
    named = re.search(r"dp(\d+)", path.name)
    return named[1] if named else None


@dataclass(frozen=True, slots=True)
class Observed:
    """The decode steps of the ranks of one barrier: tokens and requests, shape (ranks, steps), and what each cost."""

    loads: Floats
    requests: Floats
    step_ms: Floats

    @classmethod
    def of(cls, logs: Sequence[Floats], start: float, stop: float) -> "Observed":
        """The steps that end from `start` to `stop`, every rank's, with what all ranks had then."""
        within = [steps[_decodes(steps) & (steps[:, 0] >= start) & (steps[:, 0] <= stop)] for steps in logs]
        together = np.concatenate(within)
        present = np.stack([_at(steps, together[:, 0]) for steps in logs])
        return cls(present[:, :, 3], present[:, :, 2], together[:, 1])

    def fit(self) -> Fit | None:
        """What the slowest rank of each step costs."""
        columns = np.arange(len(self.step_ms))
        found, c_tokens = None, 0.0
        for _ in range(ROUNDS):
            slowest = (self.loads + c_tokens * self.requests).argmax(axis=0)
            found = fit_steps(self.loads[slowest, columns], self.requests[slowest, columns], self.step_ms)
            if found is None or found.doubt is not None or found.c_tokens == c_tokens:
                break
            c_tokens = found.c_tokens
        return found

    def doubted(self, fit: Fit | None, files: Sequence[str]) -> Fit | None:
        """The fit, with a doubt where one rank's own load explains the steps much better than the largest load does."""
        if fit is None or fit.doubt is not None:
            return fit
        own = [fit_steps(*rank, self.step_ms) for rank in zip(self.loads, self.requests, strict=True)]
        best = max(range(len(own)), key=lambda index: _r2(own[index]))
        if _r2(own[best]) < fit.r2 + MUCH_BETTER_R2:
            return fit
        found = f"R2 {_r2(own[best]):.3f} instead of {fit.r2:.3f}"
        return replace(fit, doubt=f"the load of {files[best]} alone explains the steps better ({found}): it is slower")

    def slope_with(self, c_tokens: float) -> float:
        """a where c is given, us per token; nan where there is none."""
        load = (self.loads + c_tokens * self.requests).max(axis=0)
        found = fit_steps(load, np.zeros_like(load), self.step_ms)
        return np.nan if found is None or found.doubt is not None else found.a_us_per_token


def _group(members: Sequence[Log]) -> tuple[Group, Observed]:
    files, logs = tuple(path.name for path, _ in members), [steps for _, steps in members]
    start, stop = common_span(logs)
    observed = Observed.of(logs, start, stop)
    if len(members) == 1:
        return Group(files, float(stop - start), None, None, None, observed.fit()), observed
    times = np.unique(np.concatenate([steps[:, 0] for steps in logs]))
    times = times[(times >= start) & (times <= stop)]
    loads = np.stack([_at(steps, times)[:, 3] for steps in logs])
    spread = loads.max(axis=0) - loads.min(axis=0)
    weights = np.diff(times, append=times[-1])
    mean = float(np.average(spread, weights=weights)) if weights.sum() else float(spread.mean())
    mean_load = float(np.average(loads.mean(axis=0), weights=weights)) if weights.sum() else float(loads.mean())
    group = Group(
        files=files,
        overlap_s=float(stop - start),
        load_spread_mean=mean,
        load_spread_p99=float(np.percentile(spread, 99)),
        load_spread_of_mean_ratio=mean / mean_load if mean_load else None,
        fit=observed.doubted(observed.fit(), files),
    )
    return group, observed


def with_slowdowns(found: Sequence[tuple[Group, Observed]]) -> list[Group]:
    """The groups with their slowdowns, where there are several and each one's fit means something.

    All are fitted anew with one c, the middle one: where requests bring their tokens, a slope trades with its c.
    """
    groups = [group for group, _ in found]
    fits = [group.fit for group in groups if group.fit is not None and group.fit.doubt is None]
    if len(groups) < 2 or len(fits) < len(groups):
        return groups
    c_tokens = median(fit.c_tokens for fit in fits)
    slopes = np.array([observed.slope_with(c_tokens) for _, observed in found])
    if not np.isfinite(slopes).all():
        return groups
    slowdowns = np.clip(slopes / np.median(slopes), *SLOWDOWNS).round(2)
    slowdowns[np.abs(slowdowns - 1.0) < SAME_SLOWDOWN] = 1.0
    return [replace(group, slowdown=slowdown) for group, slowdown in zip(groups, slowdowns.tolist(), strict=True)]


def _at(steps: Floats, times: Floats) -> Floats:
    """A rank's steps at each of some times: the last one not after it, or the next one where its end is near.

    The ranks of a barrier do not end a step at the same instant: who is half a millisecond later has ended it, too.
    """
    ends = steps[:, 0]
    last = np.clip(np.searchsorted(ends, times, side="right") - 1, 0, None)
    following = np.minimum(last + 1, len(steps) - 1)
    near = np.minimum(times - ends[last], steps[following, 1] / 2e3)  # in its second half, and not just after another
    found: Floats = steps[np.where(ends[following] - times < near, following, last)]
    return found


def _decodes(steps: Floats) -> NDArray[np.bool_]:
    """Which steps only decode."""
    running = steps[:, 2]
    joined = np.diff(running, prepend=running[:1]) > 0
    return (running > 0) & ~joined


def _rank(path: Path, steps: Floats) -> RankSummary:
    named = path.name.startswith(PREFILL_NAME)
    if not len(steps):
        return RankSummary(path.name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, named, None)
    return RankSummary(
        file=path.name,
        steps=len(steps),
        span_s=float(steps[-1, 0] - steps[0, 0]),
        step_ms_p50=float(np.percentile(steps[:, 1], 50)),
        step_ms_p99=float(np.percentile(steps[:, 1], 99)),
        mean_running=float(steps[:, 2].mean()),
        mean_tokens=float(steps[:, 3].mean()),
        max_waiting=int(steps[:, 4].max()),
        max_kv_cache_usage=float(steps[:, 5].max()),
        prefiller=named or only_prefills(steps),
        fit=_fit_of(steps),
    )


def only_prefills(steps: Floats) -> bool:
    """Whether no request stays for a second step, and tokens cost what it costs to compute them."""
    busy = steps[steps[:, 2] > 0]
    if len(busy) < ENOUGH_STEPS:
        return False
    running, change = busy[1:, 2], np.diff(busy[:, 3])
    same = running == busy[:-1, 2]
    stayed = same & (change > 0) & (change <= 8 * running)  # a token each, or a few where the engine speculates
    jumps = float(np.median(np.abs(change))) > 16 * float(np.median(running))
    fit = fit_steps(busy[:, 3], busy[:, 2], busy[:, 1])
    least_us = COMPUTED_FAST_US if unrelated(busy[:, 3]) else COMPUTED_US
    computes = fit is not None and fit.a_us_per_token >= least_us and fit.b_ms < 0.5 * float(busy[:, 1].mean())
    return bool(stayed.mean() < 0.01 and jumps and computes)


def unrelated(loads: Floats) -> bool:
    """Whether a step has no more in common with the next one than with one far away: all its requests are gone."""
    next_one, far = np.abs(np.diff(loads)), np.abs(loads - np.roll(loads, len(loads) // 2))
    return float(np.median(next_one)) > UNRELATED * float(np.median(far))


def _fit_of(steps: Floats) -> Fit | None:
    busy = steps[_decodes(steps)]
    return fit_steps(busy[:, 3], busy[:, 2], busy[:, 1])


def _r2(fit: Fit | None) -> float:
    return -math.inf if fit is None or fit.doubt is not None else fit.r2
