"""The modules that mypyc compiles, and the rule that code compiled from other sources never runs.

These modules are ordinary typed Python, which setup.py compiles at installation where there is a C compiler: a request
takes a third less CPU, a simulation an eighth to two fifths. Nothing else depends on it. All machine code lies in
one library whose name ends with a digest of the sources, beside a small module for each. Where that library is not
found (no compiler; a checkout with other sources than at its installation) or `BALANCEROUTE_PURE_PYTHON=1` is set,
`Sources` has the same modules read as Python.

A compiled coroutine has no exception state of its own (mypyc 2): while it waits in an `except` or a `finally`, the
exception is lost to whoever else runs, and to raise it again crashes the process, or ends as if nothing had happened.
What others raise meanwhile gets it as its `__context__`: the errors of thousands of requests that failed together were
one chain, and to clear it for each of them stopped the event loop for seconds. So these modules wait neither in an
`except` nor in a `finally`, and leave no `async with` that waits on its way out.

setup.py runs this file by its path, so it imports nothing of the package. What stays Python: dataclasses that go to
orjson, which crashes on compiled ones (`core/types.py`, `core/view.py`, `core/scheduler_config.py`); what others
inherit from (`core/policy.py`, the services, `client/protocol.py`); `core/subset.py`, where numpy does the work; and
what runs seldom.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

MODULES: Final = (
    "core.balance_route",
    "core.fit_rules",
    "core.fscore",
    "core.overlap",
    "core.pool",
    "core.pool_bypass",
    "core.prefill",
    "core.prefill_dispatch",
    "core.prefill_queue",
    "core.prefill_work",
    "core.prefix",
    "core.projection",
    "core.promotion",
    "core.refresh_schedule",
    "core.scarce_fit",
    "core.scheduler",
    "core.snapshot",
    "core.target_fit",
    "core.tracker",
    "core.workload_means",
    "proxy.admission.decision_log",
    "proxy.admission.decode_dispatcher",
    "proxy.admission.ledger",
    "proxy.admission.prompt_estimates",
    "proxy.admission.tickets",
    "proxy.client.body",
    "proxy.client.edge",
    "proxy.client.exchange",
    "proxy.client.fanout",
    "proxy.client.head",
    "proxy.client.intake",
    "proxy.client.outlets",
    "proxy.client.relay_loads",
    "proxy.client.response",
    "proxy.life.answer",
    "proxy.life.cut_off",
    "proxy.life.decoding",
    "proxy.life.held_kv",
    "proxy.life.leg",
    "proxy.life.prefilling",
    "proxy.life.pull",
    "proxy.life.retries",
    "proxy.link.frames",
    "proxy.link.hub",
    "proxy.link.member_requests",
    "proxy.link.members",
    "proxy.link.membership",
    "proxy.link.outbox",
    "proxy.link.remote",
    "proxy.link.token_counts",
    "proxy.perimeter.access",
    "proxy.perimeter.key_table",
    "proxy.perimeter.keys",
    "proxy.perimeter.pages",
    "proxy.perimeter.perimeter",
    "proxy.telemetry.instruments",
    "proxy.wire.answer_identity",
    "proxy.wire.answer_tokens",
    "proxy.wire.answer_usage",
    "proxy.wire.bounds",
    "proxy.wire.client_request",
    "proxy.wire.closing",
    "proxy.wire.connectors",
    "proxy.wire.derived_requests",
    "proxy.wire.event_contents",
    "proxy.wire.event_stream",
    "proxy.wire.event_template",
    "proxy.wire.fields",
    "proxy.wire.json_body",
    "proxy.wire.payloads",
    "proxy.wire.probe_reply",
    "proxy.wire.prompt_blocks",
    "proxy.wire.prompt_traits",
    "proxy.wire.prompts",
    "proxy.wire.responses",
    "proxy.wire.sse",
    "proxy.wire.text_offsets",
    "proxy.wire.usage",
    "proxy.workers.circuit",
    "proxy.workers.connection",
    "proxy.workers.fleet",
    "proxy.workers.identity",
    "proxy.workers.relay_fleet",
    "proxy.workers.reply",
    "proxy.workers.upstream",
    "simulator.arrivals",
    "simulator.groups",
    "simulator.oracle",
    "simulator.ranks",
    "simulator.simulation",
    "simulator.telemetry",
)
CONSTANTS_OF: Final = (  # modules that stay Python, but whose constants mypyc writes into the compiled ones
    "errors",
    "proxy.admission.decider",
    "proxy.hotpath.events",
    "proxy.link.messages",
    "proxy.link.reach",
    "proxy.wire.json_size",
    "proxy.workers.connector_check",
)
PACKAGE: Final = Path(__file__).parent


def _source(name: str) -> Path:
    return PACKAGE.joinpath(*name.split(".")).with_suffix(".py")


SOURCES: Final = {f"balanceroute.{name}": _source(name) for name in MODULES}


def group() -> str:
    """The library's name without mypyc's suffix: these sources and no others.

    Raises: OSError where a source cannot be read.
    """
    digest = hashlib.sha256()
    for path in (*SOURCES.values(), *map(_source, CONSTANTS_OF)):
        digest.update(path.read_bytes())
    return f"native_{digest.hexdigest()[:16]}"


def library() -> ModuleSpec | None:
    """The compiled form of these very sources, where there is one."""
    try:
        return PathFinder.find_spec(f"balanceroute.{group()}__mypyc", [str(PACKAGE)])
    except OSError:  # without sources the installed compiled modules are the only form
        return None


class Sources:
    """Finds the modules as Python, where Python itself would take the compiled ones beside them."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder`: nothing for all other modules."""
        source = SOURCES.get(name)
        return None if source is None else spec_from_file_location(name, source)


_KEPT_TO_PYTHON: Final = bool(os.environ.get("BALANCEROUTE_PURE_PYTHON"))

COMPILED: Final = not _KEPT_TO_PYTHON and library() is not None
STALE: Final = not _KEPT_TO_PYTHON and not COMPILED and any(PACKAGE.glob("native_*__mypyc.*"))
if not COMPILED:
    sys.meta_path.insert(0, Sources)
