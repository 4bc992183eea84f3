"""Prompts whose tokens real tokenizers have counted (scripts/measure_prompts.py), and images."""

import gzip
import json
import struct
from base64 import b64encode
from pathlib import Path
from typing import Any

import orjson

from balanceroute.proxy.wire.client_request import ClientRequest, parse

MEASURED = Path(__file__).parents[3] / "data" / "prompts" / "measured.jsonl.gz"


def a_request(body: dict[str, Any], model: str = "m") -> ClientRequest:
    endpoint = "chat" if "messages" in body else "completions"
    return parse(endpoint, orjson.dumps(body | {"model": model}))  # type: ignore[arg-type]


def measured() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.open(MEASURED, "rt")]


def png(width: int, height: int) -> str:
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(100_000)
    return "data:image/png;base64," + b64encode(head).decode()


def jpeg(width: int, height: int) -> str:
    app = b"\xff\xe0" + struct.pack(">H", 16) + bytes(14)
    frame = b"\xff\xc0" + struct.pack(">HBHH", 17, 8, height, width) + bytes(30)
    return "data:image/jpeg;base64," + b64encode(b"\xff\xd8" + app + frame).decode()
