"""The folder that the processes of one router share: whose it is, where it is, and what is kept there."""

import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.link.leadership import FileLead
from balanceroute.proxy.run_folder.folder import MAX_SOCKET_PATH, RunFolder, run_folder
from balanceroute.proxy.run_folder.kept_counts import KeptCounts
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from tests.unit.proxy.virtual_time import a_config


def test_the_run_folder_is_private_to_its_user_and_may_exist(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b")
    folder.make()
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    folder.folder.chmod(0o755)
    folder.make()
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    names = {folder.link, folder.operators, folder.lead, folder.pins("relay-0"), folder.pins("relay-1")}
    assert len(names) == 5 and all(name.parent == folder.folder for name in names)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match="own user"):
        RunFolder(tmp_path).make()


@pytest.mark.parametrize("mode", [0o1777, 0o755], ids=["sticky, as /dev/shm", "with folders of others, as /run"])
def test_a_folder_that_others_use_is_refused_and_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    """As root the router closed /dev/shm to all others."""
    if not mode & stat.S_ISVTX:
        (tmp_path / "of another service").mkdir()
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="others use it, too"):
        RunFolder(tmp_path).make()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode


@pytest.mark.parametrize("what", ["a file", "a link", "a circle", "below a file", "too long"])
def test_an_unusable_run_folder_is_reported_in_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run"
    if what == "a link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "a circle":
        path.symlink_to(path)
        path = path / "run"
    elif what == "too long":
        path = tmp_path / ("x" * MAX_SOCKET_PATH)
    else:
        path.touch()
        path = path / "run" if what == "below a file" else path
    with pytest.raises(ConfigError, match=r"^listen\.run_folder = ") as refused:
        RunFolder(path).make()
    assert "\n" not in str(refused.value)
    assert ("accepted is a folder" in str(refused.value)) is (what in ("a file", "a link"))
    assert ("it is a symbolic link" in str(refused.value)) is (what == "a link")
    assert ("or round in a circle" in str(refused.value)) is (what == "a circle")


def test_without_a_temporary_folder_the_run_folder_must_be_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    def a_read_only_root() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/']")

    monkeypatch.setattr("tempfile.gettempdir", a_read_only_root)
    with pytest.raises(
        ConfigError, match=r"^listen\.run_folder: not set, and no temporary folder can be written; set it \(No usable"
    ):
        run_folder(a_config(), 8000, {})


def test_a_removed_lock_file_is_recreated_unless_another_router_has_the_folder(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    with folder.claim() as lock:
        assert not folder.claim_again(lock)
        shutil.rmtree(folder.folder)
        assert folder.claim_again(lock) and not folder.claim_again(lock)
        with pytest.raises(ConfigError, match="another router runs with it"):
            folder.claim()
        (folder.folder / "router").unlink()
        with folder.claim(), pytest.raises(ConfigError, match="another process holds router in it by now"):
            folder.claim_again(lock)
        assert folder.claim_again(lock)


def test_the_default_run_folder_depends_on_the_port(tmp_path: Path) -> None:
    named = a_config(listen={"run_folder": str(tmp_path), "relays": 1})
    assert run_folder(named, 8000, {"XDG_RUNTIME_DIR": "/run/user/7"}).folder == tmp_path
    unnamed = a_config(listen={"relays": 1})
    assert run_folder(unnamed, 8000, {"XDG_RUNTIME_DIR": "/run/user/7"}).folder == Path("/run/user/7/balanceroute-8000")
    first, second = (run_folder(unnamed, port, {}).folder for port in (8000, 8001))
    assert first != second and first.name == f"balanceroute-{os.geteuid()}-8000"


@pytest.mark.parametrize(
    "name",
    ["link.sock", "operators.sock", "handover.sock", "relay-0.sock", "router", "lead", "identity", "far", "changes"]
    + ["life-relay-0", "counts-relay-0", "counts-brain", "counts-brain.new", "pins-relay-0", "pins-relay-1.2.new"],
)
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_an_obstacle_in_the_run_folder_is_reported_in_one_line_at_the_first_start(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "somebody's").mkdir()
    folder.make()
    if kind == "folder":
        (tmp_path / name).mkdir()
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(
        ConfigError, match=rf"^listen\.run_folder = .*: {name} in it is no (file of ours|socket)"
    ) as refused:
        folder.make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("before", [True, False], ids=["before it is asked for", "afterwards"])
def test_a_file_that_another_relay_renames_during_a_start_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    folder, access = RunFolder(tmp_path), os.access
    folder.make()
    written = tmp_path / "pins-relay-0.new"
    written.touch()

    def accessible(path: Path, mode: int) -> bool:
        if before:
            written.unlink(missing_ok=True)
        found = access(path, mode)
        written.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "access", accessible)
    folder.make()
    assert not written.exists()


