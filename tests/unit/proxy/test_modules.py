"""Every module of `proxy/` that decides something has a test file of its name."""

from pathlib import Path

TESTS = Path(__file__).parents[2]
OF_THE_PROXY = ("integration", "property", "security", "e2e")  # tests of the whole; unit tests mirror the folders
PROXY = TESTS.parent / "balanceroute" / "proxy"

DECIDES_NOTHING = {
    "client/services": "a record of what requests share",
    "life/errors": "the names of ends and failures",
    "life/outlet": "a protocol",
    "life/services": "a record of what tries share",
    "ops/services": "a record of all parts of the process that decides",
    "perimeter/key_use": "a record of what processes tell each other",
    "telemetry/forecast_metrics": "declares series",
}

MODULES = sorted(
    str(path.relative_to(PROXY).with_suffix("")) for path in PROXY.rglob("*.py") if path.stem != "__init__"
)


def test_every_module_that_decides_something_has_a_test_file() -> None:
    elsewhere = {path.name for folder in OF_THE_PROXY for path in (TESTS / folder).rglob("test_*.py")}
    for module in (each for each in MODULES if each not in DECIDES_NOTHING):
        here = (TESTS / "unit/proxy" / module).with_name(f"test_{Path(module).name}.py")
        assert here.exists() or here.name in elsewhere, f"write a {here.relative_to(TESTS)}"


def test_the_list_names_modules_that_exist() -> None:
    assert set(MODULES) >= set(DECIDES_NOTHING)
