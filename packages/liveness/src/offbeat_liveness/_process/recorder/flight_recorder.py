"""Reads torch's flight recorder, which has written down each collective of this process already.

What it gives in torch 2.13 (measured on gloo; for nccl as torch documents it):

- It is on by default (2000 entries for all groups together; `TORCH_FR_BUFFER_SIZE=0` turns it off) for gloo and nccl,
  and it sees collectives whoever issues them, Python or C++ (DDP, FSDP, Megatron): group, operation, tensor sizes and
  dtypes, the number of the collective within its group (`collective_seq_id`), the time, the thread, and whether it is
  over (`retired`).
- gloo: `state` is always "scheduled" and no start or completion times are given, so `retired` is all there is to go
  by. Point-to-point operations are not recorded, but they count in `op_id` and in `pg_status`; `collective_seq_id`
  leaves them out and is what ranks can be compared by.
  `monitored_barrier`, `new_group` and `init_process_group` are not recorded. A coalesced call is one entry with all of
  its tensors.
- nccl: `state` is scheduled, started or completed, as the watchdog thread finds it; p2p operations are entries with
  `is_p2p` and `p2p_seq_id`. What is scheduled may still stand behind other work in its stream.
- `pg_config` does not tell gloo groups apart, so the members of a group are taken from torch.distributed's own tables.
- Not recorded by either: root ranks and reduce operations, store waits, and anything outside torch.distributed.
- Call sites: the first dump with stacks imports torch._inductor (800 modules, 3 to 7 s here) unless it is kept from
  that (`_keep_inductor_out`); then it costs milliseconds.
- nccl: a dump of entries asks the device about each that is not over, which can take for ever: `nccl_recorder` asks
  without standing still with it. A dump without entries asks nothing and takes no lock.
- There are two recorders: nccl's groups write into one of their own, which `_dump_nccl_trace*` reads and only builds
  with nccl have; all others into the one of `_dump_fr_trace*`. Both are read, and what stands in both counts once. In
  builds with another library of NVIDIA's interface the first holds that one's entries.
- Its tables of groups are read without their lock: `still_recorder` says when that is safe.
"""

import json
import os
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

from offbeat_liveness._process.recorder.entries import RawEntry, backend_of, group_of
from offbeat_liveness._process.recorder.nccl_recorder import NCCL

INDUCTOR: Final = "_inductor"
RECORDERS: Final = ("fr", "nccl")


def is_loaded() -> bool:
    """Whether this process has torch.distributed, and all of torch; nothing here imports it."""
    needed = ("torch", "torch.distributed.distributed_c10d", "torch._C._distributed_c10d")
    return all(_is_whole(sys.modules.get(name)) for name in needed)


def _is_whole(module: types.ModuleType | None) -> bool:
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def status_text() -> str:
    """A text that changes whenever a collective is issued or ends, a line a recorder: about 20 µs, no entries read."""
    return "\n".join(_status(recorder) for recorder in RECORDERS if _dump(recorder, "_trace_json"))


def _status(recorder: str) -> str:
    dump = _dump(recorder, "_trace_json")
    return dump(includeCollectives=False).decode() if dump else "{}"


def has_pending(status: str) -> bool:
    """Whether a status text shows a group with an operation that was issued and is not over; may err towards yes."""
    lines = enumerate(status.splitlines())
    return any(_line_has_pending(json.loads(line), is_nccl=number > 0) for number, line in lines)


def _line_has_pending(recorder: dict[str, dict[str, dict[str, str]]], *, is_nccl: bool) -> bool:
    """Of one recorder: nccl numbers its collectives and its p2p apart, and shows the number of whichever was last."""
    pairs = [
        (int(each["last_enqueued_collective"]), int(each["last_completed_collective"]))
        for each in recorder.get("pg_status", {}).values()
    ]
    return any(issued > over or (is_nccl and issued != over) for issued, over in pairs)


def read_entries(*, call_sites: bool = False) -> list[RawEntry]:
    """What the recorders hold, oldest first, point-to-point included; about 20 ms when one is full.

    Where nccl's does not answer, its entries are left out and `NCCL.asked_at_s` says since when.

    Args:
        call_sites: with the Python frames of each.
    """
    if call_sites:
        _keep_inductor_out()
    dump, nccl_dump = _dump("fr", "_trace"), _dump("nccl", "_trace")
    # All of torch's tables first, while they are known to be still: to unpickle takes far longer.
    raw = _call(dump, call_sites) if dump else None
    status = _status("nccl")
    nccl = None
    if nccl_dump is not None and json.loads(status).get("pg_status"):  # else no nccl, or it was never used
        nccl = NCCL.entries(status, lambda: _call(nccl_dump, call_sites), with_frames=call_sites)
    # Pickled by this very process, in its own memory, a moment ago: nothing comes from outside.
    # JSON takes twice the time, and holds no frames.
    common = list(pickle.loads(raw)["entries"]) if raw is not None else []
    return _merge([*common, *nccl]) if nccl else common


def _call(dump: Callable[..., bytes], with_frames: bool) -> bytes:
    return dump(includeCollectives=True, includeStackTraces=with_frames, onlyActive=False)


def _merge(entries: list[RawEntry]) -> list[RawEntry]:
    """Entries of several recorders, oldest first, each once."""
    found = {(entry["time_created_ns"], entry["record_id"], group_of(entry)): entry for entry in entries}
    return sorted(found.values(), key=lambda entry: int(entry["time_created_ns"]))


def is_off() -> bool:
    """Whether the environment has turned the recorder off."""
    return os.environ.get("TORCH_FR_BUFFER_SIZE") == "0"


def holds_all(entries: Sequence[RawEntry]) -> bool:
    """Whether the recorder has forgotten nothing yet: a group without entries then has had no collective."""
    firsts: dict[bool, int] = {}  # nccl's recorder counts by itself
    for entry in entries:
        firsts.setdefault(backend_of(entry) == "nccl", int(entry["record_id"]))
    return not any(firsts.values()) if firsts else not is_off()


def _keep_inductor_out() -> None:
    """Keep torch from importing inductor to name the frames of compiled code while a run is stuck.

    Expected: a dump with stacks reads what was recorded. What happens in torch 2.13: its symboliser asks for
    `torch._inductor`, which `torch.__getattr__` then imports (800 modules in 3 to 7 s). Where nobody has imported it,
    there is no compiled code. So the symboliser is told that there is no such attribute, from the first dump on;
    everybody else gets what torch gives. Can go when the symboliser looks into sys.modules itself.

    Source: pytorch, torch/csrc/profiler/python/combined_traceback.cpp (appendSymbolized).
    """
    torch = sys.modules["torch"]
    given = getattr(torch, "__getattr__", None)
    if given is None or getattr(given, "__module__", "") == __name__:
        return

    def __getattr__(name: str) -> Any:  # noqa: N807 - in place of torch's
        if name == INDUCTOR and _is_symboliser():
            raise AttributeError(name)
        return given(name)

    vars(torch)["__getattr__"] = __getattr__


def _is_symboliser() -> bool:
    """Whether `torch.__getattr__` is called out of a dump: of this module's, or in a C++ thread of torch's server."""
    caller = sys._getframe(1).f_back
    return caller is None or caller.f_code is _call.__code__


def _dump(recorder: str, what: str) -> Callable[..., bytes] | None:
    """A function of this build of torch that reads a recorder: `_dump_fr_trace`, `_dump_nccl_trace`."""
    found: Callable[..., bytes] | None = getattr(
        sys.modules["torch._C._distributed_c10d"], f"_dump_{recorder}{what}", None
    )
    return found