@pytest.mark.parametrize("name", ["lead", "pins-relay-0", "life-relay-0", "link.sock"])
def test_an_obstacle_in_the_run_folder_is_moved_aside_at_a_restart(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    relay_locks = RelayLocks(folder)
    (tmp_path / name).mkdir()
    (tmp_path / name / "somebody's").touch()
    folder.make(again=True)
    (aside,) = tmp_path.iterdir()
    assert aside.name.endswith(f"-{name}") and (aside / "somebody's").exists()
    assert [(each.getMessage(), vars(each)["file"]) for each in caplog.records] == [
        ("unexpected file in the run folder renamed", str(tmp_path / name))
    ]
    folder.make()
    assert folder.other_pins("relay-7") == [] and relay_locks.running() == []


def test_an_unreadable_file_of_the_run_folder_is_made_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.lead.touch()
    folder.lead.chmod(0)

    def access(path: Path, _: int) -> bool:  # these tests may be run by root, who may read all
        return bool(path.stat().st_mode & 0o600)

    monkeypatch.setattr(os, "access", access)
    folder.make()
    assert stat.S_IMODE(folder.lead.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_made_readable_is_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    folder = RunFolder(tmp_path)
    folder.make()
    folder.lead.write_text("7\n")
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        patched.setattr(Path, "chmod", lambda path, mode: None if path == tmp_path else refuse())
        with pytest.raises(ConfigError, match="lead in it is no file of ours"):
            folder.make()
        folder.make(again=True)
    assert not folder.lead.exists()


def test_the_identity_survives_the_removal_of_its_file(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    name = folder.identity()
    (tmp_path / "identity").unlink()
    assert folder.identity() == name == RunFolder(tmp_path).identity()
    shutil.rmtree(tmp_path)
    assert folder.identity() == name
    with pytest.raises(ConfigError, match="cannot be used"):
        RunFolder(tmp_path).identity()


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b"\xff"], ids=["nothing", "zeros", "no text"])
def test_an_identity_damaged_by_a_power_loss_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "identity").write_bytes(content)
    name = RunFolder(tmp_path).identity()
    assert name and name.isprintable() and (tmp_path / "identity").read_text() == name
    assert RunFolder(tmp_path).identity() == name


def test_every_run_folder_file_is_renewed_except_the_leaders(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    kept = KeptCounts(folder)
    lead = FileLead(folder.lead)
    with folder.claim(), socket.socket(socket.AF_UNIX) as operators:
        assert lead.take()
        operators.bind(str(folder.operators))
        kept.keep("relay-0", b"{}")
        for file in tmp_path.iterdir():
            os.utime(file, (0, 0))
        folder.renew_times()
        assert {file.name for file in tmp_path.iterdir() if file.stat().st_mtime == 0} == {"lead"}
    lead.release()


def test_a_folder_with_a_leading_brain_belongs_to_another_router_although_its_lock_file_is_removed(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    with folder.claim():
        lead = FileLead(folder.lead)
        assert lead.take()
        (tmp_path / "router").unlink()
        with pytest.raises(ConfigError, match="another router runs with it"):
            folder.claim()
        lead.release()
        folder.claim().close()


def test_a_folder_stays_claimed_while_a_copy_of_its_lock_is_open(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = folder.claim()
    copy = os.dup(first.fileno())
    first.close()
    with pytest.raises(ConfigError, match="another router runs with it"):
        folder.claim()
    with pytest.raises(ConfigError, match="as it starts or is about to end; try again soon"):
        folder.claim(unanswered=True)
    os.close(copy)
    folder.claim().close()
