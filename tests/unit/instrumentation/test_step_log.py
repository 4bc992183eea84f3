"""The engine's step log: what is written, by a stand-in engine, and that it never breaks one."""

import logging
import sys
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from balanceroute.instrumentation import plugin
from balanceroute.instrumentation.reading import read
from balanceroute.instrumentation.step_log import Batch, StepLog


class Scheduler:
    """As much of a vLLM v1 scheduler as the plugin looks at."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.holding: list[Any] = []  # wait as well, in a queue whose name is another one in other versions
        self.kv_cache_manager = SimpleNamespace(usage=0.25)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting) + len(self.holding)

    def schedule(self) -> Any:
        self.running += self.waiting
        self.waiting = []
        for request in self.running:
            request.num_computed_tokens += 1
        return SimpleNamespace(total_num_scheduled_tokens=len(self.running))


def an_engine_core() -> Any:
    """A class with vLLM's methods; made anew, because the plugin changes it."""

    class EngineCore:
        def __init__(self, rank: int = 3) -> None:
            self.scheduler = Scheduler()
            self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=rank))
            self.queue: deque[Any] = deque()
            self.dummies = 0

        def step(self) -> tuple[dict[int, str], bool]:
            planned = self.scheduler.schedule()
            self.scheduler.running = [r for r in self.scheduler.running if not r.last]
            return {0: "tokens"}, planned.total_num_scheduled_tokens > 0

        def step_with_batch_queue(self) -> tuple[dict[int, str] | None, bool]:
            self.queue.append(self.scheduler.schedule())
            if len(self.queue) < 2:
                return None, True
            self.queue.popleft()
            return {0: "tokens"}, True

        def execute_dummy_batch(self) -> str:
            self.dummies += 1
            return "done"

        def shutdown(self) -> None:
            self.queue.clear()

    return EngineCore


def a_request(tokens: int, last: bool = False) -> Any:
    return SimpleNamespace(num_computed_tokens=tokens, last=last)


def steps_in(folder: Path) -> Any:
    (path,) = folder.iterdir()
    return read(path)


def test_a_step_is_one_line_with_the_load_that_it_ran_with(tmp_path: Path) -> None:
    kind = an_engine_core()
    plugin.instrument(kind, tmp_path)
    core = kind()
    core.scheduler.waiting = [a_request(99, last=True), a_request(199)]
    core.scheduler.holding = [a_request(50)]
    assert core.step() == ({0: "tokens"}, True)
    core.step()
    core.shutdown()
    steps = steps_in(tmp_path)
    assert steps[:, 2:].tolist() == [[2, 300, 1, 0.25], [1, 201, 1, 0.25]]
    assert (steps[:, 1] >= 0).all()
    assert next(tmp_path.iterdir()).name.startswith("steps-dp3-")


def test_with_asynchronous_scheduling_batches_end_in_the_order_in_which_they_were_scheduled(tmp_path: Path) -> None:
    kind = an_engine_core()
    plugin.instrument(kind, tmp_path)
    core = kind()
    core.scheduler.waiting = [a_request(0)]
    for _ in range(4):
        core.step_with_batch_queue()
    core.shutdown()
    assert steps_in(tmp_path)[:, 3].tolist() == [1, 2, 3]  # the fourth has no result yet


def test_an_empty_batch_is_no_step_and_a_dummy_one_is(tmp_path: Path) -> None:
    kind = an_engine_core()
    plugin.instrument(kind, tmp_path)
    core = kind()
    core.step()
    assert core.execute_dummy_batch() == "done" and core.dummies == 1
    core.shutdown()
    assert steps_in(tmp_path)[:, 2:].tolist() == [[0, 0, 0, 0]]


def test_overlapping_steps_are_not_counted_twice(tmp_path: Path) -> None:
    now = [0.0]
    log = StepLog(tmp_path, "0", clock=lambda: now[0], wall=lambda: 1e9 + now[0])
    batch = Batch(1, 10, 0, 0.5)
    log.scheduled(batch, 0.0)
    log.scheduled(batch, 0.001)
    for now[0] in (0.010, 0.018):
        log.completed()
    log.completed()  # nothing is under way
    log.close()
    assert steps_in(tmp_path)[:, 1] == pytest.approx([10.0, 8.0])
    assert steps_in(tmp_path)[:, 0].tolist() == pytest.approx([1e9 + 0.010, 1e9 + 0.018])


