"""A brain that stands by hears the parent, and loses no signal of it when it takes the lead."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn

from balanceroute.errors import ConfigError
from balanceroute.proxy import brain, brain_app
from balanceroute.proxy.brain_app import BrainSetup
from balanceroute.proxy.link.leadership import FileLead
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from tests.unit.proxy.virtual_time import a_config
from tests.waiting import MOST_PACE_S, PATIENCE_S, block_pace

STANDBY = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # before numpy starts threads
from pathlib import Path
from balanceroute.proxy.brain import stand_by
from balanceroute.proxy.link import leadership

leadership.LEASE_S = float("inf")  # the test leads as long as it likes, also while it does not run

def tell(word):
    print(word, flush=True)

assert stand_by(leadership.FileLead(Path(sys.argv[1])), lambda: tell("follows"), lambda: tell("waits"))
os.kill(os.getpid(), signal.SIGHUP)
tell("leads, and will hear" if signal.SIGHUP in signal.sigpending() else "leads")
"""


def test_a_reload_while_a_standby_takes_the_lead_is_applied_later(tmp_path: Path) -> None:
    lead = FileLead(tmp_path / "lead")
    assert lead.take()
    command = [sys.executable, "-c", STANDBY, str(tmp_path / "lead")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as standby:
        assert standby.stdout is not None
        assert standby.stdout.readline() == "waits\n" and lead.renew()
        standby.send_signal(signal.SIGHUP)
        assert standby.stdout.readline() == "follows\n"
        lead.release()
        assert standby.stdout.readline() == "leads, and will hear\n"
    assert standby.returncode == 0


def test_a_standby_that_was_stopped_takes_nothing_for_a_reload(tmp_path: Path) -> None:
    lead = FileLead(tmp_path / "lead")
    assert lead.take()
    command = [sys.executable, "-c", STANDBY, str(tmp_path / "lead")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as standby:
        assert standby.stdout is not None
        assert standby.stdout.readline() == "waits\n"
        for number in (signal.SIGSTOP, signal.SIGCONT):
            standby.send_signal(number)
            for _ in range(2):  # longer than it waits
                block_pace(MOST_PACE_S)
        lead.release()
        assert standby.stdout.readline() == "leads, and will hear\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_standby_ends_at_once_and_is_not_needed_any_more(tmp_path: Path, number: signal.Signals) -> None:
    lead = FileLead(tmp_path / "lead")
    assert lead.take()
    command = [sys.executable, "-c", STANDBY, str(tmp_path / "lead")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as standby:
        assert standby.stdout is not None
        assert standby.stdout.readline() == "waits\n"
        standby.send_signal(number)
        assert standby.wait(PATIENCE_S) == 0
    lead.release()


def test_the_first_epoch_is_larger_than_those_that_far_relays_have_seen_before(tmp_path: Path) -> None:
    listen, tls = {"relays": 1, "link": "127.0.0.1:8700"}, {"link_ca_file": "ca", "link_cert_file": "chain"}
    now = int(time.time())
    epochs = []
    for name, config in (("near", a_config()), ("far", a_config(listen=listen, tls=tls))):
        lead = brain.the_lead(config, RunFolder(tmp_path / name))
        (tmp_path / name).mkdir()
        assert lead.take()
        epochs.append(lead.epoch)
        lead.release()
    assert epochs[0] == 1 and epochs[1] >= now


class Led:
    """A lead that is free, and what a brain does with it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def take(self) -> bool:
        return True

    def resign(self) -> None:
        self.done.append("resign")

    def release(self) -> None:
        self.done.append("release")


@pytest.mark.parametrize(("lost", "expected"), [(True, ["release"]), (False, ["resign", "release"])])
def test_a_brain_keeps_the_lease_for_the_next_brain_of_its_pod_unless_the_router_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool, expected: list[str]
) -> None:
    led, server = Led(), SimpleNamespace(run=lambda: None, lost=lost)
    monkeypatch.setattr(brain, "the_lead", lambda *_: led)
    monkeypatch.setattr(brain, "_leading_server", lambda *_: server)
    callbacks = brain.BrainCallbacks(lambda: None, lambda: None, lambda: None)
    with pytest.raises(SystemExit) if lost else nullcontext():
        brain.run_brain(Configured.read(a_config()), RunFolder(tmp_path), BrainSetup(1), callbacks)
    assert led.done == expected


def test_a_brain_that_is_restarted_in_a_drain_leads_although_another_pod_has_the_lease_by_now(tmp_path: Path) -> None:
    config = a_config(listen={"lease": "router", "run_folder": str(tmp_path), "relays": 1})
    lead = brain.the_lead(config, RunFolder(tmp_path), again=True, drains=True)
    assert lead.take()
    lead.release()


@pytest.mark.parametrize("name", ["link.sock", "operators.sock"])
def test_a_brain_that_cannot_listen_ends_with_the_reason_and_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = RunFolder(tmp_path)
    callbacks = brain.BrainCallbacks(lambda: None, (tmp_path / name).mkdir, lambda: None)
    with pytest.raises(ConfigError, match=f"{name}: cannot listen there: "):
        brain.run_brain(Configured.read(a_config()), folder, BrainSetup(1), callbacks)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


@pytest.mark.parametrize("version", ["newest", "lowest"])
def test_a_brain_that_cannot_start_does_not_end_as_one_that_is_not_needed_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """In a drain, the parent would not restart it."""

    async def returns(server: uvicorn.Server, sockets: object = None) -> None:
        await server.lifespan.startup()
        server.should_exit = True

    def fails(*_: object) -> None:
        raise RuntimeError("no thread can be started")

    if version == "lowest":
        monkeypatch.setattr(uvicorn.Server, "startup", returns)
    monkeypatch.setattr(brain_app, "start", fails)
    callbacks = brain.BrainCallbacks(lambda: None, lambda: None, lambda: None)
    with pytest.raises(SystemExit) as ended:
        brain.run_brain(Configured.read(a_config()), RunFolder(tmp_path), BrainSetup(1), callbacks)
    assert ended.value.code


def test_a_standby_that_leads_waits_for_all_relays_of_its_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an emptied folder no relay seems to run, or only the first one that has restored its lock file. The standby
    decided at once, gave slots of running requests away, and their streams ended.
    """
    awaited: list[set[str]] = []
    folder, setup = RunFolder(tmp_path / "run"), BrainSetup(1, relays=["relay-0", "relay-1"])
    callbacks = brain.BrainCallbacks(lambda: None, lambda: None, lambda: None)
    monkeypatch.setattr(brain, "create_brain_app", lambda *arguments: awaited.append(arguments[3]))
    monkeypatch.setattr(brain, "BrainServer", lambda *_: None)

    def lead(waited: bool) -> None:
        configured = Configured.read(a_config())
        brain._leading_server(configured, folder, FileLead(folder.lead), setup, callbacks, waited)

    folder.make()
    lead(waited=False)  # the router starts: its relays hold nothing
    lead(waited=True)
    for relay in ("relay-0", "relay-0.2"):  # the second is of another router, which takes over or leaves
        lock = RelayLocks(folder).lock(relay)
        lead(waited=True)
        os.close(lock)
    own = {"relay-0", "relay-1"}
    assert awaited == [set(), own, own, {*own, "relay-0.2"}]
