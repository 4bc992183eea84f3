"""The processes under attack: an emulated cluster and a router in front of it, on loopback."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from balanceroute.cli.emulate import DECODE_PORT_OFFSET
from balanceroute.demo.processes import free_port_range
from balanceroute.emulator import Connector
from scripts.proc import children, cpu_s, resident_bytes

HOST = "127.0.0.1"
START_TIMEOUT_S = 90.0  # a process per worker, on two cores
STOP_TIMEOUT_S = 60.0
OUTPUT_LENGTHS = "lognormal:40,0.8"


@dataclass(frozen=True, slots=True)
class Shape:
    """The cluster; small KV memories make requests be recomputed, and prefillers push back."""

    prefillers: int = 2
    decoders: int = 8
    max_num_seqs: int = 16
    block_size: int = 16
    kv_blocks: int = 100
    prefill_kv_blocks: int = 700
    prefill_tokens_per_s: float = 20_000.0
    step_overhead_s: float = 0.02
    lease_s: float = 30.0
    seed: int = 0
    processes: int = 0
    connector: Connector = Connector.MOONCAKE_V1

    @property
    def decode_first(self) -> bool:
        """Whether the decode worker is chosen first; then all that waits is in the pool, and no KV is pinned."""
        return self.connector is Connector.MOONCAKE_LAYERWISE

    def flags(self, base_port: int, config: Path) -> list[str]:
        """Arguments of `balanceroute emulate`."""
        values: dict[str, object] = {
            "prefill": self.prefillers,
            "decode": self.decoders,
            "base-port": base_port,
            "max-num-seqs": self.max_num_seqs,
            "block-size": self.block_size,
            "kv-blocks": self.kv_blocks,
            "prefill-kv-blocks": self.prefill_kv_blocks,
            "prefill-rate": self.prefill_tokens_per_s,
            "step-overhead": self.step_overhead_s,
            "lease": self.lease_s,
            "output-lengths": OUTPUT_LENGTHS,
            "seed": self.seed,
            "processes": self.processes,
            "connector": self.connector,
            "write-config": config,
        }
        return [part for name, value in values.items() for part in (f"--{name}", str(value))]

    def urls(self, base_port: int) -> list[str]:
        """Base URLs of all emulated servers, prefillers first."""
        ports = [base_port + index for index in range(self.prefillers)]
        ports += [base_port + DECODE_PORT_OFFSET + index for index in range(self.decoders)]
        return [f"http://{HOST}:{port}" for port in ports]


class Process:
    """One child process, its log in a file."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self.log = process, log

    @classmethod
    async def start(cls, arguments: Sequence[str], log: Path) -> Self:
        """Run `balanceroute` with these arguments."""
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "balanceroute", *arguments, stdout=out, stderr=out
            )
        return cls(process, log)

    @classmethod
    @asynccontextmanager
    async def running(cls, arguments: Sequence[str], log: Path, url: str) -> AsyncIterator[Self]:
        """The same until the block ends, from when on `url` answers 200. Raises: RuntimeError if it never does."""
        process = await cls.start(arguments, log)
        try:
            await process.answers(url)
            yield process
        finally:
            await process.stop()

    async def answers(self, url: str) -> None:
        """Wait until `url` answers 200. Raises: RuntimeError with the end of the log when it does not in time."""
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:

            async def is_answered() -> bool:
                with suppress(httpx.TransportError):  # not listening yet
                    return (await client.get(url)).status_code == 200
                return False

            await self._wait(is_answered, f"no answer from {url}")

    async def writes(self, file: Path) -> None:
        """Wait until the file is there: the first workers of a cluster answer before its configuration is written.

        Raises: RuntimeError, as `answers`.
        """
        await self._wait(partial(asyncio.to_thread, file.exists), f"no {file}")

    async def _wait(self, ready: Callable[[], Awaitable[bool]], failure: str) -> None:
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline and self.alive:
            if await ready():
                return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{failure}:\n{self.log.read_text()[-2000:]}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.returncode is None

    def rss_bytes(self) -> int:
        """Resident memory now, of it or its largest child; 0 when it has ended."""
        found = [0]
        for pid in (self.pid, *children(self.pid)):
            with suppress(OSError):
                found.append(resident_bytes([pid]))
        return max(found)

    def cpu_s(self) -> float:
        """CPU seconds so far; 0 when it has ended."""
        with suppress(OSError):
            return cpu_s([self.pid])
        return 0.0

    def connections_to(self, port: int) -> int:
        """Established connections to a port that it listens on; 0 when it has ended."""
        try:
            lines = Path(f"/proc/{self._process.pid}/net/tcp").read_text().splitlines()[1:]
        except OSError:
            return 0
        rows = [line.split() for line in lines]
        return sum(int(local.rpartition(":")[2], 16) == port and state == "01" for _, local, _, state, *_ in rows)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.alive:
            self._process.send_signal(number)

    async def stop(self) -> int:
        """SIGTERM, and the exit code; killed when it does not end in time (then -9)."""
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()


