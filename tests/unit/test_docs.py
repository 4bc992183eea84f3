"""README and docs: what is generated is current, what is linked exists, and what says that it runs, runs."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain
from pathlib import Path
from subprocess import PIPE
from threading import Thread

import pytest

from balanceroute.config import describe_settings
from balanceroute.proxy.perimeter.routes import ACCESS
from balanceroute.simulator import Setting
from scripts.metric_advice import ADVICE
from scripts.readme_tables import PAGES, generated, metric_families, metrics_table, rewritten
from tests.ports import free_base_port

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
RUNNABLE = re.compile(r"^<!-- run -->\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CURL = ROOT / "tests/curl.py"
ROUTER, EMULATOR, DECODERS = 8000, 9000, 9100  # ports that the pages name


def blocks() -> list[tuple[str, str, str]]:
    """(name, language, text) of every block that is to run; one that two pages have, once."""
    names: dict[tuple[str, str], str] = {}
    for page in (README, *DOCS):
        for number, block in enumerate(RUNNABLE.findall(page.read_text()), start=1):
            names.setdefault(block, f"{page.relative_to(ROOT)}:{number}")
    return [(name, *block) for block, name in names.items()]


def test_every_table_is_well_formed() -> None:
    """A row that goes on in the next line, or stands apart from its table, is shown as text."""
    for page in (README, ROOT / "CONTRIBUTING.md", *DOCS, *sorted((ROOT / "deploy").rglob("*.md"))):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for found in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
            rows = found[0].splitlines()
            assert len(rows) > 1 and re.fullmatch(r"\|[-: |]+\|", rows[1]), f"{page}: {rows[0]}"
            for row in rows:
                assert row.endswith("|"), f"{page}: {row}"


def test_generated_parts_are_up_to_date_with_the_code() -> None:
    """`python -m scripts.readme_tables` rewrites them."""
    parts = generated()
    for page in PAGES:
        assert page.read_text() == rewritten(page.read_text(), parts), page
    shown = {name for page in PAGES for name in re.findall(r"<!-- begin (\w+) -->", page.read_text())}
    assert shown == set(parts)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 200


def test_the_readme_names_the_pool_of_its_results_and_that_of_serve() -> None:
    """They differ, and so do the waits."""
    named = re.search(r"a pool of (\d+) waiting\s+requests \(`serve`: \[(\d+)\]", README.read_text())
    defaults = {setting.path: setting.default for setting in describe_settings()}
    assert named is not None
    assert named.groups() == (str(Setting().pool), defaults["pool.max_entries"])


def test_every_metric_has_advice_and_every_advice_a_metric() -> None:
    described = set(re.findall(r"^\| `balanceroute_(\w+?)(?:_total|_info)?` \|", metrics_table(), re.MULTILINE))
    assert described == set(ADVICE)


def test_the_labels_on_the_page_are_those_that_are_exposed() -> None:
    compared = 0
    for family in metric_families():
        for sample in family.samples:
            labels, _ = ADVICE[family.name.removeprefix("balanceroute_")]
            assert set(sample.labels) - {"le"} == set(filter(None, labels.split(", "))), family.name
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", *DOCS], ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", *DOCS], ids=lambda page: page.name)
def test_every_script_file_and_folder_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:scripts|deploy|configs|examples)/[\w./-]*\w)[^`]*`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_setting_and_metric_that_a_page_names_exists() -> None:
    keys = {setting.path.replace("[]", "") for setting in describe_settings()}
    known = keys | {key.rpartition(".")[0] for key in keys}
    sections = {key.split(".")[0] for key in keys if "." in key}
    for page in (README, *DOCS):
        text = page.read_text()
        named = {name.replace("[]", "") for name in re.findall(r"`((?:\w+(?:\[\])?\.)+\w+)", text)}
        assert {name for name in named if name.split(".")[0] in sections} - known == set(), page
        metrics = {re.sub("_(total|info)$", "", name) for name in re.findall(r"`balanceroute_(\w+)`", text)}
        assert metrics - set(ADVICE) == set(), page


def test_the_api_page_has_every_route() -> None:
    text = (ROOT / "docs/http.md").read_text()
    declared = {route.replace("{rest:path}", "{rest}").replace("{model:path}", "{model}") for route in ACCESS} - {"/"}
    assert declared == set(re.findall(r"(/[\w/{}]+)(?=`)", " ".join(re.findall(r"^\| `.*?` \|", text, re.MULTILINE))))


def test_the_tests_that_contributing_selects_as_an_example_exist() -> None:
    words = re.findall(r'-k "(\w+) and (\w+)"', (ROOT / "CONTRIBUTING.md").read_text())[0]
    names = [re.findall(r"def (test_\w+)", path.read_text()) for path in ROOT.glob("tests/**/test_*.py")]
    assert any(all(word in name for word in words) for name in chain.from_iterable(names))


def test_no_page_installs_a_package_that_is_on_no_index() -> None:
    files = [
        README,
        ROOT / "CONTRIBUTING.md",
        *DOCS,
        *(ROOT / "deploy").rglob("*"),
        *(ROOT / "balanceroute").rglob("*.py"),
    ]
    wrong = [path for path in files if path.is_file() and re.search(r"pip install '?balanceroute", path.read_text())]
    assert wrong == []


@pytest.mark.parametrize(("language", "text"), [block[1:] for block in blocks()], ids=[name for name, *_ in blocks()])
@pytest.mark.slow
def test_a_block_marked_as_runnable_runs(language: str, text: str, tmp_path: Path) -> None:
    """As pasted into a shell at the top of a checkout, in an environment where balanceroute is installed."""
    if language == "sh" and shutil.which("curl") is None:
        text = f'curl() {{ "{sys.executable}" "{CURL}" "$@"; }}\n{text}'
    for name in ("examples", "tests", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    base = free_base_port([0, 1, 50, *range(100, 104)])
    for named, free in ((ROUTER, base + 50), (EMULATOR, base), (DECODERS, base + 100)):
        text = re.sub(rf"\b{named}\b", str(free), text)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    shell = ["bash", "-e"] if language == "sh" else [sys.executable]
    running = subprocess.Popen(
        [*shell, "-"],
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = running.communicate(text, timeout=500)
    finally:
        with suppress(ProcessLookupError):  # nothing is left behind, also by a block that hangs
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode in (0, 143), err  # `wait` tells that it was our SIGTERM that ended the last one
    assert out.strip(), "nothing is printed"
    assert "Traceback" not in err
    for answer in re.findall(r"^\{.*\}$", out, re.MULTILINE):
        assert "error" not in json.loads(answer), answer


class Reluctant(BaseHTTPRequestHandler):
    """Answers 503 once, then what it was asked."""

    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        body = self.rfile.read(int(self.headers["content-length"]))
        answer = self.headers["content-type"].encode() + b" " + body
        self.send_response(503 if self.asked == 1 else 400 if b"wrong" in body else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        """Not to stderr."""


def test_the_curl_stand_in_retries_and_prints_any_answer() -> None:
    def curl(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, CURL, "-s", *arguments], capture_output=True, text=True)
        return done.returncode, done.stdout

    json_body = ("-H", "content-type: application/json", "-d")
    with HTTPServer(("127.0.0.1", 0), Reluctant) as server:
        host = f"127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            retrying = ("--retry", "3", "--retry-delay", "0", "--retry-connrefused")
            assert curl(*retrying, f"http://{host}/a", *json_body, "{}") == (0, "application/json {}")
            assert Reluctant.asked == 2
            assert curl(host, *json_body, "wrong") == (0, "application/json wrong")
            assert curl("-f", host, *json_body, "wrong") == (22, "")
        finally:
            server.shutdown()
            thread.join()
    with socket.socket() as nobody:  # its port is taken, and nobody listens there
        nobody.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert curl("--retry", "1", "--retry-delay", "0", "--retry-connrefused", f"http://{host}/") == (7, "")
        assert curl("--compressed", host)[0] == 2  # an option that it does not have


class Loads(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.found.append(given.get("href") or "")
        elif tag != "a":
            self.found += [given.get(name) or "" for name in ("src", "srcset", "data", "poster")]


def test_the_site_builds_without_a_broken_link_and_loads_nothing_from_outside(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > len(DOCS) - 1
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert [url for url in loads.found if re.match(r"(https?:)?//", url)] == [], page
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style
