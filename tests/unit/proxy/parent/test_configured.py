"""A configuration with what its files held: a file that is wrong by now changes nothing of it."""

import asyncio
import os
import threading
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import trustme

from balanceroute.core.policies import POLICIES
from balanceroute.errors import ConfigError
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.parent.shared_config import ConfigWithKeys
from balanceroute.proxy.perimeter.key_table import KeyTable, RelayRows
from tests.unit.proxy.virtual_time import a_config


def keys(file: Path, name: str) -> str:
    file.write_text(f"- name: {name}\n  sha256: {sha256(name.encode()).hexdigest()}\n")
    return str(file)


def chain(file: Path, at_ns: int) -> str:
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
    os.utime(file, ns=(at_ns, at_ns))
    return str(file)


def test_a_reload_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    file, cert = tmp_path / "keys.yaml", tmp_path / "chain.pem"
    auth, tls = {"client_keys": keys(file, "a")}, {"cert_file": chain(cert, 1)}
    config = a_config(auth=auth, tls=tls)
    configured = Configured.read(config)
    perimeter, server = configured.perimeter, configured.tls.server
    for new, why in (
        (a_config(auth=auth, tls=tls, listen={"port": 1}), "listen"),
        (a_config(auth={"client_keys": keys(file, "b")}), "tls.cert_file"),
    ):
        with pytest.raises(ConfigError, match=why):
            configured.propose(new)
    file.write_text("- name: c\n  sha25")
    with pytest.raises(ConfigError, match=r"auth\.client_keys"):
        configured.propose(config)
    assert (configured.config, configured.perimeter, configured.tls.server) == (config, perimeter, server)
    keys(file, "d")
    configured.propose(config)
    assert configured.perimeter is perimeter
    configured.accept()
    assert configured.perimeter is not perimeter


def test_a_follower_uses_the_agreed_configuration_and_not_the_current_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, cert = tmp_path / "keys.yaml", tmp_path / "chain.pem"
    auth, tls = {"client_keys": keys(file, "a")}, {"cert_file": chain(cert, 1)}
    parent = Configured.read(a_config(auth=auth, tls=tls))
    child = replace(parent, tls=Configured.read(parent.config).tls)  # as it is forked
    keys(file, "b")
    new = a_config(auth=auth, tls=tls, limits={"max_choices": 3})
    parent.propose(new)
    parent.accept()
    file.write_text("- name: c\n  sha25")
    cert.write_text("half written")
    before = child.tls.server
    child.follow()
    assert (parent.number, child.number) == (2, 2), "saved changes of operators name it"
    assert child.config == new and child.config.model_fields_set == new.model_fields_set
    assert child.perimeter.keys is not None and [key.entry.name for key in child.perimeter.keys] == ["b"]
    assert child.tls.server is before and "certificates not reloaded" in caplog.text
    chain(cert, 2)
    child.tls.catch_up()
    assert child.tls.server is not before


def test_a_process_with_the_agreed_configuration_knows_its_own_policy_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "examples"))
    name = "own_policy:FirstFit"
    configured = Configured.read(a_config())
    configured.propose(a_config(routing={"policy": name}))
    configured.accept()
    del POLICIES[name]  # as in a process that was forked before
    configured.learn()
    configured.follow()
    assert POLICIES.pop(name, None) is not None and configured.config.routing.policy == name


def test_a_relay_that_follows_makes_its_keys_once_in_its_rows_of_the_shared_table(tmp_path: Path) -> None:
    """To make 20,000 keys twice, once of them without the table, stopped each relay for half a second."""
    file, table = tmp_path / "keys.yaml", KeyTable(1, slots=4)
    configured = Configured.read(a_config(auth={"client_keys": keys(file, "a")}))
    table.name(["a", "b"])
    relay_rows = RelayRows(table, 0)
    configured.perimeter.share_keys(relay_rows)
    keys(file, "b")
    configured.propose(configured.config)
    configured.accept()
    (key,) = configured.perimeter.keys or ()
    assert configured.perimeter.relay_rows is relay_rows and key.row is relay_rows.rows(["b"])["b"]


@pytest.mark.parametrize("threads", [True, False])
def test_a_configuration_is_fetched_off_the_loop_where_there_is_a_thread_for_that(
    threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured, readers = Configured.read(a_config(limits={"max_choices": 3})), []
    get = configured.shared.get

    def noting() -> ConfigWithKeys:
        readers.append(threading.current_thread())
        return get()

    def refusing(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(configured.shared, "get", noting)
    if not threads:
        monkeypatch.setattr(threading.Thread, "start", refusing)
    asyncio.run(configured.fetch())
    assert len(readers) == threads and threading.current_thread() not in readers
    configured.follow()
    assert configured.config.limits.max_choices == 3


def test_a_follower_without_a_reload_uses_the_configuration_of_the_start() -> None:
    configured = Configured.read(a_config(limits={"max_choices": 3}))
    configured.follow()
    assert configured.config == a_config(limits={"max_choices": 3})


def test_a_process_that_did_not_watch_catches_up_with_certificates_unless_they_are_invalid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert = tmp_path / "chain.pem"
    tls = Configured.read(a_config(tls={"cert_file": chain(cert, 1)})).tls
    first = tls.server
    tls.catch_up()
    assert tls.server is first
    cert.write_text("half written")
    tls.catch_up()
    assert tls.server is first and "certificates not reloaded" in caplog.text
    chain(cert, 2)
    tls.catch_up()
    assert tls.server is not first
