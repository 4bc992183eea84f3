"""`balanceroute check-config` as a user runs it."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from balanceroute.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["balanceroute", "check-config", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text("prefill: {workers: [{url: http://p:1}]}\ndecode: {workers: [{url: http://d:1}]}\n")
    return str(path)


def test_check_config_prints_the_effective_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    monkeypatch.setenv("BALANCEROUTE_LISTEN__PORT", "8123")
    assert run(monkeypatch, file, "--set", "routing.policy=br_0") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["listen"]["port"], shown["routing"]["policy"], shown["pool"]["ttl_s"]) == (
        8123,
        "br_0",
        240,
    )


def test_check_config_prints_json_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    assert run(monkeypatch, file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["decode"]["workers"][0]["id"] == "d:1"


def test_check_config_ends_with_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    Path(file).write_text("routing: {policy: best}\n")
    assert run(monkeypatch, file) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"balanceroute: {file}: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "setting", ["auth.client_keys=/nowhere.yaml", "tls.cert_file=/nowhere.pem", "tls.worker_ca_file=/nowhere.pem"]
)
def test_check_config_reads_the_files_that_the_configuration_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, setting: str
) -> None:
    assert run(monkeypatch, file, "--set", setting) == 2
    captured = capsys.readouterr()
    assert setting.partition("=")[2] in captured.err and captured.err.count("\n") == 1 and not captured.out
