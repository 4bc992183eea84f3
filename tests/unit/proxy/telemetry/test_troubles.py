"""What fails again and again is said once, and once more when it is over."""

import logging

import pytest

from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)


def test_a_trouble_is_logged_at_its_begin_and_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trouble = Trouble(log, "not kept", "kept again")
    trouble.end()
    for error in ("disk full", "disk full", "read only"):
        trouble.begin(error=error)
    trouble.end()
    trouble.end()
    trouble.begin(error="disk full")
    logged = [(record.levelname, record.getMessage(), vars(record).get("error")) for record in caplog.records]
    assert logged == [
        ("WARNING", "not kept", "disk full"),
        ("INFO", "kept again", None),
        ("WARNING", "not kept", "disk full"),
    ]


def test_a_trouble_without_an_end_message_is_logged_at_each_begin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trouble = Trouble(log, "not removed")
    for _ in range(2):
        trouble.begin()
        assert trouble.lasts
        trouble.end()
        assert not trouble.lasts
    assert [record.getMessage() for record in caplog.records] == ["not removed"] * 2
