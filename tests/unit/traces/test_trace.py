"""The trace table: reading, writing, refusing."""

import bz2
import gzip
import lzma
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from balanceroute.errors import InputError
from balanceroute.traces import (
    ReferenceSetting,
    Trace,
    describe_trace,
    ideal_capacity,
    read_trace,
    write_trace,
)
from tests.recorded import TRACES

HEADER = "arrival_s,prompt_tokens,output_tokens,prompt_key\n"


def a_trace(
    arrival_s: list[float] | None = None,
    prompt_tokens: list[int] | None = None,
    output_tokens: list[int] | None = None,
    prompt_key: list[str] | None = None,
) -> Trace:
    return Trace(
        np.array(arrival_s or [0.0, 0.5, 2.0]),
        np.array(prompt_tokens or [10, 20, 30]),
        np.array(output_tokens or [1, 2, 3]),
        np.array(prompt_key or ["", "k1", "k1"]),
    )


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.csv.xz"])
def test_a_written_trace_reads_back_as_itself(tmp_path: Path, name: str) -> None:
    trace = a_trace()
    write_trace(trace, tmp_path / name)
    again = read_trace(tmp_path / name)
    for field in ("arrival_s", "prompt_tokens", "output_tokens", "prompt_key"):
        assert getattr(again, field).tolist() == getattr(trace, field).tolist()


def test_equal_traces_are_written_as_equal_bytes(tmp_path: Path) -> None:
    write_trace(a_trace(), tmp_path / "a.csv.gz")
    write_trace(a_trace(), tmp_path / "b.csv.gz")
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("arrival_s,prompt_tokens\n", 1, "no column output_tokens"),
        (HEADER + "0,5,5,\n1,x,5,\n", 3, "prompt_tokens 'x' is not a whole number"),
        (HEADER + "0,5,5.5,\n", 2, "output_tokens '5.5' is not a whole number"),
        (HEADER + "0,0,5,\n", 2, "prompt_tokens '0' is below 1"),
        (HEADER + "0,5,-3,\n", 2, "output_tokens '-3' is below 1"),
        (HEADER + "0,2147483648,5,\n", 2, "prompt_tokens '2147483648' is too large: more than 2147483647"),
        (HEADER + "0,5,99999999999999999999,\n", 2, "too large"),
        (HEADER + "0,5,5,\n1e300,5,5,\n", 3, "arrival_s '1e300' is too large: more than 1e+10"),
        (HEADER + "1e15,5,5,\n", 2, "arrival_s '1e15' is too large: more than 1e+10"),
        ("arrival_s,prompt_tokens,output_tokens,prompt_tokens\n0,5,5,9\n", 1, "more than one column prompt_tokens"),
        (HEADER + "nan,5,5,\n", 2, "arrival_s 'nan' is not a finite number"),
        (HEADER + "inf,5,5,\n", 2, "arrival_s 'inf' is not a finite number"),
        (HEADER + "-1,5,5,\n", 2, "arrival_s '-1' is not a finite number"),
        (HEADER + "2,5,5,\n1,5,5,\n", 3, "arrival_s 1 is before the row above (2)"),
        (HEADER + "0,5\n", 2, "2 fields, the header has 4"),
        (HEADER + '0,5,5,"abc\n' + "1,5,5,\n" * 500, 2, "a quote is not closed on its line"),
        (HEADER + '0,5,5,\n1,5,5,"a\nb"\n', 3, "a quote is not closed on its line"),
        (HEADER + '0,5,5,"a"b\n', 2, "',' expected after"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_the_reason(tmp_path: Path, text: str, line: int, reason: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_trace(path)
    assert f"{path}: line {line}: " in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize("half", ["3,2", "3,20,", '3,20,30,"', "3,20,30,k\N{SNOWMAN}"[:-1] + "\udce2"])
def test_half_a_last_row_is_left_out_with_a_warning_that_names_it(tmp_path: Path, half: str) -> None:
    path = tmp_path / "growing.csv"
    text = "arrival_s,prompt_tokens,output_tokens,prompt_key\n1,20,30,\n2,21,31,k\n"
    path.write_text(text + half, errors="surrogateescape")
    with pytest.warns(UserWarning, match="growing.csv: left out 1 line .*, line 4") as warned:
        trace = read_trace(path)
    assert warned[0].filename == __file__
    assert trace.prompt_tokens.tolist() == [20, 21] and trace.output_tokens.tolist() == [30, 31]
    path.write_text(text + half + "\n", errors="surrogateescape")
    with pytest.raises(InputError, match="line 4"):
        read_trace(path)


def test_a_row_of_bytes_that_are_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(HEADER.encode() + b"0,5,5,\n" * 30_000 + b"1,5,5,\xe9\n" + b"2,5,5,\n" * 30_000)
    with pytest.raises(InputError, match=r"t\.csv: line 30002: not UTF-8 text$"):
        read_trace(path)


def test_an_error_shortens_a_number_of_thousands_of_digits(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(HEADER + f"0,{'9' * 5000},5,\n")
    with pytest.raises(InputError) as refused:
        read_trace(tmp_path / "t.csv")
    assert len(str(refused.value)) < len(str(tmp_path)) + 150


def test_a_byte_order_mark_and_blank_lines_are_no_part_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n" + HEADER + "\n0,5,7,k\n", encoding="utf-8-sig")
    assert read_trace(tmp_path / "t.csv").output_tokens.tolist() == [7]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (HEADER.encode(), "no requests in it"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (bz2.compress(HEADER.encode()), "line 1: not UTF-8 text; of compressed files .gz and .xz are read$"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(InputError, match=reason):
        read_trace(tmp_path / "t.csv")


@pytest.mark.parametrize("name", ["t.csv.gz", "t.csv.xz"])
def test_a_file_that_a_download_has_unpacked_and_not_renamed_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(HEADER + "0,5,7,\n")
    assert read_trace(tmp_path / name).output_tokens.tolist() == [7]


def test_whole_numbers_may_have_a_decimal_point_as_pandas_writes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(HEADER + "0.0,5.0,70.0,\n")
    trace = read_trace(tmp_path / "t.csv")
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([5], [70])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:10] + b"\xff" * 20 + data[30:],
    ],
    ids=["cut short", "bytes overwritten"],
)
@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_damaged_compressed_file_is_refused_with_its_name(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes], damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"t.csv{suffix}"
    path.write_bytes(damage(compress((HEADER + "0,5,5,\n" * 500).encode())))
    with pytest.raises(InputError, match=rf"t\.csv\{suffix}: cannot be read"):
        read_trace(path)


def test_epoch_timestamps_count_from_the_first_arrival_and_other_times_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "1700000000.25,5,5,\n1700000001.5,5,5,\n")
    assert read_trace(path).arrival_s.tolist() == [0.0, 1.25]
    path.write_text(HEADER + "3600.25,5,5,\n3601.5,5,5,\n")
    assert read_trace(path).arrival_s.tolist() == [3600.25, 3601.5]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "none.csv")


