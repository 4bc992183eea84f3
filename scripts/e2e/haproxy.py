"""HAProxy before relays of two machines, which share the brain of a third: killed under a load, every answer checked.

A machine is a run folder and its processes here. `deploy/haproxy.cfg` is used as it is, with other addresses, and the
certificates are made by the commands of docs/machines.md. Everything listens on 127.0.0.1 and is ended by process id.

    calm            both machines serve, every answer is right
    kill relays     kill -9 of one machine's processes: streams of its own may be cut short, nothing else fails; back
    kill brain      kill -9 of the process that decides: every answer is complete
    kill machine    kill -9 of all processes of the brain's machine, started again: every stream is complete
    at the end      no slot, no request and no KV is held. KV whose parameters were on their way when the relay
                    was killed nobody knows of: prefillers drop it by themselves, here after 30 s

An answer is right, cut short (the tokens so far are right), refused (another status than 200, or no connection), or
wrong.
Exits with 1 where anything else happens than is said above.
"""

import argparse
import asyncio
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx

from balanceroute.demo.processes import emulated, free_ports
from scripts.arguments import count
from scripts.e2e.harness import PATIENCE_S, Process, Site, Wrong, answer_of, held, judged_stream, verdict, wait_for

ROOT: Final = Path(__file__).parents[2]
PREFILLERS, RANKS, SLOTS = 2, 2, 8
SCALE: Final = 0.3  # of the emulated times
LEASE_S: Final = 30  # of prefilled KV that nobody pulls, in real time
CHECKED_S: Final = 3.0  # until HAProxy has found out that a machine is gone: 2 checks, 1 s apart
KEY: Final = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
CA: Final = (
    f"{KEY} -days 3650 -subj /CN=link -addext basicConstraints=critical,CA:true -addext keyUsage=critical,keyCertSign "
    "-keyout link-ca.key -out link-ca.pem"
)
CERTIFICATE: Final = (
    f"{KEY} -days 365 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 "
    "-addext basicConstraints=critical,CA:false -CA link-ca.pem -CAkey link-ca.key -keyout link.key -out link.pem"
)
_FILES: Final = {"ca": "link-ca.pem", "cert": "link.pem", "key": "link.key"}


class Machines(Site):
    """The emulated cluster, the three machines and HAProxy."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        for command in (CA, CERTIFICATE):
            subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
        self.link, front, *ports = free_ports(5)
        flags = ["--time-scale", str(SCALE), "--lease", str(LEASE_S / SCALE)]
        self.config, self.prefillers = stack.enter_context(emulated(PREFILLERS, RANKS, SLOTS, flags, folder))
        home, *others = ports
        self.url, self._machine_url = f"http://127.0.0.1:{front}", f"http://127.0.0.1:{home}"
        self.brain = self._machine("brain", home, f"listen.link=127.0.0.1:{self.link}")
        brains = f"listen.brains=[127.0.0.1:{self.link}]"
        self.relays = [self._machine(name, port, brains) for name, port in zip("ab", others, strict=True)]
        for relays in self.relays:  # HAProxy takes each for up until it has asked
            wait_for("relays", lambda: bool(relays.lines("brain found")))  # noqa: B023
        self._balance(front, others)

    def _machine(self, name: str, port: int, where: str) -> Process:
        files = [f"tls.link_{kind}_file={self.folder}/{file}" for kind, file in _FILES.items()]
        settings = [
            where,
            f"listen.run_folder={self.folder / name}",
            "listen.relays=1",
            *files,
        ]
        flags = [part for setting in settings for part in ("--set", setting)]
        return self.serve(name, self.config, port, *flags)

    def _balance(self, front: int, ports: list[int]) -> None:
        text = (ROOT / "deploy" / "haproxy.cfg").read_text().replace("bind :8000", f"bind 127.0.0.1:{front}")
        addresses = iter(ports)
        text = re.sub(r"(?m)^( +server \w+) \S+", lambda found: f"{found[1]} 127.0.0.1:{next(addresses)}", text)
        file = self.folder / "haproxy.cfg"
        file.write_text(text)
        self._balancer = self.start("haproxy", "haproxy", "-db", "-f", str(file))

    def ready(self) -> bool:
        """Whether HAProxy has somebody who serves. Raises: Wrong: it has ended."""
        if self._balancer.running.poll() is not None:
            raise Wrong(f"HAProxy has ended: {self._balancer.log.read_text()}")
        return answer_of(f"{self.url}/ready") is not None

    def held(self) -> dict[str, float]:
        """What is left of requests; nothing: all is over. HAProxy gets no /state: a machine's operator does."""
        return held(answer_of(f"{self._machine_url}/state"), self.prefillers)


