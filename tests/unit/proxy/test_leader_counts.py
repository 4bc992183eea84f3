"""What brains have counted, in the run folder."""

import asyncio
from pathlib import Path

import pytest

from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.view import view_cluster
from balanceroute.proxy.leader_counts import PERIOD_S, LeaderCounts
from balanceroute.proxy.run_folder import LEADER, RunFolder
from balanceroute.proxy.telemetry.metrics import Metrics
from tests.unit.proxy.virtual_time import in_virtual_time, let_pass


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


def test_the_next_leader_counts_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for life in range(1, 4):
        metrics = counting()
        counts = LeaderCounts(folder, ALead(), metrics)
        metrics.admissions.inc("d0", "stage_1")
        assert counts.keep()
        assert metrics.admissions.value("d0", "stage_1") == life


def test_who_leads_no_more_leaves_the_file_to_the_next(tmp_path: Path) -> None:
    folder, lead, metrics = RunFolder(tmp_path), ALead(), counting()
    counts = LeaderCounts(folder, lead, metrics)
    assert counts.keep()
    folder.keep_counts(LEADER, b"the next one's")
    lead.leads = False
    metrics.admissions.inc("d0", "stage_1")
    assert not counts.keep()
    assert folder.counts(LEADER) == b"the next one's"


def test_what_could_not_be_kept_is_kept_once_it_can_be_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, metrics = RunFolder(tmp_path / "run"), counting()
    counts = LeaderCounts(folder, ALead(), metrics)
    metrics.admissions.inc("d0", "stage_1")
    assert all(counts.keep() for _ in range(5))
    assert [each.getMessage() for each in caplog.records] == ["counts not kept"]
    folder.make()
    assert counts.keep() and folder.counts(LEADER) == metrics.counts()


def test_what_is_new_is_kept_every_second(tmp_path: Path) -> None:
    folder, metrics = RunFolder(tmp_path), counting()
    counts = LeaderCounts(folder, ALead(), metrics)

    async def test() -> None:
        watching = asyncio.get_running_loop().create_task(counts.watch())
        await let_pass(2 * PERIOD_S)
        kept = folder.counts(LEADER)
        assert kept == metrics.counts()
        folder.forget_counts()
        await let_pass(2 * PERIOD_S)
        assert folder.counts(LEADER) == b""  # nothing is new
        metrics.admissions.inc("d0", "stage_1")
        await let_pass(2 * PERIOD_S)
        assert folder.counts(LEADER) == metrics.counts() != kept
        watching.cancel()

    in_virtual_time(test)
