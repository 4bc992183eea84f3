"""The configuration: defaults < YAML < `BALANCEROUTE_SECTION__KEY` environment < command line."""

from balanceroute.config.describe import Setting, describe_settings, effective, effective_yaml
from balanceroute.config.example_flags import from_example_flags, worker_url
from balanceroute.config.loading import load, parse_assignment, read_yaml, validate
from balanceroute.config.models import Config, DecodeWorker, PolicyName, Worker, normalised_url

__all__ = [
    "Config",
    "DecodeWorker",
    "PolicyName",
    "Setting",
    "Worker",
    "describe_settings",
    "effective",
    "effective_yaml",
    "from_example_flags",
    "load",
    "normalised_url",
    "parse_assignment",
    "read_yaml",
    "validate",
    "worker_url",
]
