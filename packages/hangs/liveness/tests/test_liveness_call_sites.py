"""The line that a verdict names is the one that a reader can change, whatever stands between it and torch."""

import contextlib
import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typing_extensions

from offbeat_liveness import settled_collectives
from offbeat_liveness._process.snapshot import CallSite
from offbeat_liveness._process.stacks import hands_on, stack_of, thread_frames


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start_s = time.monotonic()
        try:
            return function(
                *args,
                **kwargs,
            )
        finally:
            assert time.monotonic() >= start_s

    return wrapper


class Counted:
    """A decorator that is a class, with a wrapper within a method."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return inner


def synced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator with a collective of its own: that is its line."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        answer = function(*args, **kwargs)
        dist.barrier()  # of the decorator
        return answer

    return wrapper


@contextlib.contextmanager
def phase() -> Iterator[None]:
    yield
    dist.barrier()  # of the phase


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.rstrip().endswith(text))


def gather_deprecated() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(torch.zeros(2), torch.ones(2))  # deprecated by torch


def gather_old() -> None:
    old = typing_extensions.deprecated("use another")(dist.barrier)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old()  # deprecated by a library


def reduce_timed() -> None:
    timed(Counted()(dist.all_reduce))(torch.ones(2))  # twice decorated


def step_synced() -> None:
    synced(time.monotonic)()


def end_phase() -> None:
    with phase():
        pass


@pytest.mark.ranks(1, liveness=False)  # not in this process: ranks are forked from it, with all that torch has recorded
@pytest.mark.parametrize(
    ("call", "mark"),
    [
        (gather_deprecated, "# deprecated by torch"),
        (gather_old, "# deprecated by a library"),
        (reduce_timed, "# twice decorated"),
        (step_synced, "# of the decorator"),
        (end_phase, "# of the phase"),
    ],
)
def test_a_collective_is_reported_at_the_line_that_makes_it(call: Callable[[], None], mark: str) -> None:
    call()
    collectives = settled_collectives()
    assert collectives
    site = collectives[-1].call_site
    assert site is not None
    assert (site.file, site.line) == (__file__, line_of(mark)), site


def test_a_thread_is_reported_without_what_only_calls_on() -> None:
    """As the recorder's lines: a thread that stands in a decorated function."""
    free = threading.Event()
    wait = timed(Counted()(free.wait))
    thread = threading.Thread(target=lambda: wait(60))
    thread.start()
    try:
        while "wait" not in (names := {each.f_code.co_name for each in _frames_of(thread)}):
            time.sleep(0.01)
        assert {"wrapper", "inner"} <= names
        functions = [each.function for each in stack_of(thread_frames()[thread.ident or 0])]
        assert functions == ["test_a_thread_is_reported_without_what_only_calls_on.<locals>.<lambda>"]
    finally:
        free.set()
        thread.join()


def _frames_of(thread: threading.Thread) -> Iterator[Any]:
    frame = thread_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_a_line_of_a_file_that_was_never_loaded_is_reported() -> None:
    assert not hands_on(CallSite(file="/nowhere/train.py", line=3, function="wrapper"))
    assert not hands_on(CallSite(file=sys.executable, line=1, function="wrapper"))
