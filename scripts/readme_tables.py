"""Writes the generated parts of README.md and docs/: settings, metrics, alerts, the explained decision, the results.

python -m scripts.readme_tables           rewrites the files
python -m scripts.readme_tables --check   exit code 1 when one is out of date

The results are those of docs/figures/results.json, which `python -m scripts.docs_figures` writes.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import yaml
from prometheus_client import Metric

from balanceroute.config import describe_settings
from scripts.metric_advice import ADVICE

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *(ROOT / "docs" / name for name in ("settings.md", "metrics.md", "how.md")))
RESULTS = ROOT / "docs" / "figures" / "results.json"
ALERTS = ROOT / "deploy" / "prometheus-alerts.yaml"
EXAMPLE = ROOT / "tests" / "data" / "explain_example.json"


def settings_tables() -> str:
    """Links to the sections, and a table for each with one row per setting."""
    tables: dict[str, list[str]] = {}
    for s in describe_settings():
        rows = tables.setdefault(s.path.partition(".")[0], [])
        rows.append(f"| `{s.path}` | {s.type} | {s.default} | {s.description} |")
    head = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    links = " · ".join(f"[{name}](#{name})" for name in tables)
    return "\n\n".join([links, *("\n".join([f"## {name}\n", *head, *rows]) for name, rows in tables.items())])


def metric_families() -> list[Metric]:
    """The metrics of a router that predicts, which has all of them, by name."""
    from balanceroute.config import Config
    from balanceroute.core.snapshot import ClusterSnapshot
    from balanceroute.core.view import view_cluster
    from balanceroute.proxy.admission.forecasts import LiveForecasts
    from balanceroute.proxy.telemetry.metrics import Metrics

    worker = [{"url": "http://worker"}]
    config = Config.model_validate(
        {"prefill": {"workers": [{"url": "http://prefiller"}]}, "decode": {"workers": worker}}
        | {"routing": {"policy": "br_h"}, "predictor": {"kind": "exact_match"}}
    )
    snapshot, forecasts = ClusterSnapshot(), LiveForecasts(config)
    forecasts.runner(snapshot)
    families = [*Metrics(lambda: view_cluster(snapshot), "br_h").collect(), *forecasts.metrics.collect()]
    forecasts.close()
    return sorted(families, key=lambda family: family.name)


def metrics_table() -> str:
    """One row per metric."""
    rows = ["| metric | type | labels | meaning | when it moves |", "|---|---|---|---|---|"]
    for family in metric_families():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels, advice = ADVICE[family.name.removeprefix("balanceroute_")]
        rows.append(f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} | {advice} |")
    return "\n".join(rows)


def alerts_table() -> str:
    """One row per alert, in the order of the file."""
    rows = ["| alert | meaning | look first |", "|---|---|---|"]
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        annotations = rule["annotations"]
        rows.append(f"| {rule['alert']} | {annotations['summary']} | {annotations['action']} |")
    return "\n".join(rows)


def results_table() -> str:
    """One row per policy, in the order of the file."""
    rows = [
        "| policy | load spread, tokens | tokens/s | TPOT p95 ms | balance | wait p50 s | p99 s | longest s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in json.loads(RESULTS.read_text()).items():
        shown = f"**`{name}`**" if name == "level_fit" else f"`{name}`"
        rows.append(
            f"| {shown} | {found['load_spread_mean']:,.0f} | {found['throughput_tok_s']:,.0f} |"
            f" {1000 * found['tpot_p95_s']:.1f} | {found['balance']:.3f} | {found['wait_p50_s']:.1f} |"
            f" {found['wait_p99_s']:.0f} | {found['wait_max_s']:.0f} |"
        )
    return "\n".join(rows)


def explained() -> str:
    """The example state and what `explain` prints for it."""
    command = [sys.executable, "-m", "balanceroute", "explain", str(EXAMPLE)]
    env = {"COLUMNS": "110", "PATH": "", "TERM": "dumb"}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=ROOT).stdout
    state = EXAMPLE.read_text().strip()
    return f"```\n$ cat state.json\n{state}\n$ balanceroute explain state.json\n{printed.strip()}\n```"


def rewritten(text: str, parts: dict[str, str]) -> str:
    """A page with its generated parts as they should be."""
    for name, part in parts.items():
        text = re.sub(
            rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)",
            lambda found, part=part: f"{found[1]}{part}\n{found[2]}",  # type: ignore[misc]
            text,
            flags=re.S,
        )
    return text


def generated() -> dict[str, str]:
    """All parts, by name."""
    return {
        "settings": settings_tables(),
        "metrics": metrics_table(),
        "alerts": alerts_table(),
        "explain": explained(),
        "results": results_table(),
    }


def main() -> int:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    parts = generated()
    outdated = [page for page in PAGES if page.read_text() != rewritten(page.read_text(), parts)]
    if arguments.check:
        return int(bool(outdated))
    for page in outdated:
        page.write_text(rewritten(page.read_text(), parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
