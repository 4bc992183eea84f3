"""Files that never answer."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from balanceroute.config.patience import in_time, off_the_loop
from balanceroute.errors import ConfigError


def test_a_file_that_is_read_in_time_is_returned() -> None:
    assert in_time(lambda: "text", "the file") == "text"


def test_a_file_that_never_answers_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "router.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"router\.yaml: no answer within 0\.05 s$"):
        in_time(pipe.read_text, str(pipe), 0.05)
    with pipe.open("w"):  # lets the thread end
        pass


@pytest.mark.parametrize("error", [ConfigError("wrong"), OSError("gone"), TimeoutError("its own")], ids=type)
def test_a_read_error_is_raised_to_the_caller(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        in_time(fail, "the file")
    assert caught.value is error


def test_a_lack_of_threads_is_reported_like_a_file_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ConfigError, match="^the file: cannot be read now: can't start new thread$"):
        in_time(lambda: "text", "the file")


@pytest.mark.anyio
async def test_a_file_that_does_not_answer_delays_only_its_reader(tmp_path: Path) -> None:
    pipe = tmp_path / "chain.pem"
    os.mkfifo(pipe)
    reading = asyncio.ensure_future(off_the_loop(pipe.read_text))
    assert await off_the_loop(lambda: "another") == "another"
    assert not reading.done()
    await asyncio.to_thread(pipe.write_text, "text")
    assert await reading == "text"


@pytest.mark.anyio
async def test_a_late_read_result_after_cancellation_is_dropped(tmp_path: Path) -> None:
    """What a thread cannot hand over would be an exception in it, which `filterwarnings` makes an error."""
    pipe = tmp_path / "chain.pem"
    os.mkfifo(pipe)
    others = threading.enumerate()  # those of former tests may be about to end
    reading = asyncio.ensure_future(off_the_loop(pipe.read_text))
    await asyncio.sleep(0)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "read" and thread not in others]
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.to_thread(pipe.write_text, "text")
    await asyncio.to_thread(thread.join)
