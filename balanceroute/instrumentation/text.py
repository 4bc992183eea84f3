"""A summary of step logs for people: a table of the files, a line or two per barrier, and what to configure."""

from balanceroute.instrumentation.reading import Fit, Group, RankSummary, Summary

NO_FIT = "no fit (too few steps, or all with the same load)"


def text_of(summary: Summary) -> str:
    """The summary as lines."""
    lines = [*_table(summary.ranks), *summary.notes]
    several = len(summary.groups) > 1
    if several:
        lines.append(f"{len(summary.groups)} servers or groups whose steps do not end together")
    for number, group in enumerate(summary.groups, start=1):
        lines += _of_group(group, f"group {number}: " if several else "")
    return "\n".join([*lines, *_configuration(summary)])


def _table(ranks: list[RankSummary]) -> list[str]:
    width = max(len(rank.file) for rank in ranks)
    columns = f"{'steps':>7} {'p50 ms':>8} {'p99 ms':>8} {'running':>8} {'tokens':>9} {'waiting':>7} {'kv':>6}"
    lines = [f"{'file':{width}}  {columns}"]
    lines += [
        f"{rank.file:{width}}  {rank.steps:7d} {rank.step_ms_p50:8.2f} {rank.step_ms_p99:8.2f} "
        f"{rank.mean_running:8.1f} {rank.mean_tokens:9.0f} {rank.max_waiting:7d} {rank.max_kv_cache_usage:6.1%}"
        + ("  a prefiller: left out" if rank.prefiller else "")
        for rank in ranks
    ]
    return [*lines, "(means per step; most waiting; highest KV usage)"]


def _of_group(group: Group, title: str) -> list[str]:
    if len(group.files) == 1:
        return [f"{title}{group.files[0]}, alone: {_line(group.fit, 'L')}"]
    lines = [f"{title}{len(group.files)} ranks that step together: {', '.join(group.files)}"]
    if group.load_spread_mean is not None:
        share = group.load_spread_of_mean_ratio
        of_mean = "" if share is None else f", {share:.1%} of the mean load"
        lines.append(
            f"load spread (max - min): mean {group.load_spread_mean:.0f} tokens{of_mean}; "
            f"p99 {group.load_spread_p99:.0f}; over {group.overlap_s:.1f} s"
        )
    return [*lines, f"largest load of all ranks: {_line(group.fit, 'L')}"]


def _line(fit: Fit | None, load: str) -> str:
    if fit is None:
        return NO_FIT
    if fit.c_tokens:
        load = f"({load} + {fit.c_tokens:.0f} * requests)"
    line = f"step = {fit.a_us_per_token:.4f} us * {load} + {fit.b_ms:.3f} ms   (R2 {fit.r2:.3f}, {fit.steps} steps)"
    return line if fit.doubt is None else f"{line}\n  this fit means nothing: {fit.doubt}"


def _configuration(summary: Summary) -> list[str]:
    if not summary.usable or summary.request_tokens is None:
        return ["configuration: nothing to change, for no fit means anything"]
    fit = max(summary.usable, key=lambda fit: fit.steps)
    lines = [
        "configuration:",
        "  decode:",
        f"    request_tokens: {summary.request_tokens}",
    ]
    if len(summary.groups) > 1:
        lines.append("    workers:   # slowdown, of the workers of")
        for group in summary.groups:
            unknown = "" if group.slowdown is not None else "   # not known: a fit means nothing"
            lines.append(f"      # {', '.join(group.files)}: {{slowdown: {group.slowdown or 1.0:g}}}{unknown}")
    elif len(summary.groups[0].files) > 1:
        lines.append("    # slowdown: 1 for all; behind one barrier every step takes as long as the slowest rank's")
    replay = f"--step-cost {fit.a_us_per_token * 1e-6:.4g} --step-overhead {fit.b_ms * 1e-3:.4g}"
    return [*lines, f"  to replay with: {replay} --request-tokens {summary.request_tokens}"]
