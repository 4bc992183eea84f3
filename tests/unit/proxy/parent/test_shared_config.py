"""What the parent has read reaches its children whole, and only whole."""

import os
from pathlib import Path

import pytest

from balanceroute.config import Config, KeyEntry, load
from balanceroute.errors import ConfigError
from balanceroute.proxy.parent.shared_config import ConfigWithKeys, SharedConfig
from tests.unit.proxy.parent.trials import failure
from tests.unit.proxy.virtual_time import a_config

CONFIGS = sorted((Path(__file__).parents[4] / "configs").glob("*.yaml"))


def put(shared: SharedConfig, config: Config, *keys: KeyEntry) -> ConfigWithKeys:
    accepted = ConfigWithKeys(config, keys)
    shared.propose(accepted)
    shared.accept()
    return accepted


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_setting_and_whether_it_was_set_reaches_other_processes(file: Path) -> None:
    config = load(file, {"BALANCEROUTE_AUTH__ADMIN_TOKEN": "a" * 32})
    shared = SharedConfig()
    put(shared, config)
    found = shared.get().config
    assert found == config and found.model_fields_set == config.model_fields_set
    assert found.auth.admin_token is not None and found.auth.admin_token.get_secret_value() == "a" * 32


def test_the_last_configuration_is_in_force_in_other_processes() -> None:
    shared, key = SharedConfig(), KeyEntry(name="a", sha256="0" * 64)
    for choices in (3, 2, 1):
        last = put(shared, a_config(limits={"max_choices": choices}), key)
        assert shared.get() == last
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(readable, 1)
        os._exit(0 if shared.get().config.limits.max_choices == 7 else 1)
    put(shared, a_config(limits={"max_choices": 7}))
    os.write(writable, b"\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(readable)
    os.close(writable)


def test_a_process_reads_each_configuration_once() -> None:
    shared = SharedConfig()
    put(shared, a_config())
    before = shared.get()
    assert shared.get() is before
    put(shared, a_config())
    assert shared.get() is shared.get() is not before


def test_one_that_is_too_large_is_refused_and_the_last_one_stays() -> None:
    shared = SharedConfig(10_000)
    before = put(shared, a_config())
    many = [KeyEntry(name=f"k{number}", sha256=f"{number:064x}") for number in range(1000)]
    with pytest.raises(ConfigError, match=r"^the configuration takes \d+ bytes of memory; accepted are 10000"):
        put(shared, a_config(), *many)
    assert shared.get() == before


def test_a_proposed_configuration_is_in_force_when_accepted() -> None:
    shared = SharedConfig()
    before = put(shared, a_config())
    proposed = ConfigWithKeys(a_config(limits={"max_choices": 7}), None)
    assert failure(lambda: shared.propose(proposed)) is None
    assert shared.get() == before
    assert failure(lambda: shared.propose(before)) is None, "another one, after one that was not accepted"
    assert failure(lambda: shared.propose(proposed)) is None
    shared.accept()
    assert shared.get() == proposed
