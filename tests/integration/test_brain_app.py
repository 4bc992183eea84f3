"""How a brain that has the lead starts, also where a file of its configuration can't be used."""

import importlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from balanceroute.config import validate
from balanceroute.core.policies import POLICIES
from balanceroute.errors import ConfigError, InputError
from balanceroute.plugins import learn_policy
from balanceroute.prediction import FinishedRequest, Model, save_model
from balanceroute.proxy.brain import LOST, BrainServer
from balanceroute.proxy.brain_app import SOCKET_REMOVED, BrainApp, BrainSetup, create_brain_app, reload_brain
from balanceroute.proxy.link.far import FarListener
from balanceroute.proxy.link.leadership import FileLead
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from tests.integration.relayed import LINEAGE, a_brain, answered, relayed, serving
from tests.integration.router import FAST
from tests.waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def beginning(folder: RunFolder, journal: Path) -> AsyncIterator[BrainApp]:
    """A brain that leads and does not listen yet; it has to end by itself, and then all of its journal is written."""
    urls = [{"url": f"http://127.0.0.1:{port}"} for port in range(1, 7)]
    config = validate({"prefill": {"workers": urls[:3]}, "decode": {"workers": urls[3:], "max_num_seqs": 2}})
    lead = FileLead(folder.lead)
    assert lead.take()
    try:
        yield create_brain_app(Configured.read(config), folder, lead, (), BrainSetup(LINEAGE, journal))
        assert workers_added(journal) == 6
    finally:
        lead.release()


def workers_added(journal: Path) -> int:
    return journal.read_text().count('"add_worker"')


async def test_a_brain_that_cannot_listen_for_relays_closes_what_it_opened(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.link.mkdir()
    async with beginning(folder, tmp_path / "journal") as app:
        with pytest.raises(ConfigError, match="cannot listen there"):
            async with app.router.lifespan_context(app):
                pass


async def test_a_brain_that_cannot_listen_for_far_relays_closes_what_it_opened(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    async with beginning(folder, tmp_path / "journal") as app:
        with socket.socket(type=socket.SOCK_DGRAM) as link, pytest.raises(ConfigError, match="listen.link"):
            server = BrainServer(app, app.config, BrainSetup(LINEAGE, link=link))
            await server._serve()
        for each in server.servers:
            each.close()


async def test_a_brain_that_ends_answers_nobody_who_waits_at_the_link_without_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FarListener, "_accept", lambda self: None)  # who comes, waits
    async with beginning(RunFolder(tmp_path), tmp_path / "journal") as app:
        with socket.create_server(("127.0.0.1", 0)) as link:
            server = BrainServer(app, app.config, BrainSetup(LINEAGE, link=link))
            async with serving(server):
                with socket.create_connection(link.getsockname()):
                    await server._answer_last_requests()
                    assert not server.server_state.connections


@pytest.mark.parametrize("meanwhile", ["link", "operators"])
async def test_a_brain_leaves_the_lead_to_another_one_where_its_folder_is_emptied_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, meanwhile: str
) -> None:
    folder, chmod = RunFolder(tmp_path / "run"), os.chmod
    folder.make()

    def emptied(path: str, mode: int) -> None:
        if path == str(getattr(folder, meanwhile)) and mode == 0o600:
            os.unlink(path)
        chmod(path, mode)

    monkeypatch.setattr(os, "chmod", emptied)
    async with beginning(folder, tmp_path / "journal") as app:
        server = BrainServer(app, app.config, BrainSetup(LINEAGE))
        with pytest.raises(SystemExit) as ended:
            await server._serve()
    for each in server.servers:
        each.close()
    assert ended.value.code == LOST
    assert [(each.getMessage(), each.levelname) for each in caplog.records if each.name.startswith("balanceroute")] == [
        (SOCKET_REMOVED, "WARNING")
    ]


class Resigning(FileLead):
    """A lead that notes when it is given up."""

    resigned = False

    def resign(self) -> None:
        self.resigned = True


