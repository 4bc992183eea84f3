"""`balanceroute decisions`: the last admissions of a running router, and what would have been done instead."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import httpx

ASK_EVERY_S = 1.0
WORKED_OUT_S = 1.2  # the router works out runners-up once per second
MOST = 100  # decisions that a router keeps
TIMEOUT_S = 10.0
LAST_TIME_S = 1e11  # the year 5138: of much later times there is no date
USED: dict[str, Any] = {
    "number": int,
    **dict.fromkeys(("policy", "request", "worker"), str),
    "at": int | float,
    "stage": int,
    "score": int | float | None,  # JSON has no infinity, which a user's own policy may return
    "runner_up": str | None,
    "runner_up_score": int | float | None,
}
"""What is used of a decision, and its type."""


def decisions(
    url: Annotated[
        str,
        typer.Argument(
            help="The router, for example http://127.0.0.1:8000. For https with a CA of your own set SSL_CERT_FILE to "
            "its file."
        ),
    ],
    last: Annotated[int, typer.Option(min=1, max=MOST, help="How many to print.")] = 20,
    watch: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds to watch before printing: runners-up are worked out only while somebody watches."
        ),
    ] = 3.0,
    admin_token: Annotated[
        str | None, typer.Option(envvar="BALANCEROUTE_AUTH__ADMIN_TOKEN", help="The router's auth.admin_token.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what GET /decisions returned.")] = False,
) -> None:
    """Print the last decisions of a running router, each with its runner-up.

    The runner-up is what the policy would have done without the request, where more waited than slots were free, or
    else without the worker. Ctrl-C ends the watching.

    Example: balanceroute decisions http://127.0.0.1:8000 --last 10
    """
    from balanceroute.cli.output import print_json

    found = watched(url, last, watch, admin_token)
    if as_json:
        print_json(found)
    else:
        show_decisions(found)


def watched(url: str, last: int, seconds: float, token: str | None) -> dict[str, Any]:
    """The router's answer after so many seconds of asking, or the last one before Ctrl-C or SIGTERM.

    Raises: InputError: it does not answer, or refuses.
    """
    import signal
    import ssl
    import time
    from contextlib import suppress

    import httpx

    from balanceroute.loadgen.client import checked, checked_secret

    checked(url)
    checked_secret("--admin-token", token)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    verify = ssl.create_default_context() if url.startswith("https") else False
    until = time.monotonic() + seconds
    with httpx.Client(base_url=url, headers=headers, verify=verify, timeout=TIMEOUT_S, trust_env=False) as client:
        found = asked(client, last)
        with suppress(KeyboardInterrupt):
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, signal.default_int_handler)
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, ASK_EVERY_S))
                found = asked(client, last)
            if seconds and any(row["runner_up"] is None for row in found["decisions"]):
                time.sleep(WORKED_OUT_S)
                complete(found, asked(client, MOST))
    return found


def complete(found: Mapping[str, Any], later: Mapping[str, Any]) -> None:
    """Write the runners-up that have been worked out since then into an answer."""
    rows = {row["number"]: row for row in later["decisions"]}
    for row in found["decisions"]:
        if row["runner_up"] is None and (same := rows.get(row["number"])):
            row["runner_up"], row["runner_up_score"] = same["runner_up"], same["runner_up_score"]


def asked(client: "httpx.Client", last: int) -> dict[str, Any]:
    """One answer. Raises: InputError."""
    import httpx

    from balanceroute.cli.output import why
    from balanceroute.errors import InputError
    from balanceroute.loadgen.run import message_of, object_in

    url = str(client.base_url).rstrip("/")
    try:
        reply = client.get("/decisions", params={"last": last})
    except httpx.HTTPError as error:
        raise InputError(f"{url}: no answer: {why(error)}") from None
    body = object_in(reply.content)
    if reply.status_code != 200 or not is_complete(body):
        message = message_of(reply.content)
        if not message or reply.status_code in (200, 404):
            message = f"{message.rstrip('.')}; " * bool(message) + "is this a balanceroute router, of this version?"
        if reply.status_code == 401:
            message = f"{message.rstrip('.')}; give it with --admin-token"
        raise InputError(f"{url}/decisions: status {reply.status_code}: {message}")
    return body


def is_complete(body: Mapping[str, Any]) -> bool:
    """Whether it has all that is printed, in its type, as the answer of a router of this version has."""
    rows = body.get("decisions")
    return (
        isinstance(body.get("count"), int)
        and isinstance(rows, list)
        and all(
            isinstance(row, dict)
            and all(isinstance(row.get(name), kind) for name, kind in USED.items())
            and 0 <= row["at"] < LAST_TIME_S
            for row in rows
        )
    )


def show_decisions(found: Mapping[str, Any]) -> None:
    """A table, the newest first, and how many there were."""
    import time

    from rich.table import Table

    from balanceroute.cli.explain import STAGES, score_text
    from balanceroute.cli.output import print_table

    rows = found["decisions"]
    policies = sorted({row["policy"] for row in rows})
    several = len(policies) > 1
    if rows:
        table = Table("when", *(["policy"] if several else []), "request", "worker", "stage")
        table.add_column("score", justify="right")
        table.add_column("otherwise")
        table.add_column("its score", justify="right")
        for row in rows:
            table.add_row(
                time.strftime("%H:%M:%S", time.localtime(row["at"])),
                *([row["policy"]] if several else []),
                row["request"],
                row["worker"],
                STAGES.get(row["stage"], str(row["stage"])),
                score_text(row["score"]),
                "not worked out" if row["runner_up"] is None else row["runner_up"],
                score_text(row["runner_up_score"]),
            )
        print_table(table)
    by = f", by {', '.join(policies)}" if rows else ""
    print_table(f"{found['count']:,} admissions so far, {len(rows)} shown{by}")
