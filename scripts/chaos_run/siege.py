"""A router under siege: honest requests beside one kind of hostile client after the other.

    scripts/siege [--short] [--only NAME ...] [--seed N] [--keep DIR]

The attackers (`besiegers.py`) have a core of their own, the last one; the router, the emulated cluster and the honest
clients have the others. First the honest clients alone are measured, then beside each attack; every answer of theirs is
verified. The bars, for each attack:

* every honest answer is right;
* p99 of their time within twice that without attackers, or 50 ms above it, whichever is more;
* the router's resident memory never more than 64 MiB above what it was before;
* when the attackers have gone, nothing is left in `/state`, and no connection but ours;
* nothing but single lines about clients in the log: no error, no traceback.

The limits are those that the router ships with, but for times: a client has ten seconds for its request.
`--short` is for a busy machine and for CI: a tenth of the attackers, and a few seconds each.
"""

import argparse
import asyncio
import json
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import uvloop

from balanceroute.engine.tokens import OutputLengths
from scripts.chaos_run.aftermath import Findings, router_settles
from scripts.chaos_run.asks import Asker, Mix
from scripts.chaos_run.besiegers import ATTACKS
from scripts.chaos_run.folder import logs_folder
from scripts.chaos_run.stack import HOST, OUTPUT_LENGTHS, Shape, Stack
from scripts.chaos_run.verdict import Kind, Verdict, judge
from scripts.chaos_run.wire import Client

