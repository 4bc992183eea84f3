"""Flags of `serve`: lists as argparse takes them, and what changes nothing is told."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from balanceroute.cli.serve import spread_lists
from balanceroute.errors import InputError
from tests.commands import exit_code, run_command


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        (
            ["serve", "--prefiller-hosts", "a", "b", "--port", "1"],
            ["serve", "--prefiller-hosts", "a", "--prefiller-hosts", "b", "--port", "1"],
        ),
        (["serve", "--decoder-ports", "1"], ["serve", "--decoder-ports", "1"]),
        (["load", "x", "y"], ["load", "x", "y"]),
        (["serve", "--decoder-ports", "1", "--host", "h", "k"], ["serve", "--decoder-ports", "1", "--host", "h", "k"]),
        (
            ["serve", "--prefiller-host", "a", "b", "--decoder-port=1", "--decoder-ports=2"],
            ["serve", "--prefiller-hosts", "a", "--prefiller-hosts", "b", "--decoder-ports=1", "--decoder-ports=2"],
        ),
    ],
    ids=["two", "one", "other-command", "after-another-flag", "without-its-last-letter"],
)
def test_a_list_flag_takes_several_values(given: list[str], spread: list[str]) -> None:
    assert spread_lists(given) == spread


@pytest.mark.parametrize("after", [["--decoder-hosts", "b"], ["--port=1"]], ids=["another list", "another option"])
def test_a_list_flag_without_a_value_is_named(after: list[str]) -> None:
    """As where a shell's variable is empty; the value of the next option is no value of this one."""
    with pytest.raises(InputError, match="^--prefiller-hosts: no value after it$"):
        spread_lists(["serve", "--prefiller-hosts", *after])


@pytest.mark.parametrize(
    ("flag", "why"),
    [("--encoder-hosts", "encoders are not served"), ("--decoder-ports-inc=2", "name every server")],
)
def test_a_flag_of_another_example_proxy_is_refused_with_the_reason(flag: str, why: str) -> None:
    with pytest.raises(InputError, match=f"^{flag.partition('=')[0]}: {why}"):
        spread_lists(["serve", "--port", "1", flag, "a"])


def test_a_knob_that_the_policy_does_not_have_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("prefill: {workers: [{url: http://p:1}]}\ndecode: {workers: [{url: http://d:1}]}\n")
    monkeypatch.setattr("balanceroute.proxy.server.serve", lambda *args: None)
    flags = ["--policy", "br_0", "--set", "routing.hold_s=1"]
    code, _, error_text = run_command(capsys, monkeypatch, "serve", "--config", str(path), *flags)
    assert code == 2 and "routing.hold_s: br_0 does not have this knob; target_fit, level_fit have it" in error_text


def test_a_journal_is_not_written_over_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    decode = "{workers: [{url: http://d:1}], max_num_seqs: 64}"
    path.write_text(f"prefill: {{workers: [{{url: http://p:1}}]}}\ndecode: {decode}\n")
    monkeypatch.setattr("balanceroute.proxy.server.serve", lambda *args: None)
    code, _, error_text = run_command(capsys, monkeypatch, "serve", "--config", str(path), "--journal", str(path))
    assert (code, error_text) == (2, f"balanceroute: {path}: cannot be written: it is the file that is read\n")
    assert path.read_text().startswith("prefill:")


