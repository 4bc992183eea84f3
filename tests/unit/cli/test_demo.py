"""`balanceroute demo`: what it refuses before anything runs, and that it leaves nothing behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import typer

from balanceroute.cli import prefix_demo
from balanceroute.cli.demo import say_if_interrupted, show, until_interrupted
from balanceroute.cli.emulate import DECODE_PORT_OFFSET
from balanceroute.demo import processes
from balanceroute.demo.decode_tier import DemoScale, PolicyRun, play
from balanceroute.demo.prefill_tier import PrefixRun, figures
from balanceroute.demo.processes import DemoFailed, emulated, free_ports, is_free, page, temporary_folder
from balanceroute.errors import InputError
from balanceroute.loadgen import LoadReport
from balanceroute.loadgen.run import Progress
from balanceroute.report import Distribution
from tests.commands import run_command
from tests.ports import free_base_port
from tests.waiting import block_until

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's word for a parent's death")
PARENT = """
import sys, threading
from pathlib import Path
from balanceroute.demo.processes import process
with process(sys.argv[2:], Path(sys.argv[1])) as child:
    print(child.pid, flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--against", "joinshortestqueue"], "did you mean join_shortest_queue?"),
        (["--policy", "best"], "policy 'best' is unknown"),
        (["--load", "0.05", "--seconds", "5"], "are too few to measure"),
        (["--prefix", "--policy", "br_0"], "--policy is about the decode tier; with --prefix leave it out"),
        (["--prefix", "--load", "1.15"], "--load is about the decode tier"),
        (["--seconds", "inf"], "--seconds inf: accepted is a finite number"),
        (["--prefix", "--seconds", "inf"], "--seconds inf: accepted is a finite number"),
        (["--seconds", "1e9"], "requests are too many, accepted are 1,000,000: lower --seconds, --load or --slots"),
        (["--seconds", "1e308"], "inf requests are too many"),
        (["--prefix", "--seconds", "1e308"], "requests are too many"),
        (["--prefix", "--seconds", "1e9"], "requests are too many, accepted are 1,000,000: lower --seconds"),
        (["--prefix", "--json", "--seconds", "1e9"], "requests are too many"),
        (["--slots", "70000"], "'--slots'"),
        (["--seed", "-1"], "'--seed'"),
    ],
)
def test_arguments_are_checked_before_anything_starts(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("something was started"))
    code, _, error_text = run_command(capsys, monkeypatch, "demo", *arguments)
    assert code == 2 and text in error_text


@pytest.mark.parametrize("scale", [DemoScale(seconds=28.0), DemoScale(seconds=300.0), DemoScale(slots=512)])
def test_requests_arrive_for_as_long_as_asked_for(scale: DemoScale) -> None:
    arrivals = scale.trace().arrival_s
    assert arrivals[-1] - arrivals[0] == pytest.approx(scale.seconds, rel=0.001)


def test_ctrl_c_keeps_the_results_so_far_and_states_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, tell: Progress) -> str:
        if name == "second":
            os.kill(os.getpid(), signal.SIGINT)
            block_until(lambda: False)
        return name

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = until_interrupted(("first", "second", "third"), run)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["first"]
    with pytest.raises(typer.Exit) as ended:
        say_if_interrupted(len(done), 3)
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "balanceroute: interrupted after 1 of 3 policies\n"
    say_if_interrupted(3, 3)


def test_an_ended_router_or_cluster_is_one_line_and_no_traceback() -> None:
    nobody = "http://127.0.0.1:1"
    with pytest.raises(InputError, match="cannot connect"):
        asyncio.run(play(DemoScale().trace(), nobody, nobody, lambda done, total: None))
    with pytest.raises(DemoFailed, match="does not answer any more"):
        page(nobody)
    failed = LoadReport(9, 0, {"status 503": 9}, 1.0, 0.0, 0, 0.0, *(Distribution.of([]) for _ in range(5)))
    with pytest.raises(DemoFailed, match="none of 9 requests has reached a prefiller: .*status 503"):
        figures("round_robin", failed, ["", ""], 0.0)


@pytest.mark.parametrize("count", [1, 2])
def test_tables_of_fewer_policies_than_asked_for_can_be_printed(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    none = LoadReport(1, 1, {}, 1.0, 1.0, 1, 1.0, *(Distribution.of([0.1]) for _ in range(5)))
    prefix_demo.show([PrefixRun("a_policy", none, 0.5, 0.1, 0.1, 1.0)] * count)
    show([PolicyRun("a_policy", none, 1.0, 1.0, 0.1, 0.5, 10.0, 5.0, 1)] * count)
    assert capsys.readouterr().out.count("a_policy") == 2 * count


@LINUX
def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    base = free_base_port((0, 1, DECODE_PORT_OFFSET))
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    command += ["emulate", "--base-port", str(base), "--decode", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    block_until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    """Whether it lives; one that has ended and that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


class Healthy(BaseHTTPRequestHandler):
    """Another cluster, which answers in the place of ours."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Not to stderr."""


def test_the_demo_does_not_use_the_cluster_of_another_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Healthy) as other:
        thread = Thread(target=other.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setattr(processes, "free_port_range", lambda prefillers, workers: other.server_port)
        try:
            with pytest.raises(DemoFailed, match="did not come up: .*cannot listen"), emulated(1, 1, 8, [], tmp_path):
                pytest.fail("it is another one's")
        finally:
            other.shutdown()
            thread.join()


def test_a_port_of_an_existing_connection_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert not is_free(client.getsockname()[1]) and not is_free(server.getsockname()[1])
    ports = free_ports(20)
    assert len({*ports}) == 20 and all(map(is_free, ports))
    assert max(ports) < 32_768, "a connection of anybody may take one before its server does"


def test_the_demo_reports_that_it_cannot_write_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def a_read_only_root() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/']")

    monkeypatch.setattr("tempfile.gettempdir", a_read_only_root)
    with pytest.raises(DemoFailed, match="^the demo needs a temporary folder: No usable"), temporary_folder():
        pass