def test_columns_may_come_in_any_order_and_keys_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("output_tokens,extra,arrival_s,prompt_tokens\n7,?,1.5,9\n")
    trace = read_trace(path)
    assert (trace.arrival_s[0], trace.prompt_tokens[0], trace.output_tokens[0]) == (1.5, 9, 7)
    assert trace.prompt_key[0] == ""


def test_description_gives_rates_means_and_keys() -> None:
    summary = describe_trace(a_trace())
    assert (summary.rows, summary.span_s, summary.rate_per_s) == (3, 2.0, 1.0)
    assert (summary.prompt_mean, summary.output_mean) == (20.0, 2.0)
    assert (summary.keyed_ratio, summary.distinct_keys) == (2 / 3, 1)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"arrival_s": [0.0, 2.0, 1.0]}, "arrival_s: not in order"),
        ({"arrival_s": [0.0, np.nan, 1.0]}, "arrival_s: accepted are numbers from 0 to 1e"),
        ({"arrival_s": [-1.0, 0.0, 1.0]}, "arrival_s: accepted are numbers from 0 to 1e"),
        ({"arrival_s": [0.0, 1.0, np.inf]}, "arrival_s: accepted are numbers from 0 to 1e"),
        ({"output_tokens": [1, 0, 3]}, "output_tokens: accepted are whole numbers from 1 to 2147483647"),
        ({"prompt_tokens": [1, 2**31, 3]}, "prompt_tokens: accepted are whole numbers from 1 to 2147483647"),
        ({"prompt_tokens": [1.5, 2.0, 3.0]}, "prompt_tokens: accepted are whole numbers from 1 to 2147483647"),
        ({"output_tokens": [1, 2]}, "output_tokens: expected one value for each of 3 arrivals"),
    ],
)
def test_an_invalid_hand_made_trace_is_refused(changed: dict[str, list[float]], reason: str) -> None:
    columns = {name: np.array(values) for name, values in changed.items()}
    with pytest.raises(InputError, match=f"^{re.escape(reason)}"):
        replace(a_trace(), **columns).checked()


