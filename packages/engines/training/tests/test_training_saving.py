"""A write beside the training: published whole or not at all, one at a time, and its failure raised once."""

import threading
import time

import pytest

from offbeat_core import DeadlineError, RunFolderError
from offbeat_mesh import Mesh
from offbeat_training import BackgroundWrite


class Folder:
    """Notes what is done with a folder, and fails where it is asked to."""

    def __init__(self, path, fails_in=""):
        self.path, self.fails_in, self.done = path, fails_in, []

    def step(self, name):
        self.done.append(name)
        if self.fails_in == name:
            raise OSError(28, "No space left on device")

    def begin(self, background):
        background.begin(self.path, *(lambda name=name: self.step(name) for name in ("write", "publish", "clear")))


def test_what_was_written_is_published_and_nothing_cleared(tmp_path):
    background = BackgroundWrite(Mesh(), 30.0)
    background.finish()  # nothing is written yet
    for number in range(2):
        folder = Folder(tmp_path / str(number))
        folder.begin(background)
        background.finish()
        assert folder.done == ["write", "publish"]
    background.finish()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write-")]


@pytest.mark.parametrize(
    ("fails_in", "done", "words"),
    [
        ("write", ["write", "clear"], r"no checkpoint, the one before it is as it was: trainer rank 0 could not write"),
        ("publish", ["write", "publish", "clear"], "no checkpoint, the one before it is as it was"),
    ],
)
def test_a_failure_is_raised_once_clears_away_and_the_next_write_goes_well(tmp_path, fails_in, done, words):
    background = BackgroundWrite(Mesh(), 30.0)
    bad, good = Folder(tmp_path / "bad", fails_in), Folder(tmp_path / "good")
    bad.begin(background)
    with pytest.raises(RunFolderError, match=words) as failed:
        good.begin(background)
    assert "No space left on device" in str(failed.value)
    assert (bad.done, good.done) == (done, [])
    good.begin(background)
    background.finish()
    assert good.done == ["write", "publish"]


def test_a_write_that_takes_longer_than_it_may_is_named_and_waited_for_again(tmp_path):
    background, may_end = BackgroundWrite(Mesh(), 0.2), threading.Event()
    background.begin(tmp_path / "slow", lambda: may_end.wait(30), lambda: None, lambda: None)
    other = Folder(tmp_path / "other")
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"the checkpoint .*slow: waited 0.2 s for the disk"):
        other.begin(background)
    assert time.monotonic() - began < 10
    assert other.done == [], "at most one at a time"
    may_end.set()
    end = time.monotonic() + 30
    while any(thread.name == "write-slow" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    background.finish()
