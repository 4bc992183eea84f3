"""Code that is not ours may raise anything: a configuration that names it is wrong then, in one line."""

from pathlib import Path

import pytest

from balanceroute.config import validate
from balanceroute.errors import ConfigError
from balanceroute.prediction import FinishedRequest, build_predictor
from balanceroute.proxy.admission.forecasts import build_forecasts
from tests.commands import run_command

WORKERS = {"prefill": {"workers": [{"url": "http://p:1"}]}, "decode": {"workers": [{"url": "http://d:1"}]}}
RAISES = {
    "by zero": ("1 / 0", "ZeroDivisionError: division by zero"),
    "an exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "an exit without a word": ("raise SystemExit", "SystemExit"),
    "lines": ("raise RuntimeError('two\\n  lines')", "RuntimeError: two lines"),
    "no exception of ours": ("raise BaseException('none')", "BaseException: none"),
    "no Unicode": ("raise RuntimeError('\\ud800')", "RuntimeError: \\ud800"),
    "no text": ("raise type('Mute', (Exception,), {'__str__': lambda _: 1 / 0})", "Mute"),
}
SETTINGS = {"policy": ("routing", "policy"), "predictor": ("predictor", "kind")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On the path of imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def module(folder: Path, number: int, text: str) -> str:
    """The name of its class; another module for each test."""
    name = f"of_others_{number}_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(text)
    return f"{name}:Own"


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize(("statement", "expected"), RAISES.values(), ids=RAISES)
def test_a_module_that_cannot_be_imported_is_reported_in_one_line_with_the_place(
    folder: Path, what: str, statement: str, expected: str
) -> None:
    section, key = SETTINGS[what]
    name = module(folder, 1, f"import os\n{statement}\n")
    with pytest.raises(ConfigError, match="^[^\n]*$") as refused:
        validate(WORKERS | {section: {key: name}})
    assert f"{what} {name}: " in str(refused.value)
    assert str(refused.value).endswith(f"{expected} ({name.removesuffix(':Own')}.py, line 2)")


@pytest.mark.parametrize("folders", [(), ("balanceroute", "examples")], ids=["elsewhere", "in a checkout"])
@pytest.mark.parametrize("what", SETTINGS)
def test_a_missing_import_is_reported_with_the_line_that_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, folders: tuple[str, ...]
) -> None:
    folder = tmp_path.joinpath(*folders)
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.syspath_prepend(str(folder))
    section, key = SETTINGS[what]
    name = module(folder, len(folders), "import os\nimport no_such_module\n")
    file = f"{name.removesuffix(':Own')}.py"
    with pytest.raises(ConfigError, match=rf"No module named 'no_such_module' .*\({file}, line 2\)$"):
        validate(WORKERS | {section: {key: name}})
    with pytest.raises(
        ConfigError, match=r"No module named 'nor_this' \(is its folder installed, or on PYTHONPATH\?\)$"
    ):
        validate(WORKERS | {section: {key: "nor_this:Own"}})


@pytest.mark.parametrize("what", SETTINGS)
def test_a_module_that_is_no_python_is_reported_with_its_line_once(folder: Path, what: str) -> None:
    section, key = SETTINGS[what]
    name = module(folder, 8, "def (\n")
    with pytest.raises(ConfigError, match=rf"^[^(]*\({name.removesuffix(':Own')}\.py, line 1\)$"):
        validate(WORKERS | {section: {key: name}})


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize(("statement", "expected"), RAISES.values(), ids=RAISES)
def test_a_class_that_cannot_be_created_is_reported_in_one_line(
    folder: Path, what: str, statement: str, expected: str
) -> None:
    section, key = SETTINGS[what]
    name = module(folder, 2, f"class Own:\n    def __init__(self, *_, **__):\n        {statement}\n")
    with pytest.raises(ConfigError, match="^[^\n]*$") as refused:
        build_forecasts(validate(WORKERS | {"routing": {"policy": "br_h"}} | {section: {key: name}}))
    assert f"{what} {name} with " in str(refused.value)
    assert str(refused.value).endswith(f"{expected} ({name.removesuffix(':Own')}.py, line 3)")


@pytest.mark.parametrize("what", SETTINGS)
def test_an_attribute_that_cannot_be_read_is_reported_in_one_line(folder: Path, what: str) -> None:
    section, key = SETTINGS[what]
    lacking = "    @property\n    def {}(self):\n        1 / 0\n"
    name = module(
        folder,
        3,
        "class Own:\n    def __init__(self, *_, **__): pass\n" + lacking.format("name") + lacking.format("predict"),
    )
    with pytest.raises(ConfigError, match=rf"{what} {name}: ZeroDivisionError: division by zero \(.*, line \d\)$"):
        build_forecasts(validate(WORKERS | {"routing": {"policy": "br_h"}} | {section: {key: name}}))


def test_a_predictor_that_cannot_learn_from_the_history_is_one_line(folder: Path) -> None:
    text = (
        "class Own:\n    def __init__(self, *_, **__): pass\n    predict = predict_one = observe = lambda *_: 1 / 0\n"
    )
    name = module(folder, 4, text)
    with pytest.raises(ConfigError, match=f"^predictor {name}, shown the history: ZeroDivisionError"):
        build_predictor(name, 8, rows=[FinishedRequest("k", 100, 7)])


@pytest.mark.parametrize("command", ["check-config", "serve"])
@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize(
    "statement", ["1 / 0", "raise SystemExit(3)", "def ("], ids=["by zero", "an exit", "no Python"]
)
def test_a_command_reports_a_broken_class_in_one_line_with_code_2(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    what: str,
    statement: str,
) -> None:
    file = folder / "router.yaml"
    file.write_text("prefill: {workers: [{url: 'http://p:1'}]}\ndecode: {workers: [{url: 'http://d:1'}]}\n")
    arguments = ["check-config", str(file)] if command == "check-config" else ["serve", "--config", str(file)]
    name = module(folder, 5, f"{statement}\n")
    code, _, err = run_command(capsys, monkeypatch, *arguments, "--set", f"{'.'.join(SETTINGS[what])}={name}")
    assert code == 2 and err.startswith("balanceroute: ") and err.count("\n") == 1 and f"{what} {name}: " in err


def test_a_policy_that_exits_while_it_decides_ends_a_replay_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "class Own:\n    name, waits_for_slots, horizon_steps = 'own', True, 0\n"
        "    patience_s = recheck_s = lambda *_: 0.0\n    def decide(self, *_):\n        raise SystemExit(7)\n"
    )
    name = module(folder, 7, text)
    code, _, err = run_command(capsys, monkeypatch, "replay", "--max-requests", "4", "--policy", name)
    assert code == 2 and err.startswith(f"balanceroute: policy {name}: SystemExit: 7 (") and err.count("\n") == 1


def test_ctrl_c_during_an_import_is_not_reported_as_an_import_error(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        validate(WORKERS | {"routing": {"policy": module(folder, 6, "raise KeyboardInterrupt\n")}})
