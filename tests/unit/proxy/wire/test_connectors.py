"""What parameters tell of their connector, and who waits for which callback."""

import orjson
import pytest

from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.wire.connectors import Callbacks, connector_of
from balanceroute.proxy.wire.payloads import decode_body, drain_body, probe_body, push_body
from tests.unit.proxy.virtual_time import a_config

REQUEST = parse("completions", orjson.dumps({"model": "m", "prompt": "one two", "max_tokens": 5, "stream": True}))


def test_a_probe_asks_for_one_token_and_its_parameters_are_sent_on() -> None:
    probe = orjson.loads(probe_body(REQUEST))
    assert probe["max_tokens"] == 1 and probe["stream"] is False
    assert probe["kv_transfer_params"]["do_remote_decode"] is True
    params = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "a_key_of_tomorrow": {"x": [None]}}
    decode = orjson.loads(decode_body(REQUEST, orjson.dumps(params)))
    assert decode["kv_transfer_params"] == params and decode["max_tokens"] == 5
    drain = orjson.loads(drain_body(REQUEST, orjson.dumps(params)))
    assert drain["kv_transfer_params"] == params and drain["max_tokens"] == 1


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"remote_engine_id": "e", "tp_size": 4}, "nixl"),
        ({"remote_engine_id": "e", "remote_ptp_size": 4}, "mooncake_v1"),
        ({"remote_engine_id": "e", "remote_num_prompt_tokens": 4}, "mooncake_v1"),
        ({"remote_engine_id": "e"}, None),
        ({"tp_size": 4, "remote_ptp_size": 4}, None),
    ],
)
def test_a_prefillers_parameters_tell_its_connector(params: dict[str, object], name: str | None) -> None:
    assert connector_of(orjson.dumps(params)) == name


def test_a_callback_is_taken_once_and_only_with_token_and_id_of_its_attempt() -> None:
    callbacks, taken = Callbacks("http://router"), list[bytes]()
    callbacks.expect("token", "cmpl-r-0", taken.append)
    assert callbacks.expects("token") and not callbacks.expects("another")
    assert callbacks.called_back("another", "cmpl-r-0", b"a") == "unknown"
    assert callbacks.called_back("token", "cmpl-x-0", b"b") == "unknown"
    assert callbacks.called_back("token", "cmpl-r-0", b"c") == "accepted"
    assert callbacks.called_back("token", "cmpl-r-0", b"d") == "repeated"
    callbacks.forget("token")
    assert callbacks.called_back("token", "cmpl-r-0", b"e") == "unknown"
    assert taken == [b"c"]


def test_a_decode_worker_gets_a_metaserver_url_with_its_token() -> None:
    params = orjson.loads(Callbacks("http://router:8000").params("token"))
    assert params["metaserver"] == "http://router:8000/v1/metaserver/token"
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False


def test_a_decode_workers_block_list_is_forwarded_to_the_prefiller_with_one_token() -> None:
    asked = {"request_id": "cmpl-r-0", "do_remote_decode": True, "remote_block_ids": [[4]]}
    push = orjson.loads(push_body(REQUEST, orjson.dumps(asked)))
    assert push["kv_transfer_params"] == asked and push["max_tokens"] == 1


@pytest.mark.parametrize("name", ["mooncake_v1", "nixl", "mooncake_layerwise"])
def test_decode_workers_are_chosen_first_where_they_ask_for_their_prefill(name: str) -> None:
    config = a_config().model_copy(update={"connector": name})
    assert config.decode_first is (name == "mooncake_layerwise")
