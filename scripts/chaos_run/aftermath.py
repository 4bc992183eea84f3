"""What must be zero when all is over: in the router, in its metrics, and on the emulated workers."""

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any

import httpx

SETTLE_S = 20.0  # for requests and drains that are still under way when the last client has its answer
_OUTCOME = re.compile(r'^balanceroute_requests_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass(slots=True)
class Findings:
    """What was found, and what of it misses a bar."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def check(self, good: bool, line: str) -> None:
        """Note a fact; one that misses the bar is a fault as well."""
        self.lines.append(line)
        if not good:
            self.faults.append(line)

    def __str__(self) -> str:
        return "\n".join(f"  {'MISSED' if line in self.faults else 'ok':<7}{line}" for line in self.lines)


def held_by_router(state: dict[str, Any]) -> dict[str, int]:
    """Everything that `GET /state` says is held, by name; only what is not zero."""
    held = {
        "waiting": len(state["waiting"]),
        "queued": len(state["queued"]),
        "exchanges": state.get("exchanges", 0),
        "drains": state.get("drains_pending", 0),
        "keys": sum(state.get("keys", {}).values()),
        "active": sum(len(worker["active"]) for worker in state["workers"]),
        "load_tokens": sum(worker["load_tokens"] for worker in state["workers"]),
        "inflight": sum(prefiller["inflight"] for prefiller in state["prefillers"]),
        "inflight_tokens": sum(prefiller["inflight_tokens"] for prefiller in state["prefillers"]),
        "pinned": sum(prefiller["pinned"] for prefiller in state["prefillers"]),
        "pinned_tokens": sum(prefiller["pinned_tokens"] for prefiller in state["prefillers"]),
    }
    return {name: count for name, count in held.items() if count}


def held_by_workers(state: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Requests and KV blocks that emulated workers still hold, by worker; only who holds something."""
    names = ("running", "waiting", "transferring", "blocks_used", "pinned")
    held = {name: {key: worker[key] for key in names if worker.get(key)} for name, worker in state["workers"].items()}
    return {name: what for name, what in held.items() if what}


def outcomes(exposition: str) -> dict[str, float]:
    """The router's count of ended requests by outcome."""
    return {outcome: float(count) for outcome, count in _OUTCOME.findall(exposition)}


async def router_settles(client: httpx.AsyncClient, url: str) -> dict[str, int]:
    """What the router still holds once it has settled: nothing, or what is left after `SETTLE_S`."""
    held: dict[str, int] = {}
    for _ in range(int(SETTLE_S / 0.25)):
        answer = await client.get(f"{url}/state")
        # right after the storm there may be no brain yet
        held = held_by_router(answer.json()) if answer.status_code == 200 else {"status": answer.status_code}
        if not held:
            return {}
        await asyncio.sleep(0.25)
    return held


async def metrics_of(client: httpx.AsyncClient, url: str) -> str:
    """The router's metrics; while no brain leads, as during a takeover, there are none."""
    for _ in range(int(SETTLE_S / 0.25)):
        answer = await client.get(f"{url}/metrics")
        if answer.status_code == 200:
            break
        await asyncio.sleep(0.25)
    return answer.text


async def workers_come_back(client: httpx.AsyncClient, url: str, count: int) -> list[str]:
    """Who of `count` workers does not take requests again within `SETTLE_S` of the last fault; how many are missing."""
    out: list[str] = []
    for _ in range(int(SETTLE_S / 0.25)):
        state = (await client.get(f"{url}/state")).json()
        workers = [*state["prefillers"], *state["workers"]]
        out = [f"{worker['id']} {worker['state']}" for worker in workers if worker["state"] != "up"]
        out += [f"{count - len(workers)} missing"] if len(workers) != count else []
        if not out:
            return []
        await asyncio.sleep(0.25)
    return out


def check_outcomes(
    findings: Findings, counted: dict[str, float], sent: int, unseen: int, right: int, left: int, uncounted: int
) -> None:
    """The router's own count against the clients'.

    Args: sent: requests to the two counted routes. unseen: those of them that may never have reached the router, or
        only in part. right: complete answers that clients got. left: clients that went. uncounted: requests of which
        a relay that was killed may have told nobody what became of them.
    """
    total, seen = sum(counted.values()), sent - unseen - uncounted
    summary = ", ".join(f"{int(count)} {name}" for name, count in counted.items())
    findings.check(seen <= total <= sent, f"received {seen}..{sent} = {int(total)} in /metrics ({summary})")
    finished, cancelled = counted.get("finished", 0), counted.get("cancelled", 0)
    findings.check(
        right - uncounted <= finished <= right + left + uncounted,
        f"finished in /metrics {int(finished)}, complete at clients {right}, clients that left {left}, "
        f"perhaps taken along by relays that were killed {uncounted}",
    )
    findings.check(cancelled <= left + uncounted, f"cancelled in /metrics {int(cancelled)}")
