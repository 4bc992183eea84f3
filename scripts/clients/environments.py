"""Where clients are installed: a virtual environment or an npm folder for each set of packages."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.clients.blocks import Client

INSTALL_TIMEOUT_S = 1800.0  # vLLM brings torch
ASK_VERSIONS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]), sep='\\n')"
WITH_TORCH = ("guidellm",)
# settings of other deployments, and whatever would make a client talk to anybody but the router
NOT_PASSED_ON = ("OPENAI_", "ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_", "GUIDELLM_", "PYTHON")
QUIET = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class InstallError(Exception):
    """A client cannot be installed."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment with a client: `folder` is a virtual environment, or of npm."""

    folder: Path
    language: str

    def command(self, script: Path) -> list[str]:
        """What runs a block that was written to this file."""
        runner = {"python": [str(self.folder / "bin/python")], "js": ["node"], "sh": ["bash", "-e"]}[self.language]
        return [*runner, str(script)]

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment variables of a block."""
        kept = {name: value for name, value in environ.items() if not name.startswith(NOT_PASSED_ON)}
        return {**kept, **QUIET, "PATH": f"{self.folder / 'bin'}:{environ['PATH']}"}

    def versions(self, packages: tuple[str, ...]) -> str:
        """What is installed there."""
        if self.language == "js":
            found = [
                json.loads((self.folder / "node_modules" / name / "package.json").read_text())["version"]
                for name in packages
            ]
        else:
            found = run(str(self.folder / "bin/python"), "-c", ASK_VERSIONS, *packages).split()
        return ", ".join(f"{name} {version}" for name, version in zip(packages, found, strict=True))


def environment_for(client: Client, language: str, folder: Path, vllm_venv: Path | None) -> Environment:
    """The client's environment, made if it is not there yet. Raises: InstallError."""
    if client.packages == ("vllm",) and vllm_venv is not None:
        print(f"{client.name}: vLLM of {vllm_venv}, nothing is installed")
        return Environment(vllm_venv, language)
    label = "node" if language == "js" else client.packages[0]
    environment = Environment(folder / label, language)
    done = environment.folder / ".installed"
    if done.exists():
        return environment
    print(f"{client.name}: installing {', '.join(client.packages)} into {environment.folder}", flush=True)
    if language == "js":
        run(
            "npm",
            "install",
            "--silent",
            "--no-audit",
            "--no-fund",
            "--prefix",
            str(environment.folder),
            *client.packages,
        )
    else:
        torch = vllm_venv if client.packages == WITH_TORCH else None
        make_venv(environment.folder, client.packages, torch)
    done.touch()
    return environment


def make_venv(folder: Path, packages: tuple[str, ...], below: Path | None) -> None:
    """A virtual environment with these packages, and with whatever the environment `below` it has."""
    run(str(below / "bin/python") if below else sys.executable, "-m", "venv", str(folder))
    python = str(folder / "bin/python")
    if below:
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        there, here = (run(str(each), "-c", ask).strip() for each in (below / "bin/python", python))
        (Path(here) / "below.pth").write_text(f"{there}\n")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)


def run(*command: str) -> str:
    """What the command prints. Raises: InstallError with the end of what it says otherwise."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=own_variables())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from error
    if done.returncode:
        raise InstallError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def own_variables() -> dict[str, str]:
    """The environment without what would lead another Python to this one's modules."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of one token per character, in Hugging Face's files: load generators make prompts with one."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {character: number for number, character in enumerate(characters)}
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": [],
        "unk_token": "?",
        "fuse_unk": False,
        "byte_fallback": False,
    }
    parts = {"added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    tree = {"version": "1.0", "truncation": None, "padding": None, **parts, "decoder": {"type": "Fuse"}, "model": model}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?", "model_max_length": 32768}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
