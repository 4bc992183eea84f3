"""Writes the settings and metrics tables and the explained decision into README.md, from the code that defines them.

python -m scripts.readme_tables           rewrites README.md
python -m scripts.readme_tables --check   exit code 1 when README.md is out of date
"""

import re
import subprocess
import sys
from pathlib import Path

from balanceroute.config import describe_settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
EXAMPLE = ROOT / "tests" / "data" / "explain_example.json"


def settings_table() -> str:
    """One row per setting."""
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{s.path}` | {s.type} | {s.default} | {s.description} |" for s in describe_settings()]
    return "\n".join(rows)


def metrics_table() -> str:
    """One row per metric of a router that predicts, which has all of them."""
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
    rows = ["| metric | type | meaning |", "|---|---|---|"]
    for family in sorted(families, key=lambda family: family.name):
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        rows.append(f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |")
    return "\n".join(rows)


def explained() -> str:
    """The example state and what `explain` prints for it."""
    command = [sys.executable, "-m", "balanceroute", "explain", str(EXAMPLE)]
    env = {"COLUMNS": "110", "PATH": "", "TERM": "dumb"}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=ROOT).stdout
    state = EXAMPLE.read_text().strip()
    return f"```\n$ cat state.json\n{state}\n$ balanceroute explain state.json\n{printed.strip()}\n```"


def rewritten(text: str) -> str:
    """README.md with its generated parts as they should be."""
    for name, part in (("settings", settings_table()), ("metrics", metrics_table()), ("explain", explained())):
        text = re.sub(
            rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)",
            lambda found, part=part: f"{found[1]}{part}\n{found[2]}",  # type: ignore[misc]
            text,
            flags=re.S,
        )
    return text


def main() -> int:
    """Rewrite or check."""
    old = README.read_text()
    new = rewritten(old)
    if "--check" in sys.argv:
        return int(old != new)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
