"""docs/log.md has every warning and error that the router logs and no other; docs/operate.md quotes errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from balanceroute.proxy.parent import supervisor

ROOT = Path(__file__).parents[2]
LOUD = {"warning", "error", "critical", "exception"}
PAGE = (ROOT / "docs/log.md").read_text()
COMPUTED = {supervisor.NOT_TAKING_OVER, "another router takes over", "brain lost", "log lines lost"}


def texts(value: ast.expr) -> list[str]:
    return [value.value] if isinstance(value, ast.Constant) and isinstance(value.value, str) else []


def logged(tree: ast.AST) -> Iterator[str]:
    """The constant texts of loud calls, and of what is logged when it begins and when it ends."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in LOUD and call.args and "log" in ast.unparse(call.func):
            yield from texts(call.args[0])
        elif name == "Trouble":
            yield from texts(call.args[1])


def events() -> list[str]:
    """What can be an `event` of level warning or above, without what is put into the text."""
    found = set(COMPUTED)
    for folder in ("proxy", "prediction", "journal"):
        for path in (ROOT / "balanceroute" / folder).rglob("*.py"):
            found |= set(logged(ast.parse(path.read_text())))
    return sorted(found)


def rows() -> list[str]:
    """The events of the page's tables."""
    cells = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `")]
    warnings = PAGE.split("## Warnings and errors")[1]
    return [event for cell in cells if cell in warnings for event in re.findall(r"`([^`]+)`", cell)]


def beginning(event: str) -> str:
    """What of it never changes: up to what is filled in."""
    return re.split(r"%|:? \.\.\.|ADDRESS", event.removeprefix("%s "))[0].rstrip(": ")


def test_every_actionable_log_line_is_on_the_page() -> None:
    known = [text for text in map(beginning, rows()) if text]
    found = events()
    assert len(found) > 80
    assert [e for e in found if not any(e.startswith(text) or text.endswith(beginning(e)) for text in known)] == []


def test_every_log_line_on_the_page_exists_in_the_code() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "balanceroute").rglob("*.py"))
    shown = {row: beginning(row.removeprefix("VARIABLE: ").removeprefix("forecasts ")) for row in rows()}
    assert len(shown) > 80
    assert [row for row, text in shown.items() if text not in sources] == []


def test_errors_quoted_on_the_troubleshooting_page_exist_in_the_code() -> None:
    page = (ROOT / "docs/operate.md").read_text().split("## Troubleshooting by symptom")[1].split("\n## ")[0]
    sources = "\n".join(path.read_text() for path in (ROOT / "balanceroute/proxy").rglob("*.py"))
    quoted = [
        text.removeprefix("2 ").rstrip("… ")
        for line in page.splitlines()
        if re.match(r"\| [45]\d\d ", line)
        for text in re.findall(r'"([^"]+)"', line.split(" | ")[0])
    ]
    assert len(quoted) > 8
    assert [text for text in quoted if text not in sources and text != "Too many open files"] == []
