"""`balanceroute check-config` as a user runs it."""

import errno
import io
import json
import os
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from balanceroute.core.policies import POLICIES
from tests.commands import exit_code


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return exit_code(monkeypatch, "check-config", *arguments)


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


def test_check_config_reports_each_problem_on_its_own_line_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    Path(file).write_text("routing: {policy: best}\npool: {max_entries: -1}\n")
    assert run(monkeypatch, file) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert all(line.startswith(f"balanceroute: {file}: ") for line in lines)
    for key in ("prefill.workers", "decode.workers", "routing.policy", "pool.max_entries"):
        assert sum(f": {key}" in line for line in lines) == 1


def test_missing_files_are_reported_together_and_none_is_created(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path
) -> None:
    model, history, keys = tmp_path / "m.npz", tmp_path / "no" / "h.sqlite3", tmp_path / "keys.yaml"
    pins = tmp_path / "none" / "pins"
    settings = [f"predictor.model={model}", f"predictor.history={history}", f"auth.client_keys={keys}"]
    settings += [f"lifecycle.pins_file={pins}"]
    assert run(monkeypatch, file, *(part for text in settings for part in ("--set", text))) == 2
    error_text = capsys.readouterr().err
    assert all(str(path) in error_text for path in (model, history, keys, pins)) and error_text.count("\n") == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml"]


def test_missing_files_are_reported_beside_other_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path
) -> None:
    model, keys = tmp_path / "m.npz", tmp_path / "keys.yaml"
    wrong = ["routing.horizon_steps=-3", "tls.cert_file=/nowhere.pem", "tls.nothing=1", "listen.port=99999"]
    settings = [*wrong, "predictor.kind=learned", f"predictor.model={model}", f"auth.client_keys={keys}"]
    assert run(monkeypatch, file, *(part for text in settings for part in ("--set", text))) == 2
    error_text = capsys.readouterr().err
    assert all(
        text in error_text for text in (str(model), str(keys), "routing.horizon_steps", "tls.nothing", "listen.port")
    )
    assert error_text.count("\n") == 5  # of a section that is wrong itself no file is looked at


def test_a_file_that_is_not_yaml_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    Path(file).write_text("prefill: [\n")
    assert run(monkeypatch, file) == 2
    assert "not valid YAML" in (error_text := capsys.readouterr().err) and error_text.count("\n") == 1


def test_a_variable_without_effect_is_a_warning_and_a_knob_without_effect_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    monkeypatch.setenv("BALANCEROUTE_POLICY", "br_0")
    assert run(monkeypatch, file, "--set", "routing.r_max=3") == 2
    error_lines = capsys.readouterr().err.splitlines()
    assert "did you mean BALANCEROUTE_" in error_lines[0] and "BALANCEROUTE_ROUTING__POLICY" in error_lines[0]
    assert error_lines[1:] == [
        "balanceroute: command line: routing.r_max: level_fit does not have this knob; br_0, br_h have it"
    ]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_printed_configuration_of_every_policy_is_a_valid_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path, policy: str
) -> None:
    assert run(monkeypatch, file, "--set", f"routing.policy={policy}") == 0
    printed = capsys.readouterr().out
    again = tmp_path / "printed.yaml"
    again.write_text(printed)
    assert run(monkeypatch, str(again)) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "setting", ["auth.client_keys=/nowhere.yaml", "tls.cert_file=/nowhere.pem", "tls.worker_ca_file=/nowhere.pem"]
)
def test_check_config_reads_the_files_that_the_configuration_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, setting: str
) -> None:
    assert run(monkeypatch, file, "--set", setting) == 2
    captured = capsys.readouterr()
    assert setting.partition("=")[2] in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_check_config_does_not_consume_a_pipe_that_serve_reads_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path
) -> None:
    pipe = tmp_path / "keys.yaml"
    os.mkfifo(pipe)
    assert run(monkeypatch, file, "--set", f"auth.client_keys={pipe}") == 2
    assert f"auth.client_keys = '{pipe}': is a pipe, which can't be read again" in capsys.readouterr().err


def test_files_behind_a_folder_that_may_not_be_searched_are_named_in_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path
) -> None:
    """As Debian's /etc/ssl/private for all but a group; simulated, as root, who may run the tests, searches all."""
    closed, looked_at, opened = tmp_path / "private", os.stat, io.open

    def stat(path: str | Path, **options: bool) -> os.stat_result:
        return forbidden(path) or looked_at(path, **options)

    def open_file(path: str | Path, *arguments: str, **options: str) -> IO[Any]:
        return forbidden(path) or opened(path, *arguments, **options)

    def forbidden(path: str | Path) -> None:
        if str(path).startswith(str(closed)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(io, "open", open_file)
    keys = ("predictor.model", "predictor.history", "lifecycle.pins_file", "auth.client_keys")
    settings = [f"{key}={closed}/folder/{key}" for key in keys]
    assert run(monkeypatch, file, *(part for text in settings for part in ("--set", text))) == 2
    error_lines = capsys.readouterr().err.splitlines()
    assert len(error_lines) == len(keys)
    for key in keys:
        assert sum(key in line and "Permission denied" in line for line in error_lines) == 1, key


def test_a_class_that_starts_a_thread_is_refused_for_relays_as_serve_refuses_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path
) -> None:
    (tmp_path / "checked_with_thread.py").write_text(
        "import threading\n"
        "from balanceroute import AdmissionPolicy\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "class Own(AdmissionPolicy):\n"
        "    name = 'own'\n"
        "    def decide(self, snapshot, now):\n"
        "        return iter(())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = ("--set", "routing.policy=checked_with_thread:Own")
    assert run(monkeypatch, file, *policy, "--set", "listen.relays=2") == 2
    assert "a class of your own starts a thread" in capsys.readouterr().err
