"""The journal: a recorded run runs again to the same answers (INV-6), and a damaged file is refused with the line."""

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from balanceroute import __version__
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec
from balanceroute.errors import ConfigError, InputError, InvariantError
from balanceroute.journal import RecordingScheduler, rerun
from balanceroute.proxy.processes import begin_anew
from tests.commands import run_command

SETTINGS = PolicySettings(policy="br_h", horizon_steps=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def record(path: Path) -> list[dict[str, Any]]:
    """A short run; the entries it leaves."""
    scheduler = RecordingScheduler(SETTINGS, SchedulerConfig(pool_ttl_s=5.0), path)
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=2), 0.0)
    for index, name in enumerate("abc"):
        scheduler.submit(RequestSpec(name, 100 + index), 1.0)
    scheduler.dispatch(1.0)
    for name in "abc":
        scheduler.prefilled(name, 120, 1.5, 3.25)
    scheduler.admit(2.0)
    for _ in range(3):
        scheduler.progress("a", 1, 2.5)
        scheduler.progress("b", 2, 2.5)
    scheduler.refresh("a", 2.0, 2.5)
    scheduler.finish("a", Outcome.FINISHED, 3.0)
    scheduler.set_draining(True, 3.0)
    scheduler.submit(RequestSpec("late", 1), 3.0)
    scheduler.expire(9.0)
    scheduler.close()
    return entries(path)


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def rewrite(path: Path, number: int, line: str) -> None:
    """Replace one line, counted from 1."""
    lines = path.read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n")


def test_a_recorded_run_runs_again_to_the_same_answers(path: Path) -> None:
    calls = record(path)
    report = rerun(path)
    assert report.difference is None and not report.cut_short
    assert (report.calls, report.tokens, report.admissions, report.span_s) == (len(calls), 9, 2, 9.0)
    assert report.settings == SETTINGS


@pytest.mark.parametrize("now", [0, np.float64(1.5)], ids=["whole", "numpy"])
def test_times_of_any_numeric_type_rerun(path: Path, now: float) -> None:
    scheduler = RecordingScheduler(SETTINGS, SchedulerConfig(), path)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=1), now)
    scheduler.close()
    assert rerun(path).difference is None


# what decides nothing, or is known from other calls
UNRECORDED = {"due_promotion", "due_refreshes", "late", "places_ahead", "recheck_s", "show_report"}


def test_every_call_of_a_scheduler_is_recorded_or_known_to_decide_nothing() -> None:
    public = {name for name, value in vars(Scheduler).items() if callable(value) and not name.startswith("_")}
    recorded = {name for name in vars(RecordingScheduler) if not name.startswith("_")} - {"close"}
    assert public - recorded == UNRECORDED, "a new call: record it in RecordingScheduler"
    assert recorded <= public, "a call that the scheduler does not have"


def test_tokens_are_summed_up_until_the_next_other_call(path: Path) -> None:
    tokens = [entry for entry in record(path) if entry["call"] == "tokens"]
    assert tokens == [{"t": 2.5, "call": "tokens", "args": {"counts": {"a": 3, "b": 6}}, "answer": None}]


def test_calls_that_another_call_makes_are_not_written(path: Path) -> None:
    calls = [entry["call"] for entry in record(path)]
    assert calls[-1] == "expire" and calls.count("finish") == 1


def test_a_call_that_raised_is_recorded_and_raises_the_same_again(path: Path) -> None:
    scheduler = RecordingScheduler(SETTINGS, SchedulerConfig(), path)
    with pytest.raises(InvariantError):
        scheduler.finish("ghost", Outcome.FAILED, 1.0)
    with pytest.raises(InvariantError):
        scheduler.progress("ghost", 1, 2.0)
    scheduler.close()
    assert [entry["raised"][:5] for entry in entries(path)] == ["ghost", "ghost"]
    assert rerun(path).difference is None


def test_changed_bounds_are_recorded_and_rerun(path: Path) -> None:
    scheduler = RecordingScheduler(SETTINGS, SchedulerConfig(), path)
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    assert scheduler.submit(RequestSpec("a", 1), 1.0) is None
    scheduler.configure(SchedulerConfig(max_queued=1, queue_deadline_s=3.0), 2.0)
    assert scheduler.submit(RequestSpec("b", 1), 2.0) is not None
    assert [release.request for release in scheduler.expire(9.0)] == ["a"]
    scheduler.close()
    assert rerun(path).difference is None


def test_a_put_back_is_recorded_and_rerun(path: Path) -> None:
    scheduler = RecordingScheduler(SETTINGS, SchedulerConfig(), path)
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    scheduler.submit(RequestSpec("a", 1), 1.0)
    scheduler.dispatch(1.0)
    scheduler.prefilled("a", 1, 1.5)
    for now in (2.0, 3.0):
        assert [admission.worker for admission in scheduler.admit(now)] == ["d0"]
        scheduler.put_back("a", now)
    scheduler.close()
    assert rerun(path).difference is None


