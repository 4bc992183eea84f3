"""What the parent has read reaches its children whole, and only whole."""

import os
from pathlib import Path

import pytest

from balanceroute.config import Config, KeyEntry, load
from balanceroute.errors import ConfigError
from balanceroute.proxy.parent.shared_config import Agreed, Agreement
from tests.unit.proxy.parent.trials import failure
from tests.unit.proxy.virtual_time import a_config

CONFIGS = sorted((Path(__file__).parents[4] / "configs").glob("*.yaml"))


def put(agreement: Agreement, config: Config, *keys: KeyEntry) -> Agreed:
    agreed = Agreed(config, keys)
    agreement.propose(agreed)
    agreement.accept()
    return agreed


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_setting_and_whether_it_was_set_reaches_other_processes(file: Path) -> None:
    config = load(file, {"BALANCEROUTE_AUTH__ADMIN_TOKEN": "a" * 32})
    agreement = Agreement()
    put(agreement, config)
    found = agreement.get().config
    assert found == config and found.model_fields_set == config.model_fields_set
    assert found.auth.admin_token is not None and found.auth.admin_token.get_secret_value() == "a" * 32


def test_the_last_configuration_is_in_force_in_other_processes() -> None:
    agreement, key = Agreement(), KeyEntry(name="a", sha256="0" * 64)
    for choices in (3, 2, 1):
        last = put(agreement, a_config(limits={"max_choices": choices}), key)
        assert agreement.get() == last
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(readable, 1)
        os._exit(0 if agreement.get().config.limits.max_choices == 7 else 1)
    put(agreement, a_config(limits={"max_choices": 7}))
    os.write(writable, b"\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(readable)
    os.close(writable)


def test_one_that_is_too_large_is_refused_and_the_last_one_stays() -> None:
    agreement = Agreement(10_000)
    before = put(agreement, a_config())
    many = [KeyEntry(name=f"k{number}", sha256=f"{number:064x}") for number in range(1000)]
    with pytest.raises(ConfigError, match=r"^the configuration takes \d+ bytes of memory; accepted are 10000"):
        put(agreement, a_config(), *many)
    assert agreement.get() == before


def test_a_proposed_configuration_is_in_force_when_accepted() -> None:
    agreement = Agreement()
    before = put(agreement, a_config())
    proposed = Agreed(a_config(limits={"max_choices": 7}), None)
    assert failure(lambda: agreement.propose(proposed)) is None
    assert agreement.get() == before
    assert failure(lambda: agreement.propose(before)) is None, "another one, after one that was not accepted"
    assert failure(lambda: agreement.propose(proposed)) is None
    agreement.accept()
    assert agreement.get() == proposed
