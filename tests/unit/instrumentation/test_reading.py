"""What is read out of step logs."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from balanceroute.cli.steps import steps
from balanceroute.errors import InputError
from balanceroute.instrumentation.reading import Group, Summary, read, summarise
from balanceroute.instrumentation.step_fit import Fit
from balanceroute.instrumentation.step_log import COLUMNS
from balanceroute.instrumentation.text import configuration, text_of
from tests.commands import run_command

HEADER = ",".join(COLUMNS) + "\n"


def a_log(path: Path, loads: list[int], *, start_s: float = 1e9) -> Path:
    """One step per load, 0.002 ms per token and 15 ms besides."""
    lines = [
        f"{start_s + 0.05 * (i + 1):.6f},{15 + 0.002 * load},{1 if load else 0},{load},0,0.5\n"
        for i, load in enumerate(loads)
    ]
    path.write_text(HEADER + "".join(lines))
    return path


def test_the_fit_finds_the_cost_of_a_token_and_of_a_step(tmp_path: Path) -> None:
    fit = summarise([a_log(tmp_path / "a", [1000, 5000, 9000, 20_000])]).ranks[0].fit
    assert fit is not None
    assert (fit.a_us_per_token, fit.b_ms, fit.r2, fit.steps) == pytest.approx((2.0, 15.0, 1.0, 4), rel=1e-6)


def test_steps_without_a_request_are_no_part_of_the_fit(tmp_path: Path) -> None:
    path = a_log(tmp_path / "a", [1000, 5000, 9000])
    path.write_text(path.read_text() + "1000000001.0,500.0,0,0,0,0.0\n")
    fit = summarise([path]).ranks[0].fit
    assert fit is not None and fit.a_us_per_token == pytest.approx(2.0) and fit.steps == 3


def test_steps_that_a_request_has_joined_are_no_part_of_the_fit(tmp_path: Path) -> None:
    path = a_log(tmp_path / "a", [1000, 5000, 9000])
    path.write_text(path.read_text() + "1000000001.0,900.0,2,9100,0,0.5\n1000000001.1,33.4,2,9200,0,0.5\n")
    fit = summarise([path]).ranks[0].fit
    assert fit is not None and fit.a_us_per_token == pytest.approx(2.0) and fit.steps == 4


def test_the_spread_is_largest_minus_smallest_load_at_the_same_time(tmp_path: Path) -> None:
    files = [a_log(tmp_path / "a", [1000] * 10), a_log(tmp_path / "b", [400] * 10, start_s=1e9 + 0.001)]
    summary = summarise(files)
    assert summary.load_spread_mean == pytest.approx(600) and summary.load_spread_p99 == pytest.approx(600)
    assert summary.load_spread_of_mean_ratio == pytest.approx(600 / 700)


def test_ranks_of_a_barrier_that_end_a_step_not_quite_at_once_are_compared_in_the_same_step(tmp_path: Path) -> None:
    loads = np.random.default_rng(1).integers(1000, 9000, 60).tolist()
    files = [a_log(tmp_path / name, loads, start_s=1e9 + at) for name, at in (("a", 0.0), ("b", 0.0004))]
    summary = summarise(files)
    assert (summary.load_spread_mean, summary.load_spread_p99) == (0.0, 0.0)
    assert summary.envelope_fit is not None
    assert (summary.envelope_fit.a_us_per_token, summary.envelope_fit.r2) == pytest.approx((2.0, 1.0), rel=1e-6)


def test_only_the_time_that_all_files_cover_is_compared(tmp_path: Path) -> None:
    early = a_log(tmp_path / "a", [9000] * 40 + [100] * 40)
    late = a_log(tmp_path / "b", [100] * 40, start_s=1e9 + 2.0)
    assert summarise([early, late]).load_spread_mean == pytest.approx(0, abs=1)


def test_the_barrier_s_cost_follows_the_largest_load(tmp_path: Path) -> None:
    heavy = [1000, 6000, 3000, 9000, 2000]
    a = a_log(tmp_path / "a", heavy)
    b = a_log(tmp_path / "b", [500] * 5)
    costs = [float(line.split(",")[1]) for line in a.read_text().splitlines()[1:]]
    lines = b.read_text().splitlines()
    b.write_text(
        "\n".join(
            [lines[0]]
            + [",".join([r.split(",")[0], str(c), *r.split(",")[2:]]) for r, c in zip(lines[1:], costs, strict=True)]
        )
        + "\n"
    )
    fit = summarise([a, b]).envelope_fit
    assert fit is not None and fit.a_us_per_token == pytest.approx(2.0) and fit.r2 == pytest.approx(1.0)


def test_files_that_do_not_overlap_have_no_spread(tmp_path: Path) -> None:
    summary = summarise([a_log(tmp_path / "a", [1] * 3), a_log(tmp_path / "b", [1] * 3, start_s=2e9)])
    assert summary.load_spread_mean is None and summary.envelope_fit is None


def test_an_engine_that_never_stepped_is_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(HEADER)
    assert summarise([path]).ranks[0].steps == 0


def test_a_byte_order_mark_and_line_ends_of_windows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    text = "\r\n".join([",".join(COLUMNS), "10,25,1,100,0,0.5", "11,26,1,101,0,0.5", ""])
    path.write_text(text, encoding="utf-8-sig", newline="")
    assert read(path).tolist() == [[10, 25, 1, 100, 0, 0.5], [11, 26, 1, 101, 0, 0.5]]


def test_a_compressed_file_is_read_and_one_that_is_cut_short_or_not_compressed_is_named(tmp_path: Path) -> None:
    plain, path = a_log(tmp_path / "a.csv", [1, 2, 3]), tmp_path / "a.csv.gz"
    data = gzip.compress(plain.read_bytes())
    path.write_bytes(data)
    assert read(path).tolist() == read(plain).tolist()
    for broken in (data[:-12], data[:20] + b"\xff" + data[21:], plain.read_bytes()):
        path.write_bytes(broken)
        with pytest.raises(InputError, match="a.csv.gz: cannot be read: (?!None)."):
            read(path)


def test_half_a_last_line_is_forgiven_and_half_a_line_before_it_is_not(tmp_path: Path) -> None:
    path = a_log(tmp_path / "a", [1, 2, 3])
    path.write_text(path.read_text() + "10000")
    assert len(read(path)) == 3
    path.write_text(path.read_text() + "\n1e9,1,1,1,0,0\n")
    with pytest.raises(InputError, match="line 5"):
        read(path)


@pytest.mark.parametrize(
    "line",
    ['1e9,"1,1,1,0,0', f"1e9,{'9' * 200_000},1,1,0,0", '1e9,"' + "9" * 200_000, "1e9,1,-1,1,0,0", "1e9,1e300,1,1,0,0"],
    ids=["quote", "field of many digits", "quote of many digits", "negative", "too large"],
)
def test_a_line_that_is_not_of_a_step_log_is_named_and_hides_no_other(tmp_path: Path, line: str) -> None:
    path = a_log(tmp_path / "a", [1, 2, 3])
    path.write_text(path.read_text() + line)
    assert len(read(path)) == 3, "forgiven as the last one"
    path.write_text(path.read_text() + "\n" + "1e9,1,1,1,0,0\n" * 500)
    with pytest.raises(InputError, match="line 5: expected 6 numbers"):
        read(path)


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [a_log(tmp_path / name, [1000, 2000, 4000]) for name in ("a.csv", "b.csv")]
    steps(files)
    text = capsys.readouterr().out
    assert "load spread (max - min): mean 0 tokens" in text
    assert "step = 2.0000 us * L + 15.000 ms" in text
    steps(files, json=True)
    assert json.loads(capsys.readouterr().out)["ranks"][1]["file"] == "b.csv"


@pytest.mark.parametrize("content", [None, "a,b\n1,2\n"])
def test_a_file_that_is_not_a_step_log_is_reported_in_one_line_with_exit_code_2(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_text(content)
    code, _, err = run_command(capsys, monkeypatch, "steps", str(path))
    assert code == 2 and err.startswith(f"balanceroute: {path}: ") and err.count("\n") == 1


def engines(
    folder: Path,
    ranks: int,
    *,
    barrier: bool,
    slowdowns: tuple[float, ...] = (),
    us_per_token: float = 0.12,
    noise: float = 0.02,
    name: str = "steps",
) -> list[Path]:
    """Decode ranks with requests that come and go, as the plugin writes them; each rank's own steps, or one barrier."""
    rng = np.random.default_rng(ranks)
    slowdowns = slowdowns or (1.0,) * ranks
    held: list[list[list[int]]] = [[] for _ in range(ranks)]
    now = np.full(ranks, 1e9) if barrier else 1e9 + rng.random(ranks)
    lines = [[HEADER] for _ in range(ranks)]
    for step in range(1200):
        for g, requests in enumerate(held):
            room = 25 + 15 * np.sin(step / 90 + 2 * g) - len(requests)
            requests += [[int(rng.lognormal(7.5, 1)), 1 + int(rng.exponential(150))] for _ in range(int(room))]
        loads = [(sum(kv for kv, _ in requests), len(requests)) for requests in held]
        ms = np.array(
            [s * us_per_token / 1e3 * (kv + 2000.0 * n) + 25 for s, (kv, n) in zip(slowdowns, loads, strict=True)]
        )
        ms = (np.full(ranks, ms.max()) if barrier else ms) * (1 + noise * rng.standard_normal(1 if barrier else ranks))
        now = now + ms / 1e3
        for g, (kv, n) in enumerate(loads):
            lines[g].append(f"{now[g]:.6f},{ms[g]:.4f},{n},{kv},0,0.5\n")
            held[g] = [[tokens + 1, left - 1] for tokens, left in held[g] if left > 1]
    files = [folder / f"{name}-dp{g}-7.csv" for g in range(ranks)]
    for file, text in zip(files, lines, strict=True):
        file.write_text("".join(text))
    return files


