"""The storm: hundreds of clients, a cluster that keeps breaking, and a check of every single answer.

    scripts/chaos [--short | --seconds N] [--seed N] [--clients N] [--scenario NAME] [--relays N] [--connector NAME]
        [--keep DIR]

`storm`: everything that `faults.py` can do, while `operations.py` takes workers out and in. `busy-decoder`: four decode
ranks, one of which answers 503 to everything, patient clients and no other fault; not one request may fail. `shutdown`:
the storm, and SIGTERM to the router in the middle of it. `frozen`: the storm over independent ranks and prefillers in
processes of their own, which are stopped (SIGSTOP) and continued, killed and started. `frozen-group`: one process with
all ranks at one barrier; the process, or only its barrier, stands still from time to time.

With `--relays` the router has several processes, and in the storm those are killed, stopped and told to end too, their
links broken, their configuration reloaded, and another router takes over (`kills.py`). Streams of a relay that is
killed may break off, and nothing else may; while a relay stands still its clients wait, and their answers may be later
by so much.

Requests are of every kind that `asks.py` knows, and have client keys, one with a limit that changes. With `--connector
mooncake_layerwise` decode workers are chosen first and call the router back.

The seed fixes the requests and the faults, in their order; how they meet depends on the machine. So each failure is
told with the request id, and the router's log of it can be kept (--keep).
"""

import argparse
import asyncio
import math
import platform
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import uvloop

from balanceroute.demo.processes import total
from balanceroute.emulator import Connector
from balanceroute.emulator.faults import FaultKind
from balanceroute.engine.tokens import OutputLengths
from scripts.arguments import count
from scripts.chaos_run.aftermath import (
    Findings,
    check_outcomes,
    held_by_router,
    held_by_workers,
    metrics_of,
    outcomes,
    router_settles,
    workers_come_back,
)
from scripts.chaos_run.asks import COUNTED, Ask, Asker, Mix
from scripts.chaos_run.faults import Saboteur, Schedule
from scripts.chaos_run.folder import logs_folder
from scripts.chaos_run.keys import KEYS, write_keys
from scripts.chaos_run.kills import TAKEOVER_S, Killer
from scripts.chaos_run.operations import Operator
from scripts.chaos_run.stack import HOST, OUTPUT_LENGTHS, Shape, Stack, merged
from scripts.chaos_run.verdict import FAULTS, INJECTED, Kind, Verdict, judge
from scripts.chaos_run.wire import GRACE_S, Answer, Client, Ended

SHOWN_FAILURES = 15
SAMPLE_S = 0.5
# "Memory flat" compares the medians of the last quarter and of the second one. The first is the warm-up: 250 clients
# open all their connections and stretch every buffer (63 -> 100 MiB within 150 s). After it the allocator's high-water
# mark still rises by steps of 2 to 3 MiB, once each, when more streams than ever come together, and stays: +2.4 to
# +5.5 MiB in runs of 300 and 600 s whose last thirds were flat to 1 MiB. 8 MiB are 600 bytes for each of the 13,000
# requests between the medians, and one that stays behind whole is 5.6 kB (tracemalloc). What is smaller is for
# `scripts/soak` to find (5 % over 90,000 requests). A run whose quarter is shorter than the warm-up only shows that, so
# `--short` is only held to a bound that a leak of about 20 KiB per request would break.
WARM_SHARE = 0.25
FLAT_BYTES = 8 * 2**20
WARM_UP_S = 120.0
WARM_UP_BYTES = 32 * 2**20
# a prefiller may finish in the moment in which the decode worker that it pushes to is hung up on, or dies
ALLOWED = {"layerwise_unmatched"}
SCENARIOS = ("storm", "busy-decoder", "shutdown", "frozen", "frozen-group")
# silence is judged by health checks before any request is late
PATIENT = {
    "health": {"failure_threshold": 2, "silence_window_s": 2.0, "group_wait_s": 10.0},
    "limits": {"idle_timeout_s": 20.0, "first_byte_timeout_s": {"prefill": 20.0, "decode": 20.0}},
    "retry": {"resume_after_silence_s": 1.0},
    "queue": {"no_worker_grace_s": 3.0},
}


