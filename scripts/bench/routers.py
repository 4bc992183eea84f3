"""What the benchmarks of whole routers load: workers without an engine, and the routers before them."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from balanceroute.demo.processes import free_ports
from scripts.bench.processes import start, stop

KEY = "sk-bench"
PREFILLERS, DECODERS = 2, 4


@dataclass(slots=True)
class Target:
    """A router under test and what was found about it, by load."""

    name: str
    port: int
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def values(self, load: str, key: str) -> list[float]:
        return [found[key] for found in self.found.get(load, ())]


class Site:
    """The workers' ports, free ones for `routers`, and the processes on them."""

    def __init__(self, folder: Path, routers: int) -> None:
        ports = free_ports(PREFILLERS + DECODERS + routers)
        self.folder, self.prefill, self.decode = folder, ports[:PREFILLERS], ports[PREFILLERS:][:DECODERS]
        self.free = iter(ports[PREFILLERS + DECODERS :])
        self._processes: list[subprocess.Popen[bytes]] = []

    def ours(self, name: str, port: int, slots: int = 64, settings: Iterable[str] = (), **listen: Any) -> Target:
        """The router of this checkout, configured in `NAME.yaml`. `listen`: settings of that section."""
        config = {
            "listen": {"host": "127.0.0.1", "port": port, **listen},
            "connector": "nixl",
            "prefill": {"workers": [{"url": f"http://127.0.0.1:{worker}"} for worker in self.prefill]},
            "decode": {
                "workers": [{"url": f"http://127.0.0.1:{worker}"} for worker in self.decode],
                "max_num_seqs": slots,
            },
        }
        file = self.config(name)
        file.write_text(json.dumps(config))  # JSON is YAML
        words = [word for setting in settings for word in ("--set", setting)]
        return Target(name, port, [sys.executable, "-m", "balanceroute", "serve", "--config", str(file), *words])

    def config(self, name: str) -> Path:
        """Where the configuration of one of ours is."""
        return self.folder / f"{name}.yaml"

    def start(self, targets: Iterable[Target]) -> None:
        """Start the workers, then the targets that have a command, and wait for all. Raises: SystemExit."""
        command = [sys.executable, "-m", "scripts.bench.relay_workers", "--prefill", *map(str, self.prefill)]
        self._start([*command, "--decode", *map(str, self.decode)], "workers")
        self._wait_for(Target("workers", self.decode[0], []))
        started = [target for target in targets if target.command]
        for target in started:
            target.process = self._start(target.command, target.name)
        for target in started:
            self._wait_for(target)

    def _wait_for(self, target: Target) -> None:
        """Wait for an answer of the model. Raises: SystemExit: the target has ended, or has had its time."""
        body = b'{"model": "bench", "max_tokens": 2, "messages": [{"role": "user", "content": "ready?"}]}'
        end = time.monotonic() + 90.0
        while True:
            try:
                http(target.port, "/v1/chat/completions", body)
                return
            except OSError as error:
                ended = target.process is not None and target.process.poll() is not None
                if ended or time.monotonic() > end:
                    log = (self.folder / f"{target.name}.log").read_text()
                    raise SystemExit(f"{target.name} does not answer: {error}\n{log[-2000:]}") from error
                time.sleep(0.2)

    def _start(self, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        process = start(command, self.folder / f"{name}.log")
        self._processes.append(process)
        return process

    def stop(self) -> None:
        """End all that was started."""
        for process in reversed(self._processes):
            stop(process)

    def pace(self, interval_ms: float) -> None:
        """Set the time between two events of a stream."""
        http(self.decode[0], "/interval", str(interval_ms).encode())

    @staticmethod
    def load(target: Target, arguments: Sequence[str], seconds: float) -> dict[str, Any]:
        """What `relay_load.py` finds."""
        pid = target.process.pid if target.process else 0
        command = [sys.executable, "-m", "scripts.bench.relay_load", *arguments, "--port", str(target.port)]
        command += ["--pid", str(pid), "--seconds", str(seconds), "--warmup", str(min(1.0, seconds))]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def http(port: int, path: str, body: bytes | None) -> bytes:
    """The body of the answer to a GET, or to a POST of `body`. Raises: OSError."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    with urllib.request.urlopen(request, timeout=5) as reply:
        content: bytes = reply.read()
        return content