class Stack:
    """`async with Stack(shape, folder) as stack:` has both running and ready."""

    def __init__(self, shape: Shape, folder: Path, *, overrides: dict[str, Any] | None = None) -> None:
        self.shape, self.folder = shape, folder
        self._overrides = overrides or {}
        self.base_port, self.port = free_ports(shape)
        self.emulator: Process
        self.router: Process
        self.routers: list[Process] = []  # those that were to take over as well
        self._config = folder / "config.yaml"
        self._processes: list[Process] = []

    @property
    def control_urls(self) -> list[str]:
        """Where the emulator's own routes are."""
        if self.shape.processes:
            return [f"http://{HOST}:{self.base_port - 1}"]
        return self.shape.urls(self.base_port)

    @property
    def url(self) -> str:
        """The router."""
        return f"http://{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        written, config = self.folder / "emulated.yaml", self._config
        try:
            self.emulator = await self._start(
                ["emulate", *self.shape.flags(self.base_port, written)], "emulator.log", self.control_urls[-1]
            )
            await self.emulator.writes(written)
            tree = yaml.safe_load(written.read_text())
            self._configure(merged(tree, settings(self.shape, self.port), self._overrides))
            self.router = await self._start(["serve", "--config", str(config)], "router.log", self.url)
            self.routers.append(self.router)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            await process.stop()

    def parents(self) -> list[int]:
        """The routers that run: the present one, one that is to take over, and those that finish what they have."""
        return [router.pid for router in self.routers if router.alive]

    async def take_over(self) -> bool:
        """Have another router take over from the present one; False: it has ended instead, as while one starts."""
        log = f"router-{len(self.routers) + 1}.log"
        router = await Process.start(["serve", "--config", str(self._config), "--take-over"], self.folder / log)
        self._processes.append(router)
        self.routers.append(router)
        while router.alive:
            if '"taking over"' in router.log.read_text(errors="replace"):
                self.router = router
                return True
            await asyncio.sleep(0.05)
        return False

    def reload(self, more: dict[str, Any]) -> None:
        """Have the router read other settings."""
        self._configure(merged(yaml.safe_load(self._config.read_text()), more))
        self.router.signal(signal.SIGHUP)

    def list_worker(self, role: str, url: str, *, listed: bool) -> None:
        """Put a worker into the configuration, or take it out; nobody is told to read it."""
        tree = yaml.safe_load(self._config.read_text())
        others = [entry for entry in tree[role]["workers"] if entry["url"] != url]
        tree[role]["workers"] = [*others, {"url": url}] if listed else others
        self._configure(tree)

    def _configure(self, tree: dict[str, Any]) -> None:
        fresh = self._config.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(tree))
        fresh.replace(self._config)  # whole at any time: a router may be starting

    async def _start(self, arguments: list[str], log: str, url: str) -> Process:
        process = await Process.start(arguments, self.folder / log)
        self._processes.append(process)
        await process.answers(f"{url}/health")
        return process


def settings(shape: Shape, port: int) -> dict[str, Any]:
    """The router's settings: short timeouts, so that each of them is met within a run."""
    return {
        "listen": {"host": HOST, "port": port},
        "prefill": {"kv_pin_s": None if shape.decode_first else shape.lease_s, "poll_interval_s": 0.5},
        "pool": {"max_entries": 1000 if shape.decode_first else 64, "ttl_s": shape.lease_s / 3},
        "queue": {"max_queued": 1000, "deadline_s": 20.0},
        "limits": {
            "request_timeout_s": 60.0,
            "connect_timeout_s": 2.0,
            "first_byte_timeout_s": {"prefill": 8.0, "decode": shape.lease_s / 3},
            "idle_timeout_s": 6.0,
            "client_header_timeout_s": 10.0,
        },
        "retry": {"max_attempts": 4},
        "health": {"interval_s": 0.5, "timeout_s": 1.5, "open_for_s": 2.0, "stall_after_s": 5.0},
        # a worker that is added again while it is stopped has to be waited for longer than any stop lasts
        "lifecycle": {"drain_timeout_s": 20.0, "join_interval_s": 0.5, "join_attempts": 40},
        "log": {"level": "info", "format": "json"},
    }


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    """Nested settings, the later ones above the earlier."""
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            below = result.get(key)
            result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def free_ports(shape: Shape) -> tuple[int, int]:
    """(first port of the emulator, port of the router): nobody listens there."""
    base = free_port_range(shape.prefillers, shape.decoders + 1)  # the router's is behind those of the decode ranks
    return base, base + DECODE_PORT_OFFSET + shape.decoders
