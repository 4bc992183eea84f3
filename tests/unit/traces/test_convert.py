"""Public traces in their original form."""

import bz2
import gzip
import json
import lzma
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from balanceroute.errors import InputError
from balanceroute.traces import TraceFormat, convert_trace, load_trace, read_trace, source, write_trace
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


def bailian_line(timestamp: float, hash_ids: list[int] | None, prompt: int = 521) -> str:
    """As in the README of alibaba-edu/qwen-bailian-usagetraces-anon."""
    row = {"chat_id": 159, "parent_chat_id": 55, "timestamp": timestamp, "input_length": prompt, "output_length": 132}
    return json.dumps(row | {"type": "text", "turn": 2} | ({} if hash_ids is None else {"hash_ids": hash_ids})) + "\n"


@pytest.mark.parametrize("hash_ids", [None, list(range(33))], ids=["no hashes", "hashes"])
def test_bailian_stamps_are_seconds_and_its_lines_are_known_by_their_chats(
    tmp_path: Path, hash_ids: list[int] | None
) -> None:
    path = written(tmp_path / "b.jsonl", bailian_line(61.114, hash_ids) + bailian_line(60.0, hash_ids))
    result = convert_trace(path)
    assert (result.format, result.notes) == (TraceFormat.BAILIAN, [])
    assert result.trace.arrival_s.tolist() == [0.0, 1.114]
    assert result.trace.prompt_tokens.tolist() == [521, 521]
    assert np.all((result.trace.prompt_key != "") == (hash_ids is not None))


def test_bailian_hashes_of_16_tokens_become_names_of_whole_beginnings_in_blocks_of_512(tmp_path: Path) -> None:
    """Each hash stands for its own 16 tokens, so equal ones behind unlike beginnings are no shared prefix."""
    one, other, third = list(range(32)), list(range(100, 132)), list(range(200, 232))
    prompts = [[*one, *other, 7], [*one, *other, 8], [*third, *other], [*one, 7], one[:31]]
    lines = [bailian_line(at, ids, prompt=16 * len(ids)) for at, ids in enumerate(prompts)]
    trace = convert_trace(written(tmp_path / "b.jsonl", "".join(lines))).trace
    names = trace.prefix
    assert [len(each) for each in names] == [2, 2, 2, 1, 0]
    assert names[0] == names[1] and names[0][:1] == names[3]
    assert names[2][0] != names[0][0] and names[2][1] != names[0][1], "the second block is the same, its prefix is not"
    assert trace.full_blocks(0) == names[0] and trace.prompt_key[0] != trace.prompt_key[1]
    write_trace(trace, tmp_path / "b.csv")
    assert read_trace(tmp_path / "b.csv").prefix == names


def test_more_bailian_hashes_than_a_prompt_has_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1: hash_ids: 34 blocks of 16 tokens in a prompt of 521 tokens"):
        convert_trace(written(tmp_path / "b.jsonl", bailian_line(0, list(range(34)))))


@pytest.mark.parametrize(
    "line",
    [
        "what,ever",
        '10.0.0.5 - - [29/Nov/2026:10:00:01 +0000] "POST /v1/chat/completions HTTP/1.1" 200 5321 "-" "curl" 2.431',
    ],
    ids=["no", "accesses"],
)
def test_a_file_in_no_known_form_is_refused_with_the_forms_that_are_known(tmp_path: Path, line: str) -> None:
    for read in (convert_trace, load_trace):
        with pytest.raises(InputError, match="no known trace: expected a CSV with arrival_s.*--format") as refused:
            read(str(written(tmp_path / "t.csv", f"{line}\n")))
        for name in set(TraceFormat) - {TraceFormat.AUTO}:
            assert f"({name})" in str(refused.value)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
@pytest.mark.parametrize(
    "header", ["arrival_s,prompt_tokens,output_tokens", "TIMESTAMP,ContextTokens,GeneratedTokens"], ids=["own", "azure"]
)
def test_a_table_without_commas_is_refused_with_what_stands_in_their_place(
    tmp_path: Path, separator: str, header: str
) -> None:
    for read in (convert_trace, load_trace):
        with pytest.raises(InputError) as refused:
            read(str(written(tmp_path / "t.csv", f"{header}\n0,5,5\n".replace(",", separator))))
        assert f"line 1: {separator!r} separates its columns; accepted are commas" in str(refused.value)


