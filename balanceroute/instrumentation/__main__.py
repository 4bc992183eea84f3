"""`python -m balanceroute.instrumentation FILE...`: load spread and step cost from step logs."""

import argparse
import json
import sys
from pathlib import Path

from balanceroute.instrumentation.reading import BadStepLog, Fit, Summary, summarise


def main(arguments: list[str] | None = None) -> int:
    """Print the summary; 2 and one line on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m balanceroute.instrumentation",
        description="Load spread over DP ranks, and step time as a * load + b, from engine step logs.",
        epilog="Example: python -m balanceroute.instrumentation steps-dp*.csv",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="One file per DP rank.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options = parser.parse_args(arguments)
    try:
        summary = summarise(options.files)
    except BadStepLog as error:
        print(f"instrumentation: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"instrumentation: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(json.dumps(summary.as_dict(), indent=2) if options.json else text_of(summary))
    return 0


def text_of(summary: Summary) -> str:
    """The summary as a table."""
    width = max(len(rank.file) for rank in summary.ranks)
    columns = f"{'steps':>7} {'p50 ms':>8} {'p99 ms':>8} {'running':>8} {'tokens':>9} {'waiting':>7} {'kv':>6}"
    lines = [f"{'file':{width}}  {columns}"]
    lines += [
        f"{rank.file:{width}}  {rank.steps:7d} {rank.step_ms_p50:8.2f} {rank.step_ms_p99:8.2f} "
        f"{rank.mean_running:8.1f} {rank.mean_tokens:9.0f} {rank.max_waiting:7d} {rank.max_kv_cache_usage:6.1%}"
        for rank in summary.ranks
    ]
    lines.append("(means per step; most waiting; highest KV usage)")
    if summary.load_spread_mean is not None:
        share = summary.load_spread_of_mean_ratio
        of_mean = "" if share is None else f", {share:.1%} of the mean load"
        lines.append(
            f"load spread (max - min): mean {summary.load_spread_mean:.0f} tokens{of_mean}; "
            f"p99 {summary.load_spread_p99:.0f}; over {summary.overlap_s:.1f} s"
        )
    lines += [f"{rank.file}: {_line(rank.fit)}" for rank in summary.ranks]
    if summary.load_spread_mean is not None:
        lines.append(f"largest load of all ranks: {_line(summary.envelope_fit)}")
    return "\n".join(lines)


def _line(fit: Fit | None) -> str:
    if fit is None:
        return "no fit (too few steps, or all with the same load)"
    return f"step = {fit.a_us_per_token:.4f} us * L + {fit.b_ms:.3f} ms   (R2 {fit.r2:.3f}, {fit.steps} steps)"


if __name__ == "__main__":
    sys.exit(main())
