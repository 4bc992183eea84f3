"""Every block of docs/clients.md against `balanceroute serve` in front of an emulated cluster.

    scripts/test_clients [--only NAME ...] [--environments DIR]

A block works if it ends well, if the router has then finished the requests and counted the tokens that the block asks
for, no more and no fewer, and if the same block with a wrong key fails without a request getting through.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from balanceroute.config.client_keys import new_key
from scripts.chaos_run.stack import HOST, Process, Shape, free_ports
from scripts.clients.blocks import ADDRESS, CLIENTS, KEY, MODEL, TOKENIZER, Block, Client, blocks
from scripts.clients.environments import Environment, InstallError, environment_for, write_tokenizer

RUN_TIMEOUT_S = 300.0  # a benchmark imports torch, on a busy machine
SETTLE_TIMEOUT_S = 30.0
WRONG_KEY = "sk-nobody-has-this-one"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A running router: what a block is filled with."""

    url: str
    key: str
    folder: Path

    def values(self, key: str) -> dict[str, str]:
        """What replaces the words of the page."""
        tokenizer = str(self.folder / "tokenizer")
        return {ADDRESS: self.url, KEY: key, MODEL: "emulated", TOKENIZER: tokenizer}


@dataclass(frozen=True, slots=True)
class Counts:
    """What the router has counted: requests that finished, that ended otherwise, refused for their key; and tokens."""

    finished: int
    unfinished: int
    refused: int
    tokens: int

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(
            self.finished - other.finished,
            self.unfinished - other.unfinished,
            self.refused - other.refused,
            self.tokens - other.tokens,
        )


