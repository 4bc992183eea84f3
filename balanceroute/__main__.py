"""The `balanceroute` command, and `python -m balanceroute`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it as later: in silence, with status 130."""
    try:
        from balanceroute.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
