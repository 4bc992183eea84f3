"""Sends a trace over HTTP against any OpenAI-compatible endpoint and measures what a client sees.

`client.py` is a small streaming HTTP/1.1 client: the load generator shares its cores with the cluster it
measures, so it must cost little per event. `prompts.py` makes token-id prompts of given lengths,
`run.py` sends them on time.
"""

from balanceroute.loadgen.run import LoadOptions, LoadReport, RequestResult, run_load

__all__ = ["LoadOptions", "LoadReport", "RequestResult", "run_load"]