@dataclass(slots=True)
class Tally:
    """What came of all requests."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    details: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Kind, str]] = field(default_factory=list)
    latest_s: float = 0.0  # longest time beyond a request's own deadline
    lag_s: float = 0.0  # sum of the times that our own process was late, as it is on a busy machine
    counted: int = 0  # requests to the two routes that the router counts
    ended_s: list[tuple[float, Kind]] = field(default_factory=list)  # of these, in seconds of the run
    unseen: int = 0
    tokens: int = 0

    def add(self, ask: Ask, answer: Answer, verdict: Verdict, at_s: float, lag_s: float = 0.0) -> None:
        """Take one in; `lag_s` is how much our own process was late meanwhile, and how long a relay stood still."""
        self.kinds[verdict.kind] += 1
        if ask.malformed:
            self.kinds["malformed"] += 1
        if verdict.status:
            self.statuses[verdict.status] += 1
        if verdict.kind in (Kind.REFUSED, Kind.BROKEN) and not ask.malformed:
            hurried = " (a deadline below 3 s)" if ask.timeout_s < 3 else ""
            self.details[f"{verdict.status} {verdict.detail[:100]}{hurried}"] += 1
        if verdict.kind is Kind.RIGHT:
            self.tokens += ask.tokens
            if verdict.detail:
                self.details[verdict.detail] += 1
        if ask.path in COUNTED and ask.method == "POST":
            self.counted += 1
            self.ended_s.append((at_s, verdict.kind))
            self.unseen += verdict.kind is Kind.LEFT and not answer.status
        late_s = answer.elapsed_s - ask.timeout_s - ask.behaviour.pause_s - lag_s
        if verdict.kind is not Kind.HANGING and late_s > self.latest_s:
            self.latest_s = late_s
        if verdict.kind in FAULTS:
            shape = f"{'stream' if ask.stream else 'object'}, {ask.prompt_tokens}+{ask.tokens} tokens"
            times = f"timeout {ask.timeout_s} s, after {answer.elapsed_s:.2f} s"
            description = (
                f"{at_s:.1f} s {ask.id} {verdict.kind}: {verdict.detail}\n      {ask.method} {ask.path} {shape},"
                f" {len(ask.choices)} choices, {times}, {ask.malformed or ask.behaviour}"
            )
            self.failures.append((verdict.kind, description))


@dataclass(slots=True)
class Memory:
    """Resident memory of the router over the run: (seconds, bytes)."""

    series: list[tuple[float, int]] = field(default_factory=list)

    def flat(self) -> tuple[bool, str]:
        """Whether it stayed flat after the warm-up, and the figures."""
        end_s = self.series[-1][0] if self.series else 0.0
        warm = [rss for at_s, rss in self.series if end_s * WARM_SHARE <= at_s <= end_s * 2 * WARM_SHARE]
        last = [rss for at_s, rss in self.series if at_s >= end_s * (1 - WARM_SHARE)]
        if not warm or not last:
            return False, "memory: no samples"
        before, after = _median(warm), _median(last)
        flat = after <= before + (FLAT_BYTES if end_s * WARM_SHARE >= WARM_UP_S else WARM_UP_BYTES)
        megabytes = " ".join(f"{rss / 2**20:.0f}" for _, rss in self.series[:: max(1, len(self.series) // 20)])
        return flat, f"router RSS {before / 2**20:.1f} -> {after / 2**20:.1f} MiB (2nd and last quarter); {megabytes}"


def _median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2]


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seconds: float
    seed: int
    clients: int
    scenario: str
    shape: Shape
    mix: Mix
    relays: int


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What the arguments ask for."""
    seconds = 60.0 if arguments.short else float(arguments.seconds)
    shape, mix = Shape(seed=arguments.seed), Mix(keys=(*KEYS[:-1] * 3, KEYS[-1]))
    if arguments.scenario == "busy-decoder":
        shape = replace(shape, decoders=4, kv_blocks=4096, prefill_kv_blocks=8192)
        mix = replace(mix, keys=KEYS[:-1], leave_share=0.0, malformed_share=0.0, hurried_share=0.0, pausing_share=0.0)
    elif arguments.scenario == "frozen":
        shape = replace(shape, decoders=6, processes=6)
    elif arguments.scenario == "frozen-group":
        shape = replace(shape, processes=1)
    shape = replace(shape, connector=arguments.connector)
    return Plan(seconds, arguments.seed, arguments.clients, arguments.scenario, shape, mix, arguments.relays)