async def counts(url: str) -> Counts:
    """What /metrics says now."""
    async with httpx.AsyncClient(trust_env=False, timeout=SETTLE_TIMEOUT_S) as client:
        text = (await client.get(f"{url}/metrics")).text
    found = {"finished": 0, "unfinished": 0, "tokens": 0, "refused": 0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "balanceroute_requests_total":
                found["finished" if sample.labels["outcome"] == "finished" else "unfinished"] += int(sample.value)
            elif sample.name == "balanceroute_generated_tokens_total":
                found["tokens"] += int(sample.value)
            elif sample.name == "balanceroute_refusals_total":
                found["refused"] += int(sample.value)
    return Counts(**found)


async def settled_counts(url: str, before: Counts, client: Client) -> Counts:
    """The difference to `before`, once all requests of the client have ended; a client may be a moment ahead."""
    deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
    while True:
        counted = await counts(url) - before
        over = counted.finished + counted.unfinished >= client.requests
        if over or asyncio.get_running_loop().time() > deadline:
            return counted
        await asyncio.sleep(0.1)


@asynccontextmanager
async def deployed(folder: Path, base: int, port: int) -> AsyncIterator[Deployment]:
    """An emulated cluster, and a router with client keys as `serve` runs it, on this machine alone.

    `base`: the emulator's first port, as for `balanceroute emulate`; `port`: the router's.
    """
    config, keys = folder / "cluster.yaml", folder / "keys.yaml"
    key, entry = new_key()
    keys.write_text(f"- name: tester\n  sha256: {entry}\n")
    write_tokenizer(folder / "tokenizer")
    cluster = ["--prefill", "2", "--decode", "2", "--base-port", str(base), "--listen-port", str(port)]
    emulate = ["emulate", *cluster, "--write-config", str(config)]
    serve = ["serve", "--config", str(config), "--set", f"auth.client_keys={keys}"]
    async with Process.running(emulate, folder / "emulator.log", f"http://{HOST}:{base}/health") as emulator:
        await emulator.writes(config)
        async with Process.running(serve, folder / "router.log", f"http://{HOST}:{port}/ready"):
            yield Deployment(f"http://{HOST}:{port}", key, folder)


async def run_block(block: Block, environment: Environment, values: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and output of the block with these values; it is killed when it takes too long."""
    # a module is looked for beside the script, so it lies in its npm folder
    folder = environment.folder if environment.language == "js" else None
    suffix = {"python": ".py", "js": ".mjs", "sh": ".sh"}[block.language]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        script = Path(place) / f"block{suffix}"
        script.write_text(block.filled(values))
        process = await asyncio.create_subprocess_exec(
            *environment.command(script),
            cwd=place,
            env=environment.variables(os.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(), RUN_TIMEOUT_S)
        except TimeoutError:
            return -1, f"it did not end within {RUN_TIMEOUT_S:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # nothing that it started is left behind
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return process.returncode or 0, out.decode(errors="replace")


async def problems(client: Client, block: Block, environment: Environment, deployment: Deployment) -> list[str]:
    """What is wrong with the block, if anything."""
    before = await counts(deployment.url)
    code, out = await run_block(block, environment, deployment.values(deployment.key))
    if code:
        return [f"exit code {code}: {out.strip()[-1500:]}"]
    found = await settled_counts(deployment.url, before, client)
    wrong = []
    if (found.finished, found.unfinished, found.tokens) != (client.requests, 0, client.tokens):
        wrong.append(f"{client.requests} requests with {client.tokens} tokens expected, the router has counted {found}")
    before = await counts(deployment.url)
    code, out = await run_block(block, environment, deployment.values(WRONG_KEY))
    found = await counts(deployment.url) - before
    if (client.failure_tells and not code) or not found.refused or found.finished or found.tokens:
        wrong.append(f"with a wrong key: exit code {code}, the router has counted {found}: {out.strip()[-500:]}")
    return wrong


async def check(chosen: list[Client], environments: Path, vllm_venv: Path | None) -> bool:
    """Install and run them all and print the table. Returns: whether all work."""
    page = blocks()
    table = Table("client", "versions", "requests", "tokens", "wrong key", "")
    failed = {}
    with tempfile.TemporaryDirectory(prefix="balanceroute-clients-") as folder:
        async with deployed(Path(folder), *free_ports(Shape(prefillers=2, decoders=2))) as deployment:
            for client in chosen:
                block, versions = page[client.name], "-"
                try:
                    environment = environment_for(client, block.language, environments, vllm_venv)
                    versions = environment.versions(client.packages)
                    wrong = await problems(client, block, environment, deployment)
                except InstallError as error:
                    wrong = [str(error)]
                if wrong:
                    failed[client.name] = wrong
                    table.add_row(client.name, versions, "", "", "", "fails")
                else:
                    table.add_row(client.name, versions, str(client.requests), str(client.tokens), "refused", "works")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    for name, wrong in failed.items():
        print(f"\n{name}:", *wrong, sep="\n  ")
    return not failed


def announce(chosen: list[Client], folder: Path, vllm_venv: Path | None, *, stays: bool) -> None:
    """Say what is downloaded, from where, and what becomes of it."""
    languages = {name: block.language for name, block in blocks().items()}
    wanted: dict[str, set[str]] = {"PyPI": set(), "npm": set()}
    for client in chosen:
        if client.packages != ("vllm",) or vllm_venv is None:
            wanted["npm" if languages[client.name] == "js" else "PyPI"] |= set(client.packages)
    if not any(wanted.values()):
        return
    end = "stays" if stays else "is deleted at the end"
    print(f"Installing the newest versions of these into {folder}, which {end}:")
    for registry, packages in wanted.items():
        if packages:
            print(f"  from {registry}: {', '.join(sorted(packages))}")
    if vllm_venv is None and wanted["PyPI"] & {"vllm", "guidellm"}:
        print("  vLLM and GuideLLM bring torch, some GB; VLLM_VENV names an environment that has them")
    print(flush=True, end="")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts/test_clients", description=(__doc__ or "").split("\n")[0])
    names = {client.name: client for client in CLIENTS}
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="NAME", help=", ".join(names))
    parser.add_argument("--environments", type=Path, help="where the clients are installed, and stay, for the next run")
    given = parser.parse_args()
    vllm_venv = Path(os.environ["VLLM_VENV"]) if os.environ.get("VLLM_VENV") else None
    chosen = [names[name] for name in given.only]
    with tempfile.TemporaryDirectory(prefix="balanceroute-environments-") as folder:
        environments = given.environments.resolve() if given.environments else Path(folder)
        announce(chosen, environments, vllm_venv, stays=given.environments is not None)
        return 0 if asyncio.run(check(chosen, environments, vllm_venv)) else 1


if __name__ == "__main__":
    sys.exit(main())
