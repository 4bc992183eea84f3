"""A file is the old one or the new one, and nobody else's to read."""

import os
from pathlib import Path

import pytest

from balanceroute.proxy.link.files import beside, is_still, replace_content


def test_a_new_file_replaces_the_old_one_and_only_its_user_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"longer than what comes")
    path.chmod(0o644)
    before = path.stat().st_ino
    mask = os.umask(0)
    try:
        replace_content(path, b"new")
    finally:
        os.umask(mask)
    assert path.read_bytes() == b"new"
    assert path.stat().st_ino != before, "whoever has the old one open reads that to its end"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_counts_as_the_same_until_it_is_surely_removed_or_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "kept", tmp_path / "other"
    path.touch()
    other.touch()
    status = path.stat()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        assert is_still(path, status)
    assert is_still(path, status)
    other.replace(path)
    assert not is_still(path, status)
    path.unlink()
    assert not is_still(path, status)


def refuse(*_: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_partial_file_left_by_a_kill_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    beside(path).write_bytes(b"half of something longer")
    replace_content(path, b"whole")
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.mkdir()
    with pytest.raises(OSError):
        replace_content(path, b"new")
    assert list(tmp_path.iterdir()) == [path] and path.is_dir()


def test_a_symbolic_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    path, other = tmp_path / "kept", tmp_path / "other"
    other.write_bytes(b"another file")
    beside(path).symlink_to(other)
    with pytest.raises(OSError):
        replace_content(path, b"new")
    assert other.read_bytes() == b"another file" and not path.exists()