def test_the_first_answer_that_differs_is_reported_with_its_line(path: Path) -> None:
    calls = record(path)
    number = next(index for index, entry in enumerate(calls) if entry["call"] == "admit") + 2
    entry = calls[number - 2]
    entry["answer"][1]["worker"] = "d7"
    rewrite(path, number, json.dumps(entry, separators=(",", ":")))
    rewrite(path, len(calls) + 1, json.dumps({**calls[-1], "answer": []}, separators=(",", ":")))  # differs as well
    difference = rerun(path).difference
    assert difference is not None
    assert (difference.line, difference.call) == (number, "admit")
    assert "d7" in difference.recorded and "d7" not in difference.rerun


@pytest.mark.parametrize(("separators", "end"), [((",", ":"), "\r\n"), ((", ", ": "), "\n")], ids=["crlf", "spaces"])
def test_a_journal_that_another_program_has_copied_or_formatted_reruns(
    path: Path, separators: tuple[str, str], end: str
) -> None:
    """Its first line was a difference, with the same answer twice."""
    record(path)
    lines = [json.dumps(json.loads(line), separators=separators) + end for line in path.read_text().splitlines()]
    path.write_bytes("".join(lines).encode())
    report = rerun(path)
    assert report.difference is None and report.calls == len(lines) - 1


def test_a_cut_last_line_is_accepted(path: Path) -> None:
    calls = record(path)
    path.write_bytes(path.read_bytes()[:-9])
    report = rerun(path)
    assert report.cut_short and report.difference is None and report.calls == len(calls) - 1


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (1, "{}", "line 1: not the header of a journal"),
        (1, "nonsense", "line 1: not the header of a journal"),
        (1, '{"journal": 99}', "line 1: journal format 99; this version reads 1"),
        (1, '{"journal":1,"version":"x","policy":"magic","config":{}}', "line 1: policy: 'magic'; accepted"),
        (
            1,
            '{"journal":1,"version":"x","policy":"br_0","config":{"pool_ttl_s":[]}}',
            "line 1: pool_ttl_s \\[\\]: accepted",
        ),
        (1, '{"journal":1,"version":"x","policy":"br_0","config":{"pool_ttl":1}}', "line 1: not the header of a"),
        (
            4,
            '{"t":1.0,"call":"submit","args":{"spec":{"id":"a","prompt_tokens":2.5}},"answer":null}',
            "line 4: prompt_t",
        ),
        (4, '{"t": 1.0, "call": "submit", "ar', "line 4: not a journal entry"),
        (4, '{"t":1.0,"call":"close","args":{},"answer":null}', "line 4: .*unknown call 'close'"),
        (4, '{"t":1.0,"call":"submit","args":{"spec":{"id":"a"}},"answer":null}', "line 4: not a journal entry"),
        (4, "[]", "line 4: not a journal entry"),
        (1, '{"journal":2,"version":"9.0"}', "this version reads 1; version '9.0' wrote it, this is "),
    ],
)
def test_a_damaged_line_is_named(path: Path, number: int, line: str, message: str) -> None:
    record(path)
    rewrite(path, number, line)
    with pytest.raises(InputError, match=message) as raised:
        rerun(path)
    assert str(raised.value).count(str(path)) == 1


def test_a_call_that_only_another_version_knows_is_refused_with_that_version(path: Path) -> None:
    record(path)
    header, *calls = path.read_text().splitlines()
    calls[0] = '{"t":1.0,"call":"foresee","args":{},"answer":null}'
    path.write_text("\n".join([header.replace(f'"{__version__}"', '"9.0"'), *calls, ""]))
    with pytest.raises(InputError, match=f"unknown call 'foresee'.; version '9.0' wrote it, this is '{__version__}'"):
        rerun(path)


def test_an_empty_or_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        rerun(path)
    path.write_text("")
    with pytest.raises(InputError, match="line 1: not the header"):
        rerun(path)


