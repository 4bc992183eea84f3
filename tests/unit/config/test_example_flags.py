"""The command line of vllm-ascend's example proxy starts this router."""

from pathlib import Path
from typing import Any

import pytest

from balanceroute.config import from_example_flags, load
from balanceroute.errors import ConfigError


def test_hosts_and_ports_are_paired_in_order() -> None:
    overrides = from_example_flags(
        prefiller_hosts=["10.0.0.1", "10.0.0.2"],
        prefiller_ports=[8100, 8101],
        decoder_hosts=["10.0.1.1", "10.0.1.1"],
        decoder_ports=[9000, 9001],
    )
    config = load(None, {}, overrides)
    assert [worker.url for worker in config.prefill.workers] == [
        "http://10.0.0.1:8100",
        "http://10.0.0.2:8101",
    ]
    assert [worker.url for worker in config.decode.workers] == [
        "http://10.0.1.1:9000",
        "http://10.0.1.1:9001",
    ]


def test_flags_that_were_not_given_change_nothing() -> None:
    assert from_example_flags() == {}


def test_all_flags_reach_their_settings() -> None:
    overrides = from_example_flags(
        host="[::]",
        port=1999,
        prefiller_ports=[1],
        decoder_ports=[2],
        max_retries=0,
        retry_delay=5,
        max_waiting_retries=9,
        waiting_retry_interval=1,
        workers=1,
        log_level="DEBUG",
    )
    config = load(None, {}, overrides)
    assert (config.listen.host, config.listen.port, config.log.level) == ("::", 1999, "debug")
    assert (config.retry.max_attempts, config.retry.base_delay_s, config.retry.longest_delay_s) == (1, 5, 5)
    assert (config.lifecycle.join_attempts, config.lifecycle.join_interval_s) == (9, 1)
    assert config.decode.workers[0].url == "http://localhost:2"


@pytest.mark.parametrize("elsewhere", ["file", "variable", "flag"])
def test_a_longest_delay_that_is_set_holds_beside_the_flag_of_the_first_one(elsewhere: str, tmp_path: Path) -> None:
    (file := tmp_path / "router.yaml").write_text("retry: {max_delay_s: 30}" if elsewhere == "file" else "retry:")
    environ = {"BALANCEROUTE_RETRY__MAX_DELAY_S": "30"} if elsewhere == "variable" else {}
    overrides = from_example_flags(prefiller_ports=[1], decoder_ports=[2], retry_delay=5)
    overrides |= {"retry.max_delay_s": 30.0} if elsewhere == "flag" else {}
    config = load(file, environ, overrides)
    assert (config.retry.base_delay_s, config.retry.longest_delay_s) == (5, 30)


@pytest.mark.parametrize("tries", [0, -1])
def test_zero_retries_mean_one_try_as_on_the_example_proxy(tries: int) -> None:
    overrides = from_example_flags(max_retries=tries, max_waiting_retries=tries)
    assert overrides == {"retry.max_attempts": 1, "lifecycle.join_attempts": 1}


@pytest.mark.parametrize("host", ["2001:db8::7", "[2001:db8::7]", "2001:0db8:0:0::7"])
def test_an_ipv6_host_is_bracketed_once(host: str) -> None:
    overrides: Any = from_example_flags(decoder_hosts=[host], decoder_ports=[9000])
    assert overrides["decode.workers"] == [{"url": "http://[2001:db8::7]:9000"}]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"decoder_hosts": ["a", "b"], "decoder_ports": [1]},
            "--decoder-hosts = a b: 2 of them, but --decoder-ports has 1",
        ),
        (
            {"decoder_hosts": ["a", "b"]},
            "--decoder-hosts = a b: 2 of them, but --decoder-ports is left out, which is 8002 alone",
        ),
        (
            {"prefiller_hosts": ["h:1"], "prefiller_ports": [1]},
            "--prefiller-hosts = 'h:1': accepted is a host name",
        ),
        (
            {"prefiller_hosts": ["http://h"], "prefiller_ports": [1]},
            "--prefiller-hosts = 'http://h': accepted is",
        ),
        (
            {"prefiller_hosts": ["a,b"], "prefiller_ports": [1]},
            "--prefiller-hosts = 'a,b': accepted is a host name",
        ),
    ],
)
def test_a_wrong_flag_is_named_as_it_was_typed(flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_example_flags(**flags)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_flags_win_over_the_file_only_for_the_side_they_name(tmp_path: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("prefill: {workers: [{url: http://p:1}]}\ndecode: {workers: [{url: http://d:1}]}\n")
    config = load(path, {}, from_example_flags(decoder_hosts=["e"], decoder_ports=[2]))
    assert (config.prefill.workers[0].worker_id, config.decode.workers[0].worker_id) == ("p:1", "e:2")


@pytest.mark.parametrize(("workers", "relays"), [(None, None), (1, 0), (4, 4)])
def test_workers_of_the_example_proxy_are_relays_and_one_is_a_single_process(
    workers: int | None, relays: int | None
) -> None:
    assert from_example_flags(workers=workers).get("listen.relays") == relays
