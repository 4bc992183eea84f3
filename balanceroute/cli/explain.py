"""`balanceroute explain`: the decision on a written-down state and why, or the rerun of a journal."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from balanceroute import __version__

if TYPE_CHECKING:
    from rich.table import Table

    from balanceroute.explain import Explanation
    from balanceroute.journal import RerunReport

STAGES = {0: "overdue", 1: "abundant", 2: "scarce", 3: "at once"}

POLICY_HELP = (
    "Decide by this policy instead, with its defaults: what would it do now? A module:Class of your own that the file "
    "names must be named here, too."
)


def explain(
    snapshot: Annotated[
        Path | None,
        typer.Argument(
            help="What GET /state returned, or the same by hand; - reads standard input.", show_default=False
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Run this journal (serve --journal) again instead and compare every action.", show_default=False
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help=POLICY_HELP, show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Print which requests the policy admits to which workers in a given state, and why.

    With --journal, make a recorded run's calls again instead; exit code 1 and the first difference if any answer
    is not the same, byte for byte.

    Example: curl -s localhost:8000/state | balanceroute explain -
    """
    from balanceroute.errors import InputError

    if (snapshot is None) == (journal is None):
        raise InputError("explain takes a SNAPSHOT file (or -), or --journal FILE")
    if journal is not None:
        from balanceroute.journal import rerun

        if policy is not None:
            learn_named(policy)
        report = rerun(journal)
        show_rerun(journal, report, as_json=as_json)
        raise typer.Exit(1 if report.difference else 0)
    assert snapshot is not None
    result = explained(snapshot, policy)
    if as_json:
        from balanceroute.cli.output import print_json

        print_json(result.to_dict())
    else:
        show_explanation(result)


def learn_named(policy: str) -> None:
    """Let a journal name a user's own policy. Raises: InputError: it is one of ours, and says nothing."""
    from balanceroute.errors import InputError
    from balanceroute.plugins import CLASS_NAME, learn_policy

    if not CLASS_NAME.fullmatch(policy):
        raise InputError(
            f"--policy {policy}: a journal's calls are made again by its own policy; "
            "accepted is a module:Class that it names"
        )
    learn_policy(policy)


def explained(path: Path, policy: str | None) -> "Explanation":
    """The decision on a file's state, by this policy if there is one. Raises: InputError that names the file."""
    from balanceroute.errors import InputError
    from balanceroute.explain import explain

    try:
        return explain(state_in(path), policy)
    except InputError as error:
        raise InputError(f"{'standard input' if str(path) == '-' else path}: {error}") from error


def read_json(path: Path) -> object:
    """The parsed file, or standard input for `-`. Raises InputError, which does not name it."""
    import json

    from balanceroute.bounded import whole
    from balanceroute.errors import InputError

    try:
        with open(0, "rb", closefd=False) if str(path) == "-" else path.open("rb") as file:
            text = whole(file).decode("utf-8-sig")
        if not text.strip():
            raise InputError("nothing in it")
        if text.startswith('{"journal":'):
            raise InputError("is a journal; explain --journal FILE runs it again")
        return json.loads(text)
    except OSError as error:
        raise InputError(error.strerror) from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not JSON ({error})") from error
    except ValueError:  # the limit on digits that int() has
        raise InputError("a number of too many digits") from None


def state_in(path: Path) -> object:
    """Read a document of GET /state. Raises: InputError: it is a refusal, or the answer of another route."""
    from balanceroute.errors import InputError

    read = read_json(path)
    refusal = read.get("error") if isinstance(read, dict) else None
    if isinstance(refusal, dict) and "message" in refusal:
        raise InputError(f"no state, but an error of the router: {refusal['message']}")
    if isinstance(read, dict) and not read.keys() & {"policy", "workers", "waiting"}:
        raise InputError("no state: it has neither policy nor workers, as GET /state of the router has")
    return read


