"""`python -m balanceroute`: the same as the `balanceroute` command."""

from balanceroute.cli import main

if __name__ == "__main__":
    main()
