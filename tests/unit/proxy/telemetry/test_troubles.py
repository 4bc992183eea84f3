"""What fails again and again is said once, and once more when it is over."""

import logging

import pytest

from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)


def test_it_is_said_when_it_begins_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trouble = Trouble(log, "not kept", "kept again")
    trouble.end()
    for error in ("disk full", "disk full", "read only"):
        trouble.begin(error=error)
    trouble.end()
    trouble.end()
    trouble.begin(error="disk full")
    told = [(record.levelname, record.getMessage(), vars(record).get("error")) for record in caplog.records]
    assert told == [
        ("WARNING", "not kept", "disk full"),
        ("INFO", "kept again", None),
        ("WARNING", "not kept", "disk full"),
    ]


def test_one_whose_end_is_no_news_is_said_anew_each_time_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trouble = Trouble(log, "not removed")
    for _ in range(2):
        trouble.begin()
        assert trouble.lasts
        trouble.end()
        assert not trouble.lasts
    assert [record.getMessage() for record in caplog.records] == ["not removed"] * 2
