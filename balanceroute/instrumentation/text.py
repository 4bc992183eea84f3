"""A summary of step logs for people: a table of the files, a line or two per barrier, and what to configure."""

from balanceroute.instrumentation.reading import COMPUTED_FAST_US, Group, RankSummary, Summary
from balanceroute.instrumentation.step_fit import Fit

NO_FIT = "no fit (too few steps, or all with the same load)"


def text_of(summary: Summary) -> str:
    """The summary as lines."""
    lines = [*_table(summary.ranks), *summary.notes]
    several = len(summary.groups) > 1
    if several:
        lines.append(f"{len(summary.groups)} servers or groups whose steps do not end together")
    for number, group in enumerate(summary.groups, start=1):
        lines += _of_group(group, f"group {number}: " if several else "")
    return "\n".join([*lines, *configuration(summary)])


def _table(ranks: list[RankSummary]) -> list[str]:
    width = max(len(rank.file) for rank in ranks)
    columns = f"{'steps':>7} {'p50 ms':>8} {'p99 ms':>8} {'running':>8} {'tokens':>9} {'waiting':>7} {'kv':>6}"
    lines = [f"{'file':{width}}  {columns}"]
    lines += [
        f"{rank.file:{width}}  {rank.steps:7d} {rank.step_ms_p50:8.2f} {rank.step_ms_p99:8.2f} "
        f"{rank.mean_running:8.1f} {rank.mean_tokens:9.0f} {rank.max_waiting:7d} {rank.max_kv_cache_usage:6.1%}"
        + _left_out(rank)
        for rank in ranks
    ]
    return [*lines, "(means per step; most waiting; highest KV usage)"]


def _left_out(rank: RankSummary) -> str:
    if rank.prefiller:
        return "  a prefiller: left out"
    return "  too few steps: left out" if rank.too_few else ""


def _of_group(group: Group, title: str) -> list[str]:
    if len(group.files) == 1:
        return [f"{title}{group.files[0]}, alone: {_line(group.fit)}"]
    lines = [f"{title}{len(group.files)} ranks that step together: {', '.join(group.files)}"]
    if group.load_spread_mean is not None:
        share = group.load_spread_of_mean_ratio
        of_mean = "" if share is None else f", {share:.1%} of the mean load"
        lines.append(
            f"load spread (max - min): mean {group.load_spread_mean:.0f} tokens{of_mean}; "
            f"p99 {group.load_spread_p99:.0f}; over {group.overlap_s:.1f} s"
        )
    return [*lines, f"largest load of all ranks: {_line(group.fit)}"]


def _line(fit: Fit | None) -> str:
    if fit is None:
        return NO_FIT
    load = f"(L + {fit.c_tokens:.0f} * requests)" if fit.c_tokens else "L"
    line = f"step = {fit.a_us_per_token:.4f} us * {load} + {fit.b_ms:.3f} ms   (R2 {fit.r2:.3f}, {fit.steps} steps)"
    if fit.doubt is not None:
        return f"{line}\n  this fit means nothing: {fit.doubt}"
    if fit.a_us_per_token >= COMPUTED_FAST_US:
        return f"{line}\n  is this a prefiller? decoding takes less than {COMPUTED_FAST_US} us per token"
    return line


def configuration(summary: Summary) -> list[str]:
    """What to write into the router's configuration, and how to replay a trace at these costs."""
    if not summary.usable or summary.request_tokens is None:
        return ["configuration: nothing to change, for no fit means anything"]
    lines = [
        "configuration:",
        "  decode:",
        f"    request_tokens: {summary.request_tokens}",
    ]
    if len(summary.groups) > 1:
        alone = all(len(group.files) == 1 for group in summary.groups)
        lines += ["    shared_barrier: false"] if alone else []
        lines.append("    workers:   # in the entry of each, by its log:")
        for number, group in enumerate(summary.groups, start=1):
            barrier = "" if alone else f", barrier_group: group{number}"
            unknown = "" if group.slowdown is not None else "   # not known: a fit means nothing"
            lines.append(f"      # {', '.join(group.files)}: {{slowdown: {group.slowdown or 1.0:g}{barrier}}}{unknown}")
    elif len(summary.groups[0].files) > 1:
        lines.append("    # slowdown: 1 for all; behind one barrier every step takes as long as the slowest rank's")
    return [*lines, *_replay(summary)]


def _replay(summary: Summary) -> list[str]:
    """The options that replay a trace at these costs; a is that of a worker with slowdown 1."""
    fit, slowdown = max(
        ((group.fit, group.slowdown or 1.0) for group in summary.groups if group.fit in summary.usable),
        key=lambda found: found[0].steps if found[0] else 0,
    )
    assert fit is not None
    options = [
        f"--step-cost {fit.a_us_per_token / slowdown * 1e-6:.4g}",
        f"--step-overhead {max(0.0, fit.b_ms) * 1e-3:.4g}",
        f"--request-tokens {summary.request_tokens}",
    ]
    lines = []
    if fit.b_ms < -0.0005:
        lines.append(f"  (an overhead of {fit.b_ms:.3f} ms is 0 within its error)")
    slowdowns = [f"{group.slowdown or 1.0:g}" for group in summary.groups for _ in group.files]
    if len(summary.groups) > 1:
        options.append(f"--workers {len(slowdowns)} --barrier-groups {len(summary.groups)}")
        if len({len(group.files) for group in summary.groups}) > 1:
            lines.append("  (replay makes the groups as equal in size as can be, which these are not)")
    if any(group.slowdown not in (None, 1.0) for group in summary.groups):
        options.append(f"--slowdowns {','.join(slowdowns)}")
    return [f"  to replay with: {' '.join(options)}", *lines]
