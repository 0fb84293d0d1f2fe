"""What a thread waits for outside torch.distributed, read off its frames."""

import threading
from collections import defaultdict
from types import FrameType
from typing import Final

from offbeat_liveness._process.current_frames import current_frames
from offbeat_liveness._process.head import OutsideWait
from offbeat_liveness._process.outside import (
    concurrency,
    connections,
    event_loop,
    interpreter,
    kernel,
    peek,
    processes,
    ray_objects,
)
from offbeat_liveness._process.outside.rule import Look, Rule

MAX_FRAMES: Final = 64
MAX_THREADS_FOLLOWED: Final = 3
MODULES: Final = (connections, concurrency, processes, event_loop, ray_objects, interpreter)


def outside_wait(frame: FrameType | None, native_id: int | None = None) -> OutsideWait | None:
    """What a thread waits for; None where it computes, or where that cannot be told.

    Nothing of the program is called, and nothing is asked that could stand still in its turn. The thread may run on
    meanwhile: what is told is what it stood in when the frame was taken.

    Args:
        frame: the thread's innermost one; it is not held afterwards.
        native_id: the kernel's number of the thread, for waits in calls of C; None leaves these out.

    Returns:
        The wait; its `text` can follow "waits for".
    """
    return _outside_wait(frame, native_id, MAX_THREADS_FOLLOWED)


def _outside_wait(frame: FrameType | None, native_id: int | None, follows: int) -> OutsideWait | None:
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    look = Look(frames, native_id, lambda ident: _wait_of_thread(ident, follows - 1))
    try:
        return _read(look)
    except Exception:  # noqa: BLE001 - a library of another version, an object that is being torn down: no answer
        return None
    finally:
        frames.clear()


def _read(look: Look) -> OutsideWait | None:
    if not look.frames:
        return None
    for depth, rule in reversed(_matches(look.frames)):
        look.depth = depth
        found = rule.read(look.frames[depth], look)
        if found is not None:
            return found
    if interpreter.is_importing(look):
        return interpreter.import_wait(look)
    found = kernel.kernel_wait(look.frames[0], look.native_id) if look.native_id else None
    return interpreter.import_wait(look) if found is None else found


def _matches(frames: list[FrameType]) -> list[tuple[int, Rule]]:
    """The rules that hold one around another, innermost first."""
    found: list[tuple[int, Rule]] = []
    last = 0
    for depth, frame in enumerate(frames):
        if depth - last > MAX_REACH:
            break
        rule = rule_of(frame)
        if rule is not None and depth - last <= rule.reach:
            found.append((depth, rule))
            last = depth
    return found


def rule_of(frame: FrameType) -> Rule | None:
    """The rule for the function that a frame runs."""
    rules = _BY_FUNCTION.get(frame.f_code.co_qualname, ())
    return next((rule for rule in rules if frame.f_code.co_filename.endswith(rule.file)), None)


def _wait_of_thread(ident: int, follows: int) -> OutsideWait | None:
    """The same of another thread of this process."""
    if follows < 0 or ident == threading.get_ident():
        return None
    frames = current_frames()
    frame = frames.get(ident)
    frames.clear()
    active = threading._active.get(ident)  # type: ignore[attr-defined]
    return _outside_wait(frame, peek.integer(peek.attribute(active, "_native_id")), follows)


def _by_function() -> dict[str, tuple[Rule, ...]]:
    found: defaultdict[str, tuple[Rule, ...]] = defaultdict(tuple)
    for module in MODULES:
        for rule in module.RULES:
            for function in rule.functions:
                found[function] += (rule,)
    return dict(found)


_BY_FUNCTION: Final = _by_function()
MAX_REACH: Final = max(rule.reach for rules in _BY_FUNCTION.values() for rule in rules)
