"""Replies of the emulated engine have the keys of a real vLLM's, and its status and text for what it refuses."""

import re
from typing import Any

import orjson
import pytest

from tests.recorded import captures
from tests.unit.emulator.conversation import a_cluster

pytestmark = pytest.mark.anyio

# random weights answer these differently, or the emulator says less on purpose
OPAQUE = {"kv_transfer_params", "logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids", "usage_details"}


def exchange(name: str) -> tuple[str, dict[str, str], bytes, int, bytes]:
    """(path, headers, body, status, reply body without chunk framing) of a capture."""
    path = captures() / f"{name}.req"
    head, body = path.read_bytes().split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in lines[1:])}
    reply_head, reply = path.with_suffix(".resp").read_bytes().split(b"\r\n\r\n", 1)
    if b"transfer-encoding: chunked" in reply_head:
        pieces = re.split(rb"(?:^|\r\n)[0-9a-f]+\r\n", reply)
        reply = b"".join(pieces)
    wanted = {key: headers[key] for key in ("content-type", "x-request-id", "x-data-parallel-rank") if key in headers}
    return lines[0].split()[1], wanted, body, int(reply_head.split()[1]), reply


def shape_of(value: Any) -> Any:
    """Keys and types, lists by their first element; numbers are all alike."""
    if isinstance(value, dict):
        return {key: "..." if key in OPAQUE else shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def stream_shapes(reply: bytes) -> tuple[Any, Any, Any, bytes]:
    """Shapes of the first event, of one in the middle and of the last two, and the end."""
    datas = [part.removeprefix(b"data: ") for part in reply.strip().split(b"\n\n") if part.strip()]
    parsed = [orjson.loads(data.strip()) for data in datas[:-1]]
    return shape_of(parsed[0]), shape_of(parsed[len(parsed) // 2]), shape_of(parsed[-2:]), datas[-1].strip()


async def ask(name: str) -> tuple[int, bytes, int, bytes]:
    """Status and reply, captured and emulated, of one captured request."""
    path, headers, body, status, reply = exchange(name)
    async with a_cluster(model="tiny", max_model_len=2048, decoders=1, connector="nixl") as (cluster, client):
        answer = await client.post(cluster.decode_urls[0] + path, content=body, headers=headers)
    return status, reply, answer.status_code, answer.content


@pytest.mark.parametrize(
    "name",
    ["010-compl", "013-compl-token_ids-prompt", "014-compl-n2", "015-compl-batchprompts", "030-chat"]
    + ["035-chat-max_completion_tokens", "036-chat-token_ids", "062-no-model-field", "067-unknown-field"]
    + ["044-dp-rank-header-0", "046-dp-rank-header-bad", "068-tokenize", "069-detokenize"],
)
async def test_a_json_reply_has_the_captured_keys(name: str) -> None:
    status, reply, own_status, own_reply = await ask(f"single/{name}")
    assert (own_status, shape_of(orjson.loads(own_reply))) == (status, shape_of(orjson.loads(reply)))


@pytest.mark.parametrize(
    "name",
    ["020-compl-stream", "021-compl-stream-usage", "022-compl-stream-continuous-usage", "031-chat-stream"]
    + ["023-compl-stream-token_ids", "026-compl-stream-interval", "033-chat-stream-usage-token_ids"]
    + ["034-chat-stream-continuous-usage"],
)
async def test_a_stream_has_the_captured_keys(name: str) -> None:
    _, reply, status, own_reply = await ask(f"single/{name}")
    assert status == 200
    assert stream_shapes(own_reply) == stream_shapes(reply)


async def test_a_stream_interval_groups_tokens_as_captured() -> None:
    _, reply, _, own_reply = await ask("single/026-compl-stream-interval")
    sizes = [
        [len(ids.split(b",")) for ids in re.findall(rb'"token_ids":\[([\d,]+)\]\}', r)] for r in (reply, own_reply)
    ]
    assert sizes[0] == sizes[1] == [1, 5, 5, 5, 4]


@pytest.mark.parametrize(
    "name",
    [
        "045-dp-rank-header-1",
        "051-err-unknown-model",
        "052-err-no-prompt",
        "053-err-too-long",
        "054-err-too-long-stream",
    ]
    + ["055-err-max_tokens-0", "056-err-max_tokens-neg", "057-err-min-gt-max", "058-err-stream_options-nostream"]
    + ["059-err-temp-neg", "060-err-emptyprompt", "061-err-chat-empty-messages", "063-err-contenttype"]
    + ["064-err-max_tokens-too-big", "065-err-oov-token"],
)
async def test_vllms_refusals_are_reproduced_with_status_and_message(name: str) -> None:
    status, reply, own_status, own_reply = await ask(f"single/{name}")
    assert (own_status, orjson.loads(own_reply)) == (status, orjson.loads(reply))


async def test_params_that_are_no_object_are_refused_as_captured() -> None:
    status, reply, own_status, own_reply = await ask("pd-bad/12x-D-string-params")
    assert (own_status, orjson.loads(own_reply)) == (status, orjson.loads(reply))


async def test_a_body_that_is_no_json_is_refused_with_400() -> None:
    status, reply, own_status, own_reply = await ask("single/050-err-badjson")
    own, captured = orjson.loads(own_reply)["error"], orjson.loads(reply)["error"]
    assert own_status == status == 400
    assert (own["type"], own["code"]) == (captured["type"], captured["code"]) and "json_invalid" in own["message"]


async def test_a_nixl_probe_returns_the_captured_params() -> None:
    path, _, body, _, reply = exchange("pd-hand/001-P-probe")
    async with a_cluster(model="tiny", connector="nixl", block_size=32) as (cluster, client):
        headers = {"x-request-id": "hand-1", "content-type": "application/json"}
        answer = await client.post(cluster.prefill_urls[0] + path, content=body, headers=headers)
        own, captured = answer.json()["kv_transfer_params"], orjson.loads(reply)["kv_transfer_params"]
        assert shape_of(own) == shape_of(captured)
        assert re.fullmatch(r"cmpl-hand-1-0-[0-9a-f]{8}", own["remote_request_id"])


async def test_metrics_have_the_captured_names_and_labels() -> None:
    text = exchange("single/004-metrics-before")[4].decode()
    real = {(m[1], tuple(re.findall(r'(\w+)="', m[2]))) for m in re.finditer(r"^(vllm:\w+)\{(.*)\} ", text, re.M)}
    async with a_cluster(model="tiny") as (cluster, client):
        answer = await client.get(cluster.decode_urls[0] + "/metrics")
        own = re.finditer(r"^(vllm:\w+)\{(.*)\} ", answer.text, re.M)
        pairs = {(m[1], tuple(re.findall(r'(\w+)="', m[2]))) for m in own}
        config = {pair for pair in pairs if pair[0] == "vllm:cache_config_info"}
        assert len(pairs) > 8
        assert pairs - config <= real
        assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"


async def test_sse_error_events_read_as_captured() -> None:
    _, _, _, _, reply = exchange("pd-bad/12x-D-wrong-port")
    async with a_cluster() as (cluster, client):
        params = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "nobody"}
        params |= {"remote_host": "127.0.0.1", "remote_port": 1, "remote_request_id": "x"}
        body = {"prompt": [300], "stream": True, "kv_transfer_params": params}
        answer = await client.post(cluster.decode_urls[0] + "/v1/completions", json=body)
        assert answer.content.strip() == reply.strip()
        assert cluster.violations() == {"unknown_engine": 1}
