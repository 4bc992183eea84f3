"""Real processes under a supervisor: they come back, end together, and lose no connection that waits."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.parent.handover import HandoverState, Predecessor
from tests.processes import complete_lines
from tests.waiting import MOST_PACE_S, PATIENCE_S, block_pace, block_until

LAUNCHER = "import os, signal, sys; "
START = "; os.execv(sys.argv[1], sys.argv[1:])"
WAITS = """
import signal
from balanceroute.proxy.parent.supervisor import _AWAITED, _pass_on, next_signal
signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)  # not in threads that numpy may have started
for number in _AWAITED:
    signal.signal(number, _pass_on)
print("waits", flush=True)
print(next_signal(0.5))
"""


class Running:
    """A supervisor in a process of its own, and what its children say."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder = folder
        self.clients: list[socket.socket] = []
        command = [sys.executable, "-m", "tests.unit.proxy.parent.supervised", str(folder), json.dumps(options)]
        self.log = folder / "log"
        if "launcher" in options:  # what it leaves to who it starts stays
            command = [sys.executable, "-c", f"{LAUNCHER}{options['launcher']}{START}", *command]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(command, stderr=sink, cwd=Path(__file__).parents[4])

    def events(self, name: str = "") -> list[str]:
        """What has happened to a child, in its order."""
        return [event for who, _, event in self._lines() if who == name or not name]

    def events_since_up(self, name: str) -> list[str]:
        """The same from when it was up first."""
        events = self.events(name)
        return events[events.index("up") :] if "up" in events else []

    def lives(self, name: str) -> list[int]:
        """The process ids that a child has had."""
        pids = [int(pid) for who, pid, event in self._lines() if who == name and event in ("up", "dies")]
        return list(dict.fromkeys(pids))

    def up(self, **times: int) -> None:
        """Wait until each of these children has been there so often."""
        wanted = {name.replace("_", "-"): count for name, count in times.items()}
        block_until(lambda: self._alive() and all(self.events(n).count("up") >= c for n, c in wanted.items()))

    def _alive(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return True

    def a_child_reports(self) -> None:
        """Have the parent look whether anything has changed, and wait until it has heard that."""
        self.process.send_signal(signal.SIGIO)
        block_until(lambda: "ShdPnd:\t0000000000000000" in Path(f"/proc/{self.process.pid}/status").read_text())

    def pid(self, name: str) -> int:
        return self.lives(name)[-1]

    def connect(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", int((self.folder / "port").read_text())))
        client.settimeout(60)
        self.clients.append(client)
        return client

    def folder_pids(self) -> list[int]:
        """All processes that were ever children."""
        return [int(pid) for _, pid, _ in self._lines()]

    def _lines(self) -> list[list[str]]:
        file = self.folder / "events"
        return [line.split() for line in complete_lines(file)] if file.exists() else []

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in complete_lines(self.log) if line.startswith("{")]
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """With the options of `supervised.py`, where the test has some."""
    started = Running(tmp_path, getattr(request, "param", {}))
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait()
        for client in started.clients:
            client.close()
        block_until(lambda: not any(map(exists, started.folder_pids())))


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ask(client: socket.socket) -> tuple[str, int]:
    """Who answers on this connection."""
    client.sendall(b"who\n")
    line = b""
    while not line.endswith(b"\n"):
        line += client.recv(100) or b" gone 0 \n"
    name, pid, _ = line.split()
    return name.decode(), int(pid)


def test_a_killed_child_is_restarted_and_the_others_are_unaffected(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    before = {name: running.pid(name) for name in ("brain", "relay-0", "relay-1")}
    clients = [running.connect() for _ in range(20)]
    at = [ask(client) for client in clients]
    os.kill(before["relay-0"], signal.SIGKILL)
    running.up(relay_0=2)
    os.kill(before["brain"], signal.SIGKILL)
    running.up(brain=2)
    for client, (name, pid) in zip(clients, at, strict=True):
        if name == "relay-1":
            assert ask(client) == (name, pid)
    assert running.pid("relay-1") == before["relay-1"]
    assert (running.folder / "deaths").read_text().split() == ["relay-0", "brain"]
    assert {line["child"]: line["signal"] for line in running.logged("child died")} == dict.fromkeys(
        ("relay-0", "brain"), "SIGKILL"
    )


@pytest.mark.parametrize(
    "running",
    [
        {"launcher": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"},
        {"launcher": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"},
    ],
    ids=["deaths ignored", "all signals blocked"],
    indirect=True,
)
def test_children_restart_and_end_whatever_signals_the_starting_process_ignores(
    running: Running,
) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    os.kill(running.pid("relay-0"), signal.SIGKILL)
    running.up(relay_0=2)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0


def test_a_stopped_relay_leaves_waiting_connections_to_the_others(running: Running) -> None:
    running.up(relay_0=1, relay_1=1)
    os.kill(running.pid("relay-0"), signal.SIGSTOP)
    clients = [running.connect() for _ in range(50)]
    assert Counter(ask(client)[0] for client in clients) == {"relay-1": 50}
    os.kill(running.pid("relay-0"), signal.SIGCONT)


def test_connections_without_a_relay_are_accepted_by_the_next_life_of_one(running: Running) -> None:
    running.up(relay_0=1, relay_1=1)
    for name in ("relay-0", "relay-1"):
        os.kill(running.pid(name), signal.SIGSTOP)
    clients = [running.connect() for _ in range(50)]
    os.kill(running.pid("relay-0"), signal.SIGKILL)
    assert Counter(ask(client)[0] for client in clients) == {"relay-0": 50}
    assert len(running.lives("relay-0")) == 2


@pytest.mark.parametrize("running", [{"drain_s": 0.0, "kill_s": 3600.0}], ids=["drains pinned KV"], indirect=True)
def test_sigterm_lets_every_child_finish(running: Running) -> None:
    (running.folder / "hold-relay-1").touch()
    running.up(brain=1, relay_0=1, relay_1=1)
    running.process.send_signal(signal.SIGTERM)
    block_until(lambda: running.events().count("ends") == 2 and "SIGUSR2" in running.events("relay-1"))
    assert running.process.poll() is None and running.events_since_up("relay-1") == ["up", "SIGUSR2"]
    (running.folder / "hold-relay-1").unlink()
    assert running.process.wait(PATIENCE_S) == 0
    assert running.events_since_up("relay-1") == ["up", "SIGUSR2", "ends"]
    assert running.events().count("up") == 3


@pytest.mark.parametrize("running", [{"end_s": 3600.0}], ids=["in time"], indirect=True)
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_all_children_at_once(running: Running, first: signal.Signals) -> None:
    (running.folder / "hold-relay-1").touch()
    running.up(brain=1, relay_0=1, relay_1=1)
    running.process.send_signal(first)
    block_until(lambda: "SIGUSR2" in running.events("relay-1"))
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0
    assert running.events_since_up("relay-1") == ["up", "SIGUSR2", "SIGINT", "ends"]


@pytest.mark.parametrize("running", [{"deaf": "relay-0", "end_s": 3600.0}], indirect=True)
def test_a_needed_child_that_dies_after_the_second_signal_is_not_started_again(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    os.kill(running.pid("brain"), signal.SIGSTOP)
    for number in (signal.SIGUSR2, signal.SIGINT):
        running.process.send_signal(signal.SIGTERM)
        block_until(lambda: number.name in running.events("relay-0"))  # noqa: B023
    os.kill(running.pid("brain"), signal.SIGKILL)
    deaths = running.folder / "deaths"
    block_until(lambda: deaths.exists() and "brain" in deaths.read_text())
    os.kill(running.pid("relay-0"), signal.SIGKILL)
    assert running.process.wait(PATIENCE_S) == 0
    assert len(running.logged("child started")) == 3


@pytest.mark.parametrize(
    "running",
    [{"deaf": "relay-0", "end_s": 0.1}, {"deaf": "relay-0", "end_s": 3600.0, "drain_s": 1.0}],
    ids=["soon after the second signal", "when its time to drain is over"],
    indirect=True,
)
def test_a_child_that_ignores_signals_is_killed(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    for _ in range(2):
        before = len(running.events("relay-0"))
        running.process.send_signal(signal.SIGTERM)
        # killed after 0.1 s, it may not have run once since the second signal
        block_until(lambda: len(running.events("relay-0")) > before or running.process.poll() is not None)  # noqa: B023
    assert running.process.wait(PATIENCE_S) == 0
    killed = [line["children"] for line in running.logged("children killed: they have not ended in time")]
    assert ["relay-0" in children for children in killed] == [True]  # a busy machine may give others too little time


@pytest.mark.parametrize("running", [{"lingers": True}], indirect=True)
def test_a_late_signal_to_an_ending_router_keeps_exit_code_0(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    running.process.send_signal(signal.SIGTERM)
    block_until((running.folder / "lingers").exists)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGIO):
        running.process.send_signal(number)
    (running.folder / "lingers").unlink()
    assert running.process.wait(PATIENCE_S) == 0


def test_signals_for_children_do_not_end_the_parent_and_reach_the_children(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        running.process.send_signal(number)
    os.kill(running.pid("relay-0"), signal.SIGKILL)
    running.up(relay_0=2)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0
    assert running.events_since_up("relay-0")[-2:] == ["SIGUSR2", "ends"]


def test_a_needed_child_is_restarted_even_while_the_others_finish(running: Running) -> None:
    (running.folder / "hold-relay-0").touch()
    (running.folder / "hold-brain").touch()
    running.up(brain=1, relay_0=1, relay_1=1)
    running.process.send_signal(signal.SIGTERM)
    block_until(lambda: "SIGUSR2" in running.events("brain") and "ends" in running.events("relay-1"))
    os.kill(running.pid("brain"), signal.SIGKILL)
    running.up(brain=2)
    (running.folder / "hold-brain").unlink()
    (running.folder / "hold-relay-0").unlink()
    assert running.process.wait(PATIENCE_S) == 0
    assert running.events("brain")[-2:] == ["SIGUSR2", "ends"] and len(running.lives("relay-1")) == 1


def test_a_needed_child_that_is_about_to_be_restarted_when_a_drain_begins_is_restarted(running: Running) -> None:
    (running.folder / "hold-relay-0").touch()
    running.up(brain=1, relay_0=1, relay_1=1)
    (running.folder / "no-fork").touch()
    os.kill(running.pid("brain"), signal.SIGKILL)
    block_until(lambda: running.logged("no process can be started, tried again"))
    running.process.send_signal(signal.SIGTERM)
    block_until(lambda: "SIGUSR2" in running.events("relay-0"))
    (running.folder / "no-fork").unlink()
    running.up(brain=2)
    (running.folder / "hold-relay-0").unlink()
    assert running.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("running", [{"drain_s": 4.0}], indirect=True)
def test_a_needed_child_that_cannot_be_restarted_does_not_outlast_the_time_to_drain(running: Running) -> None:
    (running.folder / "hold-relay-0").touch()
    (running.folder / "hold-brain").touch()
    running.up(brain=1, relay_0=1, relay_1=1)
    (running.folder / "no-fork").touch()
    running.process.send_signal(signal.SIGTERM)
    told = [partial(running.events, name) for name in ("brain", "relay-0")]
    # a very busy machine may take the whole time for that
    block_until(lambda: all("SIGUSR2" in events() for events in told) or running.process.poll() is not None)
    with suppress(ProcessLookupError):
        os.kill(running.pid("brain"), signal.SIGKILL)
    assert running.process.wait(PATIENCE_S) == 0
    (killed,) = running.logged("children killed: they have not ended in time")
    assert "relay-0" in killed["children"]


def test_an_accepted_reload_reaches_every_child_and_a_refused_one_none(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    (running.folder / "refuse").touch()
    running.process.send_signal(signal.SIGHUP)
    block_until(lambda: not (running.folder / "refuse").exists())
    running.process.send_signal(signal.SIGHUP)
    block_until(lambda: running.events().count("SIGHUP") >= 3)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0
    assert running.events().count("SIGHUP") == 3


def test_a_reload_trial_blocks_nothing_else_and_delays_the_next_reload(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    for name in ("try", "hold-trial"):
        (running.folder / name).touch()
    running.process.send_signal(signal.SIGHUP)
    block_until(lambda: running.events("trial"))
    running.process.send_signal(signal.SIGHUP)
    os.kill(running.pid("relay-0"), signal.SIGKILL)
    running.up(relay_0=2)
    assert "SIGHUP" not in running.events() and len(running.events("trial")) == 1
    (running.folder / "no-fork").touch()  # two reloads at once may be one signal to a child: the second is refused
    (running.folder / "hold-trial").unlink()
    block_until(lambda: running.logged("reload refused"))
    block_until(lambda: running.events().count("SIGHUP") == 3)
    assert len(running.events("trial")) == 1


def test_a_reload_whose_trial_fails_is_refused_with_its_reason(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    for name in ("try", "fail"):
        (running.folder / name).touch()
    running.process.send_signal(signal.SIGHUP)
    block_until(lambda: running.logged("reload refused"))
    (running.folder / "no-fork").touch()
    running.process.send_signal(signal.SIGHUP)
    block_until(lambda: len(running.logged("reload refused")) == 2)
    first, second = (line["error"] for line in running.logged("reload refused"))
    assert first == "the predictor: wrong" and second.startswith("no process can be started to try it: ")
    (running.folder / "no-fork").unlink()
    (running.folder / "fail").unlink()
    running.process.send_signal(signal.SIGHUP)
    block_until(lambda: running.events().count("SIGHUP") == 3)


@pytest.mark.parametrize("running", [{"within_s": 0.1}], indirect=True)
def test_a_trial_that_takes_too_long_is_killed(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    for name in ("try", "hold-trial"):
        (running.folder / name).touch()
    running.process.send_signal(signal.SIGHUP)
    block_until(lambda: running.logged("reload refused"))
    assert running.logged("reload refused")[0]["error"] == "to try the configuration takes longer than 0.1 s"
    assert "SIGHUP" not in running.events()


@pytest.mark.parametrize("running", [{"within_s": 3600.0}], ids=["a long one"], indirect=True)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_trial_ends_when_its_parent_is_to_end_and_does_not_delay_that(running: Running, how: signal.Signals) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    for name in ("try", "hold-trial", "hold-relay-0"):
        (running.folder / name).touch()
    running.process.send_signal(signal.SIGHUP)
    block_until(lambda: running.events("trial"))
    trial = running.folder_pids()[-1]
    running.process.send_signal(how)
    block_until(lambda: not exists(trial))
    (running.folder / "hold-relay-0").unlink()
    assert running.process.wait(PATIENCE_S) == (0 if how is signal.SIGTERM else -how)
    block_until(lambda: not any(map(exists, running.folder_pids())))


def test_a_reload_while_a_child_is_being_started_reaches_it_when_it_is_up(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    (running.folder / "slow-relay-0").touch()
    os.kill(running.pid("relay-0"), signal.SIGKILL)
    block_until(lambda: running.events("relay-0").count("starts") == 2)
    running.process.send_signal(signal.SIGHUP)
    block_until(lambda: "SIGHUP" in running.events("relay-1"))
    (running.folder / "slow-relay-0").unlink()
    block_until(lambda: "SIGHUP" in running.events("relay-0"))


def test_a_child_that_is_being_started_ends_at_once_when_the_router_drains(running: Running) -> None:
    """It has no handlers of its own yet, and none of its parent's."""
    running.up(brain=1, relay_0=1, relay_1=1)
    (running.folder / "slow-relay-0").touch()
    os.kill(running.pid("relay-0"), signal.SIGKILL)
    block_until(lambda: running.events("relay-0").count("starts") == 2)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0
    assert not running.logged("children killed: they have not ended in time")


@pytest.mark.parametrize(
    "running", [{"mend_s": 0.05, "agent": ["SIGUSR1", "SIGIO", "SIGCHLD", "SIGHUP", "SIGTERM"]}], indirect=True
)
def test_signals_that_a_monitoring_agents_thread_gets_are_the_parents(running: Running) -> None:
    """They had their default effect: a router under an agent ended as its first child was up."""
    assert running.process.wait(PATIENCE_S) == 0
    for name in ("brain", "relay-0", "relay-1"):  # the reload may reach them late or not
        assert [event for event in running.events_since_up(name) if event != "SIGHUP"][-2:] == ["SIGUSR2", "ends"]


def test_children_die_with_their_parent_however_it_ends(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    pids = running.folder_pids()
    assert len(set(pids)) == 3 and all(map(exists, pids))
    running.process.kill()
    running.process.wait()
    block_until(lambda: not any(map(exists, pids)))


@pytest.mark.parametrize(
    ("running", "wrong"),
    [({"wrong": "relay-1"}, "relay-1"), ({"wrong": "brain"}, "brain")],
    ids=["a relay's", "one that the others need"],
    indirect=["running"],
)
def test_an_invalid_configuration_ends_all_processes_with_one_line(running: Running, wrong: str) -> None:
    assert running.process.wait(PATIENCE_S) == 2
    lines = [line for line in running.log.read_text().splitlines() if not line.startswith("{")]
    assert lines == [f"balanceroute: {wrong}: wrong"]
    assert not any(map(exists, running.folder_pids()))


@pytest.mark.parametrize(
    "running", [{"wrong": "relay-1", "slow": "brain", "deaf": "relay-0", "end_s": 1.0}], indirect=True
)
def test_a_router_of_an_invalid_configuration_restarts_nothing_while_it_ends(running: Running) -> None:
    assert running.process.wait(PATIENCE_S) == 2
    assert [line["life"] for line in running.logged("child started")] == [1, 1, 1]


def test_an_invalid_configuration_ends_all_processes_even_without_a_log(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.proxy.parent.supervised", str(tmp_path), '{"wrong": "relay-1"}']
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, stderr=full, cwd=Path(__file__).parents[4], timeout=PATIENCE_S).returncode == 2


def test_the_line_of_an_invalid_configuration_is_one_write(tmp_path: Path) -> None:
    """Else the log line of another process may come between it and its end."""
    command = [sys.executable, "-m", "tests.unit.proxy.parent.supervised", str(tmp_path), '{"wrong": "relay-1"}']
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each write is a message
    with ours, theirs, subprocess.Popen(command, stderr=theirs, cwd=Path(__file__).parents[4]):
        theirs.close()
        assert b"balanceroute: relay-1: wrong\n" in list(iter(lambda: ours.recv(2**16), b""))


def test_a_file_broken_after_the_start_delays_only_restarting_processes(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    block_until((running.folder / "all-up").exists)
    (running.folder / "wrong-brain").touch()  # as a standby finds out when it takes the lead, in its first life
    running.up(brain=3)
    assert {line["exit_code"] for line in running.logged("child died")} == {2}
    assert [(line["child"], line["error"]) for line in running.logged("child cannot run")][:2] == [
        ("brain", "brain: wrong")
    ] * 2
    assert "balanceroute: " not in running.log.read_text()
    (running.folder / "wrong-brain").unlink()
    assert len(running.lives("relay-0")) == len(running.lives("relay-1")) == 1


@pytest.mark.parametrize(
    ("lacking", "expected"), [("memory", "Cannot allocate memory"), ("EMFILE", "Too many open files")]
)
def test_a_child_without_resources_reports_it_in_one_line_and_is_restarted(
    running: Running, lacking: str, expected: str
) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    block_until((running.folder / "all-up").exists)
    whole = running.folder / "short"
    whole.write_text(lacking)
    whole.rename(running.folder / "short-relay-0")
    running.up(relay_0=2)
    assert [(line["child"], line["error"]) for line in running.logged("child cannot run")] == [("relay-0", expected)]
    assert not running.logged("internal error")


@pytest.mark.parametrize(
    ("running", "pauses_s"),
    [
        ({"dies": "relay-1", "steady_s": 3600.0}, [0.0, 0.1, 0.2, 0.4, 0.8]),
        ({"dies": "relay-1", "steady_s": 0.0}, [0.0] * 5),
    ],
    ids=["soon after its start", "later"],
    indirect=["running"],
)
def test_a_child_that_repeatedly_dies_soon_is_restarted_with_growing_delays(
    running: Running, pauses_s: list[float]
) -> None:
    running.up(brain=1, relay_0=1)
    block_until(lambda: len(running.logged("child died")) >= 5)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0
    deaths = running.logged("child died")
    assert [line["again_in_s"] for line in deaths[:5]] == pauses_s
    assert {(line["child"], line["exit_code"]) for line in deaths} == {("relay-1", 7)}
    assert '"child started"' not in running.log.read_text().partition('"draining"')[2]
    assert len(running.lives("relay-0")) == len(running.lives("brain")) == 1


def test_children_continue_while_no_process_can_be_started_and_that_is_logged_once(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    (running.folder / "no-fork").touch()
    client = next(client for client in iter(running.connect, None) if ask(client)[0] == "relay-1")
    before = ask(client)
    os.kill(running.pid("relay-0"), signal.SIGKILL)
    os.kill(running.pid("brain"), signal.SIGKILL)
    block_until(lambda: len(running.logged("child died")) == 2)
    block_until(lambda: running.logged("no process can be started, tried again"))
    running.process.send_signal(signal.SIGHUP)  # the parent hears: it lives
    block_until(lambda: running.logged("reload refused"))
    assert ask(client) == before
    (running.folder / "no-fork").unlink()
    running.up(brain=2, relay_0=2)
    assert len(running.logged("no process can be started, tried again")) == 1
    assert len(running.lives("relay-1")) == 1


def test_a_successor_gets_the_sockets_and_all_leave_when_it_is_ready(running: Running) -> None:
    for name in ("brain", "relay-1"):
        (running.folder / f"hold-{name}").touch()
    block_until((running.folder / "all-up").exists)
    quitter = found(running)
    quitter.close()  # it ends before it is ready, and nothing has happened
    block_until(lambda: running.logged("the router that was to take over has ended"))
    successor = found(running)
    assert successor.state == HandoverState(running.process.pid, 1, decode_first=False)
    with pytest.raises(ConfigError, match="another router is taking over"):
        found(running)
    listener = successor.listener("127.0.0.1", int((running.folder / "port").read_text()))
    assert listener is not None
    with listener:
        assert running.events().count("up") == 3
        successor.go()
        block_until(lambda: "ends" in running.events("relay-0") and "SIGUSR1" in running.events("relay-1"))
        assert running.process.poll() is None
        os.kill(running.pid("brain"), signal.SIGKILL)
        deaths = running.folder / "deaths"
        block_until(lambda: deaths.exists() and "brain" in deaths.read_text())
        (running.folder / "hold-relay-1").unlink()
        assert running.process.wait(PATIENCE_S) == 0
        assert len(running.logged("child started")) == 3, "not even the brain: the successor has one"
        client = running.connect()  # the socket has never been closed
        taken, address = listener.accept()
        taken.close()
        assert address == client.getsockname()


@pytest.mark.parametrize("running", [{"launcher": "open(f'{sys.argv[4]}/slow-relay-1', 'w').close()"}], indirect=True)
def test_a_child_that_has_died_since_it_was_up_is_waited_for_before_a_router_takes_over(running: Running) -> None:
    running.up(brain=1, relay_0=1)
    block_until(lambda: running.events("relay-1") == ["starts"])  # there may be none of it yet
    (running.folder / "no-fork").touch()
    os.kill(running.pid("brain"), signal.SIGKILL)
    block_until(lambda: running.logged("no process can be started, tried again"))
    (running.folder / "slow-relay-1").unlink()
    running.up(relay_1=1)
    running.a_child_reports()
    assert not (running.folder / "all-up").exists()
    (running.folder / "no-fork").unlink()
    block_until((running.folder / "all-up").exists)


@pytest.mark.parametrize("then", ["it is ready", "it ends", "the signal comes again"])
def test_a_drain_waits_for_a_router_that_prepares_to_take_over(running: Running, then: str) -> None:
    successor = with_postponed_drain(running)
    running.a_child_reports()
    if then == "it is ready":
        successor.go()
    elif then == "it ends":
        successor.close()
    else:
        running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0
    for name in ("brain", "relay-0", "relay-1"):
        assert running.events_since_up(name)[1] == ("SIGUSR1" if then == "it is ready" else "SIGUSR2")
    successor.close()


def test_a_router_that_was_to_drain_does_not_drain_any_more_once_it_is_taken_over(running: Running) -> None:
    (running.folder / "hold-relay-0").touch()
    successor = with_postponed_drain(running)
    successor.go()
    block_until(lambda: "SIGUSR1" in running.events("relay-0"))
    for _ in range(2):  # the second one is heard after all that follows the first
        running.a_child_reports()
    (running.folder / "hold-relay-0").unlink()
    assert running.process.wait(PATIENCE_S) == 0
    assert running.events_since_up("relay-0") == ["up", "SIGUSR1", "ends"]


@pytest.mark.parametrize("running", [{"beside": True, "slow": "brain", "kill_s": 0.0}], indirect=True)
@pytest.mark.parametrize("why", ["it is told to end", "a child cannot run"])
def test_a_failed_takeover_finishes_the_requests_of_its_own_clients(running: Running, why: str) -> None:
    (running.folder / "hold-relay-0").touch()
    block_until(lambda: all("up" in running.events(name) for name in ("relay-0", "relay-1")))
    clients = [running.connect() for _ in range(20)]
    begun = [client for client in clients if ask(client)[0] == "relay-0"]
    if why == "it is told to end":
        running.process.send_signal(signal.SIGTERM)
    else:
        (running.folder / "wrong-relay-1").touch()
    block_until(lambda: "SIGUSR1" in running.events("relay-0"))
    assert all(ask(client)[0] == "relay-0" for client in begun)
    assert running.logged("not taking over: the router that runs goes on")
    (running.folder / "hold-relay-0").unlink()
    assert running.process.wait(PATIENCE_S) == (0 if why == "it is told to end" else 2)
    assert running.events_since_up("relay-0") == ["up", "SIGUSR1", "ends"]


def test_a_router_that_drains_can_still_be_taken_over(running: Running) -> None:
    (running.folder / "hold-relay-1").touch()
    block_until((running.folder / "all-up").exists)
    running.process.send_signal(signal.SIGTERM)
    block_until(lambda: "SIGUSR2" in running.events("relay-1") and (running.folder / "drains").exists())
    successor = found(running)
    listener = successor.listener("127.0.0.1", int((running.folder / "port").read_text()))
    assert listener is not None
    with listener:
        (running.folder / "closes").touch()
        running.a_child_reports()
        successor.go()
        block_until(lambda: "SIGUSR1" in running.events("relay-1"))
        (running.folder / "hold-relay-1").unlink()
        assert running.process.wait(PATIENCE_S) == 0
        client = running.connect()  # the socket has never been closed
        taken, address = listener.accept()
        taken.close()
        assert address == client.getsockname()


def test_a_brain_without_relays_leaves_at_once_to_a_router_that_prepares_to_take_over(running: Running) -> None:
    (running.folder / "hold-brain").touch()
    successor = with_postponed_drain(running)
    running.process.send_signal(signal.SIGTERM)
    block_until(lambda: running.events_since_up("brain")[1:] == ["SIGUSR2", "SIGUSR1"])
    (running.folder / "hold-brain").unlink()
    assert running.process.wait(PATIENCE_S) == 0
    successor.close()


def test_a_draining_router_closes_its_port_when_its_last_relay_ends(running: Running) -> None:
    (running.folder / "hold-brain").touch()
    block_until((running.folder / "all-up").exists)
    running.process.send_signal(signal.SIGTERM)
    port = int((running.folder / "port").read_text())
    block_until(lambda: not accepts(port))
    assert "ends" not in running.events("brain") and not running.logged("children killed: they have not ended in time")
    (running.folder / "hold-brain").unlink()
    assert running.process.wait(PATIENCE_S) == 0


def test_a_draining_router_closes_its_port_when_its_relays_accept_no_more_although_they_run(running: Running) -> None:
    for name in ("relay-0", "relay-1"):
        (running.folder / f"hold-{name}").touch()
    (running.folder / "closes").touch()
    block_until((running.folder / "all-up").exists)
    os.kill(running.pid("relay-0"), signal.SIGKILL)
    running.up(relay_0=2)  # on the same port, which only a drain closes
    running.process.send_signal(signal.SIGTERM)
    port = int((running.folder / "port").read_text())
    block_until(lambda: not accepts(port))
    assert not any("ends" in running.events(name) for name in ("relay-0", "relay-1"))
    for name in ("relay-0", "relay-1"):
        (running.folder / f"hold-{name}").unlink()
    assert running.process.wait(PATIENCE_S) == 0


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def found(running: Running) -> Predecessor:
    predecessor = Predecessor.find(running.folder / "handover")
    assert predecessor is not None
    return predecessor


def with_postponed_drain(running: Running) -> Predecessor:
    """What a router sees that prepares to take over from one which was then told to drain."""
    block_until((running.folder / "all-up").exists)
    predecessor = found(running)
    running.process.send_signal(signal.SIGTERM)
    block_until(lambda: running.logged("not draining: another router prepares to take over"))
    return predecessor


def test_a_router_that_ends_restores_no_file_and_tries_no_reload(running: Running) -> None:
    """The files may be its successor's by then."""
    for name in ("hold-relay-0", "try", "hold-trial"):
        (running.folder / name).touch()
    running.up(brain=1, relay_0=1, relay_1=1)
    running.process.send_signal(signal.SIGTERM)
    block_until(lambda: "SIGUSR2" in running.events("relay-0"))
    (running.folder / "found").unlink()
    running.process.send_signal(signal.SIGHUP)
    for _ in range(2):  # the second one is heard after all that follows the first
        running.a_child_reports()
    assert not (running.folder / "found").exists()
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    assert set(map(int, children)) <= {running.pid(name) for name in ("brain", "relay-0", "relay-1")}
    (running.folder / "hold-relay-0").unlink()
    assert running.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("running", [{"mend_s": 0.1}], indirect=True)
def test_files_that_other_routers_need_are_recreated_without_a_signal(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    block_until((running.folder / "all-up").exists)
    for _ in range(3):
        (running.folder / "found").unlink()
        block_until((running.folder / "found").exists)


def test_a_parent_that_was_stopped_takes_nothing_for_a_signal() -> None:
    """Python's `sigtimedwait` returned one that nobody had sent."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "waits\n"
        parent.send_signal(signal.SIGSTOP)
        for _ in range(3):  # longer than it waits
            block_pace(MOST_PACE_S)
        parent.send_signal(signal.SIGCONT)
        assert parent.stdout.readline() == f"{signal.SIGALRM:d}\n"


def test_every_child_has_its_own_name_and_process_group(running: Running) -> None:
    running.up(brain=1, relay_0=1, relay_1=1)
    for name in ("brain", "relay-0", "relay-1"):
        pid = running.pid(name)
        assert Path(f"/proc/{pid}/comm").read_text() == f"br-{name}\n"
        assert os.getpgid(pid) == pid
