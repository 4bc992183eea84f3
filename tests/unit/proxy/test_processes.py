"""What of a router in several processes is refused before there is one, in one line."""

import dataclasses
import errno
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import msgspec
import pytest
import trustme

from balanceroute.build import worker_specs
from balanceroute.config import Config
from balanceroute.core.policies import POLICIES
from balanceroute.core.types import Role
from balanceroute.errors import ConfigError
from balanceroute.journal.writing import claim
from balanceroute.proxy import processes
from balanceroute.proxy.brain_app import BrainSetup
from balanceroute.proxy.client.relay_loads import CONNECTIONS, Load
from balanceroute.proxy.link.files import replace_content
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.parent.handover import HandoverState, Predecessor
from balanceroute.proxy.parent.supervisor import Main
from balanceroute.proxy.perimeter.key_table import PER_MINUTE, REQUESTS, USED
from balanceroute.proxy.processes import Processes, begin_anew, serve_processes
from balanceroute.proxy.relay import RelaySetup
from balanceroute.proxy.run_folder.changes import Changes
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from tests.unit.proxy.parent.trials import failure
from tests.unit.proxy.virtual_time import a_config
from tests.waiting import block_until


def refusal(config: Config, journal: Path | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        serve_processes(config, lambda: config, journal)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_lease_outside_a_pod_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    message = refusal(a_config(listen={"relays": 1, "port": 0, "run_folder": str(tmp_path), "lease": "router"}))
    assert message.startswith("listen.lease = 'router': accepted only in a pod of Kubernetes: KUBERNETES_SERVICE_HOST ")


def test_a_run_folder_that_cannot_be_used_is_named() -> None:
    message = refusal(a_config(listen={"relays": 1, "port": 0, "run_folder": "/dev/null/run"}))
    assert message.startswith("listen.run_folder = '/dev/null/run'")


def test_a_run_folder_of_another_router_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    with RunFolder(tmp_path).claim():
        message = refusal(a_config(listen={"relays": 1, "port": 0, "run_folder": str(tmp_path)}))
    assert message.startswith("listen.run_folder = ") and "another router" in message and "--take-over" in message


def test_a_take_over_of_a_router_on_any_port_needs_its_run_folder() -> None:
    config = a_config(listen={"relays": 1, "port": 0})
    with pytest.raises(ConfigError, match=r"^--take-over: needs listen.run_folder where listen.port is 0"):
        serve_processes(config, lambda: config, take_over=True)


def test_a_router_whose_predictor_cannot_be_used_lets_its_predecessor_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    predecessor = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(processes, "_predecessor", lambda config: predecessor)
    predictor = {"kind": "survival", "model": str(tmp_path / "no model")}
    config = a_config(listen={"relays": 1}, routing={"policy": "br_h", "horizon_steps": 4}, predictor=predictor)
    with pytest.raises(ConfigError, match="no model"):
        serve_processes(config, lambda: config, take_over=True)
    assert closed


def test_a_router_whose_predictor_takes_too_long_lets_its_predecessor_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    predecessor = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(processes, "_predecessor", lambda config: predecessor)
    monkeypatch.setattr(processes, "_try_forecasts", lambda config: signal.pause())
    monkeypatch.setattr(processes, "WITHIN_S", 0.2)
    config = a_config(listen={"relays": 1})
    with pytest.raises(ConfigError, match="to try the configuration takes longer than 0.2 s"):
        serve_processes(config, lambda: config, take_over=True)
    assert closed


@pytest.mark.parametrize(
    ("brains", "needed", "files"),
    [((), ["brain", "brain-2"], ["router"]), (("10.0.0.1:1",), [], ["identity", "router"])],
    ids=["the brain's machine", "one with only relays"],
)
def test_a_router_starts_its_processes_and_begins_to_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brains: tuple[str, ...], needed: list[str], files: list[str]
) -> None:
    def look(mains: dict[str, Main], needed: list[str], owner: Processes) -> SimpleNamespace:
        seen.append((list(mains), needed, owner.drain_timeout_s, sorted(path.name for path in tmp_path.iterdir())))
        return SimpleNamespace(run=lambda: 3)

    seen: list[object] = []
    monkeypatch.setattr(processes, "Supervisor", look)
    for former in ("counts-brain", "journal"):
        (tmp_path / former).touch()
    config = a_config(listen={"relays": 2, "port": 0, "run_folder": str(tmp_path)}, lifecycle={"drain_timeout_s": 7})
    config = config.model_copy(update={"listen": config.listen.model_copy(update={"brains": brains})})
    assert serve_processes(config, lambda: config, tmp_path / "journal") == 3
    assert seen == [([*needed, "relay-0", "relay-1"], needed, 7.0, files)]


