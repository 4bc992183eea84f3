"""`balanceroute key` as a user runs it."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from balanceroute.config import digest_of, read_client_keys
from tests.commands import exit_code


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, given: str = "") -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    return exit_code(monkeypatch, "key", *arguments)


@pytest.mark.parametrize("beginning", ["", "keys:\n"], ids=["a new file", "under keys"])
def test_entries_go_to_the_file_and_keys_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, beginning: str
) -> None:
    file, keys = tmp_path / "keys.yaml", {}
    file.write_text(beginning)
    for name in ("search", "batch"):
        assert run(monkeypatch, name, "--max-in-flight", "3", "--priority", "-5", "0") == 0
        out, err = capsys.readouterr()
        file.write_text(file.read_text() + out)
        keys[name] = err.split()[-1]
        assert keys[name] not in out
    entries = {entry.name: entry for entry in read_client_keys(file)}
    for name, key in keys.items():
        assert entries[name].sha256 == digest_of(key.encode()).hex()
        assert entries[name].max_in_flight == 3 and entries[name].priority is not None
        assert entries[name].priority.min == -5


def test_a_key_whose_entry_cannot_be_written_is_not_shown() -> None:
    command = f"exec {sys.executable} -m balanceroute key search > /dev/full"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    message = "balanceroute: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_a_key_that_exists_is_hashed_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "old", "--stdin", given="sk-0123456789abcdef\n") == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)[0]["sha256"] == digest_of(b"sk-0123456789abcdef").hex()
    assert "0123456789" not in out + err


def test_json_output_has_the_key_and_its_entry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "one", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["entry"]["sha256"] == digest_of(printed["key"].encode()).hex()


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        (["two words"], "", "name: accepted are"),
        (["a", "--max-in-flight", "0"], "", "max_in_flight: accepted is an integer, 1 to 1000000, or null"),
        (["a", "--priority", "2", "1"], "", "a min that is not above max"),
        (["a", "--stdin"], "short\n", "16 or more"),
    ],
)
def test_bad_input_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], given: str, expected: str
) -> None:
    assert run(monkeypatch, *arguments, given=given) == 2
    err = capsys.readouterr().err
    assert expected in err and err.count("\n") == 1
