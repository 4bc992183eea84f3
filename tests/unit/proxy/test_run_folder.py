"""The folder that the processes of one router share."""

import os
import stat
from pathlib import Path

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.run_folder import RunFolder


def test_the_folder_is_made_for_our_user_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run")
    folder.make()
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    folder.folder.chmod(0o755)
    folder.make()
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    names = {folder.link, folder.operators, folder.lock, folder.pins("relay-0"), folder.pins("relay-1")}
    assert len(names) == 5 and all(name.parent == folder.folder for name in names)


def test_a_folder_that_can_not_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="file"):
        RunFolder(file).make()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match="own user"):
        RunFolder(tmp_path).make()
    with pytest.raises(ConfigError, match="too long"):
        RunFolder(tmp_path / ("long" * 30)).make()