def a_parent(
    config: Config, folder: RunFolder, lock: BinaryIO, load: Callable[[], Config] | None = None, **more: Any
) -> Processes:
    """`load`: what it reads at a reload; None: the same again."""
    given = {"sockets": [], "journal": None, "predecessor": None, **more}
    return Processes(Configured.read(config), load or (lambda: config), folder, lock, **given)


def reloaded(parent: Processes) -> bool:
    """Whether a reload succeeds, as the supervisor does one."""
    return parent.reload(failure(parent.try_reload))


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is the test runner's."""
    monkeypatch.setattr(processes, "configure", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("new", "removed", "accepted"),
    [
        ({"limits": {"max_choices": 3}}, (), True),
        ({"decode": {"max_num_seqs": 3}}, (), False),
        ({"decode": {"max_num_seqs": 3}}, ("d0",), True),
        ({"listen": {"relays": 2}}, (), False),
        ({"auth": {"client_keys": "/no/such/keys"}}, (), False),
        ({"routing": {"policy": "br_h"}, "predictor": {"kind": "survival"}}, (), True),
        ({"routing": {"policy": "br_h"}, "predictor": {"kind": "survival", "model": "/no/such/model"}}, (), False),
    ],
    ids=["limits", "slots", "slots of a removed worker", "relays", "keys", "predictor", "model"],
)
def test_a_reload_that_any_child_would_refuse_is_refused_for_all(
    tmp_path: Path, new: dict[str, Any], removed: tuple[str, ...], accepted: bool
) -> None:
    folder = RunFolder(tmp_path)
    listen = {"relays": 1, "run_folder": str(tmp_path)}
    old = a_config(1, 1, listen=listen)
    wanted = a_config(1, 1, **{"listen": listen, **new})
    with folder.claim() as lock:
        parent = a_parent(old, folder, lock, lambda: wanted)
        in_use = tuple(spec for spec in worker_specs(old) if spec.id not in removed)
        replace_content(folder.changes, msgspec.json.encode(Changes(parent.lineage, workers=in_use)))
        assert reloaded(parent) is accepted
        assert parent.config == (wanted if accepted else old)


@pytest.mark.parametrize("has_led", [False, True])
def test_a_pod_that_has_not_led_accepts_other_slots(tmp_path: Path, has_led: bool) -> None:
    folder = RunFolder(tmp_path)
    listen = {"relays": 1, "run_folder": str(tmp_path), "lease": "router"}
    old, wanted = a_config(1, 1, listen=listen), a_config(1, 1, listen=listen, decode={"max_num_seqs": 3})
    with folder.claim() as lock:
        parent = a_parent(old, folder, lock, lambda: wanted)
        if has_led:
            workers = tuple(worker_specs(old))
            replace_content(folder.changes, msgspec.json.encode(Changes(parent.lineage, workers=workers)))
        assert reloaded(parent) is not has_led


