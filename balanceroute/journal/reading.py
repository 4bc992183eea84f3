"""`rerun`: repeats the calls of a journal, and finds the first whose answer differs."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from balanceroute import __version__
from balanceroute.bounded import lines
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy, settings_from_dict
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, Phase, RequestSpec, Role, Standing, WorkerSpec, WorkerState
from balanceroute.errors import InputError, InvariantError
from balanceroute.journal.lines import FORMAT, call_line, error_text
from balanceroute.journal.writing import RecordingScheduler
from balanceroute.plugins import learn_installed


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call that answers otherwise than it did; `recorded` and `rerun` are JSON texts."""

    line: int
    at_s: float
    call: str
    args: dict[str, Any]
    recorded: str
    rerun: str


@dataclass(frozen=True, slots=True)
class RerunReport:
    """The result of a rerun.

    `span_s`: from the first call to the last, seconds of the calls' own time. `cut_short`: half a line ends the file.
    """

    version: str
    settings: PolicySettings
    calls: int
    tokens: int
    admissions: int
    span_s: float
    cut_short: bool
    difference: Difference | None


def rerun(path: Path) -> RerunReport:
    """Make the journal's calls again and compare the answers, up to the first difference.

    Raises: InputError naming the line that cannot be read. O(1) memory in the length of the file.
    """
    try:
        with path.open("rb") as file:
            return _rerun(path, file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def _rerun(path: Path, file: BinaryIO) -> RerunReport:
    numbered = enumerate(lines(file), start=1)
    version, settings, scheduler = _begun(path, next(numbered, (1, b""))[1])
    calls = tokens = admissions = 0
    first_s: float | None = None
    last_s = 0.0
    cut_short, difference = False, None
    for number, line in numbered:
        if not line.endswith(b"\n"):
            cut_short = True
            break
        try:
            entry = orjson.loads(line)
            last_s, call, args = float(entry["t"]), str(entry["call"]), dict(entry["args"])
            outcome = _perform(scheduler, call, args, last_s, raised="raised" in entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path}: line {number}: not a journal entry ({error}){_written_by(version)}") from error
        except InputError as error:
            raise InputError(f"{path}: line {number}: {error}{_written_by(version)}") from error
        first_s = last_s if first_s is None else first_s
        calls += 1
        tokens += sum(args["counts"].values()) if call == "tokens" else 0
        admissions += len(outcome["answer"]) if call == "admit" and "answer" in outcome else 0
        if call_line(last_s, call, args, outcome) != line:  # or another program has written the same line anew
            found = _difference(number, entry, outcome)
            if found.recorded != found.rerun:
                difference = found
                break
    span_s = last_s - first_s if first_s is not None else 0.0
    return RerunReport(version, settings, calls, tokens, admissions, span_s, cut_short, difference)


def _written_by(version: object) -> str:
    """A note for an unreadable line: another version may have written it."""
    other = isinstance(version, str) and version != __version__
    return f"; version {version!r:.40} wrote it, this is {__version__!r}" if other else ""


def _begun(path: Path, line: bytes) -> tuple[str, PolicySettings, Scheduler]:
    """Read the header: the version, the policy, and a scheduler for the calls."""
    version: object = __version__
    try:
        header = orjson.loads(line)
        version = header.get("version")
        if header["journal"] != FORMAT:
            raise InputError(f"journal format {header['journal']}; this version reads {FORMAT}")
        learn_installed(header.get("policy"))
        settings = settings_from_dict(header)
        return str(header["version"]), settings, Scheduler(make_policy(settings), _read_config(header["config"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: line 1: not the header of a journal ({error}){_written_by(version)}") from error
    except InputError as error:
        raise InputError(f"{path}: line 1: {error}{_written_by(version)}") from error


def _read_config(entry: dict[str, Any]) -> SchedulerConfig:
    """Bounds from their JSON values. Raises: TypeError, AttributeError: they are none."""
    bounds: dict[str, Any] = {k: math.inf if v is None and k in ENDLESS else v for k, v in entry.items()}
    return SchedulerConfig(**bounds)


ENDLESS = {field.name for field in fields(SchedulerConfig) if field.default == math.inf}
"""Bounds whose null means infinite."""

METHODS = {name for name in vars(RecordingScheduler) if not name.startswith("_")} - {"close"}
"""The calls that are a method of the scheduler."""


def _perform(scheduler: Scheduler, call: str, args: dict[str, Any], now: float, *, raised: bool) -> dict[str, Any]:
    """Make one call: {"answer": ...}, or {"raised": ...} where the scheduler found a contradiction, or its policy one.

    Args: raised: whether the call did when it was recorded; else whatever is raised speaks against the arguments.
    """
    try:
        if call == "tokens":
            for request_id, count in args["counts"].items():
                scheduler.progress(request_id, count, now)
            return {"answer": None}
        if call not in METHODS:
            raise ValueError(f"unknown call {call!r:.60}")
        return {"answer": getattr(scheduler, call)(**_typed(call, args), now=now)}
    except (Exception, SystemExit) as error:
        if not (raised or call == "admit" or isinstance(error, InvariantError)):
            raise
        return {"raised": error_text(error)}
    finally:
        scheduler.due_refreshes()  # the recorded driver took these; what came of them are `refresh` calls


def _typed(call: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the scheduler takes them, from their JSON values."""
    typed = dict(args)
    if call == "add_worker":
        typed["spec"] = WorkerSpec(**{**args["spec"], "role": Role(args["spec"]["role"])})
    elif "spec" in args:
        typed["spec"] = RequestSpec(**args["spec"])
    if "standing" in args:
        standing = args["standing"]
        typed["standing"] = Standing(
            **{**standing, "spec": RequestSpec(**standing["spec"]), "phase": Phase(standing["phase"])}
        )
    if "config" in args:
        typed["config"] = _read_config(args["config"])
    if "settings" in args:
        learn_installed(args["settings"]["policy"])
        policy, params = args["settings"]["policy"], {k: v for k, v in args["settings"].items() if k != "policy"}
        typed["settings"] = settings_from_dict({"policy": policy, "params": params})
    if "state" in args:
        typed["state"] = WorkerState(args["state"])
    if "outcome" in args:
        typed["outcome"] = Outcome(args["outcome"])
    return typed


def _difference(number: int, entry: dict[str, Any], outcome: dict[str, Any]) -> Difference:
    recorded = {key: entry[key] for key in ("answer", "raised") if key in entry}
    return Difference(
        line=number,
        at_s=entry["t"],
        call=entry["call"],
        args=entry["args"],
        recorded=orjson.dumps(recorded).decode(),
        rerun=orjson.dumps(outcome).decode(),
    )