REFUSED = {  # flags, and what each line of the answer says
    "settings": (["--set", "routing.gamma=9", "--relays", "-1"], ["listen.relays = -1", "routing.gamma = 9"]),
    "no file": (["--config", "/nowhere.yaml"], ["/nowhere.yaml"]),
    "certificate": (["--set", "tls.cert_file={text}"], ["tls.cert_file: {text} cannot be used: accepted is a cert"]),
    "ca": (["--set", "tls.worker_ca_file={text}"], ["tls.worker_ca_file: {text} cannot be used: accepted is certific"]),
    "keys": (["--set", "auth.client_keys={folder}"], ["auth.client_keys: {folder}: cannot be read: Is a directory"]),
    "pins": (["--set", "lifecycle.pins_file={folder}"], ["lifecycle.pins_file = '{folder}': is a folder; accepted is"]),
    "history": (
        ["--set", "predictor.kind=survival", "--set", "predictor.history={folder}"],
        ["predictor.history = '{folder}': is a folder; accepted is"],
    ),
    "journal": (["--journal", "{folder}"], ["{folder}"]),
    "folder": (["--journal={folder}/none/j"], ["{folder}/none/j: cannot be written: there is no folder {folder}/none"]),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_serve_cannot_use_is_refused_at_the_start_in_a_line_each(
    named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags, expected = REFUSED[named]
    words = {"text": tmp_path / "text", "folder": tmp_path}
    words["text"].write_text("no certificate")
    given = [flag.format_map(words) for flag in flags]
    workers = ["--prefiller-hosts", "p", "--decoder-hosts", "d", "--max-num-seqs", "8"]
    code, _, error_text = run_command(capsys, monkeypatch, "serve", *workers, *given)
    lines = [line for line in error_text.splitlines() if not line.startswith("{")]
    assert code == 2 and len(lines) == len(expected) and '"level":"error"' not in error_text
    assert lines[0].startswith("balanceroute: ")
    for line, reason in zip(lines, expected, strict=True):
        assert reason.format_map(words) in line


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Has `serve` refuse a journal; returns what it prints."""

    def refusal(journal: Path, *arguments: str) -> str:
        workers = ["--prefiller-hosts", "p", "--decoder-hosts", "d", "--max-num-seqs", "8"]
        code, _, error_text = run_command(capsys, monkeypatch, "serve", *workers, *arguments, "--journal", str(journal))
        assert code == 2
        return error_text

    return refusal


@pytest.mark.parametrize("relays", ["0", "1"])
def test_a_journal_is_a_file(refusal: Callable[..., str], tmp_path: Path, relays: str) -> None:
    """To open a pipe that nobody reads takes for ever, and a write to one whose reader has stopped."""
    pipe = tmp_path / "journal"
    os.mkfifo(pipe)
    expected = f"balanceroute: {pipe}: cannot be written: accepted is a file\n"
    assert refusal(pipe, "--relays", relays).endswith(expected)


def test_relays_write_a_journal_that_is_a_link_where_it_leads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A router began anew by removing the link, which may have been /dev/stdout."""
    (tmp_path / "link").symlink_to(tmp_path / "journal")
    written: list[Path] = []
    monkeypatch.setattr("balanceroute.proxy.processes.serve_processes", lambda *args: written.append(args[2]) or 0)
    workers = ["--prefiller-hosts", "p", "--decoder-hosts", "d", "--max-num-seqs", "8", "--relays", "1"]
    assert exit_code(monkeypatch, "serve", *workers, "--journal", str(tmp_path / "link")) == 0
    assert written == [tmp_path / "journal"]


def test_a_journal_whose_name_is_too_long_is_refused_in_one_line(refusal: Callable[..., str], tmp_path: Path) -> None:
    journal = tmp_path / ("a" * 256)
    router = ["--relays", "1", "--port", "0", "--set", f"listen.run_folder={tmp_path / 'run'}"]
    assert refusal(journal, *router).endswith(f"balanceroute: {journal}: File name too long\n")


@pytest.mark.parametrize("relays", ["0", "1"])
def test_a_journal_overwrites_no_file_of_another_kind(refusal: Callable[..., str], tmp_path: Path, relays: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []\n")
    expected = f"balanceroute: {keys}: it holds something else than a journal, and is not overwritten\n"
    assert refusal(keys, "--relays", relays).endswith(expected)
    assert keys.read_text() == "keys: []\n"


def test_the_two_names_of_relays_must_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = ["--prefiller-hosts", "p", "--decoder-hosts", "d", "--workers", "2", "--relays", "3"]
    code, _, error_text = run_command(capsys, monkeypatch, "serve", *workers)
    assert (code, error_text) == (2, "balanceroute: --workers 2, --relays 3: two names of one setting; give one\n")


def test_a_second_configuration_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It would replace the first one whole, where some programs merge the two."""
    code, _, error_text = run_command(capsys, monkeypatch, "serve", "--config", "a.yaml", "--config", "b.yaml")
    expected = "balanceroute: --config: accepted is one file; --set overrides single settings\n"
    assert (code, error_text) == (2, expected)


OWN_PREDICTOR = """
import threading
def work():
    threading.Thread(target=threading.Event().wait, daemon=True, name="of a class of one's own").start()
class Own:
    def __init__(self, horizon_steps):
        work()
    def predict_one(self, age, prompt_tokens, key):
        return 0.5, 10.0
    predict = observe = predict_one
"""


def test_the_thread_of_ones_own_predictor_is_not_started_in_the_parent_of_relays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Signals to the parent would come to that thread, too: the first one ended the router."""
    (tmp_path / "own_with_thread.py").write_text(OWN_PREDICTOR)
    (tmp_path / "own_at_import.py").write_text(f"{OWN_PREDICTOR}work()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    started: list[str] = []

    def start(*_: object) -> int:
        started.extend(thread.name for thread in threading.enumerate())
        return 0

    monkeypatch.setattr("balanceroute.proxy.processes.serve_processes", start)
    flags = ["--prefiller-hosts", "p", "--decoder-hosts", "d", "--max-num-seqs", "8", "--policy", "br_h"]
    flags += ["--relays", "1", "--set"]
    assert exit_code(monkeypatch, "serve", *flags, "predictor.kind=own_with_thread:Own") == 0
    assert started and "of a class of one's own" not in started
    code, _, error_text = run_command(capsys, monkeypatch, "serve", *flags, "predictor.kind=own_at_import:Own")
    assert code == 2 and error_text.startswith("balanceroute: routing.policy, predictor.kind: a class of your own")
