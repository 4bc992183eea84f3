"""What follows from what: the settings that are unset, and the rules between settings."""

from typing import Any

import pytest

from balanceroute.config import Config, effective, effective_yaml, validate
from balanceroute.config.sections.tiers import DecodeWorker
from balanceroute.errors import ConfigError

REACHED = {"layerwise": {"callback_url": "http://10.0.0.5:8000"}}


def a_config(n_workers: int = 2, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "prefill": {"workers": [{"url": "http://p:1"}]},
        "decode": {"workers": [{"url": f"http://d:{9000 + i}"} for i in range(n_workers)]},
    }
    for name, value in sections.items():
        tree[name] = tree.get(name, {}) | value if isinstance(value, dict) else value
    return validate(tree)


@pytest.mark.parametrize(
    ("sections", "ttl_s", "pin_s", "max_wait_s"),
    [
        ({}, 240, 480, 60),
        ({"connector": "nixl"}, 20, 30, 10),
        ({"connector": "mooncake_layerwise", **REACHED}, 240, None, 60),
        ({"prefill": {"kv_pin_s": 100}}, 50, 100, 25),
        ({"connector": "nixl", "prefill": {"kv_pin_s": 300}, "pool": {"ttl_s": 250}}, 250, 300, 60),
        ({"connector": "mooncake_layerwise", **REACHED, "pool": {"ttl_s": 900}}, 900, None, 60),
        ({"routing": {"max_wait_s": 7}}, 240, 480, 7),
    ],
)
def test_pool_times_follow_from_how_long_the_connector_pins_kv(
    sections: dict[str, Any], ttl_s: float, pin_s: float | None, max_wait_s: float
) -> None:
    config = a_config(**sections)
    assert (config.pool_ttl_s, config.kv_pin_s, config.max_wait_s) == pytest.approx((ttl_s, pin_s, max_wait_s))


@pytest.mark.parametrize(
    ("routing", "beta"),
    [
        ({"policy": "br_h"}, 43),
        ({"policy": "br_0"}, None),
        ({"policy": "br_0", "beta": 43}, 43),
        ({"beta": 0}, 0),
    ],
)
def test_unset_beta_is_the_policys_own(routing: dict[str, Any], beta: float | None) -> None:
    assert a_config(routing=routing).beta == beta


@pytest.mark.parametrize(
    ("sections", "steps"),
    [
        ({}, 40),
        ({"routing": {"horizon_steps": 0}}, 1),
        ({"predictor": {"period_steps": 5}}, 5),
    ],
)
def test_predictions_are_refreshed_every_half_horizon(sections: dict[str, Any], steps: int) -> None:
    assert a_config(**sections).refresh_period_steps == steps


@pytest.mark.parametrize(
    ("retry", "longest_s"), [({}, 2), ({"base_delay_s": 5}, 5), ({"base_delay_s": 5, "max_delay_s": 30}, 30)]
)
def test_the_longest_delay_follows_from_the_first_unless_it_is_set(retry: dict[str, float], longest_s: float) -> None:
    config = a_config(retry=retry)
    assert effective(config)["retry"]["max_delay_s"] == config.retry.longest_delay_s == longest_s


def test_br_h_without_a_predictor_is_allowed_when_stated() -> None:
    assert a_config(routing={"policy": "br_h"}, predictor={"kind": "none"}).predictor.kind == "none"


def test_a_learned_predictor_starts_from_a_model_or_from_a_history() -> None:
    assert a_config(predictor={"kind": "learned", "model": "m.bin"}).predictor.history is None
    assert a_config(predictor={"kind": "learned", "history": "h.sqlite3"}).predictor.model is None


def test_pool_bypass_requires_br_0() -> None:
    assert a_config(routing={"policy": "br_0", "pool_bypass": True}).routing.pool_bypass