MIB: Final = 2**20
GROWTH_BYTES: Final = 64 * MIB
SLOWER_RATIO: Final = 2.0
SLOWER_S: Final = 0.05
LOOK_S: Final = 0.1  # between two looks at the memory
GONE_S: Final = 30.0  # for what the attackers leave behind, from their last connection on
GRACE_S: Final = 30.0  # for an attacker to end after its time
OWN_SOCKETS: Final = 4  # of ours, while we look
SHAPE: Final = Shape(
    prefillers=4, kv_blocks=4096, prefill_kv_blocks=8192, step_overhead_s=0.01, prefill_tokens_per_s=200_000.0
)
MIX: Final = Mix(
    prompt_tokens=(4, 24),
    output_tokens=(1, 12),
    long_share=0.0,
    leave_share=0.0,
    malformed_share=0.0,
    hurried_share=0.0,
    pausing_share=0.0,
    several_share=0.0,
)
SETTINGS: Final[dict[str, Any]] = {
    "limits": {"client_header_timeout_s": 10.0, "client_stall_timeout_s": 10.0},
    "log": {"level": "warning"},
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How long each phase takes, how many honest requests come per second, and how many attackers there are."""

    phase_s: float
    rate: float
    sizes: dict[str, int]


FULL: Final = Scale(
    60.0,
    20.0,
    {
        "slow-heads": 1000,
        "slow-bodies": 1000,
        "pipelines": 16,
        "trailers": 16,
        "never-readers": 48,
        "connections": 10_001,
        "churn": 50_000,
    },
)
SHORT: Final = Scale(6.0, 10.0, {name: max(4, size // 10) for name, size in FULL.sizes.items()})


@dataclass(slots=True)
class Phase:
    """What the honest clients met in one phase, and what the router took."""

    name: str
    size: int = 0
    times_s: list[float] = field(default_factory=list)
    wrong: list[Verdict] = field(default_factory=list)
    before_bytes: int = 0
    most_bytes: int = 0
    after_bytes: int = 0
    done: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    sockets: int = 0

    def percentile(self, share: float) -> float:
        """Of the times of right answers, in seconds."""
        times_s = sorted(self.times_s)
        return times_s[min(len(times_s) - 1, int(share * len(times_s)))] if times_s else 0.0


class Field:
    """One router, its honest clients, and one phase after the other."""

    def __init__(self, stack: Stack, scale: Scale, seed: int, folder: Path, core: int | None) -> None:
        self._stack, self._scale, self._folder, self._core = stack, scale, folder, core
        self._asker = Asker(seed, MIX, OutputLengths.parse(OUTPUT_LENGTHS, stack.shape.seed))
        self._client = Client(HOST, stack.port)

    async def phase(self, name: str) -> Phase:
        """Honest clients for a phase's time, beside the attack of this name if there is one."""
        phase = Phase(name, self._scale.sizes.get(name, 0))
        router = self._stack.router
        phase.before_bytes = phase.most_bytes = router.rss_bytes()
        if phase.size:
            async with asyncio.TaskGroup() as both:
                attack = both.create_task(self._attack(phase))
                await self._honest(phase)
            phase.done = attack.result()
        else:
            await self._honest(phase)
        self._client.close()
        phase.held = await self._held()
        phase.sockets = await self._sockets_left()
        phase.after_bytes = router.rss_bytes()
        return phase

    async def _honest(self, phase: Phase) -> None:
        """Requests at a fixed rate, however long each takes, so that a router that stalls is not spared."""
        loop = asyncio.get_running_loop()
        start_s, count = loop.time(), int(self._scale.phase_s * self._scale.rate)
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._look(phase))
            async with asyncio.TaskGroup() as asks:
                for number in range(count):
                    await asyncio.sleep(max(0.0, start_s + number / self._scale.rate - loop.time()))
                    asks.create_task(self._ask(phase))
            looking.cancel()

    async def _ask(self, phase: Phase) -> None:
        ask = self._asker.next()
        answer = await self._client.send(ask)
        verdict = judge(ask, answer)
        if verdict.kind is Kind.RIGHT:
            phase.times_s.append(answer.elapsed_s)
        else:
            phase.wrong.append(verdict)

    async def _look(self, phase: Phase) -> None:
        while self._stack.router.alive:
            phase.most_bytes = max(phase.most_bytes, self._stack.router.rss_bytes())
            await asyncio.sleep(LOOK_S)

    async def _attack(self, phase: Phase) -> dict[str, int]:
        """Have the attack done; what was done, nothing if its process failed."""
        command = [sys.executable, "-m", "scripts.chaos_run.besiegers", phase.name, "--port", str(self._stack.port)]
        command += ["--seconds", str(self._scale.phase_s), "--size", str(phase.size)]
        command += [] if self._core is None else ["--core", str(self._core)]
        with (self._folder / f"{phase.name}.log").open("wb") as log:
            attackers = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
        try:
            async with asyncio.timeout(self._scale.phase_s + GRACE_S):
                out, _ = await attackers.communicate()
        except TimeoutError:
            return {}
        finally:
            if attackers.returncode is None:
                attackers.kill()
                await attackers.wait()
        return dict(json.loads(out)) if attackers.returncode == 0 else {}

    async def _held(self) -> dict[str, int]:
        """What is left in `/state` when it has settled."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
                return await router_settles(client, self._stack.url)
        except httpx.TransportError:
            return {"state without an answer": 1}

    async def _sockets_left(self) -> int:
        """Client connections that the router still has, when there have been few for a moment, or at last."""
        left = 0
        for _ in range(int(GONE_S / LOOK_S)):
            left = self._stack.router.connections_to(self._stack.port)
            if left <= OWN_SOCKETS:
                break
            await asyncio.sleep(LOOK_S)
        return left


def assess(findings: Findings, quiet: Phase, phase: Phase) -> None:
    """One phase against the bars."""
    name = phase.name
    findings.check(not phase.wrong, f"{name}: honest answers that were not right {len(phase.wrong)}")
    bar_s = max(quiet.percentile(0.99) * SLOWER_RATIO, quiet.percentile(0.99) + SLOWER_S)
    p99_s = phase.percentile(0.99)
    findings.check(p99_s <= bar_s, f"{name}: p99 {p99_s * 1e3:.0f} ms, bar {bar_s * 1e3:.0f} ms")
    growth = phase.most_bytes - phase.before_bytes
    findings.check(growth <= GROWTH_BYTES, f"{name}: memory {growth / MIB:+.1f} MiB at most")
    findings.check(not phase.held, f"{name}: left in /state {phase.held or 'nothing'}")
    findings.check(phase.sockets <= OWN_SOCKETS, f"{name}: connections left {phase.sockets}")
    if phase.size:
        findings.check(phase.done.get("connections", 0) > 0, f"{name}: the attackers did {phase.done or 'nothing'}")


def table(phases: Sequence[Phase]) -> str:
    """All phases, one line each."""
    lines = ["  attack          size  honest  wrong   p50 ms   p99 ms   RSS MiB before / most / after"]
    for phase in phases:
        rss = " / ".join(f"{size / MIB:.1f}" for size in (phase.before_bytes, phase.most_bytes, phase.after_bytes))
        lines.append(
            f"  {phase.name:<14}{phase.size:>6}{len(phase.times_s):>8}{len(phase.wrong):>7}"
            f"{phase.percentile(0.5) * 1e3:>9.1f}{phase.percentile(0.99) * 1e3:>9.1f}   {rss}"
        )
    return "\n".join(lines)


async def run(arguments: argparse.Namespace, folder: Path, core: int | None) -> bool:
    """One siege; True when every bar is met."""
    scale = SHORT if arguments.short else FULL
    findings = Findings()
    async with Stack(SHAPE, folder, overrides=SETTINGS) as stack:
        battlefield = Field(stack, scale, arguments.seed, folder, core)
        await battlefield.phase("warm-up")
        quiet = await battlefield.phase("none")
        phases = [quiet]
        for name in arguments.only or ATTACKS:
            phase = await battlefield.phase(name)
            phases.append(phase)
            assess(findings, quiet, phase)
        findings.check(stack.router.alive, "the router lives")
        findings.check(await stack.router.stop() == 0, "exit code of the router after SIGTERM 0")
        errors = [line for line in stack.router.log.read_text().splitlines() if '"level":"error"' in line]
        findings.check(not errors, f"errors in the router's log {len(errors)}")
    print(f"siege: {scale.rate:g} honest requests per second, {scale.phase_s:g} s each, attackers on core {core}\n")
    print(table(phases), "\n")
    print(findings)
    for verdict in [verdict for phase in phases for verdict in phase.wrong][:10]:
        print(f"    {verdict.kind}: {verdict.detail}")
    for error in errors[:5]:
        print(f"    {error[:2000]}")
    return not findings.faults


def split_cores() -> int | None:
    """Leave the last core to the attackers and keep the others, for us and our children; None where there is one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    os.sched_setaffinity(0, set(cores[:-1]))
    return cores[-1]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts/siege", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a tenth of the attackers, a few seconds each")
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), help="these attacks")
    parser.add_argument("--seed", type=int, default=1, help="of the honest requests (1)")
    parser.add_argument("--keep", type=Path, help="folder for logs and configuration; else they go")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for the router, which inherits it
    core = split_cores()
    with logs_folder("siege", arguments.keep) as folder:
        good = uvloop.run(run(arguments, folder, core))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
