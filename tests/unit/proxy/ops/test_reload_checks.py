"""Which ids of workers a takeover may change; `test_reload.py` has what a reload refuses."""

from dataclasses import replace

import pytest

from balanceroute.build import worker_specs
from balanceroute.proxy.ops.reload_checks import check_taken_over
from tests.unit.proxy.virtual_time import a_config


@pytest.mark.parametrize("server", ["http://d0:1", "http://elsewhere:1"])
def test_a_worker_may_be_renamed_or_get_another_url_by_a_takeover(server: str) -> None:
    d0 = next(spec for spec in worker_specs(a_config()) if spec.id == "d0")
    in_use = [replace(d0, id="former"), d0]  # renamed already, and its former name still has requests
    check_taken_over(in_use, a_config(decode={"workers": [{"url": server, "id": "d0"}]}))