def show_explanation(result: "Explanation") -> None:
    """Print the workers before the decision, and each admission with what came second."""
    from balanceroute.cli.output import print_table

    print_table(f"policy {result.policy}, {len(result.workers)} workers", workers_table(result))
    if result.admissions:
        print_table(admissions_table(result))
    if result.prefills:
        print_table(prefills_table(result))
    admitted = f"{len(result.admissions)} admitted"
    if result.sent_ahead:
        admitted += f", {result.sent_ahead} of them ahead of a slot"
    if result.admissions or result.left_waiting:
        print_table(f"{admitted}, {result.left_waiting} left waiting: {result.reason}")
    else:
        print_table("No request waits, so there is nothing to decide.")


def workers_table(result: "Explanation") -> "Table":
    """Loads, margins and slots, a row per worker."""
    from rich.table import Table

    table = Table("worker", "state", title="Before the decision (tokens)", title_justify="left")
    ahead = any(worker.ahead for worker in result.workers)
    for name in ("load", "margin now", "least margin ahead", "active", "free slots", *(["may send ahead"] * ahead)):
        table.add_column(name, justify="right")
    for worker in result.workers:
        cells = [worker.load_tokens, worker.margin, worker.least_margin, worker.active, worker.free_slots]
        cells += [worker.ahead] * ahead
        table.add_row(worker.id, worker.state, *("-" if cell is None else f"{cell:,}" for cell in cells))
    return table


def admissions_table(result: "Explanation") -> "Table":
    """The admissions, each with its runner-up."""
    from rich.table import Table

    table = Table("request", "worker", "stage", title="Admissions", title_justify="left")
    table.add_column("score", justify="right")
    table.add_column("otherwise")
    table.add_column("its score", justify="right")
    into_slots = len(result.admissions) - result.sent_ahead
    for index, (admit, runner_up) in enumerate(zip(result.admissions, result.runners_up, strict=True)):
        stage = f"{admit.stage} {STAGES.get(admit.stage, 'unknown')}" + ", sent ahead" * (index >= into_slots)
        cells = (stage, score_text(admit.score), str(runner_up), score_text(runner_up.score))
        table.add_row(admit.request, admit.worker, *cells)
    return table


def score_text(score: float | None) -> str:
    """The score; a dash where there is none."""
    return "-" if score is None else f"{score:,.1f}"


def prefills_table(result: "Explanation") -> "Table":
    """Prompts under way, and what each prefiller would have cost."""
    from rich.table import Table

    table = Table("request", "prefiller", title="Being prefilled (tokens)", title_justify="left")
    for name in ("prompt", "to compute"):
        table.add_column(name, justify="right")
    table.add_column("work there and elsewhere")
    for prefill in result.prefills:
        costs = ", ".join(f"{name} {cost:,.0f}" for name, cost in prefill.costs.items())
        tokens = (f"{prefill.prompt_tokens:,}", f"{prefill.uncached_tokens:,}")
        table.add_row(prefill.request, prefill.prefiller, *tokens, costs)
    return table


def show_rerun(path: Path, report: "RerunReport", *, as_json: bool) -> None:
    """Print what the rerun found."""
    from dataclasses import asdict

    from balanceroute.cli.output import print_json

    if as_json:
        print_json(asdict(report))
        return
    version = report.version if report.version == __version__ else f"{report.version} (this is {__version__})"
    typer.echo(f"{path}: version {version}, policy {report.settings.policy}")
    typer.echo(
        f"{report.calls:,} calls, {report.tokens:,} tokens, {report.admissions:,} admissions in {report.span_s:,.1f} s"
    )
    if report.cut_short:
        typer.echo("the file ends in half a line, which is left out")
    difference = report.difference
    if difference is None:
        typer.echo("every answer is the same, byte for byte")
        return
    typer.echo(f"first difference in line {difference.line}, t={difference.at_s}: {difference.call} {difference.args}")
    typer.echo(f"  recorded  {difference.recorded}")
    typer.echo(f"  rerun     {difference.rerun}")
