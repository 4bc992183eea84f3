"""What relays and leaders have counted outlives them."""

import errno
import shutil
from pathlib import Path

import pytest

from balanceroute.proxy.run_folder import kept_counts
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.kept_counts import LEADER, CountsFile, KeptCounts
from balanceroute.proxy.run_folder.relay_locks import RelayLocks, relay_name
from tests.unit.proxy.run_folder.test_relay_locks import living


def test_counts_of_a_relay_outlive_it_until_a_router_begins_to_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    kept = KeptCounts(folder)
    assert kept.of("relay-0") == b""
    kept.keep("relay-0", b"{}")
    kept.keep("relay-0", b"{1}")
    kept.keep("relay-0.2", b"{2}")
    assert sorted(kept.of_others(())) == [b"{1}", b"{2}"]
    kept.keep(LEADER, b"{3}")
    assert kept.of_others(["relay-0"]) == [b"{2}"]
    assert (kept.of("relay-0"), kept.of("relay-1")) == (b"{1}", b"")
    assert kept.of(LEADER) == b"{3}"
    kept.forget()
    assert kept.of(LEADER) == b""
    assert kept.of("relay-0") == b"" and list(tmp_path.iterdir()) == []


def test_an_obstacle_in_place_of_a_life_or_counts_file_does_not_prevent_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    relay_locks = RelayLocks(folder)
    for name in ("life-relay-0", "counts-relay-0"):
        (tmp_path / name).mkdir()
    (tmp_path / "life-relay-1").symlink_to("nobody")  # as one that is removed while it is looked for
    assert relay_locks.running() == []
    assert CountsFile(folder, "relay-0").last() == b"" and "cannot be read" in caplog.text


def test_unwritable_counts_do_not_stop_a_process_and_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = RunFolder(tmp_path / "gone")
    kept = KeptCounts(folder)
    file = CountsFile(folder, "relay-0")
    for _ in range(2):
        assert not any(file.keep(counts) for counts in (b"{1}", b"{2}", b"{2}"))
        folder.make()
        assert file.keep(b"{2}") and file.keep(b"{3}") and kept.of("relay-0") == b"{3}"
        shutil.rmtree(folder.folder)
    assert [each.getMessage() for each in caplog.records] == [
        "counters cannot be saved",
        "counters are saved again",
    ] * 2


def test_a_file_has_the_counts_that_this_process_has_kept_last_until_it_is_removed(tmp_path: Path) -> None:
    KeptCounts(RunFolder(tmp_path)).keep("relay-0", b"{1}")
    file = CountsFile(RunFolder(tmp_path), "relay-0")
    assert not file.has(b"{1}"), "a former process has kept them"
    assert file.keep(b"{1}") and file.keep(b"{2}")
    assert file.has(b"{2}") and not file.has(b"{1}")
    KeptCounts(RunFolder(tmp_path)).file("relay-0").unlink()
    assert not file.has(b"{2}")


def test_counts_are_overwritten_in_place_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = RunFolder(tmp_path)
    kept = KeptCounts(folder)
    file = CountsFile(folder, "relay-0")
    assert file.keep(b"{99}")
    before = kept.file("relay-0").stat()
    monkeypatch.setattr(kept_counts, "replace_content", full)
    assert file.keep(b"{100}") and kept.of("relay-0") == b"{100}" and not caplog.records
    assert file.keep(b"{1}") and kept.of("relay-0") == b"{1}"
    after = kept.file("relay-0").stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size), "no more room is taken"
    assert not file.keep(b"x" * (after.st_size + 1)) and kept.of("relay-0") == b"{1}"
    assert not CountsFile(folder, "relay-1").keep(b"{1}") and "No space left" in str(vars(caplog.records[-1]))


def test_counts_of_a_living_relay_are_not_removed(tmp_path: Path) -> None:
    folder, inherited = RunFolder(tmp_path), []
    kept = KeptCounts(folder)
    kept.keep("relay-0", b"{1}")
    with living(folder, "relay-0"):
        assert not kept.clean_up("relay-0", lambda counts: not inherited.append(counts))  # type: ignore[func-returns-value]
    assert inherited == [] and kept.of("relay-0") == b"{1}"
    assert kept.gone() == {"relay-0"} and kept.clean_up("relay-0", lambda counts: True)
    assert kept.gone() == set() and list(tmp_path.iterdir()) == []


def test_a_router_that_starts_beside_old_relays_uses_other_names_and_keeps_their_counts(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    relay_locks = RelayLocks(folder)
    kept = KeptCounts(folder)
    for relay in ("relay-0", "relay-1", "relay-0.12"):
        kept.keep(relay, relay.encode())
    with living(folder, "relay-1"), living(folder, "relay-0.12"):
        assert relay_locks.next_generation() == 13 and relay_name(0, 13) == "relay-0.13"
        kept.forget()
        assert sorted(kept.of_others(())) == [b"relay-0.12", b"relay-1"]
