"""Ask one real engine's own `/v1/messages` and, for the same, its chat: the captures that tests hold our answers to.

    vllm serve MODEL --served-model-name tiny --enable-auto-tool-choice --tool-call-parser hermes \\
        --enable-prompt-tokens-details --port 8150                        # a plain server, no connector
    .venv/bin/python scripts/capture_messages.py --port 8150 FOLDER       # with --thinking: a server that has a
                                                                          # --reasoning-parser

Each case leaves `NAME.req` and `NAME.resp`, the bytes of `/v1/messages` and of its answer, and, where the body can be
translated, `NAME-chat.req` and `NAME-chat.resp`: the chat that the router makes of it, asked of the same engine.
"""

import argparse
import socket
from pathlib import Path
from typing import Any

import orjson

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.message_requests import chat_of, tokenize_body

USER = {"role": "user", "content": "tell me about foxes"}
REQUEST = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": [USER]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Lima"]}}, "required": ["city"]}
SCHEMA = {**CITY, "additionalProperties": False}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA, "strict": True}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Lima"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]}
ROUND = [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}]
SYSTEM = [
    {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "and kind"},
]
STRANGE = {"role": "user", "content": '狐狸 🦊 é \u2028 \\ "'}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 250}

CASES: dict[str, dict[str, Any]] = {
    "600-whole": {},
    "601-stream": {"stream": True},
    "602-system-blocks": {"system": SYSTEM},
    "603-stop-sequence": {"stop_sequences": ["w7"], "max_tokens": 60},
    "604-stop-sequence-stream": {"stop_sequences": ["w7"], "max_tokens": 60, "stream": True},
    "605-tool": FORCED,
    "606-tool-stream": {**FORCED, "stream": True},
    "607-any-tool": {**FORCED, "tool_choice": {"type": "any"}},
    "608-any-tool-stream": {**FORCED, "tool_choice": {"type": "any"}, "stream": True},
    "609-tool-result": {"messages": ROUND, "tools": [TOOL], "tool_choice": {"type": "none"}},
    "610-metadata": {"metadata": {"user_id": "someone"}, "top_k": 5, "top_p": 0.9},
    "611-unicode-stream": {"messages": [STRANGE], "stream": True, "max_tokens": 40},
    "612-tool-cut-short": {**FORCED, "max_tokens": 20},
    "613-no-max-tokens": {"max_tokens": None},
    "614-unknown-model": {"model": "nobody"},
    "615-image": {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, PICTURE]}]},
    "616-too-long": {"max_tokens": 100_000},
    "617-json-schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 250},
    "618-end-turn": {"max_tokens": 400, "messages": [{"role": "user", "content": "to dog"}]},
    "619-tool-with-no-object": {**FORCED, "tools": [{**TOOL, "strict": False}]},
}  # fmt: skip
COUNTED: dict[str, dict[str, Any]] = {
    "620-count": {},
    "621-count-system-and-tools": {"system": SYSTEM, "messages": ROUND, "tools": [TOOL]},
}
THOUGHT: dict[str, dict[str, Any]] = {
    "630-thinking": {"max_tokens": 1100, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    "631-thinking-stream": {"max_tokens": 1100, "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True},
    "632-thinking-adaptive": {"thinking": {"type": "adaptive"}, "max_tokens": 60},
    "633-thinking-disabled": {"thinking": {"type": "disabled"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8150)
    parser.add_argument("--thinking", action="store_true", help="ask for what needs a reasoning parser, and that only")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, fields in (THOUGHT if options.thinking else CASES).items():
        body = _without_nulls(REQUEST | fields)
        _capture(options, name, "/v1/messages", orjson.dumps(body))
        try:
            chat = orjson.dumps(chat_of(body))
        except InvalidRequest:
            continue
        _capture(options, f"{name}-chat", "/v1/chat/completions", chat)
    for name, fields in ({} if options.thinking else COUNTED).items():
        body = orjson.dumps({"model": "tiny", "messages": [USER], **fields})
        _capture(options, name, "/v1/messages/count_tokens", body)
        _capture(options, f"{name}-chat", "/tokenize", tokenize_body(body))


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _capture(options: argparse.Namespace, name: str, path: str, body: bytes) -> None:
    """The bytes of one exchange, through a raw socket."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{options.port}\r\nContent-Type: application/json\r\n"
    asked = head.encode() + b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
    with socket.create_connection(("127.0.0.1", options.port), timeout=120) as connection:
        connection.sendall(asked)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    (options.folder / f"{name}.req").write_bytes(asked)
    (options.folder / f"{name}.resp").write_bytes(answer)
    print(f"{name:<32} {answer[:12].decode()} {len(answer)} bytes")


if __name__ == "__main__":
    main()
