"""The configuration: defaults < YAML < `BALANCEROUTE_SECTION__KEY` environment < command line."""

from balanceroute.config.addresses import is_loopback
from balanceroute.config.client_keys import KeyEntry, digest_of, new_key, read_client_keys
from balanceroute.config.describe import Setting, describe_settings, effective, effective_json, effective_yaml
from balanceroute.config.documents import to_yaml
from balanceroute.config.example_flags import from_example_flags
from balanceroute.config.loading import (
    assumptions,
    load,
    load_sections,
    parse_assignment,
    unused_variables,
    validate,
    with_sections,
)
from balanceroute.config.models import Config
from balanceroute.config.rules import own_places
from balanceroute.config.sections.tiers import DecodeWorker, Worker
from balanceroute.config.urls import normalised_url, place_of, server_of

__all__ = [
    "Config",
    "DecodeWorker",
    "KeyEntry",
    "Setting",
    "Worker",
    "assumptions",
    "describe_settings",
    "digest_of",
    "effective",
    "effective_json",
    "effective_yaml",
    "from_example_flags",
    "is_loopback",
    "load",
    "load_sections",
    "new_key",
    "normalised_url",
    "own_places",
    "parse_assignment",
    "place_of",
    "server_of",
    "read_client_keys",
    "to_yaml",
    "unused_variables",
    "validate",
    "with_sections",
]
