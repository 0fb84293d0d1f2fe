"""What torch's recorders hold, and how it is read."""

import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from offbeat_liveness._process import flight_recorder, nccl_recorder
from offbeat_liveness._process.flight_recorder import parse_entries


def entry_of(**changes: Any) -> dict[str, Any]:
    """One entry as torch 2.13 dumps it."""
    base = {
        "collective_seq_id": 2,
        "frames": [],
        "input_dtypes": ["Float"],
        "input_sizes": [[3, 5]],
        "is_p2p": False,
        "op_id": 2,
        "output_dtypes": ["Float"],
        "output_sizes": [[3, 5]],
        "p2p_seq_id": 0,
        "pg_id": 1,
        "process_group": ["1", "tp"],
        "profiling_name": "gloo:all_reduce",
        "record_id": 5,
        "retired": False,
        "state": "scheduled",
        "thread_id": "77",
        "thread_name": "python",
        "time_created_ns": 1000,
        "time_discovered_completed_ns": None,
        "time_discovered_started_ns": None,
        "timeout_ms": 1800000,
    }
    return {**base, **changes}


def test_a_gloo_entry() -> None:
    (entry,) = parse_entries([entry_of()])
    assert (entry.group, entry.seq, entry.op, entry.inputs) == ("1", 2, "all_reduce", ("Float[3, 5]",))
    assert (entry.done, entry.backend, entry.thread) == (False, "gloo", 77)


def test_nccl_entries_say_what_the_device_has_done() -> None:
    states = ["scheduled", "started", "completed"]
    entries = [entry_of(profiling_name="nccl:_all_gather_base", state=state) for state in states]
    parsed = parse_entries([*entries, entry_of(profiling_name="nccl:send 0->1", is_p2p=True)])
    assert [each.done for each in parsed] == [False, False, True]
    assert {each.op for each in parsed} == {"all_gather_base"}


def test_a_call_site_is_the_first_line_that_is_not_torchs() -> None:
    frames = [
        {"filename": "/v/site-packages/torch/distributed/distributed_c10d.py", "line": 3245, "name": "all_reduce"},
        {"filename": "/home/me/train.py", "line": 8, "name": "step"},
    ]
    (entry,) = parse_entries([entry_of(frames=frames)])
    assert str(entry.call_site) == "/home/me/train.py:8 in step"


def test_the_status_shows_what_is_pending() -> None:
    one = '{"pg_status": {"0": {"last_enqueued_collective": "%d", "last_completed_collective": "4"}}}'
    assert flight_recorder.has_pending(one % 5)
    assert not flight_recorder.has_pending(one % 4)
    assert not flight_recorder.has_pending("{}")


def a_recorder(entries: list[dict[str, Any]], last: int) -> dict[str, Callable[..., bytes]]:
    """What a build of torch offers to read one of its recorders, with the words that it takes."""
    status = {"pg_status": {"0": {"last_enqueued_collective": str(last), "last_completed_collective": "4"}}}

    def dump(*, includeCollectives: bool, includeStackTraces: bool, onlyActive: bool) -> bytes:
        return pickle.dumps({"entries": entries})

    def dump_json(*, includeCollectives: bool) -> bytes:
        return json.dumps(status).encode()

    return {"trace": dump, "trace_json": dump_json}


def test_the_recorder_of_nccl_is_read_beside_that_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = sys.modules["torch._C._distributed_c10d"]
    monkeypatch.setattr(nccl_recorder, "HANDLER", "nobody's")  # a build of torch may have the real one
    monkeypatch.setattr(flight_recorder, "NCCL", nccl_recorder.NcclRecorder())
    both = entry_of(profiling_name="nccl:all_reduce", record_id=0, time_created_ns=900, collective_seq_id=1)
    late = entry_of(profiling_name="nccl:all_reduce", record_id=1, time_created_ns=1100)
    sent = entry_of(profiling_name="nccl:send 0->1", record_id=2, is_p2p=True)
    recorders = {"fr": a_recorder([entry_of(record_id=0), both], 4), "nccl": a_recorder([both, late, sent], 5)}
    for name, functions in recorders.items():
        for what, function in functions.items():
            monkeypatch.setattr(binding, f"_dump_{name}_{what}", function, raising=False)
    entries = flight_recorder.read_entries()
    assert [entry["time_created_ns"] for entry in entries] == [900, 1000, 1000, 1100], "the one of both once, and p2p"
    assert flight_recorder.has_pending(flight_recorder.status_text())
    assert flight_recorder.holds_all(entries)
    assert not flight_recorder.holds_all([entry_of(record_id=0), late]), "nccl's has forgotten its first"


def test_all_tables_of_torch_are_read_before_anything_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that they are still holds for a moment only, and to unpickle a full recorder takes 20 ms."""
    binding, order = sys.modules["torch._C._distributed_c10d"], []

    def dump(**_: bool) -> bytes:
        order.append("entries")
        return pickle.dumps({"entries": []})

    def dump_json(**_: bool) -> bytes:
        order.append("status of nccl")
        return b"{}"

    def loads(content: bytes) -> dict[str, Any]:
        order.append("unpickle")
        return {"entries": []}

    monkeypatch.setattr(binding, "_dump_fr_trace", dump)
    monkeypatch.setattr(binding, "_dump_nccl_trace", dump, raising=False)
    monkeypatch.setattr(binding, "_dump_nccl_trace_json", dump_json, raising=False)
    monkeypatch.setattr(pickle, "loads", loads)
    flight_recorder.read_entries()
    assert order == ["entries", "status of nccl", "unpickle"]
