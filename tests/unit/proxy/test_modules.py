"""Every module of `proxy/` that decides something has a test file of its name."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
OF_THE_PROXY = ("unit/proxy", "integration", "property", "security", "e2e")
PROXY = TESTS.parent / "balanceroute" / "proxy"

DECIDES_NOTHING = {
    "client/services": "a record of what requests share",
    "life/errors": "the names of ends and failures",
    "life/outlet": "a protocol",
    "life/services": "a record of what tries share",
    "services": "a record of all parts",
    "telemetry/forecast_metrics": "declares series",
}

# what a module decides is held by a test of another name, which asks the whole router: nothing may be added here
UNDER_ANOTHER_NAME = {
    "admission/decode_dispatcher": "integration/test_parity.py",
    "admission/decision_log": "integration/test_dashboard.py",
    "admission/prefill_dispatcher": "integration/test_parity.py",
    "app": "integration/test_admin.py",
    "client/asgi": "security/test_bodies.py",
    "client/edge": "security/test_connections.py",
    "client/exchange": "integration/test_proxy_answers.py",
    "client/handshake": "e2e/test_tls.py",
    "client/response": "unit/proxy/client/test_protocol.py",
    "hotpath/events": "property/test_hotpath.py",
    "life/decoding": "integration/test_proxy_faults.py",
    "life/mover": "integration/test_silence.py",
    "life/pool_reaper": "integration/test_silence.py",
    "life/prefilling": "integration/test_proxy_faults.py",
    "life/pull": "integration/test_proxy_faults.py",
    "life/scoring": "integration/test_proxy_answers.py",
    "ops/dashboard/workers": "integration/test_dashboard.py",
    "ops/guard": "security/test_perimeter.py",
    "ops/metaserver": "integration/test_layerwise.py",
    "ops/steering": "integration/test_dashboard.py",
    "perimeter/routes": "security/test_perimeter.py",
    "server": "e2e/test_serve.py",
    "telemetry/metrics": "unit/proxy/telemetry/test_instruments.py",
    "wire/prompt_size": "unit/proxy/admission/test_prompt_sizes.py",
    "workers/metrics_poller": "integration/test_degraded.py",
    "workers/probing": "integration/test_poison_requests.py",
}

MODULES = sorted(
    str(path.relative_to(PROXY).with_suffix("")) for path in PROXY.rglob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("module", [each for each in MODULES if each not in DECIDES_NOTHING])
def test_a_module_that_decides_something_has_a_test_file(module: str) -> None:
    other = UNDER_ANOTHER_NAME.get(module)
    file = f"test_{Path(module).name}.py"
    found = [path for folder in OF_THE_PROXY for path in (TESTS / folder).rglob(file)]
    if other is None:
        assert found, f"write a {file}"
    else:
        assert found or (TESTS / other).is_file()


def test_the_lists_name_modules_that_exist_once() -> None:
    assert set(MODULES) >= {*DECIDES_NOTHING, *UNDER_ANOTHER_NAME}
    assert not DECIDES_NOTHING.keys() & UNDER_ANOTHER_NAME.keys()
