"""Metrics survive a kill, come back as written, and are cut back on resume."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_run import Generation, GenerationsLog, MetricsLog, RunFolder, read_generations, read_metrics
from offbeat_types import Metric, RunFolderError


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def scalars(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard files hold, read by their format's own reader."""
    from tensorboardX.event_file_writer import directory_check
    from tensorboardX.proto.event_pb2 import Event

    directory_check(str(run.tensorboard))
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(run.tensorboard.glob("events*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else sum(value.histo.bucket)
                found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_metrics_come_back_as_written(run: RunFolder) -> None:
    with MetricsLog(run) as log:
        log.write(1, {"a": 0.1, "b": Metric(value=2.0, weight=7.0), "c": np.float32(0.5), "n": 3}, time_s=100.5)
        log.write(2, {"h": [1, 2, 3], "i": np.array([4.0, 5.0]), "nan": math.nan, "inf": -math.inf})
    first, second = read_metrics(run.metrics)
    assert (first.step, first.time_s) == (1, 100.5)
    assert first.values == {"a": 0.1, "b": 2.0, "c": 0.5, "n": 3.0}
    assert second.values["h"] == [1.0, 2.0, 3.0]
    assert second.values["i"] == [4.0, 5.0]
    assert second.values["inf"] == -math.inf
    assert isinstance(second.values["nan"], float)
    assert math.isnan(second.values["nan"])


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.text("abc/", min_size=1), st.floats() | st.lists(st.floats(), max_size=3), max_size=4))
def test_any_number_comes_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    with RunFolder.create(tmp_path_factory.mktemp("run")) as run, MetricsLog(run, tensorboard=False) as log:
        log.write(3, values)
        (line,) = read_metrics(run.metrics)
    assert line.values.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(line.values[name], value)  # takes NaN for equal to NaN


def test_each_line_is_on_the_disk_before_the_next(run: RunFolder) -> None:
    log = MetricsLog(run, tensorboard=False)
    log.write(1, {"a": 1.0})
    assert len(read_metrics(run.metrics)) == 1
    log.close()
    log.close()


def test_a_line_torn_by_a_kill_is_left_out_and_then_mended(run: RunFolder) -> None:
    run.metrics.write_text('{"step":1,"time_s":1,"a":1}\n{"step":2,"ti')
    assert [line.step for line in read_metrics(run.metrics)] == [1]
    with MetricsLog(run, tensorboard=False) as log:
        log.write(2, {"a": 2.0})
    assert [line.step for line in read_metrics(run.metrics)] == [1, 2]


def test_a_damaged_line_is_named(run: RunFolder) -> None:
    run.metrics.write_text('{"step":1,"time_s":1}\nnonsense\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2: not a line of JSON"):
        read_metrics(run.metrics)


def test_a_curve_of_tensorboard_goes_on_where_a_killed_run_is_resumed(run: RunFolder) -> None:
    killed = MetricsLog(run)
    for step in range(1, 6):
        killed.write(step, {"a": float(step), "h": [step]})
    (events,) = run.tensorboard.iterdir()
    assert scalars(run)["a"][-1] == (5, 5.0)  # without a close: each step is there at once
    events.write_bytes(events.read_bytes()[:-40])  # torn by the kill, and short of a step that metrics.jsonl has
    with MetricsLog(run, resume_step=3) as log:
        log.write(4, {"a": 40.0})
    expected = {"a": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)], "h": [(1, 1.0), (2, 2.0), (3, 3.0)]}
    assert scalars(run) == expected
    MetricsLog(run, resume_step=-1).close()
    assert scalars(run) == {}


def test_tensorboard_gets_scalars_and_histograms_but_nothing_infinite(run: RunFolder) -> None:
    with MetricsLog(run) as log:
        log.write(7, {"a": 0.5, "h": [1, 2, 3], "nan": math.nan, "empty": []})
    assert scalars(run) == {"a": [(7, 0.5)], "h": [(7, 6.0)]}


def test_a_missing_file_has_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none") == []


def generation(step: int, kind: str = "train", text: str = "4") -> Generation:
    return Generation(step=step, kind=kind, version=step - 1, prompt="2+2?", completion=text, reward=1.0)  # type: ignore[arg-type]


def test_half_a_character_in_a_completion_does_not_end_the_run(run: RunFolder) -> None:
    odd = Generation(step=1, kind="train", version=0, prompt="2+2?", completion="a\ud800b", reward=math.nan)
    with GenerationsLog(run) as log:
        log.write([odd, generation(2, "train")])
    lines = run.generations.joinpath("train.jsonl").read_text().splitlines()
    assert '"completion":"a?b","reward":null' in lines[0]
    assert len(lines) == 2


def test_generations_come_back_by_kind_and_are_cut_on_resume(run: RunFolder) -> None:
    with GenerationsLog(run) as log:
        log.write([generation(1), generation(2, "validation", "a\nb\u2028</script>"), generation(2)])
    assert read_generations(run, "train") == [generation(1), generation(2)]
    assert read_generations(run, "validation") == [generation(2, "validation", "a\nb\u2028</script>")]
    with GenerationsLog(run, resume_step=1) as log:
        log.write([generation(2, text="again")])
    assert [each.completion for each in read_generations(run, "train")] == ["4", "again"]
    assert read_generations(run, "validation") == []
