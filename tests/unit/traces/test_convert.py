"""Public traces in their original form."""

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from balanceroute.errors import InputError
from balanceroute.traces import TraceFormat, convert_trace, read_trace, write_trace
from tests.recorded import TRACES

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:01+00:00,76,0
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
45,ChatGPT,472,18,490,Conversation log
118,GPT-4,1087,230,1317,Conversation log
122,GPT-4,417,0,417,API log
"""


def mooncake_line(timestamp: int, hash_ids: list[int], prompt: int = 1000) -> str:
    row = {"timestamp": timestamp, "input_length": prompt, "output_length": 7, "hash_ids": hash_ids}
    return json.dumps(row) + "\n"


def written(path: Path, text: str) -> Path:
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt") as file:
        file.write(text)
    return path


def test_azure_2023_stamps_have_seven_decimals_and_become_seconds_from_zero(tmp_path: Path) -> None:
    trace = convert_trace(written(tmp_path / "a.csv", AZURE_2023)).trace
    assert trace.arrival_s == pytest.approx([0.0, 4.314579], abs=1e-5)
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


def test_azure_2024_stamps_have_a_zone_and_empty_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    result = convert_trace(written(tmp_path / "a.csv.gz", AZURE_2024))
    assert result.format is TraceFormat.AZURE
    assert result.without_output == 1
    assert result.trace.arrival_s == pytest.approx([0.0, 0.007405], abs=1e-6)


def test_burstgpt_rows_keep_their_seconds(tmp_path: Path) -> None:
    result = convert_trace(written(tmp_path / "b.csv", BURSTGPT))
    assert (result.format, result.without_output) == (TraceFormat.BURSTGPT, 1)
    assert result.trace.arrival_s.tolist() == [0.0, 73.0]


def test_mooncake_rows_with_equal_blocks_share_a_key(tmp_path: Path) -> None:
    text = mooncake_line(3000, [0, 1]) + mooncake_line(0, [0, 2]) + mooncake_line(6000, [0, 1])
    trace = convert_trace(written(tmp_path / "m.jsonl.xz", text)).trace
    assert trace.arrival_s.tolist() == [0.0, 3.0, 6.0]
    assert trace.prompt_key[1] == trace.prompt_key[2] != trace.prompt_key[0]


def test_jitter_is_seeded_and_spreads_equal_stamps(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", "".join(mooncake_line(0, [i]) for i in range(50)))
    arrivals = convert_trace(path, jitter_s=3.0, seed=4).trace.arrival_s
    assert np.all(np.diff(arrivals) >= 0)
    assert 2.0 < arrivals[-1] < 3.0
    assert arrivals.tolist() == convert_trace(path, jitter_s=3.0, seed=4).trace.arrival_s.tolist()


@pytest.mark.parametrize(
    ("format", "text", "line", "reason"),
    [
        (TraceFormat.AZURE, AZURE_2023 + "yesterday,5,5\n", 4, "TIMESTAMP 'yesterday'"),
        (TraceFormat.AZURE, AZURE_2023 + "2023-11-16 18:15:46,x,5\n", 4, "ContextTokens 'x'"),
        (TraceFormat.AZURE, AZURE_2023 + "2023-11-16 18:15:46,5\n", 4, "2 fields"),
        (TraceFormat.AZURE, AZURE_2023 + "2023-11-16 18:15:46,0,5\n", 4, "0 prompt and 5 output tokens"),
        (TraceFormat.AZURE, "a,b\n", 1, "no column TIMESTAMP"),
        (TraceFormat.BURSTGPT, BURSTGPT + "x,m,1,1,2,l\n", 5, "Timestamp 'x'"),
        (TraceFormat.MOONCAKE, mooncake_line(0, []) + "{oops\n", 2, "Expecting"),
        (
            TraceFormat.MOONCAKE,
            '{"timestamp": 0, "input_length": 1, "output_length": 1}',
            1,
            "no field 'hash_ids'",
        ),
        (TraceFormat.MOONCAKE, "[]", 1, "expected a JSON object, found []"),
        (TraceFormat.MOONCAKE, "[" * 100_000, 1, "JSON nested too deeply"),
        (TraceFormat.MOONCAKE, "9" * 5000, 1, "a number of too many digits"),
        (
            TraceFormat.MOONCAKE,
            '{"timestamp": null, "input_length": 1, "output_length": 1, "hash_ids": []}',
            1,
            "timestamp 'null' is not a number",
        ),
        (
            TraceFormat.MOONCAKE,
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 5}',
            1,
            "hash_ids: expected a list of integers, found 5",
        ),
        (TraceFormat.MOONCAKE, mooncake_line(0, [], prompt=2**31), 1, "input_length '2147483648' is too large"),
        (TraceFormat.BURSTGPT, BURSTGPT + "1e300,m,1,1,2,l\n", 5, "Timestamp '1e300' is too large"),
        (TraceFormat.BURSTGPT, BURSTGPT + "123,m,1,-1,0,l\n", 5, "Response tokens '-1' is below 0"),
        (TraceFormat.AZURE, AZURE_2023 + '"2023-11-16 18:15:46,1,5\n' * 9, 4, "a quote is not closed on its line"),
        (TraceFormat.AUTO, "what,ever\n", 1, "say which with --format"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(
    tmp_path: Path, format: TraceFormat, text: str, line: int, reason: str
) -> None:
    path = written(tmp_path / "bad", text)
    with pytest.raises(InputError) as refused:
        convert_trace(path, format)
    assert f"line {line}: " in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize("text", [AZURE_2023, BURSTGPT, mooncake_line(0, [1])], ids=["azure", "burstgpt", "mooncake"])
def test_a_byte_order_mark_and_leading_blank_lines_do_not_hide_the_format(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text("\n \n" + text, encoding="utf-8-sig")
    assert len(convert_trace(tmp_path / "t").trace) > 0


@pytest.mark.parametrize("jitter_s", [float("inf"), float("nan"), -1.0])
def test_jitter_that_is_no_span_of_time_is_refused(tmp_path: Path, jitter_s: float) -> None:
    path = written(tmp_path / "m.jsonl", mooncake_line(0, [1]))
    with pytest.raises(InputError, match="jitter must be 0 to"):
        convert_trace(path, jitter_s=jitter_s)


def test_a_damaged_xz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl.xz").write_bytes(b"not xz")
    with pytest.raises(InputError, match="cannot be read"):
        convert_trace(tmp_path / "m.jsonl.xz", TraceFormat.MOONCAKE)


@pytest.mark.parametrize(
    ("original", "reference"),
    [
        ("azure2023_conv_original.csv.gz", "azure2023_conv.csv.gz"),
        ("mooncake_conversation_original.jsonl.xz", "mooncake_conversation.csv.gz"),
    ],
)
def test_public_originals_convert_to_the_reference_tables(original: str, reference: str) -> None:
    ours = convert_trace(TRACES / original).trace
    theirs = read_trace(TRACES / reference)
    assert ours.prompt_tokens.tolist() == theirs.prompt_tokens.tolist()
    assert ours.output_tokens.tolist() == theirs.output_tokens.tolist()
    assert ours.arrival_s == pytest.approx(theirs.arrival_s, abs=2e-6)
    assert len(set(ours.prompt_key.tolist())) == len(set(theirs.prompt_key.tolist()))


def test_a_mooncake_request_without_hashes_has_no_key(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 7, "hash_ids": null}\n')
    assert convert_trace(path).trace.prompt_key.tolist() == [""]


def test_mooncakes_block_hashes_are_kept_in_the_order_of_arrival_and_written_and_read_back(tmp_path: Path) -> None:
    path, csv = tmp_path / "trace.jsonl", tmp_path / "trace.csv"
    path.write_text("\n".join([mooncake_line(3000, [0, 7]), mooncake_line(0, [0, 5]), mooncake_line(1000, [])]) + "\n")
    trace = convert_trace(path).trace
    assert trace.prefix == ((0, 5), (), (0, 7))
    write_trace(trace, csv)
    assert read_trace(csv).prefix == trace.prefix
    assert read_trace(csv).head(1).prefix == ((0, 5),)
    assert [trace.full_blocks(row) for row in range(3)] == [(0,), (), (0,)]  # of 1,000 tokens


def test_more_blocks_than_a_prompt_has_room_for_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake_line(0, [1, 2, 3], prompt=1000) + "\n")
    with pytest.raises(InputError, match="line 1: hash_ids: 3 blocks of 512 tokens in a prompt of 1000 tokens"):
        convert_trace(path)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [("1 x", "expected whole numbers"), ("1 2 3", "3 blocks of 512"), (str(2**63), "out of range")],
)
def test_blocks_of_a_csv_that_make_no_sense_are_named_with_their_line(
    tmp_path: Path, blocks: str, message: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens,prefix_blocks\n0,600,5,1\n1,600,5,{blocks}\n")
    with pytest.raises(InputError, match=f"line 3: prefix_blocks.*{message}"):
        read_trace(path)
