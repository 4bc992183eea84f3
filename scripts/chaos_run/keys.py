"""Client keys of a storm: two without limits, and one that may not have many requests at a time."""

import hashlib
import os
import random
from pathlib import Path

import yaml

KEYS = ("chaos-a", "chaos-b", "chaos-bounded")
MOST_IN_FLIGHT = (5, 60)


def write_keys(folder: Path, draw: random.Random) -> Path:
    """Write the router's file of them, with a limit that is drawn anew each time."""
    entries = [{"name": key, "sha256": hashlib.sha256(key.encode()).hexdigest()} for key in KEYS]
    limited = entries[-1] | {"max_in_flight": draw.randint(*MOST_IN_FLIGHT)}
    path, fresh = folder / "keys.yaml", folder / "keys.new"
    fresh.write_text(yaml.safe_dump([*entries[:-1], limited]))
    os.replace(fresh, path)
    return path