async def test_a_brain_that_drains_lets_others_lead_at_once_and_ends_after_its_relays(tmp_path: Path) -> None:
    folder, lead = RunFolder(tmp_path), Resigning(tmp_path / "lead")
    assert lead.take()
    tiers = {tier: {"workers": [{"url": f"http://127.0.0.1:{port}"}]} for port, tier in ((1, "prefill"), (2, "decode"))}
    config, setup = validate(tiers), BrainSetup(LINEAGE, relays=["relay-0"])
    relay = RelayLocks(folder).lock("relay-0")  # it runs, and is about to join again
    server = BrainServer(create_brain_app(Configured.read(config), folder, lead, (), setup), config, setup)
    try:
        async with serving(server):
            server.drain()
            assert lead.resigned and server.busy(server._app.services) and not server.should_exit
            os.close(relay)
            await until(lambda: server.should_exit)
            assert not server.lost
    finally:
        lead.release()


@pytest.mark.parametrize("again", [False, True])
async def test_a_brain_leads_without_a_journal_that_cannot_be_opened_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, again: bool
) -> None:
    folder, lead = RunFolder(tmp_path), FileLead(tmp_path / "lead")
    assert lead.take()
    setup = BrainSetup(LINEAGE, Path("/dev/full"), again=again).as_leader(waited=False)
    tiers = {tier: {"workers": [{"url": f"http://127.0.0.1:{port}"}]} for port, tier in ((1, "prefill"), (2, "decode"))}
    app = create_brain_app(Configured.read(validate(tiers)), folder, lead, (), setup)
    try:
        async with app.router.lifespan_context(app):
            assert [each.getMessage() for each in caplog.records][:1] == ["leading without the journal"]
    finally:
        lead.release()


def test_a_journal_that_a_brain_has_begun_stays_and_the_next_one_writes_beside_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert BrainSetup(LINEAGE, journal).as_leader(waited=True).journal == journal
    journal.touch()
    assert BrainSetup(LINEAGE, journal).as_leader(waited=True).journal == tmp_path / f"journal.{os.getpid()}"


async def test_a_restarted_brain_leads_without_a_broken_predictor_until_a_reload_repairs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model.npz"
    model.write_text("half written")
    predictor = {"kind": "survival", "model": str(model)}
    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        tree = router.config.model_dump(exclude_unset=True)
        routing = {"policy": "br_h", "horizon_steps": 4}
        config = validate(tree | {"routing": routing, "predictor": predictor})
        router.brain.end()
        await until(lambda: relay.app.services.membership.member is None)
        with pytest.raises(InputError):
            async with a_brain(config, router.folder, relays=["relay-0"]):
                pass
        async with a_brain(config, router.folder, relays=["relay-0"], again=True) as brain:
            assert brain.services.forecasts is None and "leading without the predictor" in caplog.text
            await answered(relay, 1)
            await reload_brain(brain, config, Perimeter(config))
            assert brain.services.forecasts is None and brain.read is config
            rows = [FinishedRequest("", 10, length, "stop", float(length)) for length in range(1, 100)]
            save_model(model, Model("survival", 4, rows))
            await reload_brain(brain, config, Perimeter(config))
            assert brain.services.forecasts is not None
            await answered(relay, 2)


@pytest.mark.parametrize("broken", [None, "def FirstFit(patience_s):\n    raise RuntimeError"], ids=["gone", "fails"])
async def test_a_restarted_brain_uses_the_default_policy_until_a_reload_can_import_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module, name = tmp_path / "policy_that_goes.py", "policy_that_goes:FirstFit"
    whole = (Path(__file__).parents[2] / "examples" / "own_policy.py").read_text()

    def forgotten() -> None:
        POLICIES.pop(name, None)
        sys.modules.pop(module.stem, None)
        importlib.invalidate_caches()

    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        module.write_text(whole)
        tree = router.config.model_dump(exclude_unset=True)
        config = validate(tree | {"routing": {"policy": name, "options": {"patience_s": 5.0}}})
        module.unlink()
        if broken is not None:
            module.write_text(broken)
        forgotten()
        router.brain.end()
        await until(lambda: relay.app.services.membership.member is None)
        with pytest.raises(ConfigError):
            async with a_brain(config, router.folder, relays=["relay-0"]):
                pass
        async with a_brain(config, router.folder, relays=["relay-0"], again=True) as brain:
            assert brain.services.config.routing.policy == "level_fit"
            assert "leading with the default policy" in caplog.text
            await answered(relay, 1)
            module.write_text(whole)
            forgotten()
            learn_policy(name)
            await reload_brain(brain, config, Perimeter(config))
            assert brain.services.config.routing.policy == name and brain.read is config
            await answered(relay, 2)
    forgotten()