class Load:
    """Clients that ask one stream after the other, and what came of it."""

    def __init__(self, url: str, clients: int) -> None:
        self.found: Counter[str] = Counter()
        self.worst_wait_s = 0.0  # for a first token
        self._numbers = itertools.count()
        self._http = httpx.AsyncClient(
            base_url=url, timeout=PATIENCE_S, trust_env=False, limits=httpx.Limits(max_connections=None)
        )
        self._stops = asyncio.Event()
        self._tasks = [asyncio.get_running_loop().create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        while not self._stops.is_set():
            number = next(self._numbers)
            found, _ = await judged_stream(self._http, number, 20 + number % 5 * 40, self._note_wait)
            self.found[found] += 1
            if found == "refused":
                await asyncio.sleep(0.2)

    def _note_wait(self, wait_s: float) -> None:
        self.worst_wait_s = max(self.worst_wait_s, wait_s)

    def take(self) -> tuple[Counter[str], float]:
        """What has been found, and the worst wait, since the last call."""
        taken = self.found, self.worst_wait_s
        self.found, self.worst_wait_s = Counter(), 0.0
        return taken

    async def end(self) -> None:
        """Wait for what is under way."""
        self._stops.set()
        await asyncio.gather(*self._tasks)
        await self._http.aclose()


async def run(site: Machines, clients: int, seconds: float) -> None:
    """All phases. Raises: Wrong."""
    await asyncio.to_thread(wait_for, "the first answer", site.ready)
    load = Load(site.url, clients)
    dies, brain = site.relays[0], site.brain

    async def kill_relays() -> None:
        dies.kill()
        await asyncio.sleep(CHECKED_S)
        dies.start()
        await asyncio.to_thread(wait_for, "the machine is back", lambda: bool(dies.lines("brain found")))

    async def kill_brain() -> None:
        leads = [line["pid"] for line in brain.lines("listening") if "epoch" in line]
        os.kill(leads[-1], signal.SIGKILL)

        def another_decides() -> bool:
            return len(brain.lines("the brain decides")) > len(leads)

        print(f"    another brain decides after {await asyncio.to_thread(wait_for, 'takeover', another_decides):.1f} s")

    async def kill_machine() -> None:
        brain.kill()
        await asyncio.sleep(1.0)
        brain.start()
        await asyncio.to_thread(wait_for, "the brain is back", lambda: bool(brain.lines("the brain decides")))

    # what may happen beside right answers, and how often: a machine's own streams, and what is sent to it meanwhile
    phases: list[tuple[str, Callable[[], Awaitable[None]] | None, dict[str, int]]] = [
        ("calm", None, {}),
        ("kill relays", kill_relays, {"cut short": clients, "refused": clients * 20}),
        ("kill brain", kill_brain, {}),
        ("kill machine", kill_machine, {}),
    ]
    try:
        for name, act, allowed in phases:
            if act is not None:
                await act()
            await asyncio.sleep(seconds)
            found, wait_s = load.take()
            print(f"{name:14} {dict(found)}, longest wait for a first token {wait_s:.1f} s", flush=True)
            if not found["right"] or any(
                count > allowed.get(what, 0) for what, count in (found - _right(found)).items()
            ):
                raise Wrong(f"{name}: {dict(found)}; accepted beside right ones are at most {allowed}")
    finally:
        await load.end()
    await check_end(site, load)


async def check_end(site: Machines, load: Load) -> None:
    """What came last is right, and nothing is left of all that was asked. Raises: Wrong."""
    found, _ = load.take()
    if set(found) - {"right"}:
        raise Wrong(f"the last ones: {dict(found)}")
    try:
        took_s = await asyncio.to_thread(wait_for, "nothing is held", lambda: not site.held())
    except Wrong as error:
        raise Wrong(f"{error}: {site.held()}") from None
    print(f"{'at the end':14} {dict(found)}, nothing is held after {took_s:.1f} s")


def _right(found: Counter[str]) -> Counter[str]:
    return Counter({"right": found["right"]})


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load after each event")
    parser.add_argument("--clients", type=count, default=12)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a folder in which the logs stay")
    arguments = parser.parse_args()
    for program in ("haproxy", "openssl"):
        if shutil.which(program) is None:
            parser.error(f"{program} is not installed")

    def check(folder: Path) -> None:
        with ExitStack() as stack:
            asyncio.run(run(Machines(folder, stack), arguments.clients, arguments.seconds))

    return verdict(check, arguments.keep)


if __name__ == "__main__":
    sys.exit(main())
