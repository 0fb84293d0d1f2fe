"""A process forks when no thread is on its way out."""

import ctypes
import os

import pytest

from offbeat_testing import wait_for_leaving_threads

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's /proc")


def start_native_thread(microseconds: int) -> int:
    """A thread that Python does not know, which sleeps for so long; its number."""
    libc, before = ctypes.CDLL(None), set(os.listdir("/proc/self/task"))
    handle, sleep = ctypes.c_ulong(), ctypes.cast(libc.usleep, ctypes.c_void_p)
    assert libc.pthread_create(ctypes.byref(handle), None, sleep, ctypes.c_void_p(microseconds)) == 0
    libc.pthread_detach(handle)
    (number,) = set(os.listdir("/proc/self/task")) - before
    return int(number)


def test_a_thread_on_its_way_out_is_waited_for() -> None:
    wait_for_leaving_threads()
    number = start_native_thread(1_200_000)
    wait_for_leaving_threads()
    assert not os.path.exists(f"/proc/self/task/{number}")


def test_a_thread_that_stays_is_not_waited_for_for_ever() -> None:
    number = start_native_thread(20_000_000)
    wait_for_leaving_threads()
    wait_for_leaving_threads()
    assert os.path.exists(f"/proc/self/task/{number}")