def a_prefiller(path: Path, us_per_token: float = 50.0) -> Path:
    """One prompt per step."""
    rng = np.random.default_rng(1)
    lines, now = [HEADER], 1e9
    for tokens in rng.lognormal(8, 1, 200).astype(int):
        ms = 5 + us_per_token / 1e3 * tokens
        now += ms / 1e3
        lines.append(f"{now:.6f},{ms:.4f},1,{tokens},0,0.1\n")
    path.write_text("".join(lines))
    return path


def test_behind_a_barrier_the_fit_finds_the_cost_of_a_request_too(tmp_path: Path) -> None:
    (group,) = summarise(engines(tmp_path, 4, barrier=True)).groups
    assert len(group.files) == 4 and group.fit is not None and group.fit.doubt is None
    assert group.fit.a_us_per_token == pytest.approx(0.12, rel=0.05)
    assert group.fit.c_tokens == pytest.approx(2000, rel=0.1)
    assert group.fit.b_ms == pytest.approx(25, rel=0.05)
    assert group.slowdown is None, "all wait for the slowest"


def test_servers_that_step_independently_are_distinguished_and_have_slowdowns(tmp_path: Path) -> None:
    summary = summarise(engines(tmp_path, 3, barrier=False, slowdowns=(1.0, 1.3, 1.0)))
    assert [len(group.files) for group in summary.groups] == [1, 1, 1]
    assert [group.slowdown for group in summary.groups] == pytest.approx([1.0, 1.3, 1.0], abs=0.05)
    assert summary.load_spread_mean is None, "no barrier, no spread"
    assert summary.request_tokens == pytest.approx(2000, rel=0.1)


