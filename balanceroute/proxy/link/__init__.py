"""The calls of `admission/decider.py` between processes: relays hold requests, the brain decides on them."""
