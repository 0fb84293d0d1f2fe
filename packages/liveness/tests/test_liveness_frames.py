"""A look at all threads returns, whatever the garbage collector does meanwhile."""

import gc
import os
import subprocess
import sys
import threading
import time
from types import FrameType

import pytest

from offbeat_liveness import current_frames

COLLECTED_WHILE_LOOKING = """
import gc, threading
from offbeat_liveness import current_frames

class Circle:
    def __init__(self):
        self.me, self.local = self, threading.local()
        self.local.value = 1

stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(40)]
for thread in threads:
    thread.start()
gc.disable()
Circle()
gc.enable()
gc.set_threshold(gc.get_count()[0] + 10)  # the tenth object from here on sets it off: a frame, while all are looked at
frames = current_frames()
gc.set_threshold(700)
stop.set()
print(len(frames), gc.isenabled())
"""


def test_a_collection_during_a_look_does_not_stop_the_process() -> None:
    """With `sys._current_frames` itself Python 3.11 stands still here, every time."""
    ended = subprocess.run(
        [sys.executable, "-c", COLLECTED_WHILE_LOOKING], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.split() == ["41", "True"], ended.stderr


def test_a_collector_that_rests_is_not_woken() -> None:
    gc.disable()
    try:
        assert threading.get_ident() in current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_born_during_a_look_collects_and_looks() -> None:
    stop = threading.Event()
    seen: list[dict[int, FrameType]] = []

    def look() -> None:
        while not stop.is_set():
            seen[:] = [current_frames()]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(50):
            time.sleep(0.001)
            if (child := os.fork()) == 0:
                os._exit(0 if gc.isenabled() and current_frames() else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
        seen.clear()