def test_a_rank_that_alone_explains_the_steps_of_its_barrier_is_named_as_slower(tmp_path: Path) -> None:
    summary = summarise(engines(tmp_path, 4, barrier=True, slowdowns=(1.0, 1.0, 1.0, 1.5)))
    (group,) = summary.groups
    assert group.fit is not None and group.fit.doubt is not None
    assert group.files[3] in group.fit.doubt and "slower" in group.fit.doubt
    assert summary.request_tokens is None


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 29])
def test_a_file_with_too_few_steps_is_no_server_of_its_own_and_hides_nothing_of_the_others(
    tmp_path: Path, steps: int
) -> None:
    files = engines(tmp_path, 3, barrier=True)
    whole = summarise(files[:2])
    files[2].write_text("".join(files[2].read_text().splitlines(keepends=True)[: 1 + steps]))
    summary = summarise(files)
    assert summary.groups == whole.groups and summary.load_spread_mean == whole.load_spread_mean
    assert [rank.too_few for rank in summary.ranks] == [False, False, True]
    assert text_of(summary).count("too few steps: left out") == 1


def test_two_ranks_of_one_number_are_two_servers(tmp_path: Path) -> None:
    one, two = tmp_path / "steps-dp0-1.csv", tmp_path / "steps-dp0-2.csv"
    assert len(summarise([a_log(one, [1000, 2000, 4000]), a_log(two, [1000, 2000, 4000])]).groups) == 2