def test_whole_numbers_may_be_floats_as_in_a_data_frame() -> None:
    whole = np.array([3.0, 4.0])
    made = Trace([0, 1], whole, whole, ["", ""]).checked()  # type: ignore[arg-type]
    assert made.prompt_tokens.tolist() == [3, 4] and made.prompt_tokens.dtype == np.int64


def test_a_trace_made_by_hand_may_have_columns_of_any_kind_that_hold_numbers() -> None:
    small = np.array([200, 255], dtype=np.uint8)
    made = Trace([0, 1], small, small, [7, None], ([1], np.array([2]))).checked()  # type: ignore[arg-type]
    assert [column.dtype.kind for column in (made.arrival_s, made.prompt_tokens, made.prompt_key)] == ["f", "i", "U"]
    assert (made.prompt_tokens + made.output_tokens).tolist() == [400, 510]  # as 8 bits they would be 144 and 254
    assert made.prompt_key.tolist() == ["7", ""]
    assert made.prefix == ((1,), (2,))


@pytest.mark.parametrize("key", ["a\nb", "a\rb"])
def test_a_key_with_a_line_break_is_not_written(tmp_path: Path, key: str) -> None:
    trace = Trace([0, 1], [20, 30], [3, 4], ["", key])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="^prompt_key .*: accepted are texts without line breaks"):
        write_trace(trace, tmp_path / "trace.csv")
    assert not list(tmp_path.iterdir())


def test_unsigned_arrivals_out_of_order_are_refused() -> None:
    arrivals = np.array([5, 3, 7], dtype=np.uint8)  # of the first two numpy's difference is 254
    with pytest.raises(InputError, match="^arrival_s: not in order"):
        replace(a_trace(), arrival_s=arrivals).checked()


def test_a_trace_of_lists_is_scaled_as_one_of_arrays() -> None:
    trace = Trace([0, 1, 3], [20, 30, 40], [3, 4, 5], ["a", "", "b"])  # type: ignore[arg-type]
    assert trace.with_lengths(2, 3).prompt_tokens.tolist() == [40, 60, 80]
    assert trace.at_rate(2.0).arrival_s.tolist() == [0.0, 1 / 3, 1.0]


def test_a_trace_of_lists_is_written_and_described(tmp_path: Path) -> None:
    trace = Trace([0, 1], [20, 30], [3, 4], ["a", "b,c"])  # type: ignore[arg-type]
    write_trace(trace, tmp_path / "trace.csv")
    assert describe_trace(read_trace(tmp_path / "trace.csv")) == describe_trace(trace)


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("arrival_s", ["0", "1"], "arrival_s: expected a column of numbers"),
        ("arrival_s", np.array(["2026-01-01", "2026-01-02"], dtype="datetime64[s]"), "arrival_s: expected a column"),
        ("prompt_tokens", [True, False], "prompt_tokens: expected a column of numbers"),
        ("output_tokens", [[1, 2]], "output_tokens: expected a column of numbers"),
        ("prefix", ((1,),), "prefix: expected the blocks of each of 2 prompts"),
        ("prefix", ((1,), ("a",)), "prefix: accepted are lists of whole numbers"),
        ("prefix", ((1,), (2, 3)), "prefix: 2 blocks of 512 tokens in a prompt of 30 tokens"),
    ],
)
def test_a_column_that_holds_no_numbers_is_refused(column: str, values: object, reason: str) -> None:
    good = Trace(np.array([0.0, 1.0]), np.array([20, 30]), np.array([3, 4]), np.array(["", ""]))
    with pytest.raises(InputError, match=f"^{re.escape(reason)}"):
        replace(good, **{column: values}).checked()


def test_a_trace_can_be_replayed_at_another_rate() -> None:
    assert describe_trace(a_trace().at_rate(4.0)).rate_per_s == pytest.approx(4.0)


def test_ideal_capacity_is_slots_over_step_time_and_output_length() -> None:
    # one request of 10 + 2 tokens holds 10, then 11 tokens: 10.5 on average
    trace = a_trace([0.0], [10], [2], [""])
    setting = ReferenceSetting(n_workers=2, slots=3, step_cost_s=0.1, step_overhead_s=1.0)
    step_s = 0.1 * 3 * 10.5 + 1.0
    assert ideal_capacity(trace, setting) == pytest.approx(2 * 3 / (2 * step_s))


@pytest.mark.parametrize("name", ["heavy_tailed", "capped"])
def test_the_published_traces_arrive_at_115_percent_of_ideal_capacity(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.csv.gz")
    assert len(trace) / trace.arrival_s[-1] / ideal_capacity(trace) == pytest.approx(1.15, abs=1e-4)
