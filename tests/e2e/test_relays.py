"""`balanceroute serve --relays 2` as processes in front of an emulated cluster: any of them may die."""

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest

from balanceroute.engine.tokens import FIRST_TRIPLE_ID, continuation, decode
from balanceroute.journal import rerun
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from tests.e2e.pin_records import recorded_pins
from tests.e2e.routers import (
    LONG,
    PATIENT,
    PREFILLERS,
    RANKS,
    SHAPE,
    SLOTS,
    Router,
    a_router,
    all_end,
    all_under_way,
    keeps_asking,
    streams,
    with_router,
)
from tests.ports import free_base_port
from tests.processes import Cluster, emulated, end_group, process
from tests.waiting import block_until, until

pytestmark = pytest.mark.e2e


def test_relays_answer_as_one_router(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        async def unary(number: int) -> None:
            prompt = [FIRST_TRIPLE_ID + number]
            body = {"model": "emulated", "prompt": prompt, "max_tokens": 9, "ignore_eos": True}
            answer = (await router.client.post("/v1/completions", json=body, headers={"connection": "close"})).json()
            assert answer["choices"][0]["text"] == decode(continuation(prompt, 9)), answer

        begun = streams(router, 30, 15)
        await asyncio.gather(*map(unary, range(20)))
        assert await all_end(begun) == 30
        assert (await router.get("/ready")).json()["workers_up"] == {"prefill": PREFILLERS, "decode": RANKS}
        assert (await router.get("/v1/models")).json()["data"][0]["id"] == "emulated"
        finished = r'balanceroute_requests_total\{outcome="finished"\} (\S+)'
        await until(lambda: _counted(router, finished, 50))

    with_router(test, cluster, tmp_path)


async def _counted(router: Router, pattern: str, wanted: float) -> bool:
    found = re.search(pattern, (await router.get("/metrics")).text)
    return found is not None and float(found[1]) == wanted


def test_counters_never_fall_when_a_process_dies(cluster: Cluster, tmp_path: Path) -> None:
    finished = r'balanceroute_requests_total\{outcome="finished"\} (\S+)'
    ttft = r"balanceroute_request_ttft_seconds_count (\S+)"

    async def test(router: Router) -> None:
        seen = 0.0

        async def are(wanted: float) -> bool:
            nonlocal seen
            page = (await router.get("/metrics")).text
            found = re.search(finished, page)
            assert found is not None and float(found[1]) >= seen, page
            seen = float(found[1])
            return seen == wanted and await _counted(router, ttft, wanted)

        assert await all_end(streams(router, 12, 9)) == 12
        await until(lambda: are(12))
        for number, died in enumerate((*router.relays.values(), router.brains[-1])):
            os.kill(died, signal.SIGKILL)
            await until(lambda: are(12 + 6 * number))  # noqa: B023
            await until(lambda: died not in (*router.relays.values(), router.brains[-1]))  # noqa: B023
            assert await all_end(streams(router, 6, 9, first=100 * number)) == 6
            await until(lambda: are(18 + 6 * number))  # noqa: B023
        page = (await router.get("/metrics")).text
        restarts = dict(re.findall(r'^balanceroute_restarts_total\{process="(\w+)"\} (\S+)$', page, re.MULTILINE))
        assert restarts == {"relay": "2.0", "brain": f"{len(router.brains) - 1}.0"}

    with_router(test, cluster, tmp_path)


def test_a_killed_relay_ends_only_its_own_streams(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        begun = streams(router, 14)  # more than there are slots
        await all_under_way(router, begun)
        name, pid = next(iter(router.relays.items()))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: router.logged("relay lost", relay=name))
        lost = router.logged("relay lost", relay=name)[0]["requests"]
        later = streams(router, 4, 20, first=100)
        assert len(begun) - lost <= await all_end(begun) <= len(begun)  # one that is lost may just have ended
        assert await all_end(later) == 4
        await until(lambda: router.relays[name] != pid)  # it is back

    with_router(test, cluster, tmp_path)


def test_a_keys_limits_hold_for_all_relays_and_survive_a_restart_of_a_relay(cluster: Cluster, tmp_path: Path) -> None:
    entries = [
        {"name": "few", "sha256": hashlib.sha256(b"few").hexdigest(), "max_in_flight": 4},
        {"name": "slow", "sha256": hashlib.sha256(b"slow").hexdigest(), "requests_per_minute": 30},
    ]
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps(entries))
    keys.chmod(0o600)

    async def test(router: Router) -> None:
        async def ask(key: str, tokens: int) -> int:
            body = {"model": "emulated", "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
            headers = {"connection": "close", "authorization": f"Bearer {key}"}
            return (await router.client.post("/v1/completions", json=body, headers=headers)).status_code

        async def let_in() -> int:
            answers = await asyncio.gather(*(ask("slow", 1) for _ in range(60)))
            assert set(answers) <= {200, 429}
            return answers.count(200)

        asked = [asyncio.get_running_loop().create_task(ask("few", 20_000)) for _ in range(24)]  # none ends by itself

        async def are_four() -> bool:
            return sum(request.done() for request in asked) >= 20 and await router.active() == 4

        await until(are_four)
        assert [request.result() for request in asked if request.done()] == [429] * 20
        for request in asked:
            request.cancel()
        began_s = time.monotonic()
        used = await let_in()
        assert used >= 30
        for name, pid in router.relays.items():
            os.kill(pid, signal.SIGKILL)
            await until(lambda: router.relays[name] != pid)  # noqa: B023
            used += await let_in()
        assert used <= 31 + (time.monotonic() - began_s) / 2

    with_router(test, cluster, tmp_path, "--set", f"auth.client_keys={keys}", relays=4)


def test_connections_and_bodies_within_the_routers_bounds_fit_its_relays(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        address = router.client.base_url
        idle = [await asyncio.open_connection(address.host, address.port) for _ in range(34)]
        large = b"x" * 20_000_000  # more than half of a relay's part of all
        for _ in range(4):
            answer = await router.client.post("/v1/completions", content=large, headers={"connection": "close"})
            assert answer.status_code == 400, answer.text  # it is no JSON, but was read
        assert not any(reader.at_eof() for reader, _ in idle)
        for _, writer in idle:
            writer.close()

    limits = {"max_connections": 40, "max_held_bytes": 64_000_000, "client_header_timeout_s": 600}  # of those that idle
    bounds = [part for name, value in limits.items() for part in ("--set", f"limits.{name}={value}")]
    with_router(test, cluster, tmp_path, *bounds, relays=4)


@pytest.mark.parametrize("relays", [0, 2])
def test_connections_without_free_descriptors_are_refused_and_all_others_served(
    cluster: Cluster, tmp_path: Path, relays: int
) -> None:
    async def run() -> None:
        async with a_router(cluster, tmp_path, relays=relays, open_files=160) as router:
            (line,) = router.logged("open files (ulimit -n) are enough for fewer clients than limits.max_connections")
            assert line["clients"] == 40 * max(1, relays)
            many = streams(router, 150, 27)  # none of the first ends before the last of them has come
            complete = await all_end(many)
            assert complete == sum(stream.begun for stream in many)
            assert line["clients"] // 2 <= complete < 150
            assert await all_end(streams(router, 8, 20, first=200)) == 8
            await until(router.holds_nothing)

    asyncio.run(run())


def test_streams_go_on_without_a_brain_and_the_next_brain_takes_them_over(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        begun = streams(router, 14)
        await all_under_way(router, begun)
        os.kill(router.brains[-1], signal.SIGKILL)
        later = streams(router, 4, 20, first=100)  # they wait for the next one
        await until(lambda: len(router.brains) == 2)
        await until(lambda: all(router.logged("brain found", relay=name, epoch=2) for name in router.relays))
        assert await router.active() <= RANKS * SLOTS
        complete = await all_end(begun)
        void = sum(line["void"] for line in router.logged("relay joined"))
        assert 14 - void <= complete <= 14, router.logged("request")  # one that is void may just have ended
        assert await all_end(later) == 4
        assert not void or router.were_late  # a relay that does not come in time finds its slots taken

    with_router(test, cluster, tmp_path, "--journal", str(tmp_path / "journal"))
    first, second = sorted(tmp_path.glob("journal*"))
    assert (
        rerun(second).difference is None and first.stat().st_size > 0
    )  # a kill may cut off the last line of the first


def test_a_brain_that_dies_during_a_drain_is_back_and_drains_as_well(cluster: Cluster, tmp_path: Path) -> None:
    async def test() -> None:
        async with a_router(cluster, tmp_path, *PATIENT) as router:
            begun = streams(router, RANKS * SLOTS, 4 * LONG)  # a busy machine may need seconds to see that they run
            await all_under_way(router, begun)

            async def drains() -> bool:
                return bool((await router.state())["draining"])

            with cluster.standing_still():
                router.running.send_signal(signal.SIGTERM)
                await until(lambda: len(router.logged("draining")) == 4)  # one of each process
                os.kill(router.brains[-1], signal.SIGKILL)
                await until(lambda: router.logged("brain found", epoch=2))  # by each relay that has streams
                await until(drains)
            assert await all_end(begun) == len(begun)
            await until(lambda: router.running.poll() is not None)
            assert router.running.returncode == 0 and len(router.brains) == 2

    asyncio.run(test())


def test_a_relay_that_is_stopped_during_a_drain_finds_a_brain_when_it_resumes(cluster: Cluster, tmp_path: Path) -> None:
    async def test() -> None:
        async with a_router(cluster, tmp_path, *PATIENT, relays=1) as router:
            begun = streams(router, 14)  # some wait for a slot
            await all_under_way(router, begun)
            with cluster.standing_still():
                router.running.send_signal(signal.SIGTERM)
                await until(lambda: len(router.logged("draining")) == 3)  # one of each process
                os.kill(router.relays["relay-0"], signal.SIGSTOP)
                await until(lambda: router.logged("relay lost"))
                os.kill(router.relays["relay-0"], signal.SIGCONT)
            assert await all_end(begun) == 14
            await until(lambda: router.running.poll() is not None)
            assert router.running.returncode == 0 and len(router.brains) == 1

    asyncio.run(test())


def test_a_run_folder_that_is_lost_during_a_drain_keeps_no_request_waiting(cluster: Cluster, tmp_path: Path) -> None:
    async def test() -> None:
        async with a_router(cluster, tmp_path, standbys=1, run_folder=tmp_path / "run") as router:
            begun = streams(router, 14)  # some wait for a slot
            await all_under_way(router, begun)
            router.running.send_signal(signal.SIGTERM)
            await until(lambda: len(router.logged("draining")) >= 4)
            shutil.rmtree((tmp_path / "run").rename(tmp_path / "lost"))  # at once: a process may write a file meanwhile
            assert await all_end(begun) == 14
            await until(lambda: router.running.poll() is not None)
            assert router.running.returncode == 0

    asyncio.run(test())


def test_a_drain_signal_to_one_child_process_ends_it_and_no_request(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        name = next(iter(router.relays))
        for told, present in enumerate((lambda: router.brains[-1], lambda: router.relays[name]), 1):
            begun = streams(router, RANKS * SLOTS)
            await all_under_way(router, begun)
            pid = present()
            os.kill(pid, signal.SIGTERM)
            await until(lambda: len(router.logged("told to end by another process than the parent")) == told)  # noqa: B023
            assert await all_end(streams(router, 8, 20, first=100)) == 8
            assert await all_end(begun) == len(begun)
            await until(lambda: present() != pid)  # noqa: B023
            assert not router.logged("draining")

    with_router(test, cluster, tmp_path, standbys=1)


def test_one_relay_keeps_accepting_when_all_get_sigterm(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        begun = streams(router, RANKS * SLOTS)
        await all_under_way(router, begun)
        before = router.relays
        router.running.send_signal(signal.SIGSTOP)  # it starts no other relay: one without streams ends at once
        try:
            for pid in before.values():
                os.kill(pid, signal.SIGTERM)
            await until(lambda: router.logged("leaving") and router.logged("not leaving before another relay accepts"))
            assert await all_end(streams(router, 8, 20, first=100)) == 8
            assert await all_end(begun) == len(begun)
            assert len(router.logged("leaving")) == 1
        finally:
            router.running.send_signal(signal.SIGCONT)
        await until(lambda: not set(before.values()) & set(router.relays.values()))
        assert {line["process"] for line in router.logged("leaving")} == set(before)
        assert await all_end(streams(router, 8, 20, first=200)) == 8

    with_router(test, cluster, tmp_path)


def test_the_only_relay_ignores_sigterm_and_keeps_serving(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        begun = streams(router, 4, 40)
        (pid,) = router.relays.values()
        os.kill(pid, signal.SIGTERM)
        await until(lambda: router.logged("not leaving before another relay accepts"))
        assert await all_end([*begun, *streams(router, 8, 20, first=100)]) == 12
        assert list(router.relays.values()) == [pid] and not router.logged("leaving")
        router.running.send_signal(signal.SIGTERM)
        await until(lambda: router.running.poll() is not None)
        assert router.running.returncode == 0
        assert not router.logged("brain lost", reason="this relay ends")

    async def run() -> None:
        async with a_router(cluster, tmp_path, relays=1) as router:
            await test(router)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_lost_run_folder_is_recreated_and_streams_go_on(cluster: Cluster, tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"

    async def test() -> None:
        async with a_router(cluster, tmp_path, standbys=1, run_folder=run) as router:

            def found_last(relay: str) -> int:
                found = router.logged("brain found", relay=relay)
                return int(found[-1]["epoch"]) if found else 0

            for led in (1, 2, 3):  # relays have seen an epoch that the folder has lost
                before = router.brains[-1]
                os.kill(before, signal.SIGKILL)
                await until(  # relays find a brain before it says that it listens
                    lambda: router.brains[-1] != before and all(found_last(name) > led for name in router.relays)  # noqa: B023
                )

            begun = streams(router, RANKS * SLOTS)
            await all_under_way(router, begun)
            before, decided = router.brains[-1], len(router.logged("the brain decides"))  # killed ones may not say so
            if how == "removed":
                shutil.rmtree(run.rename(tmp_path / "lost"))  # at once: a process may write a file meanwhile
            else:
                for file in run.iterdir():
                    file.unlink(missing_ok=True)
            await until(lambda: router.brains[-1] != before and len(router.logged("the brain decides")) > decided)
            assert await all_end(streams(router, 4, 20, first=100)) == 4
            assert await all_end(begun) == len(begun)
            # the brain may decide before a relay that is late has told it the epoch
            await until(lambda: all(found_last(name) > 4 for name in router.relays))
            assert len(router.relays) == 2
            await until(router.holds_nothing)
            await until(lambda: sorted(RelayLocks(RunFolder(run)).running()) == ["relay-0", "relay-1"])
            await until(RunFolder(run).handover.exists)
            assert RunFolder(run).is_claimed

    asyncio.run(test())


def test_a_lost_socket_is_recreated_and_streams_go_on(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        for name, is_replaced in product(("link.sock", "operators.sock"), (False, True)):
            begun = streams(router, RANKS * SLOTS)
            await all_under_way(router, begun)
            before = router.brains[-1]
            await until((tmp_path / name).is_socket)
            with socket.socket(socket.AF_UNIX) as other:
                if is_replaced:  # in one step: the next brain may listen there at any moment
                    other.bind(str(tmp_path / "other.sock"))
                    (tmp_path / "other.sock").rename(tmp_path / name)
                else:
                    (tmp_path / name).unlink(missing_ok=True)
                await until(lambda: router.brains[-1] != before)  # noqa: B023
            assert await all_end(streams(router, 4, 20, first=100)) == 4
            assert await all_end(begun) == len(begun)
            assert len((await router.state())["workers"]) == RANKS

    with_router(test, cluster, tmp_path, standbys=1)


def test_an_obstacle_in_place_of_a_run_folder_file_does_not_prevent_restarts(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        for number, name in enumerate(
            ("lead", "life-relay-0", "counts-relay-0", "pins-relay-0", "spoilt pins-relay-0")
        ):
            relays, led = router.relays, len(router.brains)
            path = tmp_path / name.removeprefix("spoilt ")
            if name.startswith("spoilt"):
                path.write_bytes(b"spoilt" * 20)
            else:
                put_folder_in_place_of(path)
            for pid in (router.brains[-1], relays["relay-0"]):
                with suppress(ProcessLookupError):  # a brain that has lost its file ends by itself
                    os.kill(pid, signal.SIGKILL)
            await until(lambda: len(router.brains) > led and router.relays["relay-0"] != relays["relay-0"])  # noqa: B023
            assert await all_end(streams(router, 6, 20)) == 6
            await until(path.is_file)
            await until(router.holds_nothing)
            assert router.running.poll() is None

            def repaired() -> int:
                renamed = router.logged("unexpected file in the run folder renamed")
                return len(renamed) + len(router.logged("damaged lines in the record of pinned KV"))

            await until(lambda: repaired() > number)  # noqa: B023 (whoever has renamed it logs it afterwards)
            assert repaired() == number + 1, name

    with_router(test, cluster, tmp_path, standbys=1)


def put_folder_in_place_of(path: Path) -> None:
    """Whose process may make it again at any moment."""
    while not path.is_dir():
        path.unlink(missing_ok=True)
        with suppress(FileExistsError):
            path.mkdir()


def test_a_standby_moves_obstacles_aside_that_appeared_after_its_start(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        await until((tmp_path / "lead.next").exists)  # it stands by
        link, led = tmp_path / "link.sock", len(router.brains)
        os.kill(router.brains[-1], signal.SIGSTOP)  # not killed: the next life would move it
        put_folder_in_place_of(link)
        await until(lambda: len(router.brains) > led)
        os.kill(router.brains[led - 1], signal.SIGKILL)
        await until(link.is_socket)
        assert await all_end(streams(router, 6, 20)) == 6
        await until(lambda: router.deaths)
        assert [line.get("signal") for line in router.deaths] == ["SIGKILL"]

    with_router(test, cluster, tmp_path, standbys=1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stands still"])
def test_a_standby_takes_over_and_the_former_brain_exits_when_it_resumes(
    cluster: Cluster, tmp_path: Path, how: signal.Signals
) -> None:
    async def test(router: Router) -> None:
        begun = streams(router, 14)
        await all_under_way(router, begun)
        first = router.brains[-1]
        led = len(router.brains)
        os.kill(first, how)
        try:
            later = streams(router, 4, 20, first=100)  # they wait for the next one
            await until(lambda: len(router.brains) > led and router.brains[-1] != first)
            assert await router.active() <= RANKS * SLOTS
            complete = await all_end(begun)
            void = sum(line["void"] for line in router.logged("relay joined"))
            assert 14 - void <= complete <= 14 and await all_end(later) == 4
        finally:
            if how is signal.SIGSTOP:
                os.kill(first, signal.SIGCONT)
        await until(lambda: [line for line in router.logged("child died") if line["child"].startswith("brain")])
        epochs = [line["epoch"] for line in router.logged("listening") if "epoch" in line]
        assert len(epochs) == len(set(epochs)), "no epoch has two leaders"
        assert await all_end(streams(router, 4, 20, first=200)) == 4

    with_router(test, cluster, tmp_path, standbys=1)


def test_a_half_written_key_file_does_not_prevent_restarts(cluster: Cluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- name: a\n  sha256: {sha256(b'a').hexdigest()}\n")

    async def test(router: Router) -> None:
        keys.write_text("- name: b\n  sha25")
        relays, led = router.relays, len(router.brains)
        for pid in (router.brains[-1], *relays.values()):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(router.brains) > led and not set(relays.values()) & set(router.relays.values()))
        await until(lambda: len(router.logged("child died")) >= 3)
        assert all(line.get("signal") == "SIGKILL" for line in router.deaths)
        answer = await router.client.post(
            "/v1/completions", json={"prompt": [1]}, headers={"authorization": "Bearer x"}
        )
        assert answer.status_code == 401

    with_router(test, cluster, tmp_path, "--set", f"auth.client_keys={keys}", standbys=1)


def test_all_processes_apply_the_configuration_that_the_parent_has_read(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    before = cluster.config.read_text()
    file.write_text(before)

    async def test(router: Router) -> None:
        name, pid = next(iter(router.relays.items()))
        os.kill(pid, signal.SIGSTOP)
        try:
            file.write_text(before + "limits: {max_choices: 1}\n")
            router.running.send_signal(signal.SIGHUP)
            others = {"brain", "brain-2", *router.relays} - {name}
            await until(lambda: {line["process"] for line in router.logged("configuration reloaded")} == others)
            file.write_text(before + "limits: {max_choi")
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: router.logged("configuration reloaded", process=name))
        body = {"model": "emulated", "prompt": [1], "max_tokens": 1, "n": 2}
        for _ in range(20):  # on any relay
            answer = await router.client.post("/v1/completions", json=body, headers={"connection": "close"})
            assert answer.status_code == 400, answer.text
        assert not router.logged("reload refused")

    with_router(test, replace(cluster, config=file), tmp_path, standbys=1)


@pytest.mark.parametrize("relays", [0, 1], ids=["one process", "relays"])
def test_sighup_while_the_router_starts_does_not_end_it(cluster: Cluster, tmp_path: Path, relays: int) -> None:
    file, log = tmp_path / "router.yaml", tmp_path / "log"
    os.mkfifo(file)
    flags = ["--relays", str(relays), "--port", "0", "--set", f"listen.run_folder={tmp_path}"]
    with process("serve", "--config", str(file), *flags, log=log) as running:
        with file.open("w") as opened:  # it has begun to read
            running.send_signal(signal.SIGHUP)
            opened.write(cluster.config.read_text())
        block_until(lambda: '"listening"' in log.read_text() or running.poll() is not None)
        assert running.poll() is None, log.read_text()


def test_a_relay_that_was_stopped_is_declared_lost_and_rejoins(cluster: Cluster, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        begun = streams(router, 14)
        await all_under_way(router, begun)
        name, pid = next(iter(router.relays.items()))
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: router.logged("relay lost", relay=name))
            assert await router.active() <= RANKS * SLOTS
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: len(router.logged("relay joined", relay=name)) >= 2)
        complete = await all_end(begun)
        void = sum(line["void"] for line in router.logged("relay joined"))
        assert 14 - void <= complete <= 14
        assert router.relays[name] == pid

    with_router(test, cluster, tmp_path)


def test_a_new_router_takes_over_and_no_request_fails(cluster: Cluster, tmp_path: Path) -> None:
    async def test() -> None:
        port = free_base_port((0,))
        async with a_router(cluster, tmp_path, port=port) as old:
            begun = streams(old, 4, 70)  # with those of the clients they fit the slots
            await until(lambda: all(stream.begun for stream in begun))
            ended = asyncio.Event()
            clients = [asyncio.get_running_loop().create_task(keeps_asking(old, n, ended)) for n in range(4)]
            async with a_router(cluster, tmp_path, "--take-over", port=port, log_name="new.log") as new:
                await until(lambda: old.logged("another router takes over"))
                await until(lambda: len(old.logged("leaving")) == 2)
                assert await all_end(begun) == 4
                begun = streams(new, 6, 40, first=300)
                await until(lambda: old.running.poll() is not None)  # its clients' connections have ended, too
                assert old.running.returncode == 0
                assert await all_end(begun) == 6
                ended.set()
                assert all([await client for client in clients])
                await until(lambda: new.brains)  # it may decide before it says that it listens
                assert new.brains[-1] not in old.brains and set(new.relays) == {"relay-0.2", "relay-1.2"}
                assert sum(line["void"] for line in new.logged("relay joined")) == 0
                finished = r'balanceroute_requests_total\{outcome="finished"\} (\S+)'
                total = 10 + sum(client.result() for client in clients)
                await until(lambda: _counted(new, finished, total))  # of the old relays as well
                await until(new.holds_nothing)

    asyncio.run(test())


def test_a_router_that_drains_is_taken_over_and_its_streams_go_on(cluster: Cluster, tmp_path: Path) -> None:
    async def test() -> None:
        port = free_base_port((0,))
        async with AsyncExitStack() as stack:
            old = await stack.enter_async_context(a_router(cluster, tmp_path, *PATIENT, port=port))
            begun = streams(old, 4, 4 * LONG)
            await until(lambda: all(stream.begun for stream in begun))
            with cluster.standing_still():
                old.running.send_signal(signal.SIGTERM)
                await until(lambda: len(old.logged("draining")) == 4)  # one of each process
                taking_over = a_router(cluster, tmp_path, *PATIENT, "--take-over", port=port, log_name="new.log")
                new = await stack.enter_async_context(taking_over)
                await until(lambda: old.have_left)
                await until(lambda: new.brains and len(new.found(new.brains[-1])) == 2)
            served = streams(new, 4, 10, first=300)
            assert await all_end(served) == 4 and await all_end(begun) == 4
            await until(lambda: old.running.poll() is not None)
            assert old.running.returncode == 0 and old.logged("leaving")
            await until(new.holds_nothing)

    asyncio.run(test())


def test_a_key_gets_no_second_burst_from_a_router_that_takes_over(cluster: Cluster, tmp_path: Path) -> None:
    keys, headers = tmp_path / "keys.yaml", {"connection": "close", "authorization": "Bearer slow"}
    keys.write_text(json.dumps([{"name": "slow", "sha256": sha256(b"slow").hexdigest(), "requests_per_minute": 30}]))
    keys.chmod(0o600)

    async def let_in(router: Router) -> int:
        body = {"model": "emulated", "prompt": "a", "max_tokens": 1}
        asked = [router.client.post("/v1/completions", json=body, headers=headers) for _ in range(60)]
        answers = [answer.status_code for answer in await asyncio.gather(*asked)]
        assert set(answers) <= {200, 429}
        return answers.count(200)

    async def test() -> None:
        port, flags = free_base_port((0,)), ["--set", f"auth.client_keys={keys}"]
        async with a_router(cluster, tmp_path, *flags, port=port) as old:
            began_s = time.monotonic()
            used = await let_in(old)
            assert used >= 30
            async with a_router(cluster, tmp_path, "--take-over", *flags, port=port, relays=3, log_name="new") as new:
                await until(lambda: old.running.poll() is not None)
                used += await let_in(new)
                assert used <= 31 + (time.monotonic() - began_s) / 2

    asyncio.run(test())


@pytest.mark.parametrize("relays", [2, 1], ids=["as many relays", "fewer"])
def test_the_next_start_frees_the_kv_that_all_processes_had_pinned(
    cluster: Cluster, tmp_path: Path, relays: int
) -> None:
    async def killed() -> None:
        async with a_router(cluster, tmp_path) as router:
            begun = streams(router, 14, 4 * LONG)

            async def are_prefilled() -> bool:  # what a prefiller answers while it dies, no record can know of
                waiting = len((await router.state())["waiting"])
                recorded = recorded_pins(tmp_path)
                return recorded == waiting >= 4 and waiting + sum(stream.begun for stream in begun) == 14

            await until(are_prefilled)
            end_group(router.running)
            for stream in begun:
                await stream.end()

    async def next_one(router: Router) -> None:
        assert await all_end(streams(router, 4, 20)) == 4

    asyncio.run(killed())
    assert cluster.holds_kv()
    with_router(next_one, cluster, tmp_path, relays=relays)


@pytest.mark.parametrize("died", ["a relay", "the brain"])
def test_callbacks_of_decode_workers_reach_the_relay_that_has_their_request(tmp_path: Path, died: str) -> None:
    async def run(cluster: Cluster) -> None:
        port = free_base_port((0,))
        url = f"layerwise.callback_url=http://127.0.0.1:{port}"
        async with a_router(cluster, tmp_path, "--set", url, port=port) as router:
            assert await all_end(streams(router, 16, 20)) == 16
            begun = streams(router, 14, first=100)
            await all_under_way(router, begun)
            name, pid = next(iter(router.relays.items()))
            os.kill(pid if died == "a relay" else router.brains[-1], signal.SIGKILL)
            later = streams(router, 8, 20, first=200)
            if died == "a relay":
                await until(lambda: router.logged("relay lost", relay=name))
                lost = router.logged("relay lost", relay=name)[0]["requests"]
            else:
                await until(lambda: len(router.brains) == 2)
                lost = 0
            complete = await all_end(begun)
            void = sum(line["void"] for line in router.logged("relay joined"))
            assert len(begun) - lost - void <= complete <= len(begun)  # one that is lost or void may just have ended
            assert await all_end(later) == 8
            assert await all_end(streams(router, 8, 20, first=300)) == 8
            await until(router.holds_nothing)
            await until(lambda: not cluster.holds_kv())

    with emulated(tmp_path, *SHAPE, "--connector", "mooncake_layerwise") as cluster:
        asyncio.run(run(cluster))