def test_two_groups_beside_each_other_are_two_groups(tmp_path: Path) -> None:
    first = engines(tmp_path, 3, barrier=True)
    second = engines(tmp_path, 2, barrier=True, name="other")
    found = summarise([second[0], *first, second[1]]).groups
    assert sorted(len(group.files) for group in found) == [2, 3]
    assert all(len({file.split("-")[0] for file in group.files}) == 1 for group in found)


def test_a_file_that_is_given_twice_is_no_second_server(tmp_path: Path) -> None:
    (file,) = engines(tmp_path, 1, barrier=False)
    (tmp_path / "link").symlink_to(file)
    for twice in ([file, file], [file, tmp_path / "." / file.name], [file, tmp_path / "link"]):
        with pytest.raises(InputError, match="is given twice; accepted is one file per DP rank"):
            steps(twice)


def test_a_link_that_leads_to_itself_is_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(InputError, match="link: .*symbolic links"):
        steps([link, link.with_name("other")])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fit_to_a_step_with_negative_cost_is_reported_as_meaningless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    files = engines(tmp_path, ranks, barrier=True)
    rewritten(
        files[0], lambda lines: [re.sub(",", ",-", line, count=1) if n == 700 else line for n, line in enumerate(lines)]
    )
    steps(files, json=False)
    text = capsys.readouterr().out
    assert "this fit means nothing: 1 of the steps cost less than 0 ms" in text
    assert "to replay with" not in text


def test_a_fit_to_noise_is_reported_as_meaningless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = engines(tmp_path, 1, barrier=False, us_per_token=0.0, noise=0.3)
    steps(files)
    text = capsys.readouterr().out
    assert "this fit means nothing" in text and "no fit means anything" in text
    assert summarise(files).request_tokens is None


@pytest.mark.parametrize("us_per_token", [50.0, 3.0], ids=["slow", "fast"])
def test_a_prefiller_is_left_out_whatever_its_name(tmp_path: Path, us_per_token: float) -> None:
    decoders = engines(tmp_path, 2, barrier=True)
    summary = summarise([*decoders, a_prefiller(tmp_path / "steps-dp0-9.csv", us_per_token)])
    assert [rank.prefiller for rank in summary.ranks] == [False, False, True]
    assert [len(group.files) for group in summary.groups] == [2]
    named = a_log(tmp_path / "steps-prefill-dp0-1.csv", [1000, 2000])
    assert summarise([named]).groups == []


def rewritten(path: Path, change: Callable[[list[str]], list[str]]) -> Path:
    """The same file with its lines below the header changed."""
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *change(lines)]) + "\n")
    return path


