"""When torch's flight recorder may be read: while the groups of this process stand still.

torch 2.13 writes its tables of groups under a lock and reads them without it: `dump` and `dump_json` walk `pg_config`,
which each new group enters and one of the same name overwrites, and `pg_status`, which a group enters with its first
collective, as a null pointer for a moment. A reader that meets such a write dies of SIGSEGV. Counters are words, and
entries are copied under the lock.

A dump holds the GIL throughout, and whoever records a collective takes it (for the stack) after its group has counted
the collective and before it writes. So while no count has changed for a moment, nobody is on the way into the tables.
A group enters `pg_config` without the GIL, at the end of its making: that is to have stood much longer.

torch before 2.13 takes the GIL for the stack while it holds the recorder's lock. A reader with the GIL that waits for
the lock would then stand still with the whole process, for ever; so there a thread that has counted is given longer to
come by the GIL.

Source: pytorch 2.13.0, torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (recordWithResetEnabled, record_pg_ranks,
getPgConfigJson, getPgStatusJson) and ProcessGroupGloo.cpp (the constructor, enqueue).
"""

import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.recorder import flight_recorder
from offbeat_liveness._process.recorder.entries import RawEntry
from offbeat_liveness._process.stacks import thread_frames

SETTLED_S: Final = 0.01
CONTENDED_S: Final = 0.1  # a thread has the GIL within this, however many want it
MAKING_S: Final = 0.5  # a group is made in milliseconds, unless a member does not come
PATIENCE_S: Final = 0.2
POLL_S: Final = 0.002
MAKERS: Final = frozenset({"_new_process_group_helper", "split_group", "_create_shrunk_process_group"})
Scene = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
"""The threads that make a group, and each group with what it has counted."""


class StillRecorder:
    """Reads the recorder, and leaves it alone while groups are made or used.

    Args:
        patience_s: `entries` waits as long for a moment without collectives.

    Attributes:
        moved_s: when a group was last seen to be made, used or gone, monotonic seconds.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._seen: Scene = ((), ())
        self.moved_s = time.monotonic()

    def status_text(self, frames: Mapping[int, FrameType] | None = None) -> str | None:
        """The status of all groups, "" without torch.distributed; None while they move.

        Args:
            frames: of all threads, where the caller has them.
        """
        if not flight_recorder.is_loaded():
            return ""
        return flight_recorder.status_text() if self._is_still(frames) else None

    def entries(self) -> list[RawEntry] | None:
        """What the recorder holds, with call sites; None if this process did not stand still for a moment."""
        give_up_s = time.monotonic() + self._patience_s
        while not self._is_still():
            if time.monotonic() >= give_up_s:
                return None
            time.sleep(POLL_S)
        return flight_recorder.read_entries(call_sites=True)

    def _is_still(self, frames: Mapping[int, FrameType] | None = None) -> bool:
        """Whether nobody makes a group, and none has counted, for a moment; about 1 µs for each group."""
        scene, now_s = _scene(frames), time.monotonic()
        if scene != self._seen:
            self.moved_s = now_s  # first: another thread may compare at any moment
            self._seen = scene
        is_making, _ = scene
        return now_s - self.moved_s >= (MAKING_S if is_making else settled_s())


def settled_s() -> float:
    """How long nobody is to have counted before a recorder of this torch may be read."""
    version = str(getattr(sys.modules.get("torch"), "__version__", "")).split(".")[:2]
    return CONTENDED_S if version in (["2", "11"], ["2", "12"]) else SETTLED_S


def _scene(frames: Mapping[int, FrameType] | None = None) -> Scene:
    module = sys.modules["torch.distributed.distributed_c10d"]
    found = thread_frames() if frames is None else frames
    makers = tuple(ident for ident, frame in found.items() if _is_making(frame))
    return makers, tuple((id(group), _count(group)) for group in list(module._world.pg_map))


def _is_making(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in MAKERS:
            return True
        frame = frame.f_back
    return False


def _count(group: Any) -> int:
    """Of all backends of a group; those that do not count stay at 0."""
    count = 0
    for device in group._device_types:
        try:
            count += group._get_backend(device)._get_sequence_number_for_group()
        except RuntimeError:
            continue
    return count
