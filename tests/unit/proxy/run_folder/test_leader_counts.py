"""What brains have counted, in the run folder."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.view import view_cluster
from balanceroute.proxy.run_folder import kept_counts
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.kept_counts import GONE_S, LEADER, KeptCounts
from balanceroute.proxy.run_folder.leader_counts import PERIOD_S, LeaderCounts
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from balanceroute.proxy.telemetry.metrics import Metrics
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time


class ALead:
    """One that is lost when told so."""

    epoch = 1
    leads = True

    def take(self) -> bool:
        return True

    def renew(self) -> bool:
        return self.leads

    def resign(self) -> None:
        """Nobody hears."""

    def release(self) -> None:
        """Nobody hears."""


def counting() -> Metrics:
    return Metrics(lambda: view_cluster(ClusterSnapshot()), "br_0")


def test_the_next_leader_continues_the_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for life in range(1, 4):
        metrics = counting()
        counts = LeaderCounts(folder, ALead(), metrics)
        metrics.admissions.inc("d0", "stage_1")
        assert counts.keep()
        assert metrics.admissions.value("d0", "stage_1") == life
        assert metrics.restarts.value("brain") == life - 1


def test_the_first_leader_of_a_router_that_takes_over_is_no_restart(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for generation, restarts in ((1, 0), (1, 1), (2, 1), (2, 2), (3, 2)):
        metrics = counting()
        assert LeaderCounts(folder, ALead(), metrics, generation=generation).keep()
        assert metrics.restarts.value("brain") == restarts


@pytest.mark.parametrize("damaged", [b"[1]", b"\xff", b'{"generation":"x","inherited":[1,{}]}'])
def test_a_leader_counts_anew_where_the_counts_of_the_last_one_are_damaged(tmp_path: Path, damaged: bytes) -> None:
    folder, metrics = RunFolder(tmp_path), counting()
    KeptCounts(folder).keep(LEADER, damaged)
    counts = LeaderCounts(folder, ALead(), metrics)
    assert counts.inherited == set() and counts.keep()
    assert KeptCounts(folder).of(LEADER) == metrics.counts()


def test_a_former_leader_leaves_the_file_to_the_next(tmp_path: Path) -> None:
    folder, lead, metrics = RunFolder(tmp_path), ALead(), counting()
    counts = LeaderCounts(folder, lead, metrics)
    assert counts.keep()
    KeptCounts(folder).keep(LEADER, b"the next one's")
    lead.leads = False
    metrics.admissions.inc("d0", "stage_1")
    assert not counts.keep()
    assert KeptCounts(folder).of(LEADER) == b"the next one's"


def test_unstored_counts_are_stored_later_and_the_failure_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, metrics = RunFolder(tmp_path / "run"), counting()
    counts = LeaderCounts(folder, ALead(), metrics)
    metrics.admissions.inc("d0", "stage_1")
    assert all(counts.keep() for _ in range(5))
    assert [each.getMessage() for each in caplog.records] == ["counters cannot be saved"]
    folder.make()
    assert counts.keep() and KeptCounts(folder).of(LEADER) == metrics.counts()


@with_virtual_time
async def test_new_counts_are_stored_every_second(tmp_path: Path) -> None:
    folder, metrics = RunFolder(tmp_path), counting()
    counts = LeaderCounts(folder, ALead(), metrics)
    watching = asyncio.get_running_loop().create_task(counts.watch())
    await let_pass(2 * PERIOD_S)
    kept = KeptCounts(folder).of(LEADER)
    assert kept == metrics.counts()
    KeptCounts(folder).forget()
    await let_pass(2 * PERIOD_S)
    assert KeptCounts(folder).of(LEADER) == kept  # somebody had removed it
    metrics.admissions.inc("d0", "stage_1")
    await let_pass(2 * PERIOD_S)
    assert KeptCounts(folder).of(LEADER) == metrics.counts() != kept
    os.close(RelayLocks(folder).lock("relay-9"))  # it has died before it counted anything
    await let_pass(GONE_S + 10.0)
    assert KeptCounts(folder).gone() == set()
    watching.cancel()


def counted(requests: int) -> bytes:
    metrics = counting()
    metrics.requests.inc("finished", by=requests)
    return metrics.counts()


def test_the_leader_takes_over_counts_of_removed_relays_and_deletes_their_files(tmp_path: Path) -> None:
    folder, metrics, inherited = RunFolder(tmp_path), counting(), []
    for relay, requests in (("relay-0", 3), ("relay-1", 4), ("relay-0.2", 100)):
        os.close(RelayLocks(folder).lock(relay))
        KeptCounts(folder).keep(relay, counted(requests))
    life = RelayLocks(folder).lock("relay-0.2")
    counts = LeaderCounts(folder, ALead(), metrics, inherited.append)
    for now in range(0, int(GONE_S), 5):
        counts.clean_up(now)
    assert inherited == [] and len(KeptCounts(folder).of_others(())) == 3
    counts.clean_up(GONE_S)
    assert sorted(inherited) == ["relay-0", "relay-1"] and counts.inherited == set()
    assert metrics.requests.value("finished") == 7
    counts.keep()
    assert {path.name for path in tmp_path.iterdir()} == {"counts-brain", "counts-relay-0.2", "life-relay-0.2"}
    after = counting()
    assert LeaderCounts(folder, ALead(), after).inherited == set() and after.requests.value("finished") == 7
    os.close(life)


def test_a_leader_killed_while_taking_over_counts_causes_no_double_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    KeptCounts(folder).keep("relay-0", counted(3))

    def killed(path: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    first = LeaderCounts(folder, ALead(), counting())
    first.clean_up(0.0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", killed)
        first.clean_up(GONE_S)
    assert KeptCounts(folder).of("relay-0")
    metrics = counting()
    second = LeaderCounts(folder, ALead(), metrics)
    for now in (0.0, GONE_S):
        assert metrics.requests.value("finished") == 3 and second.inherited == {"relay-0"}
        second.clean_up(now)
    assert metrics.requests.value("finished") == 3 and second.inherited == set()
    assert not KeptCounts(folder).of("relay-0")


def test_files_of_former_relays_stay_when_their_counts_cannot_be_stored_or_another_brain_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lead, metrics = RunFolder(tmp_path), ALead(), counting()
    KeptCounts(folder).keep("relay-0", counted(3))
    counts = LeaderCounts(folder, lead, metrics)
    with monkeypatch.context() as patched:
        patched.setattr(kept_counts, "replace_content", full)
        for now in (0.0, GONE_S, 2 * GONE_S):
            counts.clean_up(now)
    # otherwise they would count twice where the relay is started again, as it continues from its file
    assert metrics.requests.value("finished") == 0 and counts.inherited == set()
    assert KeptCounts(folder).of("relay-0")
    lead.leads = False
    counts.clean_up(3 * GONE_S)
    assert KeptCounts(folder).of("relay-0")
    lead.leads = True
    counts.clean_up(4 * GONE_S)
    assert not KeptCounts(folder).of("relay-0") and metrics.requests.value("finished") == 3


def full(path: Path, content: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