def test_a_journal_that_cannot_be_continued_ends_and_the_scheduler_continues(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    scheduler = RecordingScheduler(PolicySettings(), SchedulerConfig(), path)
    os.close(reader)  # from now on a write fails, as on a full disk
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    for number in range(3):
        assert scheduler.submit(RequestSpec(f"r{number}", 10), float(number)) is None
    assert len(scheduler.snapshot.requests) == 3
    scheduler.close()
    assert [record.message for record in caplog.records] == ["the journal ends here"]


def test_a_journal_whose_last_calls_cannot_be_written_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    scheduler = RecordingScheduler(PolicySettings(), SchedulerConfig(), path)
    scheduler.dispatch(0.0)
    os.close(reader)
    scheduler.dispatch(0.1)  # so soon after the other that it stays in memory
    assert not caplog.records
    scheduler.close()
    assert [record.message for record in caplog.records] == ["the journal ends here"]


def test_several_processes_may_write_their_journals_to_one_device() -> None:
    journals = [RecordingScheduler(PolicySettings(), SchedulerConfig(), Path(os.devnull)) for _ in range(2)]
    for journal in journals:
        journal.close()


def test_a_journal_that_cannot_be_opened_is_refused() -> None:
    with pytest.raises(InputError, match="No space left on device"):
        RecordingScheduler(PolicySettings(), SchedulerConfig(), Path("/dev/full"))


@pytest.mark.parametrize("content", ["keys:\n- name: a\n", "{}\n", '{"journals":'], ids=["YAML", "JSON", "nearly one"])
def test_a_file_that_is_no_journal_is_not_overwritten(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(InputError, match="it holds something else than a journal, and is not overwritten"):
        RecordingScheduler(SETTINGS, SchedulerConfig(), path)
    assert path.read_text() == content


def test_a_journal_in_use_is_refused_and_unchanged(path: Path) -> None:
    first = RecordingScheduler(SETTINGS, SchedulerConfig(), path)
    first.dispatch(0.0)
    before = path.read_bytes()
    with pytest.raises(InputError, match="another process writes it"):
        RecordingScheduler(SETTINGS, SchedulerConfig(), path)
    with pytest.raises(ConfigError, match="another process writes it"):
        begin_anew(path)
    assert path.read_bytes() == before
    first.close()
    assert rerun(path).calls == 1
    RecordingScheduler(SETTINGS, SchedulerConfig(), path).close()
    assert rerun(path).calls == 0
    begin_anew(path)
    assert not path.exists()


def test_a_journal_is_written_where_its_file_system_has_no_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    RecordingScheduler(SETTINGS, SchedulerConfig(), path).close()
    assert rerun(path).calls == 0


def test_a_killed_process_loses_at_most_a_second_of_its_journal(path: Path) -> None:
    scheduler = RecordingScheduler(SETTINGS, SchedulerConfig(), path)
    for tick in range(30):
        scheduler.dispatch(tick * 0.1)
    left_behind = path.read_bytes()  # not closed: what a killed process would leave
    scheduler.close()
    assert left_behind.count(b"\n") >= 20


def test_choices_by_prefix_run_again_from_the_journal_alone(path: Path) -> None:
    scheduler = RecordingScheduler(SETTINGS, SchedulerConfig(prefill_policy="prefix_affinity"), path)
    for worker in ("p0", "p1"):
        scheduler.add_worker(WorkerSpec(worker, Role.PREFILL), 0.0)
        scheduler.report_prefix_cache(worker, 5000, 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    for number in range(8):
        prefix = tuple(1000 * (number % 2) + block for block in range(number))
        scheduler.submit(RequestSpec(str(number), 500 * number + 1, prefix=prefix, block_tokens=500), float(number))
        scheduler.dispatch(float(number))
        scheduler.prefilled(str(number), 500 * number + 1, float(number), None, 500 if number == 6 else None)
    scheduler.forget_prefixes("p0", 9.0)
    scheduler.close()
    assert rerun(path).difference is None


def test_a_journal_of_an_unknown_prefill_policy_is_refused(path: Path) -> None:
    record(path)
    text = path.read_text()
    path.write_text(text.replace('"prefill_policy":"least_tokens"', '"prefill_policy":"psychic"'))
    with pytest.raises(InputError, match="line 1: .*psychic"):
        rerun(path)


def test_the_journal_reruns_without_the_hashes_of_prompts(tmp_path: Path) -> None:
    path, hashes = tmp_path / "journal", [2**64 - 1 - block for block in range(5)]
    scheduler = RecordingScheduler(
        PolicySettings(policy="br_0"), SchedulerConfig(prefill_policy="prefix_affinity"), path
    )
    for name in ("p0", "p1"):
        scheduler.add_worker(WorkerSpec(name, Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    chosen = []
    for turn in range(1, 6):
        scheduler.submit(RequestSpec(f"r{turn}", 100 * turn, prefix=hashes[:turn], block_tokens=100), 1.0 * turn)
        chosen += scheduler.dispatch(1.0 * turn)
        scheduler.prefilled(f"r{turn}", 100 * turn, turn + 0.5, cached_tokens=100 * (turn - 1))
    scheduler.close()
    assert {prefill.worker for prefill in chosen} == {"p0"}  # all turns where the first one went
    text = path.read_text()
    assert not any(str(block) in text for block in hashes)
    specs = [json.loads(line)["args"]["spec"] for line in text.splitlines()[1:] if '"submit"' in line]
    assert specs[4]["prefix"][:2] == specs[1]["prefix"]
    assert len(set(specs[4]["prefix"])) == 5
    assert rerun(path).difference is None


def test_another_policy_for_a_journal_is_refused_where_it_would_change_nothing(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(path)
    code, _, error_text = run_command(capsys, monkeypatch, "explain", "--journal", str(path), "--policy", "br_0")
    assert code == 2
    assert error_text.startswith("balanceroute: --policy br_0: a journal's calls are made again by its own policy")


def test_a_journal_in_place_of_a_state_is_recognised(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(path)
    code, _, error_text = run_command(capsys, monkeypatch, "explain", str(path))
    assert (code, error_text) == (2, f"balanceroute: {path}: is a journal; explain --journal FILE runs it again\n")
