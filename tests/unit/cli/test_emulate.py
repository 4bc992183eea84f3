"""`balanceroute emulate`: flags, the configuration it writes, the running command."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from balanceroute.cli.emulate import DECODE_PORT_OFFSET, configuration, running, write_yaml
from balanceroute.config import load
from balanceroute.emulator import ClusterShape, EmulatedCluster, ProcessCluster
from balanceroute.emulator.cluster import reached_at
from balanceroute.emulator.processes import members_of
from tests.commands import run_command
from tests.plain_http import PLAIN
from tests.ports import free_base_port
from tests.waiting import PATIENCE_S


def a_configuration(**shape: Any) -> dict[str, Any]:
    async def build() -> dict[str, Any]:
        async with EmulatedCluster(ClusterShape(**shape), listen=False) as cluster:
            return configuration(cluster)

    return asyncio.run(build())


@pytest.mark.parametrize("connector", ["mooncake_v1", "nixl", "mooncake_layerwise"])
@pytest.mark.parametrize(
    ("lease_s", "time_scale"), [(None, 1.0), (6.0, 1.0), (12.0, 0.5)], ids=["usual lease", "short lease", "fast"]
)
def test_the_written_configuration_is_one_that_serve_takes(
    tmp_path: Path, connector: str, lease_s: float | None, time_scale: float
) -> None:
    file = tmp_path / "cluster.yaml"
    leases = {"lease_s": lease_s, "time_scale": time_scale}
    write_yaml(file, a_configuration(prefillers=2, decoders=4, ranks_per_url=2, connector=connector, **leases))
    config = load(file, {})
    assert [worker.dp_rank for worker in config.decode.workers] == [0, 1, 0, 1]
    assert (len(config.prefill.workers), config.routing.policy, config.decode.max_num_seqs) == (2, "level_fit", 8)
    assert lease_s is None or config.pool_ttl_s == 3.0
    assert lease_s is None or config.kv_pin_s == (None if connector == "mooncake_layerwise" else 6.0)


def test_the_written_configuration_of_a_long_lease_is_one_that_serve_takes(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    write_yaml(file, a_configuration(lease_s=86_400.0, time_scale=1000.0))
    assert load(file, {}).kv_pin_s == 86_400


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill", "0"], "--prefill"),
        (["--nope"], "--nope"),
        (["--connector", "foo"], "mooncake_v1, nixl, mooncake_layerwise"),
        (["--output-lengths", "lognormal:3"], "lognormal:MEDIAN,SIGMA"),
        (["--time-scale", "0"], "--time-scale 0: accepted is a number from 0.001 to 1000"),
        (["--prefill-rate", "inf"], "--prefill-rate inf: accepted is a number from 1 to 1000000000"),
        (["--lease", "-1"], "--lease -1: accepted is a number from 0.001 to 86400"),
        (["--base-port", "1", "--processes", "1"], "--base-port 1: with --processes the port below it is needed"),
        (["--kv-blocks", "9000000000"], "--kv-blocks"),
        (["--max-num-seqs", "65537"], "--max-num-seqs"),
        (["--ranks-per-url", "4097", "--decode", "4097"], "--ranks-per-url"),
        (["--step-cost", "inf"], "--step-cost inf: accepted is a number from 0 to 1"),
        (["--step-overhead", "1e300"], "--step-overhead 1e+300: accepted is a number from 0 to 86400"),
        (["--transfer", "inf"], "--transfer inf: accepted is a number from 0 to 86400"),
        (["--transfer", "nan"], "--transfer nan: accepted"),
        (["--transfer-per-token", "1e300"], "--transfer-per-token 1e+300: accepted is a number from 0 to 1"),
        (["--time-scale", "1e300"], "--time-scale 1e+300: accepted"),
        (["--prefill-rate", "1e-300"], "--prefill-rate 1e-300: accepted"),
        (["--host", "no..name"], "cannot listen on 'no..name': no name of a host"),
        (["--base-port", "65000", "--decode", "500"], "--base-port 65000: the last decode rank's port would be 65599"),
    ],
)
def test_a_bad_flag_ends_in_one_line_and_exit_code_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed, error_text = run_command(capsys, monkeypatch, "emulate", *flags)
    assert (code, printed, error_text.count("\n")) == (2, "", 1)
    assert words in error_text


def test_too_few_open_files_for_the_cluster_are_said_in_one_line() -> None:
    base = free_base_port([0, 1, *range(DECODE_PORT_OFFSET, DECODE_PORT_OFFSET + 40)])
    command = [sys.executable, "-m", "balanceroute", "emulate", "--decode", "40", "--base-port", str(base)]
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (24, 24))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, preexec_fn=few)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "too many open files" in done.stderr.lower()


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_the_command_serves_until_a_signal_and_ends_cleanly_with_a_stream_open(
    tmp_path: Path, number: signal.Signals
) -> None:
    port, file = free_base_port((0, DECODE_PORT_OFFSET)), tmp_path / "cluster.yaml"
    command = [sys.executable, "-m", "balanceroute", "emulate", "--prefill", "1", "--decode", "1"]
    command += ["--base-port", str(port), "--write-config", str(file)]
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None and process.stderr is not None
        first_line = process.stdout.readline()
        assert "emulating 1 prefillers" in first_line, process.stderr.read()
        body = {"prompt": "hello", "max_tokens": 5000, "stream": True}
        with (
            httpx.Client(timeout=PATIENCE_S, **PLAIN) as client,
            client.stream("POST", f"http://127.0.0.1:{port + DECODE_PORT_OFFSET}/v1/completions", json=body) as reply,
        ):
            assert next(reply.iter_lines()).startswith("data: {")
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == ""
    assert load(file, {}).prefill.workers[0].url == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_cluster_that_is_still_starting(number: signal.Signals) -> None:
    class Starting(EmulatedCluster):
        async def __aenter__(self) -> Self:
            signal.raise_signal(number)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.Event().wait()
            return self

    async def start() -> None:
        async with running(Starting(ClusterShape(), listen=False)):
            raise AssertionError("it has started")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(start())


@pytest.mark.parametrize(
    ("host", "url"),
    [("::1", "http://[::1]:9000"), ("::", "http://[::1]:9000"), ("", "http://127.0.0.1:9000"), ("h", "http://h:9000")],
)
def test_a_host_of_any_kind_is_named_as_a_url_does(host: str, url: str) -> None:
    shape = ClusterShape(prefillers=1, decoders=1)
    members = members_of(shape, 1, host, [9000], [9100])
    assert ProcessCluster(shape, members, host, 8999).prefill_urls == [url]
    assert f"http://{reached_at(host)}:9000" == url
