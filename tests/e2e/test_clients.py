"""docs/clients.md: every block has its client, and what needs no installation runs as scripts/test_clients runs it."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.clients import environments
from scripts.clients.blocks import ADDRESS, CLIENTS, KEY, MODEL, TOKENIZER, Block, Client, blocks
from scripts.clients.check import Deployment, deployed, problems
from scripts.clients.environments import Environment, InstallError, make_venv, run, write_tokenizer
from tests.ports import free_base_port

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

INSTALLED = ("openai", "openai-async", "anthropic")  # by the extra `dev`
HERE = Environment(Path(sys.prefix), "python")
NAMED = {client.name: client for client in CLIENTS}
BARE = """\
import json
import urllib.request

body = json.dumps({"model": "MODEL", "prompt": "a", "max_tokens": 8, "ignore_eos": True}).encode()
headers = {"authorization": "Bearer KEY", "content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, headers)).read()
"""


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncIterator[Deployment]:
    base = free_base_port([0, 1, 50, 100, 101])
    async with deployed(tmp_path_factory.mktemp("clients"), base, base + 50) as running:
        yield running


def test_every_block_of_the_page_is_run_by_the_script() -> None:
    assert [client.name for client in CLIENTS] == list(blocks())


def test_only_the_placeholders_of_a_block_are_replaced() -> None:
    values = {ADDRESS: "http://127.0.0.1:9", KEY: "secret", MODEL: "own", TOKENIZER: "/t"}
    filled = blocks()["vllm-bench"].filled(values)
    assert "export OPENAI_API_KEY=secret\n" in filled
    assert "--base-url http://127.0.0.1:9 --model own --tokenizer /t" in filled
    assert 'base_url="http://127.0.0.1:9/v1", api_key="secret"' in blocks()["openai"].filled(values)


@pytest.mark.parametrize("name", INSTALLED)
async def test_a_block_works_with_the_key_and_fails_with_a_wrong_one(name: str, deployment: Deployment) -> None:
    assert await problems(NAMED[name], blocks()[name], HERE, deployment) == []


async def test_a_block_that_behaves_unexpectedly_is_reported(deployment: Deployment) -> None:
    client, block = Client("bare", (), requests=1, tokens=8), Block("python", BARE)
    assert await problems(client, block, HERE, deployment) == []
    [problem] = await problems(replace(client, tokens=9), block, HERE, deployment)
    assert "1 requests with 9 tokens expected, the router has counted Counts(finished=1, unfinished=0" in problem
    [problem] = await problems(client, replace(block, text="import no_such_client\n"), HERE, deployment)
    assert problem.startswith("exit code 1: ") and "No module named 'no_such_client'" in problem
    careless = "try:\n" + "".join(f"    {line}\n" for line in block.text.splitlines())
    careless += "except urllib.error.HTTPError:\n    pass\n"
    [problem] = await problems(client, replace(block, text=careless), HERE, deployment)
    assert problem.startswith("with a wrong key: exit code 0")


def test_environment_variables_of_another_deployment_reach_no_client() -> None:
    given = {"OPENAI_BASE_URL": "http://elsewhere", "PYTHONPATH": "/x", "HOME": "/home/me", "PATH": "/usr/bin"}
    variables = Environment(Path("/venv"), "python").variables(given)
    assert {"OPENAI_BASE_URL", "PYTHONPATH"} & set(variables) == set()
    assert (variables["HOME"], variables["PATH"]) == ("/home/me", "/venv/bin:/usr/bin")


def test_an_environment_sees_the_packages_below_it_and_a_failed_installation_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_pip(*command: str) -> str:  # of its own, which takes longer than all the rest; there is one below
        return run(*command, *(["--without-pip"] if "venv" in command else []))

    monkeypatch.setattr(environments, "run", without_pip)
    make_venv(tmp_path / "venv", ("pip",), Path(sys.prefix))  # which is there already: nothing is fetched
    ask = "import json, httpx; print(json.dumps(httpx.__version__))"
    python = str(tmp_path / "venv/bin/python")
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, env={}, check=True)
    assert json.loads(found.stdout)
    with pytest.raises(InstallError, match="no-such-folder"):
        run(python, "-c", "raise SystemExit('ERROR: no-such-folder')")


def test_the_tokenizer_has_one_distinct_token_per_character(tmp_path: Path) -> None:
    written = json.loads((write_tokenizer(tmp_path / "t") / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    assert set(map(len, vocabulary)) == {1} and set("Level loads?\n") <= set(vocabulary)
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