@pytest.mark.parametrize(
    "left", ["1700000000.1,5.2,3", "", "time,step_co"], ids=["half a step", "all", "half a header"]
)
def test_a_reused_process_id_appends_after_the_last_complete_line_of_the_killed_engine(
    tmp_path: Path, left: str
) -> None:
    before = StepLog(tmp_path, "0")
    before.dummy(0.0)
    before.close()
    whole = "" if left.startswith("time") else before.path.read_text()
    before.path.write_text(whole + left)

    after = StepLog(tmp_path, "0")
    after.dummy(0.0)
    after.close()

    assert after.path == before.path and after.path.read_text().startswith(whole)
    assert len(read(after.path)) == (2 if whole else 1)


def test_an_engines_own_exception_propagates(tmp_path: Path) -> None:
    kind = an_engine_core()

    def broken(core: Any) -> None:
        raise RuntimeError("out of memory")

    kind.step = broken
    plugin.instrument(kind, tmp_path)
    with pytest.raises(RuntimeError, match="out of memory"):
        kind().step()


@pytest.mark.parametrize("breaks", ["folder", "scheduler", "usage"])
def test_an_error_of_the_plugin_ends_the_log_with_one_warning_and_the_engine_continues(
    tmp_path: Path, breaks: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    kind = an_engine_core()
    folder = tmp_path / "file" if breaks == "folder" else tmp_path
    if breaks == "folder":
        folder.write_text("in the way")
    plugin.instrument(kind, folder)
    core = kind()
    core.scheduler.waiting = [a_request(5)]
    if breaks == "scheduler":
        core.scheduler.get_request_counts = None  # as in a version that has no such method
    if breaks == "usage":
        core.scheduler.kv_cache_manager = None
    for _ in range(3):
        assert core.step() == ({0: "tokens"}, True)
        assert core.execute_dummy_batch() == "done"
    core.shutdown()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_engines_of_one_process_that_take_turns_go_on_for_ever(tmp_path: Path) -> None:
    engine_core = an_engine_core()
    plugin.instrument(engine_core, tmp_path)
    engines = [engine_core(), engine_core()]
    for engine in engines:
        engine.scheduler.waiting = [a_request(100)]
    turns = sys.getrecursionlimit()
    for _ in range(turns):
        for engine in engines:
            assert engine.step() == ({0: "tokens"}, True)
    engines[0].shutdown()
    assert len(steps_in(tmp_path)) == 2 * turns


def a_vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An importable vLLM with an engine core of the emulated kind, which is returned."""
    core_module = ModuleType("vllm.v1.engine.core")
    kind = core_module.EngineCore = an_engine_core()  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", core_module)
    return kind


def test_without_the_variable_vllm_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = a_vllm(monkeypatch)
    as_it_was = dict(vars(kind))
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    plugin.register()
    monkeypatch.setenv(plugin.VARIABLE, "")
    plugin.register()
    assert dict(vars(kind)) == as_it_was


def test_an_incompatible_vllm_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv(plugin.VARIABLE, str(tmp_path))
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_registering_twice_wraps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = a_vllm(monkeypatch)
    monkeypatch.setenv(plugin.VARIABLE, str(tmp_path))
    plugin.register()
    plugin.register()
    core = kind()
    core.scheduler.waiting = [a_request(1)]
    core.step()
    core.shutdown()
    assert len(steps_in(tmp_path)) == 1


@pytest.mark.parametrize(
    ("core", "arguments", "rank"),
    [
        (SimpleNamespace(dp_rank=5), [], "5"),
        (SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=2))), [], "2"),
        (SimpleNamespace(), ["vllm", "--data-parallel-rank", "7"], "7"),
        (SimpleNamespace(), ["vllm", "--data-parallel-rank=8"], "8"),
        (SimpleNamespace(), ["vllm", "serve"], "unknown"),
    ],
)
def test_the_rank_is_found_in_the_engine_or_its_launch_arguments(
    core: Any, arguments: list[str], rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    assert plugin.dp_rank(core) == rank


def test_the_rank_is_found_in_the_process_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.multiprocessing, "current_process", lambda: SimpleNamespace(name="EngineCore_DP11"))
    assert plugin.dp_rank(SimpleNamespace()) == "11"


@pytest.mark.parametrize(("role", "name"), [("kv_producer", "steps-prefill-dp3-"), ("kv_consumer", "steps-dp3-")])
def test_a_prefillers_file_is_marked_as_such(tmp_path: Path, role: str, name: str) -> None:
    core_class = an_engine_core()
    plugin.instrument(core_class, tmp_path)
    core = core_class()
    core.vllm_config.kv_transfer_config = SimpleNamespace(kv_role=role)
    core.execute_dummy_batch()
    core.shutdown()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith(name)
