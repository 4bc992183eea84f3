"""`python -m balanceroute.instrumentation FILE...`: `balanceroute steps` without the rest of the command line."""

import argparse
import json
import sys
from pathlib import Path

from balanceroute.instrumentation.reading import BadStepLog, summarise
from balanceroute.instrumentation.text import text_of


def main(arguments: list[str] | None = None) -> int:
    """Print the summary; 2 and one line on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m balanceroute.instrumentation",
        description="Load spread over DP ranks, and what a step costs, from engine step logs.",
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
    print(json.dumps(summary.as_dict(), indent=2) if options.json else text_of(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