@pytest.mark.parametrize(
    "content", [bz2.compress(b"arrival_s"), "arrival_s".encode("utf-16")], ids=["compressed", "utf-16"]
)
def test_what_is_no_text_is_not_called_an_unknown_trace(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    for read in (convert_trace, load_trace):
        with pytest.raises(InputError, match=r"line 1: not UTF-8 text; of compressed files \.gz and \.xz are read"):
            read(str(tmp_path / "t.csv"))


def test_a_table_that_lacks_some_columns_of_a_trace_is_refused_with_their_names(tmp_path: Path) -> None:
    for read in (convert_trace, load_trace):
        with pytest.raises(InputError, match="line 1: no column arrival_s, output_tokens; expected"):
            read(str(written(tmp_path / "t.csv", "time,prompt_tokens,completion_tokens\n0,5,5\n")))


@pytest.mark.parametrize(
    "text",
    [
        '{"custom_id": "1", "body": {"max_tokens": 5}}\n',
        '{"timestamp": "2026-01-05T10:00:00Z", "level": "info"}\n',
        '{\n  "timestamp": 5\n}\n',
        '[\n  {"input_length": 5}\n]\n',
    ],
    ids=["batch", "log", "object", "array"],
)
def test_json_of_another_kind_is_refused_with_the_fields_of_a_mooncake_trace(tmp_path: Path, text: str) -> None:
    for read in (convert_trace, load_trace):
        with pytest.raises(InputError, match="JSON lines with timestamp, input_length, output_length") as refused:
            read(str(written(tmp_path / "t.jsonl", text)))
        assert "\n" not in str(refused.value)


def test_a_format_is_also_named_by_a_text(tmp_path: Path) -> None:
    path = written(tmp_path / "b.csv", BURSTGPT)
    for name in ("auto", "burstgpt"):
        assert convert_trace(path, name).format is TraceFormat.BURSTGPT
    with pytest.raises(InputError, match="format csv: one of auto, azure, mooncake"):
        convert_trace(path, "csv")


def test_a_mooncake_line_without_a_length_is_refused_with_the_field(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1: no field 'output_length'"):
        convert_trace(written(tmp_path / "t.jsonl", '{"timestamp": 5, "input_length": 5}\n'))


@pytest.mark.parametrize("name", ["t.csv.GZ", "t.csv.XZ"])
def test_a_compressed_file_name_in_capitals_is_recognised(tmp_path: Path, name: str) -> None:
    trace = convert_trace(written(tmp_path / "b.csv", BURSTGPT)).trace
    write_trace(trace, tmp_path / name)
    assert not (tmp_path / name).read_bytes().startswith(b"arrival_s")
    assert read_trace(tmp_path / name).prompt_tokens.tolist() == trace.prompt_tokens.tolist()


@pytest.mark.parametrize("quote", ["", '"'], ids=["plain", "quoted"])
def test_a_table_that_replay_reads_directly_needs_no_conversion(tmp_path: Path, quote: str) -> None:
    header = ",".join(f"{quote}{name}{quote}" for name in ("arrival_s", "prompt_tokens", "output_tokens"))
    with pytest.raises(InputError, match="is a trace already, which replay and describe read as it is"):
        convert_trace(written(tmp_path / "t.csv", f"{header}\n0,5,5\n"))


def test_a_file_of_failed_requests_alone_is_refused_as_that(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none of its 1 requests generated anything"):
        convert_trace(written(tmp_path / "a.csv", AZURE_2024.splitlines()[0] + "\n2024-05-10 00:00:01+00:00,76,0\n"))


@pytest.mark.parametrize("text", ["", "\n \n"], ids=["empty", "blank"])
def test_an_empty_file_is_named_as_one(text: str, tmp_path: Path) -> None:
    for read in (convert_trace, read_trace, load_trace):
        with pytest.raises(InputError, match="nothing in it$"):
            read(str(written(tmp_path / "t", text)))


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
        (TraceFormat.AZURE, AZURE_2023 + "2023-11-16 18:15:46,0,5\n", 4, "a prompt of 0 tokens"),
        (TraceFormat.AZURE, "a,b\n", 1, "no column TIMESTAMP"),
        (TraceFormat.BURSTGPT, BURSTGPT + "x,m,1,1,2,l\n", 5, "Timestamp 'x'"),
        (TraceFormat.MOONCAKE, mooncake_line(0, []) + "{oops\n", 2, "Expecting"),
        (
            TraceFormat.MOONCAKE,
            '{"timestamp": 0, "input_length": 1, "hash_ids": []}',
            1,
            "no field 'output_length'",
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
        (TraceFormat.AZURE, AZURE_2023 + "2023-11-16 18:15:46,123,374,44\n", 4, "4 fields, the header has 3"),
        (TraceFormat.AZURE, AZURE_2023 + '"2023-11-16 18:15:46,1,5\n' * 9, 4, "a quote is not closed on its line"),
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
    (tmp_path / "m.jsonl.xz").write_bytes(lzma.compress(mooncake_line(0, [1]).encode())[:-20])
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


@pytest.mark.parametrize(("first", "doubted"), [(0, False), (1732590000, True), (1732590000000, False)])
def test_a_timestamp_that_resembles_seconds_is_read_as_milliseconds_with_a_note(
    tmp_path: Path, first: int, doubted: bool
) -> None:
    lines = mooncake_line(first, []) + mooncake_line(first + 5, [])
    result = convert_trace(written(tmp_path / "m.jsonl", lines))
    assert result.trace.arrival_s.tolist() == [0.0, 0.005]
    assert [note.split(",")[0] for note in result.notes] == [f"took timestamp {first} as milliseconds"] * doubted


def test_lines_in_mooncakes_form_need_no_hashes(tmp_path: Path) -> None:
    text = '{"timestamp": 500, "input_length": 9, "output_length": 7, "session": "a"}\n'
    trace = convert_trace(written(tmp_path / "m.jsonl", text)).trace
    assert (trace.prompt_tokens.tolist(), trace.prompt_key.tolist(), trace.prefix) == ([9], [""], ())


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


ROUTER = """{"time": "2026-01-01T00:00:00.000+00:00", "level": "info", "logger": "balanceroute", "event": "listening"}
{"time": "2026-01-01T00:00:12.500+00:00", "event": "request", "duration_s": 2.0, "prompt_tokens": 900, "tokens": 31}
{"time": "2026-01-01T00:00:11.000+00:00", "event": "request", "duration_s": 1.0, "prompt_tokens": 400, "tokens": 8}
{"time": "2026-01-01T00:00:13.000+00:00", "event": "request", "outcome": "rejected", "duration_s": 0.1}
"""


def test_this_routers_log_yields_arrival_times_and_lengths(tmp_path: Path) -> None:
    result = convert_trace(written(tmp_path / "router.log.gz", ROUTER))
    assert (result.format, result.without_output, result.estimated) == (TraceFormat.ROUTER, 1, 0)
    assert result.trace.arrival_s == pytest.approx([0.0, 0.5])
    assert result.trace.prompt_tokens.tolist() == [400, 900]
    assert result.trace.output_tokens.tolist() == [8, 31]


def test_a_request_for_several_choices_is_read_as_the_requests_that_workers_got(tmp_path: Path) -> None:
    several = ROUTER.replace('"prompt_tokens": 900, "tokens": 31', '"prompt_tokens": 900, "tokens": 31, "choices": 3')
    result = convert_trace(written(tmp_path / "router.log", several))
    assert result.trace.arrival_s == pytest.approx([0.0, 0.5, 0.5, 0.5])
    assert result.trace.prompt_tokens.tolist() == [400, 300, 300, 300]
    assert result.trace.output_tokens.tolist() == [8, 10, 10, 11]


BANNER = "loading /etc/router.yaml\nwarning: {braces} of a shell\n"
PREFIXES = {
    "nothing": "",
    "kubectl logs --prefix": "[pod/router-0/router] ",
    "kubectl logs --timestamps, docker logs -t": "2026-01-01T00:00:11.001002003Z ",
    "containerd": "2026-01-01T00:00:11.001002003Z stderr F ",
    "docker compose": "\x1b[36mrouter-1  | \x1b[0m",
    "journalctl": "Jan 01 00:00:11 host balanceroute[17]: ",
}


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_this_routers_log_is_recognised_after_a_banner_and_with_prefixes_on_its_lines(
    prefix: str, end: str, tmp_path: Path
) -> None:
    text = "".join(prefix + line + end for line in (BANNER + ROUTER).splitlines())
    (tmp_path / "router.log").write_text(text, encoding="utf-8-sig", newline="")
    for path in (tmp_path / "router.log", written(tmp_path / "packed.gz", text)):
        result = convert_trace(path)
        assert (result.format, result.without_output, result.damaged) == (TraceFormat.ROUTER, 1, ())
        assert result.trace.prompt_tokens.tolist() == [400, 900]


@pytest.mark.parametrize("wrap", [
    lambda line: {"log": line + "\n", "stream": "stderr", "time": "2026-01-01T00:00:11.0Z"},
    lambda line: {"_PID": "17", "__REALTIME_TIMESTAMP": "1767225611000000", "MESSAGE": line},
    lambda line: {"_PID": "17", "MESSAGE": list(b"\x1b[1;36m(APIServer pid=17)\x1b[0;0m " + line.encode())},
], ids=["docker", "journalctl -o json", "journalctl -o json of coloured lines"])  # fmt: skip
def test_logs_that_docker_and_journald_have_wrapped_in_json_are_read(
    wrap: Callable[[str], dict[str, object]], tmp_path: Path
) -> None:
    for log, kind in (
        (BANNER + ROUTER, TraceFormat.ROUTER),
        (vllm_log(("01-01 00:00:00", "Received request a: prompt: 'x', params: (max_tokens=16)")), TraceFormat.VLLM),
    ):
        lines = [json.dumps(wrap(line)) + "\n" for line in log.splitlines()]
        assert convert_trace(written(tmp_path / "container.log", "".join(lines))).format is kind


@pytest.mark.parametrize("router_first", [True, False])
def test_a_log_with_requests_of_this_router_and_of_vllm_is_read_as_the_kind_that_is_named(
    router_first: bool, tmp_path: Path
) -> None:
    """As `docker compose logs` prints all servers of a cluster."""
    engine = vllm_log(("01-01 00:00:00", "Received request a: prompt: 'x', params: (max_tokens=16)"))
    path = written(tmp_path / "all.log", ROUTER + engine if router_first else engine + ROUTER)
    for read in (convert_trace, lambda path: load_trace(str(path))):
        with pytest.raises(InputError, match=r"of this router and of vLLM .* --format router or vllm"):
            read(path)
    assert len(convert_trace(path, "router").trace) == 2 and len(convert_trace(path, "vllm").trace) == 1


def test_a_log_of_this_router_beside_a_vllm_that_logs_no_requests_says_how_it_is_read(tmp_path: Path) -> None:
    """The advice was to have vLLM log them."""
    path = written(tmp_path / "all.log", vllm_log(("01-01 00:00:00", "Starting vLLM")) + ROUTER)
    with pytest.raises(InputError, match=r"the first is line 5\): trace convert --format router"):
        convert_trace(path)
    assert len(convert_trace(path, "router").trace) == 2


def test_requests_that_other_programs_log_beside_vllm_are_none_of_this_router(tmp_path: Path) -> None:
    """structlog, which many services log with, writes `event` as well."""
    engine = vllm_log(("01-01 00:00:00", "Received request a: prompt: 'x', params: (max_tokens=16)"))
    other = '{"method": "POST", "path": "/v1/completions", "event": "request", "timestamp": "2026-01-01T00:00:00Z"}\n'
    assert len(convert_trace(written(tmp_path / "all.log", engine + other)).trace) == 1


@pytest.mark.parametrize("message", [[300], ["INFO"], [1.5], {}, 7])
def test_messages_in_journald_s_objects_that_are_no_text_are_passed_over(message: object, tmp_path: Path) -> None:
    log = vllm_log(("01-01 00:00:00", "Received request a: prompt: 'x', params: (max_tokens=16)"))
    lines = [json.dumps({"_PID": "17", "MESSAGE": each}) + "\n" for each in (message, *log.splitlines())]
    assert len(convert_trace(written(tmp_path / "journal.json", "".join(lines))).trace) == 1


def test_lines_that_journald_left_out_as_too_long_are_counted(tmp_path: Path) -> None:
    """As `journalctl -o json` without --all writes fields of more than 4096 bytes."""
    log = vllm_log(("01-01 00:00:00", "Received request a: prompt: 'x', params: (max_tokens=16)"))
    messages = [*log.splitlines(), None]
    lines = [json.dumps({"_PID": "17", "MESSAGE": message}) + "\n" for message in messages]
    result = convert_trace(written(tmp_path / "journal.json", "".join(lines)))
    assert result.damaged == (len(messages),)
    assert result.notes[-1] == f"left out 1 line that is cut short or damaged, line {len(messages)}"


def docker_object(part: str, *, last: bool) -> str:
    return json.dumps({"log": part + last * "\n", "stream": "stdout", "time": "2026-01-01T00:00:11.0Z"})


def line_of_a_node(part: str, *, last: bool) -> str:
    return f"2026-01-01T00:00:11.0Z stdout {'F' if last else 'P'} {part}"


@pytest.mark.parametrize("written_as", [docker_object, line_of_a_node], ids=["docker", "kubernetes"])
def test_lines_that_a_container_s_runtime_wrote_in_parts_are_put_together(
    written_as: Callable[..., str], tmp_path: Path
) -> None:
    ids = list(range(100_000, 105_000))
    text = vllm_log(
        ("01-01 00:00:00", f"Received request a: prompt: 'x', params: (max_tokens=9), prompt_token_ids: {ids}"),
        ("01-01 00:00:01", "Generated response a: output: 'ok', output_token_ids: [8, 9], finish_reason: stop"),
    )
    between = written_as("INFO:     127.0.0.1:1 GET /health", last=True).replace("stdout", "stderr")
    lines = []
    for line in text.splitlines():
        parts = [line[start : start + 16384] for start in range(0, len(line), 16384)]
        lines += [written_as(part, last=False) for part in parts[:-1]]
        lines += [between, written_as(parts[-1], last=True)]
    result = convert_trace(written(tmp_path / "container.log", "\n".join(lines) + "\n"))
    assert (result.trace.prompt_tokens.tolist(), result.trace.output_tokens.tolist()) == ([5000], [2])
    assert result.notes == []
    unfinished = "\n".join([*lines, written_as("INFO 01-01 00:00:02 [a.py:1] Received", last=False)]) + "\n"
    assert convert_trace(written(tmp_path / "live.log", unfinished)).damaged == (len(lines) + 1,)


def test_a_cut_last_line_is_left_out_alone_and_reported(tmp_path: Path) -> None:
    result = convert_trace(written(tmp_path / "router.log", ROUTER + ROUTER[:200]))
    assert len(result.trace) == 2
    assert result.notes[-1] == "left out 1 line that is cut short or damaged, line 6"


@pytest.mark.parametrize("text", [
    mooncake_line(0, [0, 1]) * 2, bailian_line(0, None) * 2, AZURE_2023, "".join(BURSTGPT.splitlines(True)[:3]),
], ids=["mooncake", "bailian", "azure", "burstgpt"])  # fmt: skip
def test_half_a_last_line_of_a_table_is_left_out_and_reported_and_half_a_line_before_it_is_refused(
    tmp_path: Path, text: str
) -> None:
    lines = text.splitlines(keepends=True)
    half = lines[-1][: len(lines[-1]) // 2]
    result = convert_trace(written(tmp_path / "growing", text + half))
    assert len(result.trace) == 2
    assert result.notes == [f"left out 1 line that is cut short or damaged, line {len(lines) + 1}"]
    for damaged in (text + half + "\n", lines[0] + half + "\n" + lines[-1]):
        with pytest.raises(InputError, match=f"line ({len(lines) + 1}|2):"):
            convert_trace(written(tmp_path / "damaged", damaged))


def test_a_whole_last_line_needs_no_line_end_and_a_file_of_half_a_line_is_refused(tmp_path: Path) -> None:
    result = convert_trace(written(tmp_path / "m.jsonl", mooncake_line(0, []).rstrip()))
    assert (len(result.trace), result.notes) == (1, [])
    with pytest.raises(InputError, match="line 1: not JSON"):
        convert_trace(written(tmp_path / "m.jsonl", mooncake_line(0, [])[:-9]))


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_half_lines_of_killed_processes_are_left_out_alone_and_counted(tmp_path: Path, prefix: str) -> None:
    """Cut off and followed by a line's end, or by what the next process has written; before the event's name, too."""
    listening, request, other, refused = ROUTER.splitlines(keepends=True)
    lines = [listening, request[:100] + "\n", request, other[:20] + "\n", request[:90] + other, refused, other]
    result = convert_trace(written(tmp_path / "router.log", "".join(prefix + line for line in lines)))
    assert result.trace.prompt_tokens.tolist() == [400, 900] and result.damaged == (2, 4, 5)
    assert result.notes[-1] == "left out 3 lines that are cut short or damaged, the first of them line 2"


def test_a_line_that_is_cut_inside_a_character_is_a_half_line(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_bytes(ROUTER.encode() + '{"time": "2026", "event": "\u00e9'.encode()[:-1] + b"\n" + ROUTER.encode())
    assert (convert_trace(log).damaged, len(load_trace(str(log)))) == ((5,), 4)


def test_a_log_of_which_most_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """As a log is whose lines are all cut at a width."""
    cut = "".join(line[:70] + "\n" for line in ROUTER.splitlines())
    with pytest.raises(InputError, match="4 of 4 lines of this router cannot be read; the first is line 1: not JSON"):
        convert_trace(written(tmp_path / "router.log", cut), TraceFormat.ROUTER)


def test_this_routers_plain_log_is_refused_as_such(tmp_path: Path) -> None:
    text = "20:40:45.123 INFO    listening port=8000\n20:40:46.123 INFO    request id=a prompt_tokens=5 tokens=7\n"
    log = written(tmp_path / "router.log", text)
    for read in (convert_trace, load_trace):
        with pytest.raises(
            InputError, match="plain-text log, which has no dates; run the router with log.format: json"
        ):
            read(str(log))


def test_a_request_line_without_a_field_is_named(tmp_path: Path) -> None:
    text = '{"event": "request", "time": "2026-01-01T00:00:00+00:00"}\n'
    with pytest.raises(InputError, match="line 1: no field 'duration_s'"):
        convert_trace(written(tmp_path / "r.log", text))


NAMED = "(APIServer pid=7) {level} {stamp} [request_logger.py:60] {text}\n"


def vllm_log(*lines: tuple[str, str]) -> str:
    """(stamp, text) of each line, after a server's banner."""
    banner = "\n".join(["  vLLM banner", "model loaded"]) + "\n"
    return banner + "".join(NAMED.format(level="INFO", stamp=stamp, text=text) for stamp, text in lines)


def test_vllms_log_of_token_ids_is_counted_exactly(tmp_path: Path) -> None:
    text = vllm_log(
        ("12-31 23:59:58", "Request chatcmpl-a details: prompt: 'x, y', prompt_token_ids: [1, 2, 3], shape: None."),
        (
            "12-31 23:59:58",
            "Received request chatcmpl-a: params: SamplingParams(n=1, max_tokens=64), lora_request: None.",
        ),
        ("12-31 23:59:58", "Request chatcmpl-a details: prompt: 'x, y', prompt_token_ids: [1, 2, 3], shape: None."),
        ("12-31 23:59:59", "Generated response chatcmpl-a (streaming delta) details: output_token_ids: [5, 6]"),
        ("12-31 23:59:59", "Generated response chatcmpl-a (streaming delta): output: 'it is', finish_reason: None"),
        ("01-01 00:00:00", "Generated response chatcmpl-a (streaming delta) details: output_token_ids: [7]"),
        ("01-01 00:00:00", "Generated response chatcmpl-a (streaming complete): output: 'it is so', finish_reason: x"),
        # the older form, all in one line, and numbered choices
        (
            "01-01 00:00:03",
            "Received request cmpl-b-0: prompt: 'it\\'s', params: SamplingParams(max_tokens=9), "
            "prompt_token_ids: [4, 5], prompt_embeds shape: None, lora_request: None.",
        ),
        (
            "01-01 00:00:04",
            "Generated response cmpl-b: output: 'ok', output_token_ids: [8, 9, 9, 9], finish_reason: stop",
        ),
    )
    result = convert_trace(written(tmp_path / "vllm.log", text))
    assert (result.format, result.estimated) == (TraceFormat.VLLM, 0)
    assert result.trace.arrival_s.tolist() == [0.0, 5.0], "a year has passed in between, not minus one"
    assert result.trace.prompt_tokens.tolist() == [3, 2]
    assert result.trace.output_tokens.tolist() == [3, 4]


ACCESSES = 'INFO:     10.0.0.9:4711 - "GET /health HTTP/1.1" 200 OK\n(APIServer pid=7) INFO:     accepted\n' * 5000


def test_a_log_is_recognised_however_many_lines_of_others_it_begins_with(tmp_path: Path) -> None:
    received = "Received request cmpl-a-0: prompt: 'abcd', params: SamplingParams(max_tokens=9), lora_request: None."
    result = convert_trace(written(tmp_path / "vllm.log", ACCESSES + vllm_log(("01-01 00:00:03", received))))
    assert (result.format, len(result.trace)) == (TraceFormat.VLLM, 1)
    assert convert_trace(written(tmp_path / "router.log", ACCESSES + ROUTER)).format is TraceFormat.ROUTER


def test_lengths_that_vllms_log_does_not_have_are_estimated_and_reported(tmp_path: Path) -> None:
    text = vllm_log(
        ("01-01 00:00:00", f"Received request a: prompt: '{'word' * 50}', params: SamplingParams(max_tokens=16)."),
        ("01-01 00:00:01", f"Received request b: prompt: '{'word' * 10}', params: SamplingParams(max_tokens=99)."),
        (
            "01-01 00:00:02",
            f"Generated response b: output: '{'word' * 7}', output_token_ids: None, finish_reason: stop",
        ),
        ("01-01 00:00:02", "Received request c: prompt: 'x', params: SamplingParams(max_tokens=99)."),
        ("01-01 00:00:03", "Generated response c: output: '', output_token_ids: None, finish_reason: abort"),
    )
    result = convert_trace(written(tmp_path / "vllm.log", text))
    assert result.trace.prompt_tokens.tolist() == [50, 10]
    assert result.trace.output_tokens.tolist() == [16, 7]
    assert (result.estimated, result.unanswered, result.without_output) == (2, 1, 1)
    assert "took max_tokens as the answers of 1 requests" in result.notes[2]


@pytest.mark.parametrize(
    "quoted",
    [
        "Received request zz: prompt: 'foo', prompt_token_ids: [1, 2, 3, 4, 5]",
        "Request a details: prompt: 'x', prompt_token_ids: [1]",
        "Generated response a: output: 'x', output_token_ids: [1, 2, 3]",
        "INFO 01-01 09:00:00 [logger.py:1] Received request zz: prompt: 'foo', prompt_token_ids: [1]",
        ", prompt_token_ids: [1], output_token_ids: [1], max_tokens=1, <streaming_complete: 9 tokens>",
    ],
)
def test_text_in_a_prompt_or_an_answer_is_not_read_as_a_log_line(tmp_path: Path, quoted: str) -> None:
    text = vllm_log(
        ("01-01 00:00:00", f"Request a:7 details: prompt: {quoted!r}, prompt_token_ids: [1, 2, 3], shape: None."),
        ("01-01 00:00:00", "Received request a:7: params: SamplingParams(n=1, max_tokens=16), lora_request: None."),
        (
            "01-01 00:00:01",
            f"Generated response a:7: output: {quoted!r}, output_token_ids: [4, 5], finish_reason: stop",
        ),
        ("01-01 00:00:02", f"Received request b: prompt: {quoted!r}, params: x, prompt_token_ids: [1, 2, 3, 4]"),
        ("01-01 00:00:03", "Generated response b (streaming delta) details: output_token_ids: [7]"),
        ("01-01 00:00:03", f"Generated response b (streaming complete): output: {quoted!r}, finish_reason: stop"),
        ("01-01 00:00:04", f"Error in {quoted}"),
    )
    trace = convert_trace(written(tmp_path / "vllm.log", text)).trace
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert trace.prompt_tokens.tolist() == [3, 4] and trace.output_tokens.tolist() == [2, 1]


def test_half_an_answer_at_the_end_of_vllms_log_does_not_count_as_all_of_it(tmp_path: Path) -> None:
    text = vllm_log(
        ("01-01 00:00:00", "Received request a: prompt: 'x', params: SamplingParams(max_tokens=64)"),
        ("01-01 00:00:01", "Generated response a: output: 'ok', output_token_ids: [8, 9, 9, 9], finish_reason: stop"),
    )
    result = convert_trace(written(tmp_path / "vllm.log", text[: text.index(", 9]")]))
    assert result.trace.output_tokens.tolist() == [64], "as of any request whose answer is not logged yet"
    assert result.notes[-1] == "left out 1 line that is cut short or damaged, line 4"


def test_requests_that_use_an_id_again_are_requests_of_their_own(tmp_path: Path) -> None:
    """Two runs of `vllm bench serve` against one server."""
    text = vllm_log(
        ("01-01 00:00:00", "Request a details: prompt: 'x', prompt_token_ids: [1, 2, 3], shape: None."),
        ("01-01 00:00:00", "Received request a: params: SamplingParams(max_tokens=9), lora_request: None."),
        ("01-01 00:00:02", "Generated response a: output: 'ok', output_token_ids: [8, 9], finish_reason: stop"),
        ("01-01 00:00:07", "Request a details: prompt: 'x', prompt_token_ids: [1, 2], shape: None."),
        ("01-01 00:00:07", "Received request a: params: SamplingParams(max_tokens=9), lora_request: None."),
        ("01-01 00:00:09", "Generated response a: output: 'ok', output_token_ids: [8, 9, 9], finish_reason: stop"),
    )
    trace = convert_trace(written(tmp_path / "vllm.log", text)).trace
    assert trace.arrival_s.tolist() == [0.0, 7.0]
    assert trace.prompt_tokens.tolist() == [3, 2] and trace.output_tokens.tolist() == [2, 3]


def test_requests_whose_prompts_vllm_did_not_log_are_counted_as_that(tmp_path: Path) -> None:
    """The level became DEBUG with a restart in between."""
    text = vllm_log(
        ("01-01 00:00:00", "Received request a: params: SamplingParams(max_tokens=9), lora_request: None."),
        ("01-01 00:00:02", "Generated response a: output: 'ok', output_token_ids: [8, 9], finish_reason: stop"),
        ("01-01 00:00:07", "Request b details: prompt: 'x', prompt_token_ids: [1, 2], shape: None."),
        ("01-01 00:00:07", "Received request b: params: SamplingParams(max_tokens=9), lora_request: None."),
        ("01-01 00:00:09", "Generated response b: output: 'ok', output_token_ids: [8, 9, 9], finish_reason: stop"),
    )
    result = convert_trace(written(tmp_path / "vllm.log", text))
    assert result.trace.prompt_tokens.tolist() == [2]
    assert result.notes == ["left out 1 requests whose prompts are not in the log"]


def test_vllms_log_is_read_in_colour(tmp_path: Path) -> None:
    """As a terminal or `VLLM_LOGGING_COLOR=1` has it."""
    text = "Received request a: prompt: 'x', params: SamplingParams(max_tokens=16)"
    stamp = "\x1b[32mINFO\x1b[0m \x1b[90m01-01 00:00:00\x1b[0m \x1b[90m[logger.py:1]\x1b[0m"
    log = written(tmp_path / "vllm.log", f"\x1b[0;36m(APIServer pid=7)\x1b[0;0m {stamp} {text}\n")
    assert len(convert_trace(log).trace) == 1


def test_concatenated_vllm_logs_of_several_servers_share_their_years(tmp_path: Path) -> None:
    def of_server(name: str) -> str:
        asked = "Received request {}: prompt: 'x', params: SamplingParams(max_tokens=16)"
        stamps = ("12-31 23:59:58", "01-01 00:00:01")
        return vllm_log(*((stamp, asked.format(f"{name}{stamp[:2]}")) for stamp in stamps))

    result = convert_trace(written(tmp_path / "vllm.log", of_server("a") + of_server("b")))
    assert result.trace.arrival_s.tolist() == [0.0, 0.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("stamps", "arrivals"),
    [
        (("02-28 23:59:59", "03-01 00:00:00"), [0.0, 1.0]),
        (("02-28 23:59:59", "02-29 00:00:00", "03-01 00:00:00"), [0.0, 1.0, 86401.0]),
        (("12-31 23:59:59", "01-01 00:00:00", "02-29 00:00:00"), [0.0, 1.0, 59 * 86400.0 + 1]),
    ],
)
def test_february_has_29_days_in_a_log_that_has_a_29th(
    stamps: tuple[str, ...], arrivals: list[float], tmp_path: Path
) -> None:
    asked = "Received request {}: prompt: 'x', params: SamplingParams(max_tokens=16)"
    text = vllm_log(*((stamp, asked.format(stamp[:5])) for stamp in stamps))
    assert convert_trace(written(tmp_path / "vllm.log", text)).trace.arrival_s.tolist() == arrivals


@pytest.mark.parametrize("before", ["", "2026-01-01T00:00:00.1Z stdout F ", "vllm-0  | "])
def test_vllms_json_log_equals_its_text_log(tmp_path: Path, before: str) -> None:
    """As `--logging-config.formatter json` has it."""
    lines = [
        (
            "DEBUG",
            "Request a-0 details: prompt: 'it \"is\"\\\\n', prompt_token_ids: [1, 2, 3], prompt_embeds shape: None.",
        ),
        ("INFO", "Received request a-0: params: SamplingParams(n=1, max_tokens=64), lora_request: None."),
        ("DEBUG", "Generated response a-0 details: output_token_ids: [5, 6]"),
        ("INFO", "Generated response a-0: output: 'it', finish_reason: stop"),
    ]
    logged = {
        "asctime": "2026-01-01 00:00:00,955",
        "name": "vllm.entrypoints.x",
        "processName": "APIServer",
        "process": 7,
    }
    texts = [json.dumps({**logged, "levelname": level, "message": message}) for level, message in lines]
    log = written(tmp_path / "vllm.log", "\n".join(before + text for text in ["banner", *texts, texts[0][:-30]]))
    result = convert_trace(log)
    assert (result.format, result.estimated) == (TraceFormat.VLLM, 0)
    assert (result.trace.prompt_tokens.tolist(), result.trace.output_tokens.tolist()) == ([3], [2])


def test_the_prefix_of_old_vllm_versions_has_one_bracket(tmp_path: Path) -> None:
    text = "INFO 01-01 00:00:00 logger.py:36] Received request a: prompt: 'x', params: SamplingParams(max_tokens=16)\n"
    assert len(convert_trace(written(tmp_path / "vllm.log", text)).trace) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("INFO 01-01 00:00:00 [a.py:1] started\n", "no line 'Received request'"),
        ("INFO 01-01 00:00:00 [a.py:1] Received request a: params: SamplingParams(max_tokens=9)\n", "no prompt of any"),
        ("INFO 13-41 00:00:00 [a.py:1] Received request a: params\n", "line 1: '13-41 00:00:00' is no date"),
    ],
    ids=["no requests", "no prompts", "no date"],
)
def test_a_vllm_log_with_too_little_information_is_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        convert_trace(written(tmp_path / "vllm.log", text))


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n2023-11-16 18:15:46,374,44,1\n"
    with pytest.raises(InputError, match="line 1: more than one column ContextTokens"):
        convert_trace(written(tmp_path / "a.csv", text))


def test_arrivals_so_far_apart_that_steps_are_lost_in_rounding_are_refused(tmp_path: Path) -> None:
    text = mooncake_line(0, [1]) + mooncake_line(10**15, [1])
    with pytest.raises(InputError, match=r"arrivals are up to 1e\+12 s apart"):
        convert_trace(written(tmp_path / "m.jsonl", text))


@contextmanager
def piped(data: bytes) -> Iterator[str]:
    """The name of a pipe that somebody writes to."""
    reading, writing = os.pipe()

    def feed() -> None:
        with suppress(BrokenPipeError), open(writing, "wb") as pipe:
            pipe.write(data)

    writer = threading.Thread(target=feed, daemon=True)  # which waits for ever where not all is read
    writer.start()
    try:
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)
        writer.join(5)


def long_router_log(n: int) -> str:
    return "".join(
        f'{{"time": "2026-01-01T00:00:{i % 60:02d}+00:00", "event": "request", "duration_s": 0, '
        f'"prompt_tokens": 900, "tokens": 31}}\n'
        for i in range(n)
    )


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress], ids=["plain", "gz", "xz"])
def test_a_log_through_a_pipe_is_read_completely(compress: Callable[[bytes], bytes]) -> None:
    log = compress(long_router_log(3000).encode())
    with piped(log) as name:
        assert len(convert_trace(name).trace) == 3000
    with piped(log) as name:
        assert len(load_trace(name)) == 3000


def test_a_trace_through_a_pipe_is_read_completely() -> None:
    text = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},100,10\n" for i in range(20_000))
    with piped(text.encode()) as name:
        assert len(load_trace(name)) == 20_000


def test_a_pipe_with_more_data_than_the_limit_is_refused_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_PIPED_BYTES", 2**20)
    text = "arrival_s,prompt_tokens,output_tokens\n" + "0,100,10\n" * 2**18
    with piped(text.encode()) as name, pytest.raises(InputError, match="more than 1 MiB through a pipe"):
        load_trace(name)


def test_a_pipe_is_refused_where_several_processes_would_read_it() -> None:
    with piped(b"") as name, pytest.raises(InputError, match="is a pipe, which cannot be read again"):
        source.check_read_again(name)