def test_a_configuration_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        a_config().listen.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("worker", "name"),
    [
        ({"url": "http://10.0.1.2:9000"}, "10.0.1.2:9000"),
        ({"url": "http://10.0.1.2:9000", "dp_rank": 0}, "10.0.1.2:9000@0"),
        ({"url": "http://[::1]:9000"}, "[::1]:9000"),
        ({"url": "https://h"}, "h:443"),
        ({"url": "http://h", "id": "d0"}, "d0"),
    ],
)
def test_a_worker_is_called_by_its_id_or_else_by_its_place(worker: dict[str, Any], name: str) -> None:
    assert DecodeWorker.model_validate(worker).worker_id == name


def test_several_ranks_may_share_a_url() -> None:
    workers = [{"url": "http://d:1", "dp_rank": rank} for rank in range(3)]
    assert len(a_config(decode={"workers": workers}).decode.workers) == 3


def test_slots_are_the_workers_own_or_the_groups() -> None:
    decode = {
        "workers": [{"url": "http://d:1", "max_num_seqs": 16}, {"url": "http://d:2"}],
        "max_num_seqs": 64,
    }
    config = a_config(decode=decode)
    assert [config.decode.slots_of(worker) for worker in config.decode.workers] == [16, 64]


def test_the_effective_configuration_includes_derived_values() -> None:
    shown = effective(a_config(3, routing={"policy": "br_0"}))
    assert (shown["routing"]["beta"], shown["pool"]["ttl_s"], shown["predictor"]["period_steps"]) == (
        3.0,
        240,
        40,
    )
    assert [row["max_num_seqs"] for row in shown["decode"]["workers"]] == [64, 64, 64]


def test_the_effective_configuration_is_a_configuration() -> None:
    config = a_config(connector="nixl")
    again = validate(effective(config))
    assert effective(again) == effective(config)


def test_secrets_are_masked_wherever_a_configuration_is_shown() -> None:
    config = a_config(auth={"worker_api_key": "sk-very-secret", "admin_token": "hush-hush"})
    for text in (effective_yaml(config), repr(config), str(effective(config))):
        assert "very-secret" not in text
        assert "hush" not in text
    assert config.auth.worker_api_key is not None
    assert config.auth.worker_api_key.get_secret_value() == "sk-very-secret"


@pytest.mark.parametrize(
    ("sections", "url"),
    [
        (REACHED, "http://10.0.0.5:8000"),
        ({"listen": {"host": "10.0.0.7"}}, "http://10.0.0.7:8000"),
        ({"listen": {"host": "fd00::7", "port": 9000}}, "http://[fd00::7]:9000"),
        ({"listen": {"host": "::"}, **REACHED}, "http://10.0.0.5:8000"),
    ],
    ids=["given", "one-address", "ipv6", "wildcard-but-given"],
)
def test_decode_workers_of_the_layerwise_connector_call_back_where_the_router_listens(
    sections: dict[str, Any], url: str
) -> None:
    assert a_config(connector="mooncake_layerwise", **sections).callback_url == url


LINKED = {"link_ca_file": "ca.pem", "link_cert_file": "link.pem"}