class Run:
    """One run against a running stack."""

    def __init__(self, plan: Plan, stack: Stack) -> None:
        self._plan, self._stack = plan, stack
        self._asker = Asker(plan.seed, plan.mix, OutputLengths.parse(OUTPUT_LENGTHS, plan.shape.seed))
        self._client = Client(HOST, stack.port)
        group = plan.scenario == "frozen-group"
        schedule = Schedule(
            plan.seed,
            plan.shape.prefillers,
            plan.shape.decoders,
            own_processes=plan.scenario == "frozen",
            lasting=not group,
        )
        self._saboteur = Saboteur(stack.control_urls, schedule)
        self._operator = Operator(stack, plan.seed)
        self._killer = Killer(stack, plan.seed)
        self._started_s = time.monotonic()
        self._stopping = False
        self.tally, self.memory, self.findings = Tally(), Memory(), Findings()

    async def storm(self) -> None:
        """Let it rage for the planned time, then wait for the last answers."""
        plan = self._plan
        if plan.scenario == "busy-decoder":
            await self._saboteur.inject("d1", {"kind": FaultKind.STATUS, "status": 503, "count": None})
        async with asyncio.TaskGroup() as side:
            sampling = side.create_task(self._sample_memory())
            attacks = {
                "storm": [self._saboteur.run, self._operator.run],
                "shutdown": [self._saboteur.run, self._shut_down],
                "frozen": [self._saboteur.run, self._operator.run],
                "frozen-group": [self._saboteur.run, self._saboteur.freeze_group],
            }.get(plan.scenario, [])
            if plan.relays and plan.scenario == "storm":
                attacks.append(self._killer.run)
            tasks = [sampling, *(side.create_task(attack()) for attack in attacks)]
            async with asyncio.TaskGroup() as clients:
                for index in range(plan.clients):
                    clients.create_task(self._drive(index))
            for task in tasks:
                task.cancel()
        self._client.close()
        await self._operator.aclose()

    async def inspect(self) -> None:
        """What is left when all is over."""
        findings, tally, stack = self.findings, self.tally, self._stack
        await self._saboteur.heal_all()
        if not stack.router.alive:  # as it should be after a shutdown; what it knew of orphans went with it
            await self._inspect_workers(None)
            return
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            held = await router_settles(client, stack.url)
            findings.check(not held, f"router holds {held or 'nothing'}")
            out = await workers_come_back(client, stack.url, self._plan.shape.prefillers + self._plan.shape.decoders)
            findings.check(not out, f"workers not back in service {out or 'none'}")
            exposition = await metrics_of(client, stack.url)
            left = tally.kinds[Kind.LEFT] + tally.kinds[Kind.HANGING]
            uncounted = self._taken_along()
            counted = outcomes(exposition)
            check_outcomes(findings, counted, tally.counted, tally.unseen, tally.kinds[Kind.RIGHT], left, uncounted)
            errors = total(exposition, "balanceroute_internal_errors_total")
            findings.check(errors == 0, f"internal errors of the router {int(errors)}")
            for name in ("retries", "recomputes", "moves", "kv_drains"):
                findings.lines.append(f"{name} {int(total(exposition, f'balanceroute_{name}_total'))}")
            orphans = int(total(exposition, "balanceroute_kv_orphans"))
            lease_s = self._plan.shape.lease_s
            forgotten = self._killer.forgot_orphans(lease_s)
            await self._inspect_workers(orphans + self._taken_along(lease_s), forgotten=forgotten)
            held = held_by_router((await client.get(f"{stack.url}/state")).json())
            findings.check(not held, f"router holds {held or 'nothing'} after the leases")
        flat, line = self.memory.flat()
        findings.check(flat, line)

    def _taken_along(self, last_s: float = math.inf) -> int:
        """How many requests killed relays may have taken along, uncounted or pinned, in the run's last seconds."""
        since_s = self._elapsed() - last_s
        return sum(
            kind is Kind.TAKEN or self._killer.may_be_uncounted(self._started_s + at_s)
            for at_s, kind in self.tally.ended_s
            if at_s >= since_s
        )

    async def _inspect_workers(self, orphans: int | None, forgotten: bool = False) -> None:
        """Workers hold nothing but KV whose drain was impossible, and that only until its lease ends.

        `orphans`: how much there may be of that. `forgotten`: and more, of which no process knows any more.
        """
        findings = self.findings
        state = await self._saboteur.state()
        pinned = sum(worker.get("pinned", 0) for worker in state["workers"].values())
        busy = {
            name: held
            for name, held in held_by_workers(state).items()
            if set(held) - {"pinned", "blocks_used"} or "pinned" not in held
        }
        findings.check(not busy, f"workers run {busy or 'nothing'}")
        findings.check(
            orphans is None or forgotten or pinned <= orphans,
            f"prompts pinned on prefillers {pinned}, known as undrainable or taken along by relays {orphans or 0}"
            f"{', and more that is forgotten' if forgotten else ''}",
        )
        wait_s = 0.0
        while held_by_workers(state) and wait_s < self._plan.shape.lease_s + 5:
            await asyncio.sleep(1.0)
            wait_s += 1.0
            state = await self._saboteur.state()
        held = held_by_workers(state)
        findings.check(not held, f"workers hold {held or 'nothing'} after {wait_s:.0f} s")
        expired = sum(worker.get("expired", 0) for worker in state["workers"].values())
        findings.lines.append(f"leases that ran out during the run {expired}")
        workers = state["workers"].values()
        seen: Counter[str] = sum((Counter(worker["violations"]) for worker in workers), Counter())
        log = [line for worker in workers for line in worker["violation_log"]]
        findings.check(set(seen) <= ALLOWED, f"violations seen by the workers {dict(seen)} {log[:20]}")

    async def _drive(self, index: int) -> None:
        """One client after the other, in one place of the crowd."""
        await asyncio.sleep(index / self._plan.clients)  # no thundering start
        while self._elapsed() < self._plan.seconds and self._stack.router.alive:
            ask = self._asker.next()
            lag_s, too_late, asked_s = self.tally.lag_s, self._stopping, time.monotonic()
            answer = await self._client.send(ask)
            if too_late and not answer.status and answer.ended in (Ended.CUT, Ended.REFUSED):
                self.tally.kinds["after the end"] += 1  # sent to a port that was closed, or just about to be
                await asyncio.sleep(0.2)
                continue
            verdict = judge(ask, answer)
            lag_s = self.tally.lag_s - lag_s + self._killer.stood_still_s(asked_s)
            broke = verdict.kind is Kind.IMPROPER and answer.ended in (Ended.CUT, Ended.REFUSED)
            if broke and self._killer.took(time.monotonic(), lag_s + ask.behaviour.pause_s):
                verdict = replace(verdict, kind=Kind.TAKEN)
            if self._plan.relays and answer.status in (401, 404) and verdict.detail.endswith(INJECTED):
                verdict = replace(
                    verdict, kind=Kind.REFUSED
                )  # a new relay has seen no worker yet that serves the model
            self.tally.add(ask, answer, verdict, self._elapsed(), lag_s)
            if answer.status in (429, 503):
                await asyncio.sleep(0.2)  # a fraction of Retry-After: the router stays under pressure

    async def _shut_down(self) -> None:
        """SIGTERM in mid-storm; the clients go on until the process has ended."""
        await asyncio.sleep(self._plan.seconds / 2)
        self._stopping = True
        self._stack.router.signal(signal.SIGTERM)

    async def _sample_memory(self) -> None:
        while True:
            self.memory.series.append((self._elapsed(), self._stack.router.rss_bytes()))
            due_s = self._elapsed() + SAMPLE_S
            await asyncio.sleep(SAMPLE_S)
            late_s = self._elapsed() - due_s
            if late_s > 0.1:
                self.tally.lag_s += late_s

    def _elapsed(self) -> float:
        return time.monotonic() - self._started_s

    def judge_all(self, exit_code: int) -> None:
        """The bars that concern answers and the end of the process."""
        plan, tally, findings = self._plan, self.tally, self.findings
        for kind in (Kind.WRONG, Kind.IMPROPER, Kind.HANGING):
            findings.check(tally.kinds[kind] == 0, f"{kind} answers {tally.kinds[kind]}")
        findings.check(
            tally.latest_s <= GRACE_S,
            f"latest end {tally.latest_s:.2f} s after a deadline (allowed {GRACE_S}), the clients' own lag left out:"
            f" {tally.lag_s:.1f} s in sum",
        )
        if plan.scenario == "busy-decoder":
            failed = tally.kinds[Kind.REFUSED] + tally.kinds[Kind.BROKEN]
            findings.check(failed == 0, f"failed requests {failed} with 1 of {plan.shape.decoders} decoders at 503")
        if plan.relays and plan.scenario == "storm":
            takeovers = sorted(self._killer.takeovers_s())
            latest_s = takeovers[max(0, math.ceil(0.99 * len(takeovers)) - 1)] if takeovers else 0.0
            middle_s = takeovers[len(takeovers) // 2] if takeovers else 0.0
            within = f"(p99 of {len(takeovers)}, allowed {TAKEOVER_S:g}; median {middle_s:.2f})"
            findings.check(latest_s <= TAKEOVER_S, f"a brain decides again after {latest_s:.2f} s {within}")
        findings.check(tally.kinds[Kind.RIGHT] > 0, f"right answers {tally.kinds[Kind.RIGHT]}")
        findings.check(exit_code == 0, f"exit code of the router after SIGTERM {exit_code}")
        tracebacks = sum(router.log.read_text(errors="replace").count("Traceback") for router in self._stack.routers)
        findings.check(tracebacks == 0, f"tracebacks in the log {tracebacks}")

    def report(self) -> str:
        """The summary table, then the first failures."""
        plan, tally = self._plan, self.tally
        total, killed = sum(tally.kinds[kind] for kind in Kind), self._killer.done
        lines = [
            f"chaos {plan.scenario}: {plan.seconds:.0f} s, {plan.clients} clients, seed {plan.seed},"
            f" {plan.relays} relays, {plan.shape.connector}, {plan.shape.prefillers} prefillers,"
            f" {plan.shape.decoders} decode ranks, Python {platform.python_version()}",
            "",
            f"  {'requests':<12}{total:>9}  ({tally.tokens} right tokens, {tally.kinds['malformed']} malformed)",
            *(f"  {kind:<12}{tally.kinds[kind]:>9}" for kind in Kind),
            *([f"  not sent    {late:>9}  (after the end)"] if (late := tally.kinds["after the end"]) else []),
            f"  status       {'  '.join(f'{status}: {n}' for status, n in sorted(tally.statuses.items()))}",
            f"  faults       {', '.join(f'{kind} {n}' for kind, n in self._saboteur.played.most_common())}",
            f"  operations   {', '.join(f'{what} {n}' for what, n in self._operator.done.most_common()) or 'none'}",
            *([f"  processes    {', '.join(f'{what} {n}' for what, n in killed.most_common())}"] if killed else []),
            "",
            str(self.findings),
            "",
            "  what was refused or broken off:",
            *(f"  {n:>7}  {detail}" for detail, n in tally.details.most_common(25)),
        ]
        if tally.failures:
            lines += ["", f"  {len(tally.failures)} failures, of each kind the first {SHOWN_FAILURES}:"]
            for kind in (Kind.WRONG, Kind.IMPROPER, Kind.HANGING):
                lines += [f"    {description}" for what, description in tally.failures if what is kind][:SHOWN_FAILURES]
        return "\n".join(lines)


async def run(plan: Plan, folder: Path) -> bool:
    """One whole run; True when every bar is met."""
    keys = write_keys(folder, random.Random(plan.seed))
    overrides = {
        "listen": {"relays": plan.relays, "run_folder": str(folder / "run")},
        "auth": {"client_keys": str(keys), "worker_api_key": "of-the-workers"},
    }
    stack = Stack(plan.shape, folder, overrides=merged(overrides, PATIENT if plan.shape.processes else {}))
    async with stack:
        this = Run(plan, stack)
        await this.storm()
        if stack.router.alive or plan.scenario == "shutdown":
            await this.inspect()
        this.judge_all(await stack.router.stop())
        former = [await router.stop() for router in stack.routers if router is not stack.router]
        this.findings.check(  # -15: it was still loading its code
            set(former) <= {0, 2, -signal.SIGTERM},
            f"exit codes of those that were taken over, or took over in vain {former}",
        )
        code = await stack.emulator.stop()  # killed and -9 if requests of the storm keep it from ending
        this.findings.check(code == 0, f"exit code of the emulator after SIGTERM {code}")
    print(this.report())
    return not this.findings.faults


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="length of the storm (600)")
    parser.add_argument("--short", action="store_true", help="60 seconds")
    parser.add_argument("--seed", type=int, default=1, help="of requests and faults (1)")
    parser.add_argument("--clients", type=count, default=250, help="at once (250)")
    parser.add_argument("--scenario", choices=SCENARIOS, default="storm")
    parser.add_argument("--relays", type=int, default=0, help="processes for clients and streams (0: one for all)")
    parser.add_argument("--connector", choices=list(Connector), type=Connector, default=Connector.MOONCAKE_V1)
    parser.add_argument("--keep", type=Path, help="folder for logs and configuration; else they go")
    arguments = parser.parse_args()
    if arguments.scenario.startswith("frozen") and arguments.connector is Connector.MOONCAKE_LAYERWISE:
        parser.error("--connector mooncake_layerwise: the emulated workers cannot be processes of their own then")
    with logs_folder("chaos", arguments.keep) as folder:
        good = uvloop.run(run(plan_of(arguments), folder))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