def test_a_reload_that_renames_an_added_server_is_refused_for_all(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    listen = {"relays": 1, "run_folder": str(tmp_path)}
    old, wanted = a_config(1, 1, listen=listen), a_config(1, 2, listen=listen)
    (known, further) = [spec for spec in worker_specs(wanted) if spec.role is Role.DECODE]
    added = dataclasses.replace(further, id="hand")
    with folder.claim() as lock:
        parent = a_parent(old, folder, lock, lambda: wanted)
        changes = Changes(parent.lineage, added=(added,), workers=(*worker_specs(old), added))
        replace_content(folder.changes, msgspec.json.encode(changes))
        assert not reloaded(parent) and parent.config == old


def test_a_machine_without_a_brain_warns_itself_of_a_reload_that_opens_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "link.pem")
    (tmp_path / "keys.yaml").write_text("[]")
    sections = {
        "listen": {"relays": 1, "brains": ["127.0.0.1:8700"], "run_folder": str(tmp_path / "run")},
        "tls": {"link_ca_file": str(tmp_path / "ca.pem"), "link_cert_file": str(tmp_path / "link.pem")},
    }
    old = a_config(1, 1, auth={"client_keys": str(tmp_path / "keys.yaml"), "worker_api_key": "secret"}, **sections)
    wanted = a_config(1, 1, auth={"worker_api_key": "secret"}, **sections)
    folder = RunFolder(tmp_path / "run")
    folder.make()
    with folder.claim() as lock:
        parent = a_parent(old, folder, lock, lambda: wanted)
        assert reloaded(parent)
    assert [record.message[:40] for record in caplog.records] == ["whoever can connect uses the workers' key"[:40]]


def test_a_dead_relays_entries_in_shared_memory_are_cleared(tmp_path: Path) -> None:
    config = a_config(1, 1, listen={"relays": 2, "run_folder": str(tmp_path)})
    folder = RunFolder(tmp_path)
    with folder.claim() as lock:
        parent = a_parent(config, folder, lock)
        one, other = (Load(parent.loads, place) for place in (0, 1))
        one.accept(100.0)
        one.put(CONNECTIONS, 7)
        parent.died("brain")
        assert other.others(CONNECTIONS) == 7
        parent.died("relay-0")
        assert other.others(CONNECTIONS) == 0 and not other.step_back(100.0)


def test_a_restarted_router_with_the_same_process_id_has_another_lineage(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path), a_config(1, 1, listen={"relays": 1, "run_folder": str(tmp_path)})
    with folder.claim() as lock:
        lives = [a_parent(config, folder, lock) for _ in range(2)]
    assert lives[0].lineage != lives[1].lineage


@pytest.mark.parametrize(
    ("brain", "waits", "leads"), [("brain", "standby", "brain"), ("brain-2", "standby-2", "brain-2")]
)
def test_ps_calls_a_brain_as_the_log_does_once_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brain: str, waits: str, leads: str
) -> None:
    """`child died` of brain-2 was a br-standby in `ps`, or a second br-brain."""
    folder, config = RunFolder(tmp_path), a_config(1, 1, listen={"relays": 1, "run_folder": str(tmp_path)})
    names: list[str] = []
    monkeypatch.setattr(processes, "be_called", names.append)
    monkeypatch.setattr(processes, "run_brain", lambda *given: given[-1].on_lead())
    with folder.claim() as lock:
        parent = a_parent(config, folder, lock)
        monkeypatch.setattr(parent, "_begin", lambda name: None)
        parent.mains()[brain](lambda: None)
    assert names == [waits, leads]


def test_a_failed_takeover_lets_the_next_router_use_other_names(tmp_path: Path) -> None:
    config = a_config(1, 1, listen={"relays": 1, "run_folder": str(tmp_path)})
    folder = RunFolder(tmp_path)
    ours, old = socket.socketpair()

    def successor() -> Processes:
        state = HandoverState(lineage=4711, generation=1, decode_first=False)
        predecessor = Predecessor(ours, state, [], (tmp_path / "router").open("rb"), Path(os.devnull).open("rb"))
        return a_parent(config, folder, lock, predecessor=predecessor)

    with folder.claim() as lock, old:
        assert not a_parent(config, folder, lock).has_predecessor
        first = successor()
        assert first.relays == ["relay-0.2"] and first.has_predecessor
        lock = RelayLocks(folder).lock("relay-0.2")
        first.stop_listening()
        assert old.recv(1) == b"", "the old one hears of it before the last stream has ended"
        second = successor()
        assert second.relays == ["relay-0.3"]
        second.stop_listening()
        os.close(lock)


def refused_takeover(parent: Processes, new: Config) -> str:
    """Why a router of another configuration cannot take over from this one."""
    parent.all_up()
    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(serve_processes, new, lambda: new, None, True)
        block_until(lambda: parent.succeeded() or started.done())
    parent.stop_listening()
    return str(started.exception())