@pytest.mark.parametrize(
    ("listen", "sections", "wrong"),
    [
        ({"link": "10.0.0.1:8700", "relays": 1}, {}, "never plain TCP"),
        ({"brains": ["10.0.0.1:8700"], "relays": 1}, {"tls": {"link_ca_file": "ca.pem"}}, "never plain TCP"),
        ({"link": "10.0.0.1:8700"}, {"tls": LINKED}, r"only with listen\.relays"),
        ({"brains": ["10.0.0.1:8700"]}, {"tls": LINKED}, r"only with listen\.relays"),
        ({"link": "10.0.0.1:0", "relays": 1}, {"tls": LINKED}, "1 to 65535"),
        ({"brains": ["0.0.0.0:8700"], "relays": 1}, {"tls": LINKED}, "can be reached"),
        ({"brains": ["10.0.0.1"], "relays": 1}, {"tls": LINKED}, "HOST:PORT"),
        ({"brains": ["10.0.0.1:1"], "link": "10.0.0.1:1", "relays": 1}, {"tls": LINKED}, "where a brain runs"),
        ({"brains": ["10.0.0.1:1"], "lease": "router", "relays": 1}, {"tls": LINKED}, "where a brain runs"),
        (
            {"link": "10.0.0.1:1", "relays": 1},
            {"tls": LINKED, "connector": "mooncake_layerwise", **REACHED},
            "mooncake_layerwise",
        ),
        ({"brains": [f"b{i}:1" for i in range(17)], "relays": 1}, {"tls": LINKED}, "a list of texts, at most 16"),
        ({"brains": [8700], "relays": 1}, {"tls": LINKED}, r"listen\.brains\[0\] = 8700: accepted is text$"),
        ({"lease": "Router", "relays": 1}, {}, r"listen\.lease = 'Router': accepted is NAME or NAMESPACE/NAME, of"),
        ({"lease": f"{'n' * 64}/router", "relays": 1}, {}, "accepted is NAME or NAMESPACE/NAME"),
        ({"lease": "r" * 254, "relays": 1}, {}, "accepted is NAME or NAMESPACE/NAME"),
        ({}, {"tls": {"link_key_file": "link.key"}}, r"only with tls\.link_cert_file"),
        (
            {},
            {"tls": {"key_file": "/nowhere.pem"}},
            r"tls\.key_file = '/nowhere\.pem': accepted only with tls\.cert_file",
        ),
    ],
)
def test_an_impossible_link_is_refused(listen: dict[str, Any], sections: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        a_config(listen=listen, **sections)


@pytest.mark.parametrize("lease", ["router", "infra/router-2.east", f"{'n' * 63}/{'r' * 253}"])
def test_a_lease_is_named_as_kubernetes_names_things(lease: str) -> None:
    assert a_config(listen={"lease": lease, "relays": 1}).listen.lease == lease


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("health", "interval_s"),
        ("prefill", "poll_interval_s"),
        ("predictor", "refit_interval_s"),
        ("lifecycle", "join_interval_s"),
    ],
)
def test_a_period_that_would_take_a_whole_core_is_refused(section: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key} = 1e-09: accepted is a number, 0\.01 to 86400"):
        a_config(**{section: {key: 1e-9}})


def test_a_horizon_that_is_and_is_not_chosen_by_the_router_is_refused() -> None:
    with pytest.raises(ConfigError, match="horizon_steps auto is horizon_auto true, not false"):
        a_config(routing={"policy": "br_h", "horizon_steps": "auto", "horizon_auto": False})


def test_a_link_is_taken_as_addresses() -> None:
    assert a_config(listen={"link": "[::1]:8700", "relays": 1}, tls=LINKED).listen.link_address == ("::1", 8700)
    config = a_config(listen={"brains": ["brain-0:8700", "10.0.0.2:1"], "relays": 1}, tls=LINKED)
    assert config.listen.brain_addresses == [("brain-0", 8700), ("10.0.0.2", 1)]


@pytest.mark.parametrize("listen", [{}, {"host": "::"}, {"host": "10.0.0.7", "port": 0}], ids=["v4", "v6", "any-port"])
def test_an_address_that_decode_workers_cannot_call_back_is_refused(listen: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"layerwise\.callback_url, such as http://"):
        a_config(connector="mooncake_layerwise", listen=listen)


@pytest.mark.parametrize("host", ["fe80::1%eth0", "b\u00fccher.example", "256.256.256.256"])
def test_an_address_that_no_url_may_hold_can_be_listened_on_where_nobody_calls_back(host: str) -> None:
    assert a_config(listen={"host": host}).callback_url == ""
    with pytest.raises(ConfigError, match=r"layerwise\.callback_url, such as http://"):
        a_config(connector="mooncake_layerwise", listen={"host": host})


def test_a_callback_url_for_a_connector_that_never_calls_back_is_refused() -> None:
    with pytest.raises(ConfigError, match="accepted only with connector mooncake_layerwise"):
        a_config(**REACHED)
