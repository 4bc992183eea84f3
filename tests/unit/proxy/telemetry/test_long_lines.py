"""Lines that are cut to a bound."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from balanceroute.proxy.telemetry.long_lines import CUT, LEAST, bounded


def as_json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields)


def cut(most_bytes: int, **fields: Any) -> dict[str, Any]:
    line = bounded(fields, as_json, most_bytes)
    assert len(line) <= most_bytes
    cut_fields: dict[str, Any] = json.loads(line)
    return cut_fields


def test_a_line_that_fits_is_unchanged() -> None:
    assert cut(1000, path="/" * 900) == {"path": "/" * 900}


def test_a_cut_line_is_filled_and_records_the_original_length() -> None:
    fields = cut(1000, path="/" * 2000, status=404)
    assert fields["status"] == 404 and fields[CUT] == {"path": 2000}
    assert len(as_json(fields)) == 1000


def test_fields_that_clients_choose_are_cut_first_then_the_longest() -> None:
    fields = cut(1500, short="s" * 300, longest="l" * 5000, path="/" * 400)
    assert fields["path"] == "/" * LEAST and fields["short"] == "s" * 300
    assert fields[CUT] == {"path": 400, "longest": 5000}


@pytest.mark.parametrize("name", ["time", "level", "logger", "process"])
def test_the_time_level_and_logger_of_a_line_are_never_cut(name: str) -> None:
    fields = cut(600, **{name: "x" * 400}, error="y" * 400)
    assert fields[name] == "x" * 400 and fields[CUT] == {"error": 400}


def test_the_end_of_a_traceback_is_kept() -> None:
    assert cut(400, exception="far " * 500 + "why")["exception"].endswith("why")


def test_a_structure_is_cut_in_its_json_form() -> None:
    fields = cut(600, state={"workers": [{"id": number} for number in range(500)], 1: None})
    assert fields["state"].startswith('{"workers":[{"id":0}')


def test_fields_are_cut_to_nothing_when_there_are_too_many() -> None:
    fields = cut(900, **{f"field{number}": "x" * 250 for number in range(20)})
    assert "" in fields.values() and len(fields[CUT]) > 10