@pytest.mark.usefixtures("unsignalled")
@pytest.mark.parametrize("before", ["mooncake_v1", "mooncake_layerwise"])
def test_a_router_that_asks_the_tiers_in_the_other_order_cannot_be_taken_over(tmp_path: Path, before: str) -> None:
    folder = RunFolder(tmp_path / "run")
    listen = {"relays": 1, "port": 0, "run_folder": str(folder.folder)}
    layerwise = {"connector": "mooncake_layerwise", "layerwise": {"callback_url": "http://127.0.0.1:1"}}
    orders = {"mooncake_v1": a_config(listen=listen), "mooncake_layerwise": a_config(listen=listen, **layerwise)}
    old, new = orders.pop(before), *orders.values()
    folder.make()
    with folder.claim() as lock, socket.create_server(("127.0.0.1", 0)) as listener:
        parent = a_parent(old, folder, lock, sockets=[listener])
        assert refused_takeover(parent, new).startswith(
            "connector: cannot change to or from mooncake_layerwise with --take"
        )


@pytest.mark.usefixtures("unsignalled")
@pytest.mark.parametrize(
    ("tiers", "problem"),
    [
        ({"prefill": ["p0", "d1"], "decode": ["d0"]}, "worker d1: it is a decode worker at http://d1"),
        ({"prefill": ["p0"], "decode": ["d0", "p1"]}, "worker p1: it is a prefill worker at http://p1"),
        ({"prefill": ["p0", "p1"], "decode": [("d0", "d1"), ("d1", "d0")]}, "worker d0: d1 is the worker at http://d1"),
    ],
    ids=["a decoder prefills", "a prefiller decodes", "two ids change places"],
)
def test_a_router_is_not_taken_over_by_one_that_gives_its_ids_to_its_other_workers(
    tmp_path: Path, tiers: dict[str, list[Any]], problem: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    listen = {"relays": 1, "port": 0, "run_folder": str(folder.folder)}

    def of(names: list[Any]) -> dict[str, Any]:
        pairs = [name if isinstance(name, tuple) else (name, name) for name in names]
        return {"workers": [{"id": name, "url": f"http://{server}:1"} for name, server in pairs]}

    old = a_config(prefill=of(["p0", "p1"]), decode=of(["d0", "d1"]), listen=listen)
    new = a_config(**{tier: of(names) for tier, names in tiers.items()}, listen=listen)
    folder.make()
    with folder.claim() as lock, socket.create_server(("127.0.0.1", 0)) as listener:
        parent = a_parent(old, folder, lock, sockets=[listener])
        changes = Changes(parent.lineage, workers=tuple(worker_specs(old)))
        replace_content(folder.changes, msgspec.json.encode(changes))
        assert refused_takeover(parent, new).startswith(problem)


def test_a_trial_process_closes_the_listeners_and_the_run_folder_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_config(1, 1, listen={"relays": 1, "run_folder": str(tmp_path)})
    new = config.model_copy(update={"predictor": config.predictor.model_copy(update={"kind": "survival"})})
    folder = RunFolder(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as link, folder.claim() as lock:
        parent = a_parent(config, folder, lock, lambda: new, sockets=[listener], link=link)

        def tell(_: Config) -> None:
            raise ConfigError(f"{listener.fileno()} {link.fileno()} {lock.closed}")

        monkeypatch.setattr(processes, "_try_forecasts", tell)
        assert str(failure(parent.try_reload)) == "-1 -1 True"
        assert listener.fileno() >= 0 and not lock.closed


@pytest.mark.usefixtures("unsignalled")
def test_a_child_is_told_what_has_happened_and_keeps_only_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(_: object, __: object, setup: BrainSetup | RelaySetup, *___: object) -> None:
        drains = setup.drains if isinstance(setup, BrainSetup) else None
        raise ConfigError(f"{setup.again} {drains}, {listener.fileno() >= 0} {link.fileno() >= 0} {not lock.closed}")

    def told(child: str) -> str:
        return str(failure(partial(parent.mains()[child], lambda: None)))

    monkeypatch.setattr(processes, "run_brain", tell)
    monkeypatch.setattr(processes, "run_relay", tell)
    config, folder = a_config(1, 1, listen={"relays": 1, "run_folder": str(tmp_path)}), RunFolder(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as link, folder.claim() as lock:
        parent = a_parent(config, folder, lock, sockets=[listener], link=link)
        assert (told("brain-2"), told("relay-0")) == ("False False, False True False", "False None, True False False")
        parent.all_up()
        parent.begin_drain()
        assert (told("brain-2"), told("relay-0")) == ("True True, False True False", "True None, True False False")
        parent.stop_listening()


@pytest.mark.usefixtures("unsignalled")
def test_keys_are_known_to_relays_after_a_reload_and_their_use_after_a_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(_: object, __: object, setup: RelaySetup, *___: object) -> None:
        rows = setup.relay_rows.rows(["one", "other"])
        rows["other"].put(REQUESTS + PER_MINUTE, 60.0)
        rows["other"].add(REQUESTS + USED, 7.0)
        raise ConfigError(f"{rows['other'].own(REQUESTS + USED):g}")

    monkeypatch.setattr(processes, "run_relay", use)
    keys, folder = tmp_path / "keys", RunFolder(tmp_path)
    keys.write_text("keys: [{name: one, sha256: " + "a" * 64 + "}]\n")
    config = a_config(1, 1, listen={"relays": 1, "run_folder": str(tmp_path)}, auth={"client_keys": str(keys)})
    with folder.claim() as lock, ThreadPoolExecutor(1) as threads:
        parent = a_parent(config, folder, lock)
        keys.write_text(f"{keys.read_text()[:-2]}, {{name: other, sha256: {'b' * 64}}}]\n")
        assert reloaded(parent) and str(failure(partial(parent.mains()["relay-0"], lambda: None))) == "7"
        parent.all_up()
        predecessor = found(parent, folder, threads)
        successor = a_parent(config, folder, lock, predecessor=predecessor)
        assert str(failure(partial(successor.mains()["relay-0.2"], lambda: None))) == "14"
        for router in (successor, parent):
            router.stop_listening()


def found(parent: Processes, folder: RunFolder, threads: ThreadPoolExecutor) -> Predecessor:
    """What a successor finds of this router."""
    asked = threads.submit(Predecessor.find, folder.handover)
    block_until(lambda: parent.succeeded() or asked.done())
    predecessor = asked.result()
    assert predecessor is not None
    return predecessor


@pytest.mark.usefixtures("unsignalled")
def test_the_run_folder_is_the_successors_from_its_first_question_to_its_end(tmp_path: Path) -> None:
    config, folder = a_config(1, 1, listen={"relays": 1, "run_folder": str(tmp_path)}), RunFolder(tmp_path)
    with folder.claim() as lock, ThreadPoolExecutor(1) as threads:
        parent = a_parent(config, folder, lock)
        parent.all_up()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.connect(str(folder.handover))
            parent.repair()
            assert not parent.succeeded() and parent.has_successor, "it was not forgotten"
        assert not parent.succeeded() and not parent.has_successor
        predecessor = found(parent, folder, threads)
        (tmp_path / "router").rename(tmp_path / "removed")
        parent.repair()
        assert not (tmp_path / "router").exists(), "another lock than the one that the successor has"
        (tmp_path / "removed").rename(tmp_path / "router")
        predecessor.go()
        block_until(parent.succeeded)
        folder.claim().close()
        parent.stop_listening()


def refuses_to_reload(folder: Path, happens: Callable[[], None]) -> None:
    """Where that happens while the configuration is read, a parent goes on by the one that it has."""
    config = a_config(1, 1, listen={"relays": 1, "run_folder": str(folder)})

    def load() -> Config:
        happens()
        return config

    with RunFolder(folder).claim() as lock:
        parent = a_parent(config, RunFolder(folder), lock, load)
        assert not reloaded(parent) and parent.config is config


def test_a_reload_that_fails_for_whatever_reason_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Configured) -> None:  # what goes well in another process need not in this one
        raise MemoryError

    monkeypatch.setattr(Configured, "accept", fail)
    refuses_to_reload(tmp_path, lambda: None)
    assert [record.message for record in caplog.records] == ["reload failed"]


def test_a_reload_imports_classes_in_a_child_and_not_in_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    name, listen = "own_policy:FirstFit", {"relays": 1, "run_folder": str(tmp_path)}
    predictor = {"kind": "own_predictor:MeanByKey"}

    def load() -> Config:
        return a_config(1, 1, listen=listen, routing={"policy": name}, predictor=predictor)

    folder = RunFolder(tmp_path)
    with folder.claim() as lock:
        parent = a_parent(a_config(1, 1, listen=listen), folder, lock, load)
        for module in ("own_policy", "own_predictor"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delitem(POLICIES, name, raising=False)
        assert reloaded(parent) and parent.config.routing.policy == name
        assert not {"own_policy", "own_predictor"} & sys.modules.keys() and name not in POLICIES


@pytest.mark.parametrize("ends", [lambda: os._exit(5), lambda: os.kill(os.getpid(), 9)], ids=["exit", "signal"])
def test_a_configuration_that_crashes_its_reader_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: Callable[[], None]
) -> None:
    refuses_to_reload(tmp_path, ends)
    assert [record.message for record in caplog.records] == ["reload refused"]


@pytest.fixture
def unsignalled() -> Iterator[None]:
    """A parent that is asked to look by nobody."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, before)


@pytest.mark.usefixtures("unsignalled")
def test_the_socket_that_a_take_over_uses_is_recreated_when_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = a_config(1, 1, listen={"relays": 1, "run_folder": str(tmp_path / "run")})
    folder = RunFolder(tmp_path / "run")
    folder.make()
    with folder.claim() as lock:
        parent = a_parent(config, folder, lock)
        parent.repair()
        assert not folder.handover.exists(), "not before all are up"
        parent.all_up()
        shutil.rmtree(folder.folder)
        folder.folder.touch()
        for _ in range(2):
            parent.repair()
        folder.folder.unlink()
        parent.repair()
        assert folder.is_claimed
        with socket.socket(socket.AF_UNIX) as successor:
            successor.connect(str(folder.handover))
        folder.handover.unlink()
        parent.repair()
        assert folder.handover.exists()
        parent.stop_listening()
    messages = [record.message for record in caplog.records]
    assert messages.count("no other router can take over from this one") == 1


def test_a_parent_knows_whether_any_of_its_relays_accepts(tmp_path: Path) -> None:
    config = a_config(1, 1, listen={"relays": 2, "run_folder": str(tmp_path / "run")})
    folder = RunFolder(tmp_path / "run")
    folder.make()
    with folder.claim() as lock:
        parent = a_parent(config, folder, lock)
        assert not parent.accepts
        Load(parent.loads, 1).accept(1.0)
        assert parent.accepts
        parent.died(parent.relays[1])
        assert not parent.accepts


def test_a_journal_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    config = a_config(listen={"relays": 1, "port": 0, "run_folder": str(tmp_path / "run")})
    journal = tmp_path / "no_folder" / "journal.jsonl"
    assert refusal(config, journal) == f"{journal}: No such file or directory"
    assert refusal(config, tmp_path) == f"{tmp_path}: Is a directory"
    unknowable = tmp_path / ("a" * 256)  # a look at it fails already, as in a folder that may not be searched
    assert refusal(config, unknowable) == f"{unknowable}: File name too long"


def test_a_journal_whose_disk_is_full_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"journal: No space left on device$"):
        begin_anew(tmp_path / "journal")
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_another_router_writes_is_named_and_stays(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with journal.open("wb", buffering=0) as file:
        claim(file)
        with pytest.raises(ConfigError, match="journal: another process writes it$"):
            begin_anew(journal)
    assert journal.exists()
    begin_anew(journal)
    assert not journal.exists()


def test_a_removed_identity_file_is_rewritten_with_the_same_name(tmp_path: Path) -> None:
    listen = {"relays": 1, "run_folder": str(tmp_path), "lease": "router"}
    folder, config = RunFolder(tmp_path), a_config(1, 1, listen=listen)
    with folder.claim() as lock:
        name = folder.identity()
        parent = a_parent(config, folder, lock)
        (tmp_path / "identity").unlink()
        parent.repair()
        assert (tmp_path / "identity").read_text() == name
