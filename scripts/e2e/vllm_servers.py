"""The vLLM servers and the router of `real_vllm.py`: where they listen, and how they start and end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

PREFILL, DECODE, ROUTER = 8100, (8200, 8201), 8300
SECOND_PREFILL = 8101  # started by the check that needs it
SIDE_CHANNEL = {PREFILL: 5600, SECOND_PREFILL: 5610, DECODE[0]: 5700, DECODE[1]: 5710}
MODEL = "tiny"
LEASE_S = 30
BASE = f"http://127.0.0.1:{ROUTER}"


class Servers:
    """The vLLM servers and the router: started, watched, ended."""

    def __init__(self, logs: Path, relays: int = 0) -> None:
        self.logs = logs
        self.relays = relays
        """Relays of the router, where a check does not ask for a number of its own."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start_vllm(self, port: int, *options: str) -> None:
        """Start one vLLM server without waiting for it."""
        venv, model = os.environ["VLLM_VENV"], os.environ["VLLM_MODEL"]
        role = "kv_consumer" if port in DECODE else "kv_producer"
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        command = [f"{venv}/bin/vllm", "serve", model, "--served-model-name", MODEL, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "64", "--enforce-eager"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        command += ["--dtype", "float32"]  # with bfloat16 decoders die on some virtual machines whose CPUs have AMX
        command += ["--block-size", "32", "--kv-transfer-config", json.dumps(transfer), *options]
        env = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "UCX_TLS": "tcp,sm,self",
            "UCX_NET_DEVICES": "lo",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL[port]),
        }
        self._spawn(port, command, env)

    def start_router(
        self,
        port: int = ROUTER,
        connector: str = "nixl",
        prefillers: tuple[int, ...] = (PREFILL,),
        policy: str = "least_tokens",
        relays: int | None = None,
        slots: int = 64,
    ) -> None:
        """Start `balanceroute serve` in front of these prefillers and the decoders, `slots` of each."""
        config = self.logs / f"router-{port}.yaml"
        decoders, listed = (
            "\n".join(f"    - url: http://127.0.0.1:{each}" for each in ports) for ports in (DECODE, prefillers)
        )
        config.write_text(
            f"listen: {{host: 127.0.0.1, port: {port}, relays: {self.relays if relays is None else relays}, "
            f"run_folder: {self.logs}/run-{port}}}\n"
            f"connector: {connector}\n"
            f"prefill:\n  policy: {policy}\n  workers:\n{listed}\n"
            f"decode:\n  max_num_seqs: {slots}\n  shared_barrier: false\n  workers:\n{decoders}\n"
            "predictor: {kind: survival}\nhealth: {interval_s: 1.0}\n"
        )
        command = [sys.executable, "-m", "balanceroute", "serve", "--config", str(config)]
        self._spawn(port, command, dict(os.environ))

    def take_over(self) -> float:
        """Replace the router, as last configured, by `--take-over`; returns after how many s the old one ended."""
        old = self.processes.pop(ROUTER)
        config, started_s = str(self.logs / f"router-{ROUTER}.yaml"), time.monotonic()
        command = [sys.executable, "-m", "balanceroute", "serve", "--config", config, "--take-over"]
        self._run(ROUTER, command, dict(os.environ))
        assert old.wait(180) == 0, f"the old router ended with {old.returncode}"
        return time.monotonic() - started_s

    def _spawn(self, port: int, command: list[str], env: dict[str, str]) -> None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise SystemExit(f"port {port} is in use: what listens there would be checked instead")
        self._run(port, command, env)

    def _run(self, port: int, command: list[str], env: dict[str, str]) -> None:
        log = (self.logs / f"{port}.log").open("ab")
        self.processes[port] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self, port: int, timeout_s: float = 480.0) -> None:
        """Wait until the server's /health says 200."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.processes[port].poll() is not None:
                raise SystemExit(f"the server on port {port} ended: see {self.logs}/{port}.log")
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet: asked again below
            time.sleep(0.5)
        raise SystemExit(f"the server on port {port} is not ready after {timeout_s:.0f} s: see {self.logs}/{port}.log")

    def kill(self, port: int) -> None:
        """kill -9 of a server and its engine processes."""
        process = self.processes.pop(port)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def send(self, port: int, number: signal.Signals) -> None:
        """A signal to a server and its engine processes."""
        os.killpg(self.processes[port].pid, number)

    def end(self, port: int) -> None:
        """End a server in peace."""
        process = self.processes.pop(port)
        process.terminate()
        process.wait(30)

    def replace_router(
        self,
        prefillers: tuple[int, ...] = (PREFILL,),
        policy: str = "least_tokens",
        relays: int | None = None,
        slots: int = 64,
    ) -> None:
        """End the router and start another."""
        self.end(ROUTER)
        self.start_router(prefillers=prefillers, policy=policy, relays=relays, slots=slots)
        self.wait_ready(ROUTER, 120)

    def restart(self, port: int, *options: str) -> None:
        """Bring a killed vLLM server back."""
        self.start_vllm(port, *options)
        self.wait_ready(port)

    def stop(self) -> None:
        """End all of them."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
