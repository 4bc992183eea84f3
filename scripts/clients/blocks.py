"""The blocks of docs/clients.md, and what each needs to run and has to do."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BLOCK = re.compile(r"^<!-- client: ([\w-]+) -->\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ADDRESS, KEY, MODEL, TOKENIZER = "http://127.0.0.1:8000", "KEY", "MODEL", "TOKENIZER"  # what a reader replaces


@dataclass(frozen=True, slots=True)
class Client:
    """A block: its client's environment, and how many requests and generated tokens it takes.

    `packages` are of PyPI, for a block in JavaScript of npm; blocks with equal packages share an environment.
    `failure_tells`: whether its exit code says that requests failed; that of a load generator does not.
    """

    name: str
    packages: tuple[str, ...]
    requests: int
    tokens: int
    failure_tells: bool = True


CLIENTS = (
    Client("openai", ("openai",), 2, 16),
    Client("openai-async", ("openai",), 20, 160),
    Client("openai-node", ("openai", "@anthropic-ai/sdk"), 2, 16),
    Client("anthropic", ("anthropic",), 2, 16),
    Client("anthropic-node", ("openai", "@anthropic-ai/sdk"), 2, 16),
    Client("langchain", ("langchain-openai", "langchain-anthropic"), 5, 40),
    Client("litellm", ("litellm",), 4, 32),
    Client("vllm-bench", ("vllm",), 40, 800, failure_tells=False),
    Client("guidellm", ("guidellm",), 40, 800, failure_tells=False),
)


@dataclass(frozen=True, slots=True)
class Block:
    """The text of a block and its language: python, js or sh."""

    language: str
    text: str

    def filled(self, values: Mapping[str, str]) -> str:
        """The text with what a reader replaces replaced."""
        pattern = "|".join(rf"\b{re.escape(word)}\b" for word in values)
        return re.sub(pattern, lambda found: values[found[0]], self.text)


def blocks() -> dict[str, Block]:
    """The blocks of the page, by client."""
    return {name: Block(language, text) for name, language, text in BLOCK.findall(PAGE.read_text())}