def moved(lines: list[str], by_s: float) -> list[str]:
    """The same steps by another clock."""
    parts = [line.partition(",") for line in lines]
    return [f"{float(time) + by_s:.6f},{rest}" for time, _, rest in parts]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda lines: [*lines[:600], *moved(lines[600:], -300.0)], "times go back 1 time, as where a clock is set"),
        (lambda lines: lines[::-1], "times go back 1,199 times: sorted by time"),
    ],
    ids=["clock set back", "newest first"],
)
def test_steps_with_decreasing_times_are_read_and_reported(
    tmp_path: Path, change: Callable[[list[str]], list[str]], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = engines(tmp_path, 1, barrier=False)
    expected = summarise([file]).groups[0].fit
    summary = summarise([rewritten(file, change)])
    found = summary.groups[0].fit
    assert expected is not None and found is not None and found.doubt is None
    assert found.a_us_per_token == pytest.approx(expected.a_us_per_token, rel=0.01)
    steps([file])
    assert f"{file.name}: {note}" in capsys.readouterr().out


@pytest.mark.parametrize("by_s", [0.5, -3600.0])
def test_ranks_of_one_barrier_are_found_by_their_costs_where_their_clocks_differ(tmp_path: Path, by_s: float) -> None:
    files = engines(tmp_path, 3, barrier=True)
    together = summarise(files)
    rewritten(files[1], lambda lines: moved(lines[7:], by_s))
    summary = summarise(files)
    assert [len(group.files) for group in summary.groups] == [3]
    assert summary.load_spread_mean == pytest.approx(together.load_spread_mean, rel=0.05)
    assert len(summary.notes) == 1 and f"{by_s:+.3f} s apart: one barrier, by two clocks" in summary.notes[0]


def test_a_rank_by_another_clock_that_shares_no_time_with_some_rank_of_the_barrier_stands_alone(tmp_path: Path) -> None:
    files = engines(tmp_path, 3, barrier=True)
    rewritten(files[1], lambda lines: lines[:200])
    rewritten(files[2], lambda lines: moved(lines[600:], 3600.0))
    assert [group.files for group in summarise(files).groups] == [(files[0].name, files[1].name), (files[2].name,)]


def test_the_command_line_prints_what_to_configure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps(engines(tmp_path, 2, barrier=True), json=False)
    text = capsys.readouterr().out
    assert "request_tokens: " in text and "--step-cost 1.2" in text and "# slowdown: 1 for all" in text
    with pytest.raises(InputError, match="/proc/self/mem: cannot be read"):  # it opens, and no byte can be read
        steps([Path("/proc/self/mem")], json=False)
    with pytest.raises(InputError, match="nothing.csv: cannot be read"):
        steps([tmp_path / "nothing.csv"])


def test_the_line_for_replay_has_the_slowdowns_and_the_cost_that_they_multiply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps(engines(tmp_path, 2, barrier=False, slowdowns=(1.0, 1.5)), json=False)
    options = dict(re.findall(r"--([a-z-]+) (\S+)", capsys.readouterr().out))
    costs = [float(options["step-cost"]) * float(each) for each in options["slowdowns"].split(",")]
    assert costs == pytest.approx([1.2e-7, 1.8e-7], rel=0.05)
    assert (options["workers"], options["barrier-groups"]) == ("2", "2"), "neither waits for the other"


@pytest.mark.parametrize(
    ("sizes", "configured", "replayed", "stated"),
    [
        ((1, 1), "shared_barrier: false", "--workers 2 --barrier-groups 2", False),
        ((2, 2), "# c, d: {slowdown: 1, barrier_group: group2}", "--workers 4 --barrier-groups 2", False),
        ((3, 1), "# d: {slowdown: 1, barrier_group: group2}", "--workers 4 --barrier-groups 2", True),
    ],
    ids=["each alone", "two barriers", "unequal"],
)
def test_the_barrier_groups_are_in_the_configuration_and_in_the_line_for_replay(
    sizes: tuple[int, int], configured: str, replayed: str, stated: bool
) -> None:
    files = ("abcd"[: sizes[0]], "abcd"[sizes[0] : sum(sizes)])
    fit = Fit(0.1, 20.0, 0.9, 500)
    text = "\n".join(
        configuration(Summary([], [Group(tuple(names), 1.0, None, None, None, fit, 1.0) for names in files], 1.0))
    )
    assert configured in text and replayed in text and "--slowdowns" not in text
    assert ("as equal in size as can be" in text) == stated


def test_a_cost_below_zero_of_an_empty_step_is_doubted_or_printed_as_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_log(tmp_path / "a", [10_000 + 100 * (step % 97) for step in range(500)])
    bent = rewritten(path, lambda lines: [line.replace(f",{cost}", f",{cost - 20:.4f}") for line, cost in costs(lines)])
    steps([bent])
    text = capsys.readouterr().out
    assert "this fit means nothing: an empty step would take -5.000 ms" in text and "to replay with" not in text
    fits = [Fit(0.1, -0.2, 0.9, 500)]
    summary = Summary([], [Group(("a",), 1.0, None, None, None, fit) for fit in fits], 1.0)
    text = "\n".join(configuration(summary))
    assert "--step-overhead 0 " in text and "-0.200 ms is 0 within its error" in text


def costs(lines: list[str]) -> list[tuple[str, float]]:
    """Each line with its cost."""
    return [(line, float(line.split(",")[1])) for line in lines]
