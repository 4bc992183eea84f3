"""`balanceroute demo --prefix`."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from balanceroute.demo.prefill_tier import PrefixRun, PrefixScale

SHOWN = ("round_robin", "least_tokens", "prefix_affinity")


def prefix_demo(seconds: float, seed: int, json: bool) -> None:
    """Show what knowing the prefillers' caches is worth: the same conversations through every prefill policy."""
    from balanceroute.cli.demo import side_by_side
    from balanceroute.demo.prefill_tier import PrefixScale, run_prefix_demo

    scale = PrefixScale(seconds=seconds, seed=seed)
    side_by_side(scale, SHOWN, run_prefix_demo, json, announce, show)


def announce(scale: "PrefixScale") -> None:
    """Say what runs, and how it was scaled."""
    trace = scale.trace()
    typer.echo(
        f"{len(trace)} turns of conversations in {scale.seconds:g} s through {scale.prefillers} emulated prefillers"
        f" with a prefix cache each.\nScaled to two cores: prompts 1/{scale.factor}"
        f" (mean {trace.prompt_tokens.mean():.0f} tokens), time {scale.speed:g} times as fast,"
        f" {scale.tokens_per_s:,.0f} tokens/s per prefiller.\n"
    )


def show(runs: "list[PrefixRun]") -> None:
    """The table, one column per policy, and the change from the last but one to the last."""
    from balanceroute.cli.demo import show_side_by_side

    show_side_by_side(
        runs,
        [
            ("computed, %", lambda run: run.computed_ratio * 100, ".1f"),
            ("thought cached, %", lambda run: run.predicted_ratio * 100, ".1f"),
            ("found cached, %", lambda run: run.hit_ratio * 100, ".1f"),
            ("busiest / mean", lambda run: run.busiest_ratio, ".2f"),
            ("TTFT p50, ms", lambda run: run.report.ttft_s.p50 * 1e3, ",.0f"),
            ("TTFT p95, ms", lambda run: run.report.ttft_s.p95 * 1e3, ",.0f"),
            ("TTFT p99, ms", lambda run: run.report.ttft_s.p99 * 1e3, ",.0f"),
        ],
        runs[-2:][0],
    )
