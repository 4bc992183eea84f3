"""Ask vLLM's own model of a chat whether it accepts what the router makes of messages, thousands of random ones.

    .venv/bin/python -m scripts.check_message_bodies --vllm VENV/bin/python [--examples 3000]

The bodies are those of the property test of `wire/message_requests.py`, which holds them to the emulator's checks. Here
each that is accepted goes, as prefillers and decode workers get it, through `ChatCompletionRequest` of the vLLM of
VENV, and as `/tokenize` gets it through `TokenizeChatRequest`.
"""

import argparse
import subprocess
import sys
import warnings
from typing import Any

import orjson
from hypothesis import HealthCheck, given, settings

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.message_requests import parse_messages, tokenize_body
from balanceroute.proxy.wire.payloads import decode_body, probe_body
from tests.unit.proxy.wire.test_message_requests import FIELDS, ODD, TURNS, body

_VALIDATE = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
for line in sys.stdin.buffer:
    data = json.loads(line)
    try:
        (ChatCompletionRequest if "max_tokens" in data else TokenizeChatRequest).model_validate(data)
    except Exception as error:
        print(json.dumps({"body": data, "error": str(error)[:300]}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the Python of a virtual environment with vLLM")
    parser.add_argument("--examples", type=int, default=3000)
    options = parser.parse_args()
    lines, accepted = bodies(options.examples)
    ran = subprocess.run([options.vllm, "-c", _VALIDATE], input=b"\n".join(lines), capture_output=True)
    if ran.returncode:
        sys.exit(ran.stderr.decode()[-2000:])
    refused = [orjson.loads(line) for line in ran.stdout.splitlines() if line.startswith(b"{")]
    for each in refused[:10]:
        print(f"refused: {each['error']}\n  {orjson.dumps(each['body']).decode()[:600]}")
    print(f"{options.examples} bodies, {accepted} accepted, {len(lines)} asked of vLLM, {len(refused)} refused there")
    return 1 if refused else 0


def bodies(examples: int) -> tuple[list[bytes], int]:
    """What workers would get for random messages, and how many of these the router accepts."""
    lines: list[bytes] = []
    accepted = [0]

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(TURNS, FIELDS, ODD)
    def collect(turns: list[Any], fields: dict[str, Any], odd: dict[str, Any]) -> None:
        raw = orjson.dumps(body(*turns, **fields) | {"max_tokens": 2000} | odd)
        try:
            request = parse_messages(raw)
        except InvalidRequest:
            return
        accepted[0] += 1
        lines.extend((probe_body(request), decode_body(request, b"{}"), tokenize_body(raw)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return lines, accepted[0]


if __name__ == "__main__":
    sys.exit(main())
