"""A timeline loads whatever happened to the process that wrote it."""

import json
import subprocess
import sys
import time
from threading import Thread

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_run import clock_s, read_timeline
from offbeat_run._log.timeline import Timeline


def spans(path):
    events = read_timeline(path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [(names[e["tid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]


def test_a_closed_timeline_is_plain_json_with_named_tracks(tmp_path):
    path = tmp_path / "t.json"
    with Timeline(path) as timeline:
        timeline.span("trainer-0", "update", 10.0, 12.5, {"version": 3})
        timeline.span("rollout-0", "generate", 11.0, 13.0)
    events = json.loads(path.read_text())
    update = next(event for event in events if event["ph"] == "X")
    assert (update["ts"], update["dur"], update["args"]) == (10e6, 2.5e6, {"version": 3})
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"trainer-0", "rollout-0"}


def test_an_empty_timeline_is_plain_json_too(tmp_path):
    Timeline(tmp_path / "t.json").close()
    assert json.loads((tmp_path / "t.json").read_text()) == []
    assert read_timeline(tmp_path / "none.json") == []


def test_a_killed_process_leaves_a_timeline_that_loads_and_goes_on(tmp_path):
    path = tmp_path / "t.json"
    code = (
        "import os, signal, sys; from offbeat_run._log.timeline import Timeline\n"
        "t = Timeline(sys.argv[1]); t.span('a', 'one', 1.0, 2.0); t.span('b', 'two', 2.0, 3.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert spans(path) == [("a", "one", 1.0, 1.0), ("b", "two", 2.0, 1.0)]
    assert json.loads(path.read_text() + "]")  # the array form, short of its bracket alone, as viewers accept it
    for name in ("three", "four"):  # opened again after a kill, then after a proper end
        with Timeline(path) as timeline:
            timeline.span("b", name, 3.0, 4.0)
    assert [name for _, name, _, _ in spans(path)] == ["one", "two", "three", "four"]
    assert {track for track, *_ in spans(path)} == {"a", "b"}
    json.loads(path.read_text())


@settings(max_examples=50)
@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_still_loads(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "t.json"
    with Timeline(path) as timeline:
        for i in range(3):
            timeline.span("a", f"s{i}", i, i + 1)
    path.write_bytes(path.read_bytes()[:cut])
    with Timeline(path) as timeline:
        timeline.span("a", "last", 9, 10)
    json.loads(path.read_text())
    assert spans(path)[-1] == ("a", "last", 9.0, 1.0)


def test_threads_may_write_at_once(tmp_path):
    path = tmp_path / "t.json"
    with Timeline(path) as timeline:
        threads = [
            Thread(target=lambda n=n: [timeline.span(f"t{n}", "x", i, i + 1) for i in range(50)]) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(spans(path)) == 200
    assert len(json.loads(path.read_text())) == 204
    timeline.span("late", "after the end", 1, 2)  # a thread that outlives the run does no harm
    assert len(spans(path)) == 200


def test_the_clock_of_every_process_is_the_wall_clock(tmp_path):
    code = "from offbeat_run import clock_s; print(clock_s())"
    before = time.time()
    other = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert before - 0.5 <= other <= time.time() + 0.5
    assert abs(clock_s() - time.time()) < 0.5
