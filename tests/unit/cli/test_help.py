"""What a new user meets first: help, mistyped commands, completion."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from balanceroute.cli import main

COMMANDS = "serve demo emulate replay reproduce load steps explain decisions check-config key".split()
COMMANDS += ["trace generate", "trace convert", "trace describe", "predictor fit", "predictor evaluate"]


@pytest.fixture
def ordinary_signals() -> Iterator[None]:
    """What this process ignores, as under nohup, its children would ignore as well."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def output_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["balanceroute", *arguments])
    with pytest.raises(SystemExit):
        main()
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_values_of_options_and_arguments_are_words_and_nothing_is_cut_off(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(monkeypatch, capsys, *command.split(), "--help")
    assert "Options:" in text and not re.search(r"<(str|int|float|path|bool|list|Path)", text)
    assert "…" not in text
    assert re.search(rf"^  Example: .*balanceroute {command}", text, re.M)


@pytest.mark.parametrize("command", ["", "serve", "trace generate"])
def test_h_is_help_as_in_the_example_proxy(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [output_of(monkeypatch, capsys, *command.split(), flag) for flag in ("-h", "--help")]
    assert asked[0] == asked[1] and "Usage:" in asked[0]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("serve --port 1 cluster.yaml", "Unexpected argument 'cluster.yaml'; did you mean --config cluster.yaml?"),
        ("replay own.csv --load 1", "Unexpected argument 'own.csv'; did you mean --trace own.csv?"),
        ("check-config one.yaml two.yaml", "Unexpected argument 'two.yaml'"),
        ("key a \x1b[31m", "Unexpected argument '\\x1b[31m'"),
    ],
    ids=["a configuration", "a trace", "no option", "no text"],
)
def test_an_extra_argument_is_named_with_the_option_it_may_belong_to(
    typed: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output_of(monkeypatch, capsys, *typed.split()) == f"balanceroute: {expected}\n"


@pytest.mark.parametrize("typed", ["serve --decoder-ports 1 2-9", "replay --load 2-9"], ids=["integer", "number"])
def test_an_invalid_number_is_shown_with_its_option(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error_text = output_of(monkeypatch, capsys, *typed.split())
    assert "'2-9'" in error_text and typed.split()[1] in error_text and error_text.count("\n") == 1


def test_the_list_of_commands_is_complete_and_explains_the_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(monkeypatch, capsys, "--help")
    assert "..." not in text.partition("Commands:")[2] and "…" not in text
    assert all(re.search(rf"{number} \w", text.partition("Exit codes:")[2]) for number in (0, 1, 2, 130))


@pytest.mark.parametrize(
    ("typed", "meant"), [("reply", "replay"), ("check_config", "check-config"), ("trace genrate", "generate")]
)
def test_a_mistyped_command_gets_a_suggestion(
    typed: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"Did you mean '{meant}'?" in output_of(monkeypatch, capsys, *typed.split())


def test_the_shell_can_complete_commands() -> None:
    environ = {
        **os.environ,
        "_BALANCEROUTE_COMPLETE": "complete_bash",
        "COMP_WORDS": "balanceroute re",
        "COMP_CWORD": "1",
    }
    command = "import sys; sys.argv[0] = 'balanceroute'; from balanceroute.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", command], env=environ, capture_output=True, text=True)
    assert done.stdout.split() == ["replay", "reproduce"]


def test_a_command_that_is_interrupted_during_its_import_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    ended = subprocess.run(
        [sys.executable, "-m", "balanceroute", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("wraps", [True, False], ids=["as a cause", "as it is"])
def test_a_command_interrupted_during_an_import_prints_nothing_whatever_state_it_left(
    tmp_path: Path, wraps: bool
) -> None:
    (tmp_path / "numpy.py").write_text(
        "try:\n    raise KeyboardInterrupt\nexcept BaseException as error:\n"
        f"    raise {'RuntimeError(1) from error' if wraps else ''}\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "balanceroute", "trace", "generate", "capped", "--out", str(tmp_path / "t.csv")]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.usefixtures("ordinary_signals")
def test_a_signal_during_an_import_that_catches_everything_ends_the_command_in_silence(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    1 + 1\n"
        "except BaseException:\n    raise RuntimeError from None\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "balanceroute", "--help"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_entry_module_imports_nothing_before_it_handles_interrupts() -> None:
    code = "import sys; before = {*sys.modules}; import balanceroute.__main__; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["balanceroute", "balanceroute.__main__"]


@pytest.mark.usefixtures("ordinary_signals")
def test_sighup_does_not_end_serve_while_it_is_imported(tmp_path: Path) -> None:
    signal_itself = "import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nraise SystemExit(7)\n"
    (tmp_path / "typer.py").write_text(signal_itself)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    for command, status in (("serve", 7), ("replay", -signal.SIGHUP)):
        ended = subprocess.run([sys.executable, "-m", "balanceroute", command], env=environ, check=False)
        assert ended.returncode == status


@pytest.mark.parametrize(("pid", "status"), [(1, 128 + signal.SIGTERM), (2, -signal.SIGTERM)])
def test_sigterm_ends_a_starting_command_also_as_pid_1(tmp_path: Path, pid: int, status: int) -> None:
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    code = f"import os\nos.getpid = lambda: {pid}\nfrom balanceroute.__main__ import main\nmain()"
    ended = subprocess.run([sys.executable, "-c", code, "serve"], env=environ, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (status, b"")
